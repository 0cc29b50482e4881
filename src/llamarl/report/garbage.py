"""Signs that a response is garbage, from its text alone. Pure, cheap, with limits far outside of what good answers show."""

from __future__ import annotations

import unicodedata
import zlib
from collections import Counter
from functools import cache

__all__ = ["flags_of", "is_repetitive", "other_script"]

_MAX_PERIOD = 60
_MIN_LOOP = 80
"""Characters that a loop covers at least: numbers and rulers have short ones."""
_MIN_ROUNDS = 4
_MIN_COMPRESSED = 400
_RATIO = 0.12
"""Compressed bytes by bytes; prose has 0.3 to 0.6."""
_MIN_LETTERS = 8
_OTHER_SHARE = 0.3
_NEUTRAL = frozenset({"LATIN", "GREEK", "MATHEMATICAL", ""})
"""Scripts that formulas and names bring along anywhere."""


def is_repetitive(text: str) -> bool:
    """Whether it runs in circles: a loop of up to 60 characters at its end, or text that says little more than once."""
    if any(_ends_in_loop(text, period) for period in range(1, _MAX_PERIOD + 1)):
        return True
    data = text.encode("utf-8", "replace")
    return len(data) >= _MIN_COMPRESSED and len(zlib.compress(data, 1)) < _RATIO * len(data)


def _ends_in_loop(text: str, period: int) -> bool:
    size = max(_MIN_LOOP, _MIN_ROUNDS * period)
    return len(text) >= size and text[-1] == text[-1 - period] and text[-size:-period] == text[period - size :]


@cache
def _script(character: str) -> str:
    """First word of the character's name, which names its script (``CYRILLIC``, ``CJK``, ``HANGUL``, ..); "" for no letter."""
    return unicodedata.name(character, "").split(" ")[0] if character.isalpha() else ""


def other_script(text: str, context: str) -> bool:
    """Whether much of ``text`` is written in scripts that ``context`` (prompt and reference answer) does not use."""
    if text.isascii():
        return False
    counts: Counter[str] = Counter()
    for character, number in Counter(text).items():
        counts[_script(character)] += number
    letters = sum(number for script, number in counts.items() if script)
    known = {_script(character) for character in set(context)} | _NEUTRAL
    foreign = sum(number for script, number in counts.items() if script not in known)
    return letters >= _MIN_LETTERS and foreign > _OTHER_SHARE * letters


def flags_of(text: str, context: str, finish_reason: str) -> int:
    """Bits of ``observability.findings.FLAGS``."""
    found = (is_repetitive(text), finish_reason == "length", other_script(text, context), not text.strip())
    return sum(1 << position for position, flag in enumerate(found) if flag)
