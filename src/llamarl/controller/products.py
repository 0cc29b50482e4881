"""What a run leaves besides checkpoints: RUN/model, RUN/adapter, RUN/critic.

    last tick ─▶ its checkpoint, proved ─▶ a writer (``roles.Product``), in the controller ─▶ RUN/model

They are written from a checkpoint alone: of the last tick, or of the version with the lowest held-out loss where that
decides (``evaluation.patience``). So the way is one for a run that ends, for a resume that finds them not whole, file for
file, and for ``llamarl export``, whatever ranks on whatever hosts the trainer had.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from llamarl.checkpoint.storage import CheckpointStore, saving
from llamarl.checkpoint.written import sync_folder
from llamarl.config import RunConfig
from llamarl.controller.early_end import EarlyEnd
from llamarl.controller.run_folder import RunFolder
from llamarl.import_path import resolve
from llamarl.models.exported import why_incomplete
from llamarl.observability.metrics import read_metrics
from llamarl.roles import Product, Role, present_roles

__all__ = ["incomplete_products", "tick_of_products", "write_products"]


def tick_of_products(run_dir: Path, config: RunConfig, newest: int) -> int:
    """The tick of whose checkpoint they are: ``newest``, or with ``evaluation.patience`` that of the lowest held-out
    loss of those up to it that are there."""
    if not config.evaluation.patience:
        return newest
    early_end = EarlyEnd(config.evaluation, num_ticks=config.run.num_ticks, ahead=0)
    rows = (row for row in read_metrics(run_dir) if int(row["step"] or 0) <= newest)
    early_end.note_rows(rows, CheckpointStore(run_dir / "checkpoints").ticks())
    return newest if early_end.best is None else early_end.best


def incomplete_products(run_dir: Path, config: RunConfig, checkpoint: Path | None = None) -> Mapping[str, str]:
    """Folder of ``RUN`` -> why it is not whole, or of a run that has been prolonged since, of all that a run of
    ``config`` leaves. Reads every byte.

    Args:
        checkpoint: Of the run's last tick, of whose states they are made; None: not known.
    """
    version = None
    if checkpoint is not None and not config.evaluation.patience:  # which takes an earlier one
        version = 1 + int(checkpoint.name.removeprefix("tick_"))
    wanted = [product.folder for _, product in _wanted(config, checkpoint)]
    return {name: why for name in wanted if (why := _why_not_whole(run_dir / name, version))}


def write_products(run: RunFolder, checkpoint: Path, config: RunConfig, names: Collection[str] | None = None) -> None:
    """Write them from a checkpoint; what was there of each stays until the new one is whole. A class of the user's own
    in the place of a role may keep a state of another kind, of which nothing is made.

    Args:
        checkpoint: Its folder, proved.
        names: Folders to write; None: all.

    Raises:
        CheckpointError: The disk is full, or the state cannot be read.
        RunFolderLost: The run's folder is gone, or another one.
    """
    for _, product in _wanted(config, checkpoint):
        if names is not None and product.folder not in names:
            continue
        folder, partial = run.path / product.folder, run.path / f"{product.folder}.partial"
        run.check()
        _remove(partial)
        with saving(partial, f"the run's {product.folder}"):
            resolve(product.writer)(checkpoint, config, partial)
            run.check()
            _remove(folder)
            os.replace(partial, folder)
            sync_folder(run.path)


def _wanted(config: RunConfig, checkpoint: Path | None) -> list[tuple[Role, Product]]:
    roles = [r for r in present_roles(config) if checkpoint is None or (checkpoint / r.name / "state").is_dir()]
    return [(role, one) for role in roles for one in role.products if one.wanted(config)]


def _why_not_whole(folder: Path, version: int | None) -> str | None:
    if not folder.is_dir():
        return "it is missing"
    why = why_incomplete(folder, version=version)
    return f"it is not what the run's end writes ({why})" if why else None


def _remove(path: Path) -> None:
    """A folder with all that is in it; of a link, the link alone."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
