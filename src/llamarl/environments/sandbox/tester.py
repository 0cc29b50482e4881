"""In a box of its own: runs the tests against a program that is in another box, and keeps the count.

Stands alone, with ``link`` beside it. The names that the tests use and do not define stand for the program's: a function is
called over the line, and what it returns is compared here, with this interpreter's own ``==``. So the program never sees what
is expected, and cannot change how it is compared.

    tests' box:  assert double(2) == 4  ──▶ call 0 (2) ──▶  program's box:  double(2)
                        4 == 4, here    ◀──── 4 ─────────
"""

import ast
import builtins
import contextlib
import importlib
import json
import os
import sys
import types
from typing import Any

from link import Gone, Line, unlimited_digits  # type: ignore[import-not-found]  # a file of the box

__all__ = ["Far", "free_names", "main"]

_ALIASES = {"np": "numpy", "pd": "pandas", "dt": "datetime", "plt": "matplotlib.pyplot"}
_OWN_OPERATORS = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift iadd isub imul"


class Far:
    """An object of the program's."""

    def __init__(self, number: int, kind: str) -> None:
        object.__setattr__(self, "_far_number", number)
        object.__setattr__(self, "_far_kind", kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = {"of": _number(self), "args": _LINE.encode(args), "kwargs": _LINE.encode(kwargs)}
        answer = _ask("call", request)
        after = answer.get("after")
        for arg, now in zip(args, after if isinstance(after, list) else [], strict=False):
            if now is not None:
                _change(arg, _LINE.decode(now))
        if type(place := answer.get("same")) is int and 0 <= place < len(args):
            return args[place]
        return _LINE.decode(answer.get("value"))

    def __getattr__(self, name: str) -> Any:
        return _value("get", of=_number(self), name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        _value("set", of=_number(self), name=name, value=_LINE.encode(value))

    def __eq__(self, other: Any) -> Any:
        if isinstance(other, Far) and _number(other) == _number(self):
            return True
        if not isinstance(other, Far) and not _TRUST:
            return NotImplemented  # an object of the program's does not say what it equals
        return _operate("eq", self, other) is True

    def __hash__(self) -> int:
        return hash(_operate("hash", self))

    def __bool__(self) -> bool:
        return _operate("bool", self) is True

    def __len__(self) -> int:
        return _operate("len", self)  # type: ignore[no-any-return]

    def __iter__(self) -> Any:
        items = _operate("iter", self)
        if not isinstance(items, Far):
            return iter(items)
        return _items(items)

    def __next__(self) -> Any:
        return _operate("next", self)

    def __getitem__(self, key: Any) -> Any:
        return _operate("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _operate("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        _operate("delitem", self, key)

    def __contains__(self, item: Any) -> bool:
        if _TRUST:
            return _operate("contains", self, item) is True
        return any(own is item or own == item for own in self)

    def __str__(self) -> str:
        return str(_operate("str", self))

    def __repr__(self) -> str:
        return str(_operate("repr", self))

    def __format__(self, how: str) -> str:
        return str(_operate("format", self, how))

    def __dir__(self) -> Any:
        return _operate("dir", self)

    def __reversed__(self) -> Any:
        return _operate("reversed", self)

    def __enter__(self) -> Any:
        return _operate("enter", self)

    def __exit__(self, *_: object) -> Any:
        return _operate("exit", self)

    def __neg__(self) -> Any:
        return _operate("neg", self)

    def __abs__(self) -> Any:
        return _operate("abs", self)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Far) and _operate("isinstance", value, self) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, Far) and _operate("issubclass", value, self) is True


def _items(items: Far) -> Any:
    while True:
        try:
            item = _operate("next", items)
        except StopIteration:
            return
        yield item


def _own(name: str, word: str, swapped: bool = False) -> Any:
    """An operator between an object of the program's and another value: only another such object may be it."""

    def operate(self: Far, other: Any) -> Any:
        if not isinstance(other, Far) and not _TRUST:
            return NotImplemented
        return _operate(word, other, self) if swapped and isinstance(other, Far) else _operate(word, self, other)

    operate.__name__ = name
    return operate


for _word in ("lt", "le", "gt", "ge", *_OWN_OPERATORS.split()):
    setattr(Far, f"__{_word.rstrip('_')}__", _own(f"__{_word.rstrip('_')}__", _word))


def _number(of: Far) -> int:
    return object.__getattribute__(of, "_far_number")  # type: ignore[no-any-return]


def _ask(do: str, request: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = _LINE.ask(do=do, **request)
    if "raised" in answer:
        args = _LINE.decode(answer.get("args"))
        raise _error_class(answer["raised"])(*(args if isinstance(args, list) else []))
    return answer


def _value(do: str, **request: Any) -> Any:
    return _LINE.decode(_ask(do, request).get("value"))


def _operate(do: str, of: Any, *args: Any) -> Any:
    return _value(do, of=_number(of), args=_LINE.encode(args))


def _change(arg: Any, now: Any) -> None:
    """Give a value that the program changed in place what it holds now."""
    if type(arg) is not type(now):
        return
    if isinstance(arg, (list, bytearray)):
        if arg != now:
            arg[:] = now
    elif isinstance(arg, (dict, set)) and arg != now:
        arg.clear()
        arg.update(now)


_errors: dict[int, type[BaseException]] = {}


def _error_class(about: Any) -> type[BaseException]:
    """The built-in exception of that name, or a class of ours for one of the program's."""
    try:
        names, number = [str(name) for name in about["error"]], int(about["number"])
    except (TypeError, KeyError, ValueError) as error:
        raise Gone("no exception") from error
    known = [
        found
        for name in names
        if isinstance(found := getattr(builtins, name, None), type) and issubclass(found, BaseException)
    ]
    base = known[0] if known else Exception
    if names and names[0] == base.__name__:
        return base
    if number not in _errors:
        _errors[number] = type(names[0] if names else "Exception", (base,), {})
    return _errors[number]


_given: list[Any] = []


def _near(value: Any) -> dict[str, Any]:
    if isinstance(value, Far):
        return {"yours": _number(value)}
    for number, error in _errors.items():
        if error is value:
            return {"yours": number}
    if not callable(value) and not hasattr(value, "__next__") and type(value).__module__ != "tests":
        raise TypeError(f"a test cannot hand {type(value).__name__} to the program: only plain data, functions, iterators and "
                        "objects of its own classes")  # fmt: skip
    for number, other in enumerate(_given):
        if other is value:
            return {"number": number}
    _given.append(value)
    return {"number": len(_given) - 1}


def _far(about: Any) -> Any:
    if "yours" in about:
        return _given[int(about["yours"])]
    if "error" in about:
        return _error_class(about)
    number, kind = about["number"], about["type"]
    if type(number) is not int or type(kind) is not str:
        raise ValueError("no object")
    return Far(number, kind)


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    """What the program may do with what the tests handed to it: call it, take its next item, use its public attributes."""
    try:
        do, of = request["do"], _given[int(request["of"])]
        if do == "call" and callable(of):
            args, kwargs = _LINE.decode(request["args"]), _LINE.decode(request["kwargs"])
            return {"value": _LINE.encode(of(*args, **kwargs))}
        if do == "next" and hasattr(of, "__next__"):
            return {"value": _LINE.encode(next(of))}
        name = request.get("name")
        if type(of).__module__ == "tests" and isinstance(name, str) and not name.startswith("_"):
            if do == "get":
                return {"value": _LINE.encode(getattr(of, name))}
            if do == "set" and not isinstance(of, (type, types.FunctionType, types.MethodType)):
                setattr(of, name, _LINE.decode(request["value"]))
                return {"value": None}
        raise TypeError("the tests do not allow that")
    except Gone:
        raise
    except BaseException as error:
        known = next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"), "Exception")
        return {"raised": known, "args": _LINE.encode([])}


_LINE = Line(3, _serve, _near, _far)
_TRUST = False


def free_names(sources: list[str]) -> list[str]:
    """Names that the tests read, in order, those that the language has and those that they make themselves left out."""
    read: dict[str, None] = {}
    made: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Load):
                    read[node.id] = None
                else:
                    made.add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                made.add(node.name)
            elif isinstance(node, ast.arg):
                made.add(node.arg)
            elif isinstance(node, ast.alias):
                made.add((node.asname or node.name).partition(".")[0])
    return [name for name in read if name not in made]


class _Solution(types.ModuleType):
    """``import solution`` and ``from solution import name`` in tests."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name)


def _named(name: str) -> Any:
    try:
        return _value("name", name=name)
    except KeyError:
        raise AttributeError(f"the program has no {name}") from None


def _scope(sources: list[str], entry_point: str) -> dict[str, Any]:
    """The tests' globals, with the program's names in it."""
    tests = types.ModuleType("tests")
    sys.modules["tests"] = tests
    sys.modules["solution"] = _Solution("solution")
    scope = vars(tests)
    for name in dict.fromkeys([*free_names(sources), *([entry_point] if entry_point else ())]):
        if hasattr(builtins, name) and name != entry_point:
            continue
        if (name in sys.stdlib_module_names or name in _ALIASES) and name != entry_point:
            with contextlib.suppress(ImportError):  # modules are the tests' own, whatever the program calls so
                scope[name] = importlib.import_module(_ALIASES.get(name, name))
            continue
        with contextlib.suppress(AttributeError):
            scope[name] = _named(name)
    return scope


def _cases(scope: dict[str, Any], entry_point: str) -> list[Any]:
    """Functions to call, of a test file that has been run: check(candidate), test_* and unittest's."""
    found: list[Any] = []
    if callable(check := scope.get("check")) and entry_point:
        found.append(lambda: check(scope[entry_point]))
    unittest = sys.modules.get("unittest")
    for name, value in list(scope.items()):
        if name.startswith("test_") and isinstance(value, types.FunctionType):
            found.append(value)
        elif (
            unittest is not None
            and isinstance(value, type)
            and issubclass(value, unittest.TestCase)
            and value.__module__ == "tests"
        ):
            loaded = unittest.defaultTestLoader.loadTestsFromTestCase(value)
            found += [_unittest(case) for case in loaded]
    return found


def _unittest(case: Any) -> Any:
    def run() -> None:
        result = case.defaultTestResult()
        case.run(result)
        if not result.wasSuccessful():
            raise AssertionError

    return run


def _try(run: Any, say: Any) -> None:
    """One test; the program's end is the end of all of them."""
    try:
        run()
    except Gone:
        raise
    except BaseException as error:
        say({"failed": type(error).__name__})
    else:
        say({"passed": 1})


def main() -> None:
    """Results go to what standard output was, one JSON object a line; tests print nowhere."""
    global _TRUST
    unlimited_digits()
    out = os.dup(1)
    os.set_inheritable(out, False)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(null, fd)

    def say(line: dict[str, Any]) -> None:
        os.write(out, json.dumps(line).encode() + b"\n")

    with open("job.json", encoding="utf-8") as file:
        job = json.load(file)
    os.unlink("job.json")
    _TRUST = job["trust"]
    sources, entry_point = job["tests"], job["entry_point"]
    sys.argv = ["tests.py"]
    say({"ready": 1})
    try:
        message = _LINE._receive()
        state = message["ask"]["loaded"] if isinstance(message.get("ask"), dict) else "no"
        say({"loaded": state if state in ("yes", "no", "raised") else "no"})
        if state != "yes":
            return
        _LINE._send({"answer": {}})
        try:
            scope = _scope(sources, entry_point)
        except Exception as error:  # the program's answers are not what it has
            raise Gone(type(error).__name__) from error
        say({"begun": 1})
        if not job["file"]:
            for source in sources:
                code = compile(source, "tests.py", "exec")
                _try(lambda code=code: exec(code, scope), say)
        else:
            code = compile(sources[0], "tests.py", "exec")
            _try_file(code, scope, entry_point, say)
        say({"done": 1})
    except Gone as error:
        say({"gone": str(error)})


def _try_file(code: Any, scope: dict[str, Any], entry_point: str, say: Any) -> None:
    """A test file: it may be all asserts, or functions, or both."""
    try:
        exec(code, scope)
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


if __name__ == "__main__":
    main()
