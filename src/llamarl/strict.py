"""What every configuration dataclass shares: one pydantic setting, and one way to refuse values.

It lives below all packages so that each package's ``config.py`` can import it without importing anything else.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import annotated_types
from pydantic import AfterValidator, ConfigDict, Strict

from llamarl.errors import Mistake

__all__ = ["IN_STATE", "NO_BITS", "SAVED", "STRICT", "Effect", "ListOf", "Mistakes", "bounds", "holding", "refuse"]

T = TypeVar("T")

SAVED = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)
"""Of what a file holds that llamarl wrote itself: unknown keys are refused."""

STRICT = ConfigDict(strict=True, **SAVED)
"""Of a recipe's sections. Types are taken as TOML gives them: ``"5"`` is no number, ``2.0`` and
``true`` are no integers; a whole number is a number. The string under a field is its description,
shown by ``--help`` and beside a wrong value."""

ListOf = Annotated[tuple[T, ...], Strict(False)]
"""A field that takes a list, and keeps it as a tuple."""


class Effect(enum.Enum):
    """What another value of a key would do to a run that has begun. A field without a mark changes
    bits, which is the safe assumption about one that nobody thought of."""

    BITS = "bits"
    """What is sampled or learned from then on is other than in a run that always had the old value:
    refused on resume."""

    NO_BITS = "no bits"
    """Where, how long, how fast, what is shown or kept: free to change on resume. Written
    ``Annotated[int, NO_BITS]``."""

    IN_STATE = "in state"
    """As BITS, and the states in a checkpoint are of that value: not even a fork of the run may change it."""


NO_BITS = Effect.NO_BITS
IN_STATE = Effect.IN_STATE


class Mistakes(ValueError):
    """All that is wrong with values of one section that do not go together, so that a user need not
    mend it one run at a time."""

    def __init__(self, found: Iterable[Mistake]) -> None:
        self.found = tuple(found)
        super().__init__("; ".join(str(mistake) for mistake in self.found))

    def __reduce__(self) -> tuple[type[Mistakes], tuple[tuple[Mistake, ...]]]:
        return Mistakes, (self.found,)


def refuse(mistakes: Iterable[Mistake]) -> None:
    """Raise ``Mistakes`` if there are any."""
    found = tuple(mistakes)
    if found:
        raise Mistakes(found)


def holding(test: Callable[[Any], object], words: str) -> AfterValidator:
    """Make a field's own check: a value for which ``test`` is false is refused by ``words``, and told.

    Args:
        words: Such as "must contain {question}".
    """

    def check(value: Any) -> Any:
        if not test(value):
            raise ValueError(f"{words}, got {list(value) if isinstance(value, tuple) else value!r}")
        return value

    return AfterValidator(check)


def bounds(metadata: Iterable[Any], kind: object = float) -> str:
    """What a field's constraints leave of the numbers, in words: ">= 1", "in [0, 1)"; empty where that is all of them.

    Args:
        metadata: As pydantic keeps it of a field: ``Field(gt=0)`` and the like.
        kind: The field's type: of integers, > 0 is told as >= 1.
    """
    low = high = ""
    for mark in metadata:
        match mark:
            case annotated_types.Gt(gt=limit):
                low = f">= {int(str(limit)) + 1}" if kind is int else f"> {limit}"
            case annotated_types.Ge(ge=limit):
                low = f">= {limit}"
            case annotated_types.Lt(lt=limit):
                high = f"< {limit}"
            case annotated_types.Le(le=limit):
                high = f"<= {limit}"
    if low and high:
        opening, closing = "[" if "=" in low else "(", "]" if "=" in high else ")"
        return f"in {opening}{low.split(' ')[1]}, {high.split(' ')[1]}{closing}"
    return low or high
