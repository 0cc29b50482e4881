"""In the program's box: runs the program, then calls what the tests, in a box of their own, ask for.

Stands alone, with ``link`` beside it. All here is in the program's hands: it may lie about what its functions return, and
nothing else. What is expected of it, the tests' box alone knows.
"""

import operator
import os
import sys
import types
from typing import Any

from link import Gone, Line  # type: ignore[import-not-found]  # a file of the box

__all__ = ["Callback", "main"]

_OPERATORS: dict[str, Any] = {
    **{name: getattr(operator, name) for name in (
        "eq lt le gt ge add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift neg pos invert "
        "getitem setitem delitem contains iadd isub imul"
    ).split()},
    "abs": abs, "len": len, "iter": iter, "next": next, "bool": bool, "str": str, "repr": repr, "hash": hash,
    "dir": dir, "round": round, "reversed": reversed, "isinstance": isinstance, "issubclass": issubclass,
    "format": format, "enter": lambda of: type(of).__enter__(of), "exit": lambda of: type(of).__exit__(of, None, None, None),
}  # fmt: skip


class Callback:
    """A function, or an object, of the tests."""

    def __init__(self, number: int) -> None:
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _ask(do="call", of=self._number, args=_LINE.encode(args), kwargs=_LINE.encode(kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _ask(do="get", of=self._number, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(do="set", of=self._number, name=name, value=_LINE.encode(value))

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return _ask(do="next", of=self._number)


def _ask(**request: Any) -> Any:
    answer = _LINE.ask(**request)
    if "raised" in answer:
        error = getattr(__import__("builtins"), str(answer["raised"]), Exception)
        raise error(*_LINE.decode(answer["args"]))
    return _LINE.decode(answer["value"])


_objects: list[Any] = []
_numbers: dict[int, int] = {}


def _near(value: Any) -> dict[str, Any]:
    if isinstance(value, Callback):
        return {"yours": object.__getattribute__(value, "_number")}
    if id(value) not in _numbers:
        _numbers[id(value)] = len(_objects)
        _objects.append(value)
    about: dict[str, Any] = {"number": _numbers[id(value)], "type": type(value).__name__}
    if isinstance(value, types.ModuleType):
        about["module"] = value.__name__
    if isinstance(value, type) and issubclass(value, BaseException):
        about["error"] = [kind.__name__ for kind in value.__mro__]
    return about


def _far(about: dict[str, Any]) -> Any:
    return _objects[about["yours"]] if "yours" in about else Callback(about["number"])


def _call(request: dict[str, Any]) -> dict[str, Any]:
    """Call, and say what became of the arguments that can change and were sent by value."""
    args, kwargs = _LINE.decode(request["args"]), _LINE.decode(request["kwargs"])
    value = _objects[request["of"]](*args, **kwargs)
    after = [_LINE.encode(arg) if isinstance(arg, (list, dict, set, bytearray)) else None for arg in args]
    for place, arg in enumerate(args):
        if value is arg and after[place] is not None:
            return {"same": place, "after": after}
    return {"value": _LINE.encode(value), "after": after}


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    try:
        if request["do"] == "call":
            return _call(request)
        if request["do"] == "name":
            return {"value": _LINE.encode(vars(_MODULE)[request["name"]])}
        of = _objects[request["of"]]
        if request["do"] == "get":
            return {"value": _LINE.encode(getattr(of, request["name"]))}
        if request["do"] == "set":
            setattr(of, request["name"], _LINE.decode(request["value"]))
            return {"value": None}
        return {"value": _LINE.encode(_OPERATORS[request["do"]](of, *_LINE.decode(request["args"])))}
    except Gone:
        raise
    except BaseException as error:
        return _raised(error)


def _raised(error: BaseException) -> dict[str, Any]:
    try:
        args = _LINE.encode(
            [arg if isinstance(arg, (str, int, float, bool, type(None))) else repr(arg) for arg in error.args]
        )
    except BaseException:
        args = []
    return {"raised": _near(type(error)), "args": args}


_LINE = Line(3, _serve, _near, _far)
_MODULE = types.ModuleType("solution")


def main() -> None:
    sys.modules["solution"] = _MODULE
    sys.argv = ["solution.py"]
    try:
        with open("solution.py", encoding="utf-8", errors="surrogatepass") as file:
            source = file.read()
        code = compile(source, "solution.py", "exec")
    except BaseException as error:
        _LINE.ask(loaded="no", why=type(error).__name__)
        return
    try:
        exec(code, vars(_MODULE))
    except BaseException as error:
        _LINE.ask(loaded="raised", why=type(error).__name__)
        return
    _LINE.ask(loaded="yes")
    while True:
        _LINE.serve_one()


if __name__ == "__main__":
    try:
        main()
    except Gone:
        os._exit(0)
