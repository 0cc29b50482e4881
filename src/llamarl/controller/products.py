"""What the last tick of a run leaves besides checkpoints: proved file for file, and written again from the last checkpoint.

RUN/model     the policy                    (a LoRA run: unless ``lora.export_merged`` is off)
RUN/adapter   the adapters of a LoRA run
RUN/critic    the value model, if there is one
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from llamarl.checkpoint.storage import saving
from llamarl.config import RunConfig
from llamarl.import_path import resolve
from llamarl.models.exported import why_incomplete
from llamarl.roles import ROLES, present_roles

__all__ = ["incomplete_products", "write_again"]


def incomplete_products(run_dir: Path, config: RunConfig) -> Mapping[str, str]:
    """Folder of ``RUN`` -> why it is not whole, of all that a run of ``config`` writes at its end. Reads every byte."""
    wanted = [p.folder for role in present_roles(config) for p in role.products if p.wanted(config)]
    found = {name: _why(run_dir / name) for name in wanted}
    return {name: why for name, why in found.items() if why}


def write_again(run_dir: Path, name: str, checkpoint: Path, config: RunConfig) -> None:
    """Write one of them from the checkpoint of the last tick; what was there stays until the new one is whole.

    Raises:
        CheckpointError: The disk is full, or the state cannot be read.
    """
    writers = {product.folder: product.writer for role in ROLES.values() for product in role.products}
    folder, partial = run_dir / name, run_dir / f"{name}.partial"
    _remove(partial)
    with saving(partial):
        resolve(writers[name])(checkpoint, config, partial)
        _remove(folder)
        os.replace(partial, folder)


def _why(folder: Path) -> str | None:
    if not folder.is_dir():
        return "it is missing"
    why = why_incomplete(folder)
    return f"it is not whole ({why})" if why else None


def _remove(path: Path) -> None:
    """A folder with all that is in it; of a link, the link alone."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
