"""Which run a folder holds: known again after the folder was moved, removed or started over under a running job.

RUN/.run_id   random, made with the run; a run that is resumed keeps it

Whoever writes into the folder notes the identity when it starts and asks again before it writes:
data of one run never comes to lie in two places, nor data of two runs in one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llamarl.checkpoint.storage import saving
from llamarl.checkpoint.written import files_below, sync_folder
from llamarl.errors import RunFolderLost

__all__ = ["RUN_ID_FILE", "RunIdentity"]

RUN_ID_FILE = ".run_id"


@dataclass(frozen=True)
class RunIdentity:
    """What tells one run's folder from every other."""

    path: Path
    device: int
    inode: int
    run_id: str
    """Empty in a folder that has none."""

    @classmethod
    def of(cls, run_dir: str | os.PathLike[str]) -> RunIdentity:
        """That of the folder which is there now.

        Raises:
            OSError: There is none.
        """
        path = Path(run_dir)
        found = os.stat(path)
        try:
            run_id = (path / RUN_ID_FILE).read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            run_id = ""
        return cls(path=path, device=found.st_dev, inode=found.st_ino, run_id=run_id)

    def change(self) -> str:
        """What has become of the folder since, as the end of a sentence; empty if nothing."""
        try:
            now = RunIdentity.of(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return "is not there any more"
        except OSError as error:
            return f"cannot be reached any more ({error.strerror})"
        if now == self:
            return ""
        if (now.device, now.inode) == (self.device, self.inode) and not now.run_id:
            return "was emptied"
        return "is another folder now" if not now.run_id else "holds another run now"

    def check(self) -> None:
        """Call it before each write.

        Raises:
            RunFolderLost: The folder is gone, or another one.
        """
        change = self.change()
        if change:
            raise RunFolderLost(f"the run's folder {self.path} {change}: nothing more is written")

    def replace_folder(self, name: str, write: Callable[[Path], object], *, writes: bool) -> tuple[Path, ...]:
        """A folder of the run, such as its model: the old one, if any, stays until the new one is
        whole. All ranks call it.

        Args:
            write: Fills the folder that it is given.
            writes: Whether this rank is the one that writes; it alone tidies, as another would
                remove what it has begun.

        Returns:
            The files of the folder, on the disk; none for a rank that does not write.

        Raises:
            RunFolderLost: The run's folder is gone, or another one.
            CheckpointError: The disk is full or not writable.
        """
        folder, partial = self.path / name, self.path / f"{name}.partial"
        self.check()
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
        with saving(partial):
            write(partial)
            self.check()
            if writes:
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(partial, folder)
                sync_folder(self.path)
        return tuple(files_below(folder)) if writes else ()
