"""Plain values as bytes, and back: what data channels carry and what a run's journal keeps of it.
No pickle: bytes name no code.

    value ──encode──▶ [ JSON text | bytes of array 0 | bytes of array 1 | ... ] ──decode──▶ equal value, arrays over these bytes

Plain are None, booleans, numbers, text, bytes, lists, tuples, dicts with plain keys, NumPy arrays
and scalars of numbers, and the records of :mod:`llamarl.types`. In the JSON text each container is
a list that begins with its kind; an array is ``["array", dtype, shape, number of its bytes]``. What
is decoded may come from a stranger's run folder: a dtype must be on the list, a shape must fill its
bytes exactly, a record's fields must hold what its annotations say.
"""

from __future__ import annotations

import json
import math
import struct
import types as builtin_types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from llamarl import types

__all__ = ["ALIGN", "decode", "encode", "framed", "from_bytes", "padded", "to_bytes"]

ALIGN = 64
"""What each piece of a value is padded to where they lie one behind the other."""

_DTYPES = {
    np.dtype(name).str: np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
}  # fmt: skip
_RECORDS: dict[str, type] = {
    name: kind for name, kind in vars(types).items() if name in types.__all__ and isinstance(kind, type)
}
_FIELDS = {name: tuple(field.name for field in fields(kind)) for name, kind in _RECORDS.items()}
_MAX_AXES = 8


def encode(value: Any) -> list[memoryview]:
    """Turn a plain value into bytes: JSON text, then each array's.

    Raises:
        TypeError: Something in it is not plain; names its class.
        ValueError: It contains itself, or is nested too deep.
    """
    buffers: list[memoryview] = []
    try:
        text = json.dumps(_to_json(value, buffers), separators=(",", ":"))
    except RecursionError:
        raise ValueError("it contains itself, or is nested too deep") from None
    return [memoryview(text.encode()), *buffers]


def decode(views: Sequence[memoryview]) -> Any:
    """Turn what ``encode`` made into an equal value. Arrays lie over the given bytes, and are writable if those are.

    Raises:
        ValueError: ``encode`` did not make this.
    """
    if not views:
        raise ValueError("there is no text")
    try:
        return _from_json(json.loads(bytes(views[0])), dict(enumerate(views[1:])))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except (TypeError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"it holds no plain value: {type(error).__name__}: {error}") from error


def framed(value: Any) -> list[memoryview]:
    """Encode, with a piece in front that says how many follow and how long each is. Raises as ``encode``."""
    views = encode(value)
    return [memoryview(struct.pack(f"<{len(views) + 1}Q", len(views), *(v.nbytes for v in views))), *views]


def padded(value: Any) -> Iterator[memoryview]:
    """The pieces of ``framed`` as they lie one behind the other. Raises as ``encode``."""
    for view in framed(value):
        yield view
        yield memoryview(bytes(-view.nbytes % ALIGN))


def to_bytes(value: Any) -> bytes:
    """The pieces one behind the other. Raises as ``encode``."""
    return b"".join(padded(value))


def from_bytes(memory: memoryview) -> Any:
    """What ``to_bytes`` was given; its arrays lie over ``memory``.

    Raises:
        ValueError: ``to_bytes`` did not make this.
    """
    count = int.from_bytes(memory[:8], "little")
    if 8 * (count + 1) > len(memory):
        raise ValueError(f"a part of {len(memory)} bytes cannot hold {count} pieces")
    position, views = 8 * (count + 1), []
    for length in struct.unpack_from(f"<{count}Q", memory, 8):
        position += -position % ALIGN
        if position + length > len(memory):
            raise ValueError(f"a part of {len(memory)} bytes has a piece that ends behind it")
        views.append(memory[position : position + length])
        position += length
    return decode(views)


def _to_json(value: Any, buffers: list[memoryview]) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is float or kind is str:
        return value
    if kind is list or kind is tuple:
        return [kind.__name__, *[_to_json(item, buffers) for item in value]]
    if kind.__name__ in _RECORDS and kind is _RECORDS[kind.__name__]:
        return [kind.__name__, *[_to_json(getattr(value, name), buffers) for name in _FIELDS[kind.__name__]]]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.str in _DTYPES:
        array = np.asarray(value, order="C")
        buffers.append(array.reshape(-1).view(np.uint8).data)
        what = "array" if isinstance(value, np.ndarray) else "scalar"
        return [what, array.dtype.str, list(array.shape), len(buffers) - 1]
    if isinstance(value, str):  # of an enumeration, or NumPy's
        return str.__str__(value)
    if isinstance(value, Mapping):
        items = [(_to_json(key, buffers), _to_json(item, buffers)) for key, item in value.items()]
        if any(isinstance(key, list) for key, _ in items):
            raise TypeError(f"a {kind.__name__} has a key that is no number and no text")
        return ["dict", *[part for item in items for part in item]]
    if isinstance(value, bytes | bytearray):
        buffers.append(memoryview(bytes(value)))
        return ["bytes", len(buffers) - 1]
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Sequence):
        return ["tuple" if isinstance(value, tuple) else "list", *[_to_json(item, buffers) for item in value]]
    what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {kind.__module__}.{kind.__qualname__}"
    raise TypeError(f"{what} is no plain value")


def _from_json(node: Any, buffers: dict[int, memoryview]) -> Any:
    if not isinstance(node, list):
        if isinstance(node, dict):
            raise ValueError("it holds a JSON object")
        return node
    kind, *rest = node
    if kind == "list":
        return [_from_json(item, buffers) for item in rest]
    if kind == "tuple":
        return tuple(_from_json(item, buffers) for item in rest)
    if kind == "dict":
        items = [_from_json(item, buffers) for item in rest]
        return dict(zip(items[::2], items[1::2], strict=True))
    if kind == "array":
        return _array(*rest, buffers=buffers)
    if kind == "scalar":
        return _array(*rest, buffers=buffers)[()]
    if kind == "bytes":
        return bytes(_buffer(buffers, *rest))
    if not isinstance(kind, str) or kind not in _RECORDS:
        raise ValueError(f"it names {kind!r:.80}, which is no plain value")
    values = dict(zip(_FIELDS[kind], [_from_json(item, buffers) for item in rest], strict=True))
    for name, value in values.items():
        if not _CHECKS[kind][name](value):
            raise ValueError(f"{kind}.{name} holds {value!r:.80}")
    return _RECORDS[kind](**values)


def _buffer(buffers: dict[int, memoryview], number: int) -> memoryview:
    """Take a piece, which has one place in a value: two would make more of it than came."""
    if type(number) is not int or number not in buffers:
        raise ValueError(f"it names bytes {number!r:.20}, which are not there or named twice")
    return buffers.pop(number)


def _array(dtype: str, shape: list[int], number: int, *, buffers: dict[int, memoryview]) -> np.ndarray[Any, Any]:
    data, kind = _buffer(buffers, number), _DTYPES[dtype]
    if len(shape) > _MAX_AXES or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"an array has the shape {shape!r:.80}")
    if math.prod(shape) * kind.itemsize != data.nbytes:
        raise ValueError(f"an array of {dtype} and the shape {shape!r:.80} does not fill its {data.nbytes} bytes")
    if not data.nbytes:
        return np.empty(shape, kind)
    if kind == np.bool_ and np.frombuffer(data, np.uint8).max() > 1:
        raise ValueError("an array of booleans holds other values")
    return np.frombuffer(data, kind).reshape(shape)


def _resolved(hint: Any) -> Any:
    """What an alias of a ``type`` statement stands for, its arguments filled in; any other annotation as it is.
    NumPy's ``NDArray`` is one from Python 3.12 on. 3.11 has no class for them, so ``__value__`` tells."""
    while hasattr(hint, "__value__"):
        value, given = hint.__value__, dict(zip(hint.__type_params__, get_args(hint), strict=False))
        hint = value[tuple(given[parameter] for parameter in value.__parameters__)] if given else value
    return hint


def _check_of(hint: Any) -> Callable[[Any], bool]:
    """Whether a value may stand in a record's field that is annotated so. Numbers may be NumPy's:
    rewards are users' code."""
    hint = _resolved(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in arguments
    if origin in (Union, builtin_types.UnionType):
        checks = [_check_of(argument) for argument in arguments]
        return lambda value: any(check(value) for check in checks)
    if origin is tuple:
        item = _check_of(arguments[0])
        return lambda value: isinstance(value, tuple) and all(map(item, value))
    if origin is not None and issubclass(origin, Mapping):
        item = _check_of(arguments[1])
        return lambda value: isinstance(value, dict) and all(isinstance(k, str) and item(v) for k, v in value.items())
    if origin is np.ndarray:
        number = _resolved(get_args(_resolved(arguments[1]))[0])
        of = get_origin(number) or number
        kind = np.unsignedinteger if of is np.unsignedinteger else np.dtype(of).type.__mro__[1]
        return lambda value: isinstance(value, np.ndarray) and value.ndim > 0 and np.issubdtype(value.dtype, kind)
    if hint in (int, float):
        kinds: Any = (int, np.integer) if hint is int else (int, float, np.integer, np.floating, np.bool_)
        return lambda value: isinstance(value, kinds) and not (isinstance(value, int) and abs(value) >> 64)
    wanted: Any = (bool, np.bool_) if hint is bool else hint
    return lambda value: isinstance(value, wanted)


_CHECKS = {
    name: {field: _check_of(hint) for field, hint in get_type_hints(kind).items()} for name, kind in _RECORDS.items()
}
