"""In a box of its own: runs the tests against a program that is in another box, and keeps the count.

Stands alone, with ``link`` beside it. The names of the program's functions stand here for calls
over the line, and what comes back is compared here, with this interpreter's own ``==``: plain data
alone crosses. So the program never sees what is expected, and cannot change how it is compared.

    tests' box:  assert double(2) == 4  ──▶ call double (2) ──▶  program's box:  double(2)
                        4 == 4, here    ◀──────── 4 ──────────
"""

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from link import Gone, Line, decode, encode  # type: ignore[import-not-found]  # a file of the box

sys.path.pop(0)  # this folder, where in a plain box a program of the same user could lay modules for the tests

__all__ = ["main"]

_ALIASES = {"np": "numpy", "pd": "pandas", "dt": "datetime", "plt": "matplotlib.pyplot"}
_PR_SET_DUMPABLE = 4

Say = Callable[[dict[str, Any]], None]


class _Function:
    """Calls one of the program's functions."""

    def __init__(self, line: Line, name: str) -> None:
        self._line = line
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._line.send({"call": self._name, "args": encode(list(args)), "kwargs": encode(kwargs)})
        answer = self._line.receive()
        if "raised" in answer:
            raise _error(answer)
        after = answer.get("after")
        for arg, now in zip(args, after if isinstance(after, list) else [], strict=False):
            if now is not None:
                _change(arg, decode(now))
        return decode(answer.get("value"))


def _change(arg: Any, now: Any) -> None:
    """Give a value that the program changed in place what it holds now."""
    if type(arg) is not type(now):
        return
    if isinstance(arg, (list, bytearray)):
        arg[:] = now
    elif isinstance(arg, (dict, set)):
        arg.clear()
        arg.update(now)


def _error(answer: dict[str, Any]) -> BaseException:
    """The built-in exception that the program raised, or the nearest one that its own derives from."""
    names, args = answer["raised"], answer.get("args")
    for name in names if isinstance(names, list) else []:
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, BaseException):
            with contextlib.suppress(TypeError):  # a few want arguments of their own
                return kind(*map(decode, args if isinstance(args, list) else []))
    return Exception("the program raised")


def _scope(sources: list[str], entry_point: str, names: dict[str, Any], line: Line) -> dict[str, Any]:
    """The tests' globals: the program's names, and standard modules that the tests speak of."""
    functions, values = names.get("functions"), names.get("values")
    own: dict[str, Any] = {}
    for name in functions if isinstance(functions, list) else []:
        own[str(name)] = _Function(line, str(name))
    for name, value in values.items() if isinstance(values, dict) else ():
        own[name] = decode(value)
    tests, solution = types.ModuleType("tests"), types.ModuleType("solution")
    sys.modules["tests"], sys.modules["solution"] = tests, solution
    scope = vars(tests)
    for name, value in own.items():
        if name.startswith("__"):
            continue
        setattr(solution, name, value)
        if name == entry_point or not hasattr(builtins, name):
            scope[name] = value
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    for name in dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name)):
        if (name in sys.stdlib_module_names or name in _ALIASES) and name != entry_point:
            with contextlib.suppress(ImportError):  # modules are the tests' own, whatever the program calls so
                scope[name] = importlib.import_module(_ALIASES.get(name, name))
    return scope


def _cases(scope: dict[str, Any], entry_point: str) -> list[Callable[[], Any]]:
    """Functions to call, of a test file that has been run: check(candidate), pytest's by their names, and unittest's."""
    found: list[Callable[[], Any]] = []
    check = scope.get("check")
    if isinstance(check, types.FunctionType) and entry_point:
        found.append(lambda: check(scope[entry_point]))
    unittest = sys.modules.get("unittest")
    for name, value in list(scope.items()):
        if name.startswith("test") and isinstance(value, types.FunctionType):
            found.append(value)
        elif not isinstance(value, type) or value.__module__ != "tests":
            continue
        elif unittest is not None and issubclass(value, unittest.TestCase):
            found += [_unittest(case) for case in unittest.defaultTestLoader.loadTestsFromTestCase(value)]
        elif name.startswith("Test"):
            found += [_method(value, method) for method in vars(value) if method.startswith("test")]
    return found


def _method(kind: type, name: str) -> Callable[[], Any]:
    """Each in an instance of its own, as pytest does."""
    return lambda: getattr(kind(), name)()


def _unittest(case: Any) -> Callable[[], None]:
    def run() -> None:
        result = case.defaultTestResult()
        case.run(result)
        if not result.wasSuccessful():
            raise AssertionError

    return run


def _try(run: Callable[[], Any], say: Say) -> None:
    """Run one test; the program's end is the end of all of them."""
    try:
        value = run()
        if isinstance(value, types.CoroutineType):
            import asyncio  # takes time

            asyncio.run(value)
    except Gone:
        raise
    except BaseException as error:
        say({"failed": type(error).__name__})
    else:
        say({"passed": 1})


def _try_file(source: str, scope: dict[str, Any], entry_point: str, say: Say) -> None:
    """Run a test file: it may be all asserts, or functions, or both."""
    try:
        exec(compile(source, "tests.py", "exec"), scope)
    except Gone:
        raise
    except BaseException as error:
        say({"planned": 1})
        say({"failed": type(error).__name__})
        return
    cases = _cases(scope, entry_point)
    say({"planned": len(cases) or 1})
    if not cases:
        say({"passed": 1})
    for case in cases:
        _try(case, say)


def main() -> None:
    """Say results to what standard output was, one JSON object a line; tests print nowhere."""
    ctypes.CDLL(None).prctl(
        _PR_SET_DUMPABLE, 0, 0, 0, 0
    )  # before the tests are read: no process of this user reads them here
    out = os.dup(1)
    os.set_inheritable(out, False)

    def say(told: dict[str, Any]) -> None:
        os.write(out, json.dumps(told).encode() + b"\n")

    job = json.load(sys.stdin)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    sources, entry_point = job["tests"], job["entry_point"]
    sys.argv = ["tests.py"]
    say({"ready": 1})
    line = Line(3)
    try:
        line.send({"go": 1})
        names = line.receive()
        state = names.get("loaded")
        say({"loaded": state if state in ("yes", "raised") else "no"})
        if state != "yes":
            return
        try:
            scope = _scope(sources, entry_point, names, line)
        except Exception as error:  # the program's answers are not what it has
            raise Gone(type(error).__name__) from error
        if job["file"]:
            _try_file(sources[0], scope, entry_point, say)
        else:
            for source in sources:
                _try(lambda source=source: exec(compile(source, "tests.py", "exec"), scope), say)  # type: ignore[misc]
    except Gone as error:
        say({"gone": str(error)})


if __name__ == "__main__":
    main()
