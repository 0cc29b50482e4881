"""Finding the answer in what a policy wrote. Plain string work; the rules are in docs/environments.md.

The *last* candidate always wins, since a policy that reasons writes its answer at the end.
"""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["AnswerFrom", "extract_answer", "is_number", "last_boxed", "last_number"]

AnswerFrom = Literal["auto", "tag", "boxed", "last_number", "last_line", "whole"]

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[-−]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_IS_NUMBER = re.compile(r"[-−+]?[\d,]*\.?\d+")


def extract_answer(text: str, how: AnswerFrom = "auto", *, numeric: bool = False) -> str | None:
    """The answer a response gives, or None where it gives none of the form asked for.

    Args:
        how: ``tag``: inside the last ``<answer>...</answer>``; ``boxed``: inside the last ``\\boxed{...}``;
            ``last_number``; ``last_line``: the last line that is not blank; ``whole``: everything, stripped;
            ``auto``: the tag, else the box, else what follows the last ``####``, else the last number if ``numeric``,
            else everything.
        numeric: The reference answer is a number.
    """
    if how == "tag":
        tags = _TAG.findall(text)
        return tags[-1].strip() if tags else None
    if how == "boxed":
        return last_boxed(text)
    if how == "last_number":
        return last_number(text)
    if how == "last_line":
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else None
    if how == "whole":
        return text.strip() or None
    for marked in (extract_answer(text, "tag"), last_boxed(text)):
        if marked is not None:
            return marked
    if "####" in text:
        return text.rpartition("####")[2].strip() or None
    return last_number(text) if numeric else text.strip() or None


def is_number(text: str) -> bool:
    """True for one plain decimal number, with sign and thousands separators allowed."""
    return _IS_NUMBER.fullmatch(text.strip()) is not None


def last_number(text: str) -> str | None:
    """The last decimal number in the text, without dollar sign and thousands separators.

    A minus sign belongs to the number unless a word character or a closing bracket stands before it: in ``5 -3`` the
    number is -3, in ``5-3`` it is 3.
    """
    found = None
    for match in _NUMBER.finditer(text):
        found = match
    if found is None:
        return None
    return found.group().replace(",", "").replace("$", "").replace("−", "-")


def last_boxed(text: str) -> str | None:
    """Content of the last complete ``\\boxed{...}``, braces balanced."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for place in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : place].strip()
        end = start
    return None
