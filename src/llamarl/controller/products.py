"""What a run leaves besides checkpoints (RUN/model, RUN/adapter, RUN/critic): its last tick writes them.

They are proved file for file, and written again from the last checkpoint where they are not whole.
Where the held-out loss decides which version they are (``evaluation.patience``), they are written
from that version's checkpoint alone, after the last tick.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from llamarl.checkpoint.storage import CheckpointStore, saving
from llamarl.config import RunConfig
from llamarl.import_path import resolve
from llamarl.models.exported import why_incomplete
from llamarl.roles import ROLES, present_roles

__all__ = ["incomplete_products", "rewrite_product", "write_products"]


def incomplete_products(run_dir: Path, config: RunConfig) -> Mapping[str, str]:
    """Folder of ``RUN`` -> why it is not whole, of all that a run of ``config`` writes at its end. Reads every byte."""
    found = {name: _why_not_whole(run_dir / name) for name in _wanted(config)}
    return {name: why for name, why in found.items() if why}


def write_products(run_dir: Path, config: RunConfig, tick: int | None) -> None:
    """Write all of them from one checkpoint.

    Args:
        tick: Of the checkpoint; None: the newest.

    Raises:
        CheckpointError: It is not there, or the disk is full.
    """
    checkpoint = CheckpointStore(run_dir / "checkpoints", config.checkpoint).load(tick)
    for name in _wanted(config):
        rewrite_product(run_dir, name, checkpoint.path, config)


def _wanted(config: RunConfig) -> list[str]:
    return [p.folder for role in present_roles(config) for p in role.products if p.wanted(config)]


def rewrite_product(run_dir: Path, name: str, checkpoint: Path, config: RunConfig) -> None:
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


def _why_not_whole(folder: Path) -> str | None:
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
