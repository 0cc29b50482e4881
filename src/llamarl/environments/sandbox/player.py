"""In the program's box: runs the program, then calls what the tests, in a box of their own, ask for.

Stands alone, with ``link`` beside it. All here is in the program's hands: it may lie about what its
functions return, and nothing else. What is expected of it, the tests' box alone knows.
"""

import os
import sys
import types
from typing import Any

from link import Gone, Line, decode, encode  # type: ignore[import-not-found]  # a file of the box

__all__ = ["main"]


def _call(module: types.ModuleType, request: dict[str, Any]) -> dict[str, Any]:
    """Call one function, and say what became of the arguments that can change."""
    try:
        args, kwargs = decode(request["args"]), decode(request["kwargs"])
        value = vars(module)[request["call"]](*args, **kwargs)
        after = [encode(arg) if isinstance(arg, (list, dict, set, bytearray)) else None for arg in args]
        return {"value": encode(value), "after": after}
    except Gone:
        raise
    except BaseException as error:
        known = (str, int, float, bool, type(None))
        args = [encode(arg) if type(arg) in known else repr(arg) for arg in error.args]
        return {"raised": [kind.__name__ for kind in type(error).__mro__], "args": args}


def _names(module: types.ModuleType) -> dict[str, Any]:
    """What the tests may use: functions by name, plain data by value."""
    functions, values = [], {}
    for name, value in list(vars(module).items()):
        if name.startswith("__") or isinstance(value, types.ModuleType) or hasattr(value, "__next__"):
            continue
        if callable(value):
            functions.append(name)
            continue
        try:
            values[name] = encode(value)
        except Exception:  # it does not cross
            continue
    return {"functions": functions, "values": values}


def main() -> None:
    """Load the program and serve the tests."""
    line, module = Line(3), types.ModuleType("solution")
    line.receive()  # the tests keep their memory to themselves from now on
    sys.modules["solution"] = module
    sys.argv = ["solution.py"]
    try:
        with open("solution.py", encoding="utf-8", errors="surrogatepass") as file:
            code = compile(file.read(), "solution.py", "exec")
    except BaseException:
        line.send({"loaded": "no"})
        return
    try:
        exec(code, vars(module))
    except BaseException:
        line.send({"loaded": "raised"})
        return
    line.send({"loaded": "yes", **_names(module)})
    while True:
        answer = _call(module, line.receive())
        try:
            line.send(answer)
        except ValueError as error:  # too large
            line.send({"raised": ["ValueError"], "args": [str(error)]})


if __name__ == "__main__":
    try:
        main()
    except Gone:
        os._exit(0)
