"""Files below one folder, named by whoever is at the other end of a connection.

A path is walked part by part from the folder's own descriptor, and no link is followed on the way:
nothing outside can be read, written or removed, whatever lies there and whoever moves it meanwhile.
Reading a pipe or a device is refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from llamarl.checkpoint.written import is_inside
from llamarl.errors import TransferError

__all__ = ["SafeFolder"]


class SafeFolder:
    """See the module.

    Args:
        root: Must be there when it is used; it alone may be a link.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, path: str) -> int:
        """A descriptor to read a file; the caller closes it.

        Raises:
            TransferError: The path leads out, over a link, or to what is no file.
            OSError: As the system reports.
        """
        with self._folder_of(path) as (folder, name):
            try:
                descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            except OSError as error:
                raise _told(error, path) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise TransferError(f"{path} is no file")
        return descriptor

    def put(self, source: Path, path: str, *, link: bool = False) -> None:
        """Move a file of the same disk under its name, over an earlier one; folders on the way are
        made. On the disk after.

        Args:
            link: Give it another name instead of moving it.

        Raises:
            TransferError: The path leads out or over a link.
            OSError: As the system reports.
        """
        with self._folder_of(path, make=True) as (folder, name):
            if link:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                os.link(source, name, dst_dir_fd=folder, follow_symlinks=False)
            else:
                os.replace(source, name, dst_dir_fd=folder)
            os.fsync(folder)

    def remove(self, path: str) -> None:
        """A file, or a folder with all that is in it; nothing is there to remove: nothing happens.

        Raises:
            TransferError: The path leads out or over a link.
            OSError: As the system reports.
        """
        try:
            with self._folder_of(path) as (folder, name):
                if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    shutil.rmtree(name, dir_fd=folder)
                else:
                    os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return

    def walk(self, skip: Sequence[str] = ()) -> Iterator[tuple[str, int, int]]:
        """(path, bytes, mtime in ns) of each file below, in order; links are no files.

        Args:
            skip: Names of files and folders directly in the root that are left out.
        """
        for parent, folders, files in os.walk(self.root):
            here = os.path.relpath(parent, self.root)
            if here == ".":
                folders[:] = [name for name in folders if name not in skip]
                files = [name for name in files if name not in skip]
            folders.sort()
            for name in sorted(files):
                with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                    found = os.lstat(os.path.join(parent, name))
                    if stat.S_ISREG(found.st_mode):
                        path = name if here == "." else f"{here}/{name}"
                        yield path, found.st_size, found.st_mtime_ns

    @contextlib.contextmanager
    def _folder_of(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """A descriptor of the folder that holds ``path``, and the name in it."""
        if not is_inside(path):
            raise TransferError(f"{path!r:.200} is no path of a file below {self.root}")
        *parents, name = [part for part in path.split("/") if part]
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parents:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                        os.fsync(folder)
                try:
                    below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
                except OSError as error:
                    raise _told(error, path) from error
                os.close(folder)
                folder = below
            yield folder, name
        finally:
            os.close(folder)


def _told(error: OSError, path: str) -> OSError | TransferError:
    """A link in the way is told as such: Linux says ELOOP of a file, ENOTDIR of a folder."""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(error.errno, "No such file", path)
    return TransferError(
        f"{path} is reached over a link, or over what is no folder, or cannot be read ({error.strerror})"
    )
