"""From a string in a configuration to the callable it names: what a recipe may bring of the user's own.

``package.module:callable`` for installed code, ``path/to/file.py:callable`` for a user's own file.
A file is loaded once a process, under a module name derived from its absolute path: two executors
that name one file share its classes, and what one pickles the other can unpickle.

    check, source_file ─▶ read, nothing is executed: before a run, in every process
    resolve            ─▶ imported, and what its module raises passes through: in the process that needs it
    import_user        ─▶ imported, and whatever goes wrong is the user's mistake under its key: where it may hang and crash

A user's module may do anything when it is imported: end the process, wait for ever, load a model.
So a reward function is imported in the reward pool's workers alone, under their deadline.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from llamarl.errors import ConfigError, DataError, FileError, LlamaRLError
from llamarl.reading import read_bytes, user_path

__all__ = [
    "absolute_import_path",
    "call",
    "check",
    "forget_files",
    "import_user",
    "load_module",
    "own_line",
    "resolve",
    "signature_of",
    "source_file",
]

_USERS = "llamarl_user_"
_DYNAMIC = frozenset({"exec", "eval", "globals", "vars", "locals", "setattr", "__getattr__"})
"""A module that uses one of these may have names that its source does not show."""

_NOT_THE_USERS = tuple(os.path.dirname(file) + os.sep for file in (os.__file__, __file__))
"""Folders of Python's own modules, and of llamarl's."""


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
            raise ConfigError(f"{import_path!r}: {where!r} has no {attribute!r}; its callables are {public[:20]}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{import_path!r} names a {type(found).__name__}, expected something to call")
    return found


def call(import_path: str, key: str, *arguments: Any, **named: Any) -> Any:
    """What a function of the user's answers.

    Args:
        key: Of the recipe, for errors.

    Raises:
        ConfigError: It cannot be imported, or raised something: with the line of the user's file at which it did.
    """
    try:
        function = import_user(import_path, key)
    except DataError as error:
        raise ConfigError(str(error)) from error
    try:
        return function(*arguments, **named)
    except LlamaRLError:
        raise
    except Exception as error:
        raise ConfigError(f"{key} {import_path!r} raised {type(error).__name__}: {error}{own_line(error)}") from error


def import_user(import_path: str, key: str) -> Callable[..., Any]:
    """``resolve``, with every failure a mistake of the user's.

    Args:
        key: Of the recipe, for the message.

    Raises:
        DataError: The module or file cannot be imported, ends the process, or has no such callable.
    """
    where = import_path.rpartition(":")[0]
    try:
        return resolve(import_path)
    except ConfigError as error:
        raise DataError.at(key, f"{error}") from error
    except SystemExit as error:
        raise DataError.at(
            key,
            f"{import_path!r}: {where} ends its process when it is imported (sys.exit({error.code!r})): put what "
            f'it does as a program under if __name__ == "__main__":',
        ) from error
    except Exception as error:  # the user's module may raise anything
        cause = f"{type(error).__name__}: {error}{own_line(error)}"
        raise DataError.at(key, f"{import_path!r}: cannot import {where}: {cause}") from error


def own_line(error: BaseException) -> str:
    """`` at FILE:LINE: CODE``, the innermost line of the user's on the way to an exception, which libraries below may have
    raised; empty: there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        installed = {"site-packages", "dist-packages"} & {*Path(frame.filename).parts}
        if not installed and not frame.filename.startswith(("<", *_NOT_THE_USERS)):
            return f" at {frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def check(import_path: str, key: str, arguments: Sequence[str] = ()) -> None:
    """Refuse what cannot be imported, as far as the source shows: nothing is executed.

    Args:
        key: Of the recipe, for errors.
        arguments: With which the function is called, by position; empty: it is not known here.

    Raises:
        DataError: No such module or file, not Python, no such name at its top level, or a function that takes other
            arguments.
    """
    source = source_file(import_path, key)
    if source is None:
        return
    try:
        tree = ast.parse(read_bytes(source), filename=str(source))
        names = set(_bound_names(tree.body))
    except FileError as error:
        raise DataError.at(key, f"{import_path!r}: {error}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # what the parser makes of odd or deep text
        place = f"{source}:{error.lineno}" if isinstance(error, SyntaxError) else str(source)
        raise DataError.at(key, f"{import_path!r}: {place} is not Python: {str(error) or 'nested too deep'}") from error
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | names
    where, _, attribute = import_path.rpartition(":")
    if attribute.partition(".")[0] not in names and "*" not in names and not used & _DYNAMIC:
        public = sorted(name for name in names if not name.startswith("_"))
        raise DataError.at(key, f"{import_path!r}: {where} has no {attribute!r}; it has {public[:20]}")
    for found in tree.body if arguments else ():
        if getattr(found, "name", "") != attribute or getattr(found, "decorator_list", ()):  # which may change them
            continue
        of_class = isinstance(found, ast.ClassDef)
        for function in found.body if isinstance(found, ast.ClassDef) else [found]:
            if not isinstance(function, ast.FunctionDef) or (of_class and function.name != "__init__"):
                continue
            if not function.decorator_list and not _takes(function.args, len(arguments) + of_class):
                called = f"{attribute}({', '.join(arguments)})"
                text = f"{import_path!r} is {attribute}({ast.unparse(function.args)}), and is called as {called}"
                raise DataError.at(key, text)


def _takes(arguments: ast.arguments, count: int) -> bool:
    """Whether a function takes so many arguments by position, and needs no other."""
    named = len(arguments.posonlyargs) + len(arguments.args)
    most = count if arguments.vararg else named
    return named - len(arguments.defaults) <= count <= most and None not in arguments.kw_defaults


def source_file(import_path: str, key: str) -> Path | None:
    """The file whose code ``import_path`` names; None where only an import could tell.

    Raises:
        DataError: No such module or file.
    """
    path, module = import_path, import_path.rpartition(":")[0]
    if module.endswith(".py"):
        try:
            file = user_path(module, key).resolve()
        except FileError as error:
            raise DataError(str(error)) from error
        if not file.exists():
            raise DataError.at(key, f"{path!r}: no file {file}; give path/to/file.py:function or module:function")
        return file
    top, *rest = module.split(".")
    try:
        found = importlib.util.find_spec(top)
    except ValueError:  # a module that was not imported in the usual way, such as __main__
        return None
    if found is None:
        raise DataError.at(
            key,
            f"{path!r}: cannot import {top}: no such module on the import path; give path/to/file.py:function, "
            f"or put its folder on PYTHONPATH",
        )
    for depth in range(len(rest)):
        # importlib.util.find_spec would import the packages above a module; its finder asks for their place alone.
        places = found.submodule_search_locations
        found = (
            importlib.machinery.PathFinder.find_spec(".".join([top, *rest[: depth + 1]]), places) if places else None
        )
        if found is None:
            return None
    origin = Path(found.origin or "")
    return origin if origin.suffix == ".py" and origin.is_file() else None


def absolute_import_path(import_path: str) -> str:
    """The same callable, named so that a process with another working directory finds it."""
    where, attribute = _split(import_path)
    return f"{Path(where).resolve()}:{attribute}" if where.endswith(".py") else import_path


def load_module(where: str, import_path: str) -> ModuleType:
    """The module at ``where``, a dotted name or a ``.py`` file; ``import_path`` is for the message only."""
    if where.endswith(".py"):
        return _load_file(_user_file(where, import_path), import_path)
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


def _user_file(where: str, import_path: str) -> Path:
    try:
        return user_path(where, import_path).resolve()
    except FileError as error:
        raise ConfigError(str(error)) from error


def _bound_names(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that statements at the top level bind; "*" for an import of everything."""
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
            continue
        for node in ast.walk(statement):  # also inside if, try, with and loops
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif node is not statement and isinstance(node, ast.stmt):
                yield from _bound_names([node])


def _split(import_path: str) -> tuple[str, str]:
    where, colon, attribute = import_path.rpartition(":")
    if not colon or not where or not attribute:
        raise ConfigError(
            f"{import_path!r} is no import path; expected package.module:callable or path/to/file.py:callable"
        )
    return where, attribute


def forget_files() -> None:
    """Read files of the user's anew when they are named next: a notebook's may have been edited since its last run."""
    for name in [name for name in sys.modules if name.startswith(_USERS)]:
        del sys.modules[name]


def _load_file(path: Path, import_path: str) -> ModuleType:
    name = f"{_USERS}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise ConfigError(f"{import_path!r}: no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)  # what it imports from beside it is found, behind everything that is installed
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their own module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def signature_of(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """``inspect.signature`` of a user's function, whose annotations may name what only type checkers import: from
    Python 3.14 on they are evaluated when they are asked for.

    Raises:
        TypeError, ValueError: It has none.
    """
    unevaluated: dict[str, Any] = {}
    if sys.version_info >= (3, 14):
        import annotationlib

        unevaluated["annotation_format"] = annotationlib.Format.FORWARDREF
    return inspect.signature(function, follow_wrapped=follow_wrapped, **unevaluated)
