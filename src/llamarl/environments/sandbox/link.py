"""A line between the tests and the program, which run in two boxes: plain data by value, everything else by number.

Stands alone: its text is a file in both boxes. Both ends speak JSON, one message a frame; while an end waits for an answer it
serves what the other one asks, so a function of the tests may be handed to the program and called there.

What one end says is never run at the other: a value is built from exact built-in types, and an object that has no such form
stays where it is and is known by a number (``Far`` in ``tester``, ``Callback`` in ``player``).
"""

import builtins
import json
import os
import sys
from collections import namedtuple
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

__all__ = ["Gone", "Line", "unlimited_digits"]

MOST_BYTES = 16 << 20
"""Of a message."""
_MOST_DEEP = 200


class Gone(BaseException):
    """The other end has ended, or sent what is no message."""


class Line:
    """One end.

    Args:
        fd: Of a stream socket.
        serve: Answers what the other end asks.
        near: Encodes an object that is not plain data.
        far: Decodes what ``near`` of the other end has encoded.
    """

    def __init__(
        self,
        fd: int,
        serve: Callable[[dict[str, Any]], dict[str, Any]],
        near: Callable[[Any], dict[str, Any]],
        far: Callable[[dict[str, Any]], Any],
    ) -> None:
        self._fd = fd
        self._serve = serve
        self._near = near
        self._far = far

    def ask(self, **request: Any) -> dict[str, Any]:
        """What the other end answers; serves it meanwhile."""
        self._send({"ask": request})
        while True:
            message = self._receive()
            if isinstance(answer := message.get("answer"), dict):
                return answer
            self._answer(message)

    def serve_one(self) -> None:
        """Wait for a request and answer it."""
        self._answer(self._receive())

    def _answer(self, message: dict[str, Any]) -> None:
        request = message.get("ask")
        if not isinstance(request, dict):
            raise Gone("no request")
        self._send({"answer": self._serve(request)})

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        if len(data) > MOST_BYTES:
            raise ValueError(f"a value of {len(data)} bytes is too large for a test, at most {MOST_BYTES}")
        data = len(data).to_bytes(4, "little") + data
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise Gone("ended") from error

    def _receive(self) -> dict[str, Any]:
        size = int.from_bytes(self._read(4), "little")
        if size > MOST_BYTES:
            raise Gone(f"a message of {size} bytes")
        try:
            message = json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise Gone("no message") from error
        if not isinstance(message, dict):
            raise Gone("no message")
        return message

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = os.read(self._fd, min(size - len(data), 1 << 20))
            except OSError as error:
                raise Gone("ended") from error
            if not piece:
                raise Gone("ended")
            data += piece
        return bytes(data)

    def encode(self, value: Any, depth: int = 0) -> Any:
        """A value as JSON. Subclasses of built-in types become what they are made of."""
        if value is None or value is True or value is False:
            return value
        if depth > _MOST_DEEP:
            raise RecursionError("a value is nested too deeply for a test")
        if isinstance(value, type):
            own = value.__module__ == "builtins" and getattr(builtins, value.__name__, None) is value
            return {"type": value.__name__} if own else {"object": self._near(value)}
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            whole = int(value) if type(value) is not int else value
            return whole if -(2**53) < whole < 2**53 else {"int": hex(whole)}
        if isinstance(value, float):
            return {"float": float.hex(float(value))}

        def many(items: Any) -> list[Any]:
            return [self.encode(item, depth + 1) for item in items]

        if isinstance(value, list):
            return many(list.__iter__(value))
        if isinstance(value, tuple):
            fields = getattr(type(value), "_fields", None)
            if isinstance(fields, tuple) and all(isinstance(name, str) for name in fields):
                return {"named": [type(value).__name__, list(fields), many(tuple.__iter__(value))]}
            return {"tuple": many(tuple.__iter__(value))}
        if isinstance(value, dict):
            return {"dict": [many(pair) for pair in dict.items(value)]}
        if isinstance(value, set):
            return {"set": many(set.__iter__(value))}
        if isinstance(value, frozenset):
            return {"frozenset": many(frozenset.__iter__(value))}
        if isinstance(value, (bytes, bytearray)):
            return {"bytearray" if isinstance(value, bytearray) else "bytes": bytes(value).hex()}
        if isinstance(value, complex):
            return {"complex": [float.hex(value.real), float.hex(value.imag)]}
        if isinstance(value, range):
            return {"range": many([value.start, value.stop, value.step])}
        if isinstance(value, Decimal):
            return {"decimal": str(value)}
        if isinstance(value, Fraction):
            return {"fraction": many([value.numerator, value.denominator])}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encode(value.tolist(), depth + 1)
        return {"object": self._near(value)}

    def decode(self, value: Any) -> Any:
        """The value of such JSON. Raises ``Gone`` for what ``encode`` does not say."""
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        try:
            ((kind, of),) = value.items()
            return self._build(kind, of)
        except (AttributeError, TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
            raise Gone(f"no value: {type(error).__name__}") from error

    def _build(self, kind: str, of: Any) -> Any:
        if kind == "object":
            return self._far(of)
        if kind == "type":
            found = vars(builtins)[of]
            if not isinstance(found, type):  # a function would run at this end
                raise ValueError("no type")
            return found
        if kind == "int":
            return int(of, 16)
        if kind == "float":
            return float.fromhex(of)
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in of}
        if kind == "named":
            name, fields, items = of
            return namedtuple(str(name), [str(word) for word in fields], rename=True)(*map(self.decode, items))
        if kind == "complex":
            return complex(*map(float.fromhex, of))
        if kind == "fraction":
            return Fraction(*of_ints(self, of))
        if kind == "range":
            return range(*of_ints(self, of))
        if kind == "decimal":
            return Decimal(of)
        if kind in ("bytes", "bytearray"):
            return bytearray.fromhex(of) if kind == "bytearray" else bytes.fromhex(of)
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(self.decode, of))


def of_ints(line: Line, items: Any) -> list[int]:
    """Whole numbers."""
    return [int(line.decode(item)) for item in items]


def unlimited_digits() -> None:
    """Whole numbers of any size may be shown; the box's time is the limit."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
