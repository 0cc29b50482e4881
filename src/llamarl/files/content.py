"""Models, data and code that the plan of a run names, brought by content to a host that lacks them.

    paths_in(plan) ─▶ contents_of: every file with its checksum ─▶ provide: the host has the same under the same path?
                                                                   else send what it lacks, once for ever, and say where it lies
    with_paths(plan, where it lies there) ─▶ the plan of that host

Two hosts that have the same bytes under one path need nothing. What is installed (packages, named
as ``package.module:name``) is not sent: a host has its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamarl.checkpoint.snapshot import FileRecord
from llamarl.checkpoint.written import files_below
from llamarl.errors import FileError
from llamarl.files.file_client import FileClient
from llamarl.reading import user_path
from llamarl.settings.environments import OWN_CODE

__all__ = ["Content", "content_of", "paths_in", "provide", "same_there", "with_paths"]

_KEYS = frozenset({"path", "data", "eval_data"})
"""Keys of a recipe that name a model's folder or a data file, in whatever section; code is told by its form."""


@dataclass(frozen=True)
class Content:
    """A file or folder of this machine, as bytes."""

    path: Path
    """Absolute."""
    files: tuple[FileRecord, ...]
    """Below ``path``, or, for a file, the one with an empty path."""

    @property
    def is_file(self) -> bool:
        return len(self.files) == 1 and not self.files[0].path


def content_of(path: Path) -> Content:
    """Every file below ``path``, or the one that it is; links to files are their files.

    Raises:
        OSError: One cannot be read.
    """
    path = Path(os.path.abspath(path))
    if path.is_file():
        return Content(path, (FileRecord.of("", path),))
    return Content(path, tuple(FileRecord.of(file.relative_to(path).as_posix(), file) for file in _files_of(path)))


def same_there(client: FileClient, path: Path) -> bool:
    """Whether the host sees the same files under the same path, by sizes and times of writing:
    nothing need be read then."""
    files = [("", path)] if path.is_file() else [(f.relative_to(path).as_posix(), f) for f in _files_of(path)]
    seen = [(name, file.stat()) for name, file in files]
    return client.same(path, [(name, found.st_size, found.st_mtime_ns) for name, found in seen])


def _files_of(folder: Path) -> list[Path]:
    return [file for file in files_below(folder) if file.is_file() and "__pycache__" not in file.parts]


def paths_in(plain: Any) -> list[str]:
    """The files and folders that nested plain values name: models, data, and code as
    ``path/to/file.py:name``; each once."""
    found: dict[str, None] = {}

    def visit(value: str, key: str) -> str:
        where = _where(value, key)
        if where and os.path.exists(_expanded(where)):
            found[where] = None
        return value

    _map_strings(plain, visit, "")
    return list(found)


def with_paths(plain: Any, there: Mapping[str, str]) -> Any:
    """The same values with other paths.

    Args:
        there: As ``paths_in`` names it -> path on the host.
    """

    def visit(value: str, key: str) -> str:
        where = _where(value, key)
        if where not in there:
            return value
        return value.replace(where, there[where], 1) if where in value else there[where]

    return _map_strings(plain, visit, "")


def provide(client: FileClient, content: Content, open_run: Callable[[], str]) -> Path:
    """Have a content on a host; where it lies there.

    Args:
        open_run: Gives the handle of the run there; called if anything must be sent or placed.

    Raises:
        TransferError: A file changed here meanwhile, the host's disk is full, or it cannot be reached.
    """
    if (there := client.holds(content.path, content.files)) is not None:
        return there
    run = open_run()
    named = content.files
    if content.is_file:
        named = (replace(content.files[0], path=content.path.name),)
    root = content.path.parent if content.is_file else content.path
    for record in client.lacks(named):
        client.send(root / record.path, record, run, as_object=True)
    folder = client.place(run, named)
    return folder / content.path.name if content.is_file else folder


def _where(value: str, key: str) -> str:
    """The path in one value; empty where it names none. Before code may stand of which kind it is (``trl:my_shop.py:Shop``)."""
    file, colon, name = value.rpartition(":")
    if colon and name and file.endswith(".py"):
        kind, _, behind = file.partition(":")
        return behind if kind in OWN_CODE else file
    if key == "rollouts" and value:  # a run's folder: of it these alone are read
        inside = os.path.join(value, "rollouts")
        return inside if os.path.isdir(_expanded(inside)) else value
    return value if key in _KEYS else ""


def _expanded(path: str) -> str:
    try:
        return os.fspath(user_path(path, "path"))
    except FileError:
        return ""


def _map_strings(value: Any, change: Callable[[str, str], str], key: str) -> Any:
    if isinstance(value, str):
        return change(value, key)
    if isinstance(value, Mapping):
        return {name: _map_strings(item, change, str(name)) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_map_strings(item, change, key) for item in value]
    return value
