"""The line between the tests and the program, which run in two boxes: plain data by value, and nothing else.

Stands alone: its text is a file in both boxes. Both ends speak JSON, one message a frame. What one
    end says is never run at the
other: a value is built from exact built-in types, and an object that has no such form does not cross.
"""

import json
import os
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

__all__ = ["Gone", "Line", "decode", "encode"]

_MOST_BYTES = 16 << 20
"""Of a message."""
_MOST_DEEP = 200
_MOST_ITEMS = 10_000
"""Of an iterator: one without end crosses as its beginning."""
_SCALARS: dict[Any, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    int: (lambda value: hex(int(value)), lambda text: int(text, 16)),
    float: (float.hex, float.fromhex),
    complex: (lambda value: repr(complex(value)), complex),
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    Decimal: (str, Decimal),
    Fraction: (str, Fraction),
}
"""Type -> how its values are written, exactly, and read."""
_SEQUENCES: dict[Any, type] = {list: list, tuple: tuple, set: set, frozenset: frozenset}
_SEQUENCES |= dict.fromkeys((deque, range, type({}.keys()), type({}.values()), type({}.items())), list)
"""Type -> what it becomes."""
_READS = {kind.__name__: read for kind, (_, read) in _SCALARS.items()}
_MAKES: dict[str, Callable[[Any], Any]] = {"iter": lambda items: iter(list(items))}
_MAKES |= {made.__name__: made for made in _SEQUENCES.values()}


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
    for kind, (write, _) in _SCALARS.items():
        if isinstance(value, kind):
            return {kind.__name__: write(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), depth + 1)
    if isinstance(value, dict):
        return {"dict": [[encode(item, depth + 1) for item in pair] for pair in dict.items(value)]}
    for kind in _SEQUENCES:
        if isinstance(value, kind):
            return {_SEQUENCES[kind].__name__: [encode(item, depth + 1) for item in kind.__iter__(value)]}
    if hasattr(value, "__next__"):
        return {"iter": [encode(item, depth + 1) for item in islice(value, _MOST_ITEMS)]}
    raise TypeError(f"{type(value).__name__} is no plain data, and only that passes between tests and program")


def decode(value: Any) -> Any:
    """The value of such JSON. Raises ``Gone`` for what ``encode`` does not say."""
    if value is None or isinstance(value, (bool, str)):
        return value
    try:
        ((kind, of),) = value.items()
        if kind == "dict":
            return {decode(key): decode(item) for key, item in of}
        if kind in _MAKES:
            return _MAKES[kind](decode(item) for item in of)
        return _READS[kind](of)
    except (AttributeError, TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
        raise Gone(f"no value: {type(error).__name__}") from error
