"""What plain values become, and what bytes that nobody encoded are refused."""

import dataclasses
import enum
import functools
import json
import operator
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from typing_extensions import TypeAliasType, TypeVar

from llamarl.channels import plain_values
from llamarl.channels.plain_values import decode, encode
from llamarl.types import Failure, Group, Opening, Prompt, Response, Score, Turn


class Level(enum.IntEnum):
    HARD = 3


class Name(enum.StrEnum):
    RIGHT = "right"


def test_values_come_back_equal_and_of_their_own_kinds() -> None:
    value = {
        "numbers": (1, -(2**70), 0.1, float("inf"), True, None),
        1: ["text", "half \ud800", b"\0bytes", {}],
        "scalars": [np.float32(0.1), np.int64(3), np.bool_(True)],
    }
    found = decode(encode(value))
    assert found == value
    assert [type(item) for item in found["scalars"]] == [np.float32, np.int64, np.bool_]
    assert type(found["numbers"]) is tuple and found["numbers"][4] is True
    assert decode(encode([Level.HARD, Name.RIGHT, np.str_("a")])) == [3, "right", "a"]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)])
def test_arrays_come_back_with_dtype_shape_and_bits(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    (found,) = decode(encode([array]))
    assert found.dtype == array.dtype and found.shape == shape and found.tobytes() == array.tobytes()
    (turned,) = decode(encode([array.T]))
    np.testing.assert_array_equal(turned, array.T)


def group_of_every_record() -> Group:
    prompt = Prompt(
        index=1, tokens=np.arange(2, dtype=np.int32), text="?", metadata={"a": [1, {"b": None}]},
        opening=Opening(seed=2**63, max_turns=1, max_turn_tokens=0),
    )  # fmt: skip
    responses = tuple(
        Response(
            prompt_index=1, sample_index=n, tokens=np.ones(1, np.int32), behavior_logprobs=np.zeros(1, np.float32),
            policy_versions=np.zeros(1, np.int32), loss_mask=np.ones(1, np.bool_), text="!", finish_reason="stop",
            outcome=outcome, turns=(Turn(start=0, end=1, finish_reason="length", reply="!", parts={"x": 1}),),
            routed_experts=np.zeros((1, 2, 2), np.uint8),
        )
        for n, outcome in enumerate([Score(value=np.float64(0.5)), Failure(kind="timeout", detail="late"), None])
    )  # fmt: skip
    return Group(prompt=prompt, responses=responses)


def test_records_come_back_whole() -> None:
    group = group_of_every_record()
    assert str(decode(encode(group))) == str(group)


Item = TypeVar("Item")


def aliased(hint: Any) -> Any:
    """An annotation that says the same, each part of it an alias as the ``type`` statement makes them."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None or origin is Literal:
        return TypeAliasType("Plain", hint)
    if origin is UnionType:
        return TypeAliasType("Either", functools.reduce(operator.or_, map(aliased, arguments)))
    if arguments[-1] is ...:
        return TypeAliasType("Items", origin[Item, ...], type_params=(Item,))[aliased(arguments[0])]
    *before, item = map(aliased, arguments)
    return TypeAliasType("Of", origin[(*before, Item)], type_params=(Item,))[item]


def test_records_whose_annotations_are_aliases_hold_the_same() -> None:
    """NumPy's ``NDArray`` is one from Python 3.12 on; no annotation may mean another thing once it is."""
    group = group_of_every_record()
    records: list[Any] = [group, group.prompt, group.prompt.opening]
    for response in group.responses:
        records += [response, *response.turns, *([response.outcome] if response.outcome else [])]
    values = [getattr(record, field.name) for record in records for field in dataclasses.fields(record)]
    values += [np.ones(2, kind) for kind in ("float32", "int64", "uint16", "bool")]
    values += [1, 0.5, 2**65, True, {1: 2}, {"a": 1}, (1,), "high", b"high"]
    for name, record in plain_values._RECORDS.items():
        for field, hint in get_type_hints(record).items():
            check = plain_values._check_of(aliased(hint))
            verdicts = [plain_values._CHECKS[name][field](value) for value in values]
            assert [check(value) for value in values] == verdicts, f"{name}.{field}: {hint}"
            assert any(verdicts), f"no value that {name}.{field} may hold"


def test_what_is_not_plain_is_named() -> None:
    for value, why in [
        ({1j}, "builtins.set"),
        (np.array([object()]), "an array of object"),
        (np.array(["text"]), "an array of <U4"),
        ({(1, 2): 3}, "a key that is no number"),
    ]:
        with pytest.raises(TypeError, match=why):
            encode([value])
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="contains itself"):
        encode(endless)


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (["array", "|O", [1], 0], "KeyError"),
        (["array", "<i8", [2], 0], "does not fill"),
        (["array", "|u1", [8, -1], 0], "the shape"),
        (["array", "|u1", [2**62, 4], 0], "does not fill"),
        (["array", "|u1", [True] * 3, 0], "the shape"),
        (["array", "|u1", [8], 1], "it names bytes 1, which"),
        (["array", "|u1", [8], -1], "it names bytes -1, which"),
        (["array", "|b1", [8], 0], "booleans holds other values"),
        (["bytes", 7], "it names bytes 7, which"),
        (["list", ["bytes", 0], ["bytes", 0]], "it names bytes 0, which are not there or named twice"),
        (["dict", "a"], "no plain value|shorter|longer"),
        (["dict", ["list"], 1], "unhashable"),
        (["os.system", "true"], "names 'os.system'"),
        (["Score", "high", ["dict"]], "Score.value holds 'high'"),
        (["Score", 1.0], "no plain value|shorter|longer"),
        (["Group", ["Score", 1.0, ["dict"]], ["tuple"], None], "Group.prompt holds"),
        ({"a": 1}, "a JSON object"),
    ],
)
def test_bytes_that_nobody_encoded_are_refused(node: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode([memoryview(json.dumps(node).encode()), memoryview(bytes(range(8)))])
