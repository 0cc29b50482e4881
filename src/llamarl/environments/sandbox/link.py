"""The line between the tests and the program, which run in two boxes: plain data by value, and nothing else.

Stands alone: its text is a file in both boxes. Both ends speak JSON, one message a frame. What one end says is never run at the
other: a value is built from exact built-in types, and an object that has no such form does not cross.
"""

import json
import os
import sys
from collections import deque
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

__all__ = ["Gone", "Line", "decode", "encode", "unlimited_digits"]

_MOST_BYTES = 16 << 20
"""Of a message."""
_MOST_DEEP = 200
_MOST_ITEMS = 10_000
"""Of an iterator: one without end crosses as its beginning."""
_PLAIN: tuple[Any, ...] = (tuple, set, frozenset)
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}


class Gone(BaseException):
    """The other end has ended, or sent what is no message."""


class Line:
    """One end.

    Args:
        fd: Of a stream socket.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        if len(data) > _MOST_BYTES:
            raise ValueError(f"a value of {len(data)} bytes is too large for a test, at most {_MOST_BYTES}")
        data = len(data).to_bytes(4, "little") + data
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise Gone("ended") from error

    def receive(self) -> dict[str, Any]:
        """The next message of the other end; raises ``Gone``."""
        size = int.from_bytes(self._read(4), "little")
        if size > _MOST_BYTES:
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


def encode(value: Any, depth: int = 0) -> Any:
    """A value as JSON. Subclasses of built-in types become what they derive from.

    Raises:
        TypeError: It is no plain data.
    """
    if value is None or value is True or value is False:
        return value
    if depth > _MOST_DEEP:
        raise RecursionError("a value is nested too deeply for a test")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        whole = int(value) if type(value) is not int else value
        return whole if -(2**53) < whole < 2**53 else {"int": hex(whole)}
    if isinstance(value, float):
        return {"float": float.hex(float(value))}
    if isinstance(value, complex):
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytearray" if isinstance(value, bytearray) else "bytes": bytes(value).hex()}
    if isinstance(value, (Decimal, Fraction)):
        return {"decimal" if isinstance(value, Decimal) else "fraction": str(value)}
    if isinstance(value, range):
        return {"range": [hex(value.start), hex(value.stop), hex(value.step)]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), depth + 1)

    def many(items: Any) -> list[Any]:
        return [encode(item, depth + 1) for item in items]

    if isinstance(value, dict):
        return {"dict": [many(pair) for pair in dict.items(value)]}
    if isinstance(value, (list, deque, type({}.keys()), type({}.values()), type({}.items()))):
        return many(value if not isinstance(value, list) else list.__iter__(value))
    for kind in _PLAIN:
        if isinstance(value, kind):
            return {kind.__name__: many(kind.__iter__(value))}
    if hasattr(value, "__next__"):
        return {"iterator": many(islice(value, _MOST_ITEMS))}
    raise TypeError(f"{type(value).__name__} is no plain data, and only that passes between tests and program")


def decode(value: Any) -> Any:
    """The value of such JSON. Raises ``Gone`` for what ``encode`` does not say."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, list):
        return [decode(item) for item in value]
    try:
        ((kind, of),) = value.items()
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([decode(item) for item in of])
        if kind == "dict":
            return {decode(key): decode(item) for key, item in of}
        if kind == "int":
            return int(of, 16)
        if kind == "float":
            return float.fromhex(of)
        if kind == "complex":
            return complex(*map(float.fromhex, of))
        if kind == "range":
            return range(*(int(number, 16) for number in of))
        if kind in ("bytes", "bytearray"):
            return bytearray.fromhex(of) if kind == "bytearray" else bytes.fromhex(of)
        return {"decimal": Decimal, "fraction": Fraction}[kind](of)
    except (AttributeError, TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
        raise Gone(f"no value: {type(error).__name__}") from error


def unlimited_digits() -> None:
    """Let whole numbers of any size be shown; the box's time is the limit."""
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
