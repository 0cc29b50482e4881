"""A Python function of a script or notebook as a file of its own, so that other processes can import it.

    def reward(prompt, response, answer): ...      ─▶  llamarl_functions/reward_3f2a9c01.py:reward

Reward workers and executors are processes of their own, and a run that is resumed tomorrow needs
the function still. So it is named by a file: the one where it is defined if that is a module, else
a new one that holds its source with all that it uses of its notebook (functions, classes, imports,
plain constants, compiled patterns). The file's name says its content: the same function gives the same path.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import linecache
import os
import re
import symtable
import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llamarl.errors import ConfigError
from llamarl.observability.writing import keep_file

__all__ = ["FUNCTIONS_FOLDER", "import_path_of"]

FUNCTIONS_FOLDER = "llamarl_functions"
"""In the working directory: not in the run's folder, of which nothing is ever executed."""


def import_path_of(function: Callable[..., Any] | str, key: str = "reward") -> str:
    """What a recipe calls it; text is taken as it is.

    Raises:
        ConfigError: It cannot stand alone: a lambda, a method, or one that uses an object of its
            notebook that cannot be written down. The message names it.
    """
    if isinstance(function, str):
        return function
    if not isinstance(function, types.FunctionType) or "<" in function.__qualname__ or "." in function.__qualname__:
        raise ConfigError(
            f"{key}: {function!r} is no plain function with a name of its own at the top level, which another process could "
            "import: write it as def NAME(...): ..., or put it, a class above all, into a file and name it path/to/file.py:NAME"
        )
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if function.__module__ != "__main__" and getattr(module, function.__name__, None) is function:
        alone = os.path.isfile(file or "") and not _needs_its_package(function, module)
        return f"{Path(str(file)).resolve() if alone else function.__module__}:{function.__name__}"
    text = standalone_source(function, key)
    stem = f"{function.__name__}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    path = Path(FUNCTIONS_FOLDER).resolve() / f"{stem}.py"
    try:
        keep_file(path, text.encode())
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot write {path}, from which other processes import it: {error.strerror}"
        ) from error
    return f"{path}:{function.__name__}"


def _needs_its_package(function: types.FunctionType, module: Any) -> bool:
    """Whether the file of a function imports its neighbours by dots, as those of installed packages do."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return True
    return any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))


def standalone_source(function: types.FunctionType, key: str = "reward") -> str:
    """The source of a module that holds ``function`` and all that it uses of the module where it was defined.

    Raises:
        ConfigError: As ``import_path_of``.
    """
    imports: list[str] = []
    definitions: list[str] = []
    _collect(function, key, imports, definitions, set())
    head = f'"""Written by llamarl: {function.__name__}, as it was when a run began with it."""\n'
    own = [f"import sys\n\nsys.path += {folders}\n"] if (folders := _own_folders(imports)) else []
    return (
        "\n".join([head, "from __future__ import annotations\n", *own, *sorted(set(imports))])
        + "\n\n"
        + "\n\n".join(definitions)
        + "\n"
    )


def _own_folders(imports: Sequence[str]) -> list[str]:
    """Where modules that are imported lie which are no part of this Python, such as those beside a script: a command
    that goes on with the run does not look there by itself."""
    modules = [sys.modules.get(line.split()[1].partition(".")[0]) for line in imports]
    places = [getattr(module, "__path__", None) or [getattr(module, "__file__", None) or ""] for module in modules]
    folders = {Path(place).resolve().parent for some in places for place in some if os.path.exists(place)}
    python = {Path(path).resolve() for path in (sys.prefix, sys.base_prefix)}
    return sorted(str(folder) for folder in folders if not python & {folder, *folder.parents})


def _collect(owner: Any, key: str, imports: list[str], definitions: list[str], seen: set[str]) -> None:
    """Append what ``owner``, a function or class, needs, then its source."""
    owner = inspect.unwrap(owner)  # below decorators, whose names are those of another module
    seen.add(owner.__name__)
    try:
        source = _cell_of(owner) or textwrap.dedent(inspect.getsource(owner))
        if not re.search(rf"^(async def|def|class) {owner.__name__}\b", source, re.MULTILINE):
            raise OSError("its lines hold another now")  # its file was edited, or Python took the shell's own
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"{key}: the source of {owner.__name__} is not known ({error}): put it into a file and name it as "
            f"path/to/file.py:{owner.__name__}"
        ) from error
    home = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
    if isinstance(owner, types.FunctionType):
        home = owner.__globals__ | {
            name: cell.cell_contents
            for name, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        }
    for name in _names_used(source):
        if isinstance(module := home.get(name), types.ModuleType):
            imports += _imports_below(module, name, source)
        if name in seen or name not in home:
            continue  # its own, a built-in, or a mistake of the user's, which the judge reports when it is called
        seen.add(name)
        _write_down(name, home[name], owner, key, imports, definitions, seen)
    definitions.append(source.rstrip())


def _cell_of(owner: Any) -> str:
    """The source of a class of a notebook or shell, which does not know its cell; empty: it is none."""
    if not isinstance(owner, type):
        return ""
    cells = [entry[2] for entry in linecache.cache.values() if len(entry) == 4 and entry[1] is None]
    for lines in reversed(cells):  # the newest first
        with contextlib.suppress(SyntaxError):
            for found in ast.parse("".join(lines)).body:
                if isinstance(found, ast.ClassDef) and found.name == owner.__name__:
                    return ast.unparse(found)
    return ""


def _write_down(
    name: str, value: Any, owner: Any, key: str, imports: list[str], definitions: list[str], seen: set[str]
) -> None:
    plain = getattr(value, "__wrapped__", value)  # functools.cache makes no function of a function
    if isinstance(value, types.ModuleType):
        imports.append(f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}")
    elif isinstance(plain, types.FunctionType | type) and plain.__module__ == "__main__" and plain.__name__ == name:
        _collect(plain, key, imports, definitions, seen)
    elif getattr(value, "__module__", None) not in (None, "__main__") and _is_attribute(value):
        as_name = "" if value.__name__ == name else f" as {name}"
        imports.append(f"from {value.__module__} import {value.__name__}{as_name}")
    elif isinstance(value, re.Pattern):
        imports += ["import re as _re"] if "import re as _re" not in imports else []
        definitions.append(f"{name} = _re.compile({value.pattern!r}, {value.flags})")
    elif _reads_back(value):
        definitions.append(f"{name} = {value!r}")
    else:
        raise ConfigError(
            f"{key}: {owner.__name__} uses {name}, a {type(value).__name__} of this program, which cannot be written down for "
            f"other processes: make it inside the function, or put the function into a file of its own and give "
            f"path/to/file.py:{owner.__name__}"
        )


def _imports_below(module: types.ModuleType, name: str, source: str) -> list[str]:
    """Imports of what a definition takes from inside a package: ``xml.etree.ElementTree`` is not there by ``import xml``."""
    chains = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    inside = [module.__name__ + chain.removeprefix(name) for chain in chains if chain.startswith(f"{name}.")]
    return [f"import {found}" for found in inside if found in sys.modules]


def _names_used(source: str) -> list[str]:
    """Names that a definition takes from the module around it, in alphabetical order."""
    found: set[str] = set()
    tables = [symtable.symtable(source, "<function>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        found |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
    return sorted(found)


def _is_attribute(value: Any) -> bool:
    """Whether its module has it under its own name."""
    module = sys.modules.get(value.__module__)
    return getattr(module, getattr(value, "__name__", ""), None) is value


def _reads_back(value: Any) -> bool:
    """Whether its ``repr`` is a literal that gives it again: numbers, text, None, and containers of them."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return False
