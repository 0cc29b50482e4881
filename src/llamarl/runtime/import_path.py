"""From a string in a configuration to the callable it names.

``package.module:callable`` for installed code, ``path/to/file.py:callable`` for a user's own file. A file is loaded once
a process, under a module name derived from its absolute path: two executors that name one file share its classes, and
what one pickles the other can unpickle.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from llamarl.errors import ConfigError

__all__ = ["absolute_import_path", "load_module", "resolve"]


def resolve(import_path: str) -> Callable[..., Any]:
    """The callable that ``import_path`` names.

    Raises:
        ConfigError: The text has no colon, the module or file is missing, or it holds no such callable. An exception
            raised by the module's own code passes through unchanged: it is the user's to see whole.
    """
    where, attribute = _split(import_path)
    module = load_module(where, import_path)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = sorted(
                name for name, value in vars(module).items() if callable(value) and not name.startswith("_")
            )
            raise ConfigError(f"{import_path!r}: {where!r} has no {attribute!r}; its callables are {public}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{import_path!r} names a {type(found).__name__}, expected something to call")
    return found


def absolute_import_path(import_path: str) -> str:
    """The same callable, named so that a process with another working directory finds it."""
    where, attribute = _split(import_path)
    return f"{Path(where).resolve()}:{attribute}" if where.endswith(".py") else import_path


def load_module(where: str, import_path: str) -> ModuleType:
    """The module at ``where``, a dotted name or a ``.py`` file; ``import_path`` is for the message only."""
    if where.endswith(".py"):
        return _load_file(Path(where).resolve(), import_path)
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if where != missing and not where.startswith(missing + "."):
            raise  # the module exists; something that it imports does not
        raise ConfigError(
            f"{import_path!r}: no module {where!r} (nothing named {missing!r} on sys.path); "
            "install it, or name a file as path/to/file.py:callable"
        ) from None


def _split(import_path: str) -> tuple[str, str]:
    where, colon, attribute = import_path.rpartition(":")
    if not colon or not where or not attribute:
        raise ConfigError(
            f"{import_path!r} is no import path; expected package.module:callable or path/to/file.py:callable"
        )
    return where, attribute


def _load_file(path: Path, import_path: str) -> ModuleType:
    name = f"llamarl_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ConfigError(f"{import_path!r}: no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their own module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
