"""What every configuration dataclass shares: one pydantic setting, and one way to refuse values.

It lives below all packages so that each package's ``config.py`` can import it without importing anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import ConfigDict

__all__ = ["STRICT", "Mistakes", "at_least", "refuse"]

STRICT = ConfigDict(
    extra="forbid", strict=False, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
)
"""Unknown keys are refused; the string under a field is its description, shown by ``--help``."""


class Mistakes(ValueError):
    """All that is wrong with one section, so that a user need not mend it one run at a time."""

    def __init__(self, messages: Iterable[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("; ".join(self.messages))

    def __reduce__(self) -> tuple[type[Mistakes], tuple[tuple[str, ...]]]:
        return Mistakes, (self.messages,)


def refuse(messages: Iterable[str]) -> None:
    """Raise ``Mistakes`` if there are any. Each message begins with the key at fault and names every key it looked at:
    a reader of several messages can then tell which of them only follow from another."""
    found = tuple(messages)
    if found:
        raise Mistakes(found)


def at_least(config: object, least: float, *names: str, what: str = "") -> Iterator[str]:
    """A message for each of the named fields that is below ``least``.

    Args:
        what: Unit and special values, put behind the limit.
    """
    for name in names:
        value = getattr(config, name)
        if value < least:
            yield f"{name} must be >= {least}{what and ' ' + what}, got {value}"
