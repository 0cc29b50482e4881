"""Code of this package that a program replaced in its own process, which no other process of the run would see.

Executors and reward workers start from the installed package. A judge or a task that was patched in the program that starts
the run would be ignored there without a word; so a run with such a patch is refused, and the message says what to do instead.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from llamarl.errors import DataError

__all__ = ["find_patches", "refuse_patches"]


def refuse_patches(package: str = "llamarl.environments") -> None:
    """Raises DataError where a function, class or method of the package's loaded modules was replaced."""
    found = [
        patch for name, module in list(sys.modules.items()) if _within(name, package) for patch in find_patches(module)
    ]
    if found:
        raise DataError(
            f"replaced in this process alone: {', '.join(sorted(found))}. The run's processes start from the installed "
            "package and would not see it: name a judge of yours by import path (task.reward), or a whole task "
            "(task.name = 'my_task.py:MyTask')"
        )


def find_patches(module: ModuleType) -> Iterator[str]:
    """What a module's source defines, or takes from another module of llamarl, and its namespace holds no more."""
    if module.__file__ is None:
        return
    for statement in _statements(module.__file__):
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            yield from _replaced(module, statement, module.__name__)
        elif isinstance(statement, ast.ImportFrom) and _within(statement.module or "", "llamarl"):
            source = sys.modules.get(statement.module or "")
            for alias in statement.names:
                here, there = vars(module).get(alias.asname or alias.name), getattr(source, alias.name, None)
                if callable(here) and here is not there:
                    yield f"{module.__name__}.{alias.asname or alias.name}"


@functools.cache
def _statements(file: str) -> list[ast.stmt]:
    """Of an imported module's source, which is taken to stay as it was."""
    return ast.parse(Path(file).read_bytes()).body


def _replaced(owner: type | ModuleType, statement: ast.FunctionDef | ast.ClassDef, module: str) -> Iterator[str]:
    value = vars(owner).get(statement.name)
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)  # of a static or class method
    if callable(value) and getattr(value, "__module__", None) != module:
        within = "" if isinstance(owner, ModuleType) else f"{owner.__qualname__}."
        yield f"{module}.{within}{statement.name}"
    elif isinstance(value, type) and isinstance(statement, ast.ClassDef):
        for inner in statement.body:
            if isinstance(inner, ast.FunctionDef):
                yield from _replaced(value, inner, module)


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")
