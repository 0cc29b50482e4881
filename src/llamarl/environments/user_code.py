"""A user's function by import path: read without running it, or imported where it may hang, exit and crash.

A user's module may do anything when it is imported: end the process, wait for ever, load a model. So it is imported in the
reward pool's workers alone, under their deadline; every other process reads its source at most.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from llamarl.errors import DataError

__all__ = ["check_function", "import_function"]

_DYNAMIC = frozenset({"exec", "eval", "globals", "vars", "locals", "setattr", "__getattr__"})
"""A module that uses one of these may have names that its source does not show."""


def check_function(path: str) -> None:
    """Refuse what cannot be imported, as far as the source shows: nothing is executed.

    Args:
        path: ``package.module:function`` or ``path/to/file.py:function``.

    Raises:
        DataError: No such module or file, not Python, or no such name at its top level.
    """
    module, _, name = path.rpartition(":")
    source = _source_of(path, module)
    if source is None:
        return
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
    except (SyntaxError, ValueError) as error:
        place = f"{source}:{error.lineno}" if isinstance(error, SyntaxError) else str(source)
        raise DataError(f"task.reward {path!r}: {place} is not Python: {error}") from error
    except OSError as error:
        raise DataError(f"task.reward {path!r}: {source} cannot be read ({error.strerror})") from error
    names = set(_bound_names(tree.body))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | names
    if name not in names and "*" not in names and not used & _DYNAMIC:
        raise DataError(_no_function(path, module, name, names))


def import_function(path: str) -> Callable[..., Any]:
    """Import the module and take the function.

    Raises:
        DataError: The module or file cannot be imported, ends the process, or has no such function.
    """
    module_path, _, name = path.rpartition(":")
    try:
        if module_path.endswith(".py"):
            file = Path(module_path).expanduser().resolve()
            spec = importlib.util.spec_from_file_location(f"llamarl_user_{file.stem}", file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses and pickling look a class's module up here
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_path)
    except SystemExit as error:
        raise DataError(
            f"task.reward {path!r}: {module_path} ends its process when it is imported (sys.exit({error.code!r})): put what "
            f'it does as a program under if __name__ == "__main__":'
        ) from error
    except Exception as error:  # the user's module may raise anything
        raise DataError(
            f"task.reward {path!r}: cannot import {module_path}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(_no_function(path, module_path, name, (n for n, v in vars(module).items() if callable(v))))
    return function


def _no_function(path: str, module: str, name: str, names: Iterable[str]) -> str:
    public = sorted(n for n in names if not n.startswith("_"))
    return f"task.reward {path!r}: {module} has no function {name!r}; it has {public[:20]}"


def _source_of(path: str, module: str) -> Path | None:
    """The file that holds a module; None where only an import could tell."""
    if module.endswith(".py"):
        file = Path(module).expanduser().resolve()
        if not file.is_file():
            raise DataError(f"task.reward {path!r}: no file {file}; give path/to/file.py:function or module:function")
        return file
    top, *rest = module.split(".")
    try:
        found = importlib.util.find_spec(top)
    except ValueError:  # a module that was not imported in the usual way, such as __main__
        return None
    if found is None:
        raise DataError(
            f"task.reward {path!r}: cannot import {top}: no such module on the import path; give path/to/file.py:function, "
            f"or put its folder on PYTHONPATH"
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
