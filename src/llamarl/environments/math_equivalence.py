"""Whether two written answers are equal as mathematics: ``math-verify`` behind size limits.

    tidied ──words off, spelled as LaTeX──▶ expression ──within limits?──▶ math-verify ──▶ equal or not
                                                   └─ both plain numbers: compared exactly, without it

A policy chooses what is parsed here, so it must not be able to buy time or an error with it: what
is longer, deeper or greater than the limits below, has more terms once expanded, or takes more
calls to compare, is a wrong answer. The limits are counts of characters, terms and calls, never
seconds, so that a slow machine gives the same verdict. ``math-verify``'s own time limits are off:
they are alarms in seconds, and the reward pool has its own for what nobody foresaw.

The *reference* comes from a file. If it cannot be read, every answer to it would be wrong, so that is an error.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property, lru_cache
from types import FrameType
from typing import Any, TypeVar

from llamarl.environments.answers import has_words, is_taken_back, quantity, tidy

__all__ = ["check_reference", "equals_reference", "is_words", "same_answer", "why_unreadable"]

MAX_CHARS = 300
"""Of an expression for ``math-verify``."""
MAX_NUMBER_CHARS = 1000
"""Of a plain decimal number."""
MAX_DEPTH = 8
"""Brackets within brackets."""
MAX_COMMANDS = 60
MAX_TERMS = 500
"""Terms of an expression once it is expanded, counted from above."""
_HIDDEN_POWERS = re.compile(r"(\\rvert|\||\}\s*\{[^{}]*\})\s*\^|\\exp|(?<![a-zA-Z])e\s*\^|\bexp\b")
MAX_EXPONENT = 1000
"""Product of the exponents that can stand over one another, and of the digits of what they raise, over 10."""
MAX_STRANGE_EXPONENT = 100
"""Of an answer whose reference has no number of half that size: comparing ``x^{999}`` with ``\\sin x`` takes seconds."""
MAX_PARSE_CALLS = 3_000_000
"""Python calls that reading one expression may take; the limits above keep it far below."""
MAX_COMPARE_CALLS = 600_000
"""Python calls that one comparison may take; a common one takes some ten thousand, a trigonometric identity 200,000."""

_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("*", "*"), ('"', '"'), ("“", "”"))
_WHOLE = re.compile(r"(?:\\(?:boxed|fbox)\s*)?\{((?:[^{}\\]|\\.|\{(?:[^{}\\]|\\.)*\})*)\}", re.DOTALL)
_BRACKETED = re.compile(r"[(\[]\s*([-+]?[0-9]+(?:\.[0-9]+)?)\s*[)\]]")
_CURRENCY = re.compile(
    r"(?:\b(?:USD|US|EUR|GBP|Rs\.?|INR)\s*)?(?:\\?\$|€|£|¥|₹|\\pounds|\\euro)\s*|\b(?:USD|EUR|GBP|Rs\.?|INR)\s+(?=\d)"
)
_SPELLINGS = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[A-Za-z]))", r"\\sqrt{\1\2\3}"),
        (r"(?<![\w.])([0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]+)(?![\w.])", r"\1\\times 10^{\2}"),
        (r"(?<![\w.}/^])([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)(?![\w./])", r"\1\\frac{\2}{\3}"),
        (r"(?:\^|\*\*)\s*(?:\(([^()]*)\)|([-+]?[0-9]+(?:\.[0-9]+)?)(?![0-9]))", r"^{\1\2}"),
        (r"_\s*([0-9])(?=\s)", r"_{\1}"),
        (r"(?<=[0-9])\s*[xX]\s*(?=[0-9])", r"\\times "),
        (r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan|pi|theta)(?![A-Za-z])", r"\\\1"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\?\binfinity\b", r"\\infty"),
        (r"\\varnothing\b", r"\\emptyset"),
        (r"^\\approx\b", ""),
    )
)  # fmt: skip
_UNIT = re.compile(
    r"(?<=[^-+*/^=<>(,;:\s])\s+(?:[kcdm]?[mgslLAVWNJ]|[hKCF]|[kM]?Hz|k?Pa|in|mi|yd)(?:\^\{?[23]\}?)?"
    r"(?:\s*/\s*(?:[mgshL]|min)(?:\^\{?[23]\}?)?)?(?=\s*(?:,|$))"
)
"""Of letters that could be names in an expression, set apart from what they measure: 12 m/s, 3 L."""
_COMMAS = re.compile(r"(?<![\d.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")
_SPACED = re.compile(r"[-+]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?")
_PAIR = re.compile(r"\([^()]*,[^()]*\)")
_DECIMAL_COMMA = re.compile(r"[-+]?(?:0|[1-9][0-9]*),[0-9]+")
_TWO_NUMBERS = re.compile(r"[0-9]\s+\.?[0-9]|[0-9]\.[0-9]+\.|\.\.|[0-9]\.(?![0-9])")
_BASE = re.compile(r"[\(\[{]?((?=[A-F]*[0-9])[0-9A-F]+)[)\]}]?_\s*(?:\{\s*([0-9]+)\s*\}|([0-9]+))")
_REPEATING = re.compile(r"([-+]?)([0-9]{0,20})\.([0-9]{0,20})\\overline\s*\{\s*([0-9]{1,20})\s*\}")
_CLOCK = re.compile(r"[0-9]{1,2}\s*:\s*[0-5][0-9]")
_DOTS, _RATIO = re.compile("dots"), re.compile(r"[0-9]\s*:\s*1(?![0-9])")
_POWER, _WHOLE_NUMBER = re.compile(r"\^\s*[{(]?\s*-?\s*([0-9]+)"), re.compile("[0-9]+")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_REFUSED = re.compile(
    r"\\(?:sum|prod|coprod|[io]*int|lim|limsup|liminf|det|max|min|gcd|lcm|partial|nabla|frac\s*\{?d\}?\s*\{d|"
    r"Gamma\s*[({]|zeta\s*[({]|operatorname|mathop|[dt]?binom(?!\s*\{[0-9a-z+\-]{1,4}\}\s*\{[0-9a-z+\-]{1,4}\})|choose)|\)\s*_"
)
_FACTORIAL = re.compile(r"(?:(?<![0-9.])[0-9]{1,3}|(?<![a-zA-Z])[a-z]|\([0-9]?[a-z](?:[+-][0-9]{1,2})?\))\s*!(?!!)")
_EXPONENTIALS = re.compile(r"\^|\\(?:exp|sinh|cosh|tanh)\b")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_SCIENTIFIC = re.compile(
    r"([-+]?[0-9]*\.?[0-9]+)\s*(?:\\times|\\cdot|\*|x)\s*(?:10\s*\^\s*\{\s*([-+]?[0-9]{1,3})\s*\}|([0-9]+))"
)
_FRACTION = re.compile(
    r"([-+]?)\s*(?:([0-9]+)\s*)?\\frac\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))"
    r"|([-+]?[0-9]+)\s*/\s*([0-9]+)"
)
_NAMED = re.compile(
    r"\\?[A-Za-z]+'?(?:_\{?\w+\}?)?(?:\s*\([^()=]*\))?|[A-Za-z\\\s+\-(){},'|]+|\\(?:angle|triangle|overline)\b.*"
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’\-]*(?:[\s,]+[A-Za-z][A-Za-z'’\-]*)*|\(\s*[A-Za-z]\s*\)|[A-Za-z]\s*\)")
_NOT_CHOSEN = re.compile(
    r"\b(?:not|neither|never|wrong|incorrect|false|except|maybe|perhaps|possibly|might|could|cannot|if|or)\b|n['’]t\b",
    re.IGNORECASE,
)
_RELATION = re.compile(r"(?<![\\<>!])=|<|>|\\(?:leq?|geq?|lt|gt|neq?|in)\b")

_Result = TypeVar("_Result")


class _Unreadable(ValueError):
    """What was written is no expression within the limits; says why."""


class _TooManyCalls(BaseException):
    """Not an Exception: ``math-verify`` and ``sympy`` catch those on their way."""


def same_answer(given: str, reference: str) -> bool:
    """True where an answer, as a policy wrote it, equals the reference as mathematics.

    Percent signs, units, currency and the side of ``x =`` that names the quantity do not count. An equation does not
    answer for its right side unless its left side is a name or equal to it.

    Raises:
        ValueError: The reference cannot be read (see ``why_unreadable``). Whatever is given raises nothing.
    """
    return equals_reference(tidy(given), reference)


def equals_reference(given: str, reference: str) -> bool:
    """``same_answer`` of an answer that is tidied already."""
    if is_words(reference):
        return _same_words(given, reference)
    target = _reference(reference)
    try:
        answer, answer_percent = _expression(given)
        if not target.has_names:
            answer = _UNIT.sub("", answer)
        if any(sign.search(answer) and not sign.search(target.text) for sign in (_DOTS, _RATIO)):
            return False
        if _PAIR.fullmatch(target.text) and "," in answer and not re.search(r"[(\[=]", answer):
            return False  # two numbers are no pair
        if not _RELATION.search(target.text):
            answer = _value(answer, target.text)
        exact = _equal_exactly(answer, answer_percent, target)
        if exact is not None:
            return exact
        _check_limits(answer)
        if _largest(_POWER, answer) > max(MAX_STRANGE_EXPONENT, 2 * _largest(_WHOLE_NUMBER, target.text)):
            return False
    except _Unreadable:
        return False
    if target.parsed is None:
        raise ValueError(f"reference answer {reference!r:.80} is none that math-verify reads")
    parsed = _within_calls(lambda: _parse(answer), MAX_PARSE_CALLS)
    return parsed is not None and _within_calls(lambda: _verify(target.parsed, parsed), MAX_COMPARE_CALLS) is True


def _largest(pattern: re.Pattern[str], text: str) -> int:
    return max((int(digits) for digits in pattern.findall(text)), default=0)


def is_words(reference: str) -> bool:
    """True for a reference that is words or a choice's letter (``\\text{east}``, ``Navin``,
    ``(C)``), not mathematics."""
    text = _unwrap(tidy(reference))
    if text != reference.strip() and len(text) == 1 and text.isalpha():
        return "text" in reference or "mathrm" in reference or "mbox" in reference
    if re.fullmatch("[A-J]|[A-Z][a-z]|NO", text):
        return True  # of several choices; No, a name
    if _WORDS.fullmatch(text) is None:
        return False
    return "(" in text or ")" in text or has_words(text)


def check_reference(reference: str) -> None:
    """The cheap half of ``why_unreadable``, without ``math-verify``.

    Raises:
        ValueError: The reference is over a limit or is no expression; says which.
    """
    if not is_words(reference):
        _check_limits(_expression(tidy(reference))[0])


def why_unreadable(reference: str) -> str:
    """Why no answer could be compared with this reference; empty if all is well."""
    try:
        if is_words(reference):
            return ""
        target = _reference(reference)
    except ValueError as error:
        return str(error)
    known = target.number is not None or _BASE.fullmatch(target.text) or target.parsed is not None
    return "" if known else "math-verify cannot parse it"


class _Reference:
    """A reference, read once for all answers to its question."""

    def __init__(self, written: str) -> None:
        self.with_unit, self.percent = _expression(tidy(written))
        self.text = _UNIT.sub("", self.with_unit) if re.search(r"\\(?:text|math|mbox)", written) else self.with_unit
        self.has_names = re.search("[A-Za-z]", _COMMAND.sub("", self.text)) is not None
        self.number = _as_number(self.text)
        _check_limits(self.text)

    @cached_property
    def parsed(self) -> Any:
        """What ``math-verify`` makes of it, or None."""
        return _parse(self.text)


@lru_cache(maxsize=256)
def _reference(written: str) -> _Reference:
    return _Reference(written)


def _equal_exactly(answer: str, percent: bool, target: _Reference) -> bool | None:
    """The verdict where it needs no algebra: equal text, times of day, bases, brackets of other
    kinds, plain numbers."""
    if _without_spaces(answer) in (_without_spaces(target.text), _without_spaces(target.with_unit)):
        return True
    if _CLOCK.fullmatch(answer) and _CLOCK.fullmatch(target.text):
        return False
    base, target_base = _BASE.fullmatch(answer), _BASE.fullmatch(target.text)
    if base or target_base:  # 52 in base 8: the digits must be the same, and the base where it is said
        return target_base is not None and answer == (target_base.group() if base else target_base[1])
    kinds = {re.sub(r"\s", "", text)[:1] for text in (answer, target.text) if "," in text}
    if "(" in kinds and kinds & {"\\", "{"} and re.match(r"\\?\{", answer if answer[0] != "(" else target.text):
        return False  # a pair is no set
    number = _as_number(answer)
    if number is None and target.number is not None and _DECIMAL_COMMA.fullmatch(answer):
        number = Fraction(answer.replace(",", "."))
    if number is None or target.number is None:
        return None
    values = {number}
    if percent != target.percent:
        values.add(number / 100 if percent else number * 100)
    if target.number in values:
        return True
    return None if _repeats(number) ^ _repeats(target.number) else False  # 1/3 and 0.333333 may be equal, rounded


def _without_spaces(text: str) -> str:
    """Without spaces but those between two digits: 1 2 is not 12."""
    return re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text)


def _unwrap(text: str) -> str:
    """Without what stands around the whole: dollars, quotes, boxes, brackets around one number, full stops."""
    for _ in range(8):
        before = text
        text = text.strip().rstrip(",;:. ").removesuffix("\\")
        for left, right in _WRAPPERS:
            inside = text[len(left) : -len(right)]
            if inside and text.startswith(left) and text.endswith(right) and left not in inside and right not in inside:
                text = inside
                break
        if text[:1] in ("\\", "{") and text.endswith("}") and len(text) <= 4 * MAX_CHARS:
            whole = _WHOLE.fullmatch(text)
            text = whole[1] if whole and (text[0] == "\\" or "," not in text) else text
        number = _BRACKETED.fullmatch(text)
        text = number[1] if number else text
        if text == before:
            break
    return text


def _expression(tidied: str) -> tuple[str, bool]:
    """The expression in what was written, as LaTeX that ``math-verify`` reads, and whether it is a percentage.

    Raises:
        _Unreadable: There is none: too long, or words.
    """
    if len(tidied) > 4 * MAX_CHARS:
        raise _Unreadable(f"longer than {4 * MAX_CHARS} characters")
    text = _unwrap(tidied)
    if has_words(text):
        found = quantity(text)
        if not found:
            raise _Unreadable("words that are no quantity, or more than one")
        text = _unwrap(found)
    percent = text.endswith("%")
    text = _CURRENCY.sub("", text.rstrip("%")).replace("$", "").replace("~", " ")
    text = _unwrap(text).lstrip("= ").strip()
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    text = _COMMAS.sub(lambda match: match.group().replace(",", "") if _outside(match) else match.group(), text)
    if any(sign in text for sign in "([{"):
        text = re.sub(r",(?=\S)", ", ", text)  # a comma parts two entries
    for pattern, new in _SPELLINGS:
        text = pattern.sub(new, text)
    text = text.strip()
    if not text:
        raise _Unreadable("empty")
    repeating = _REPEATING.fullmatch(text)
    if repeating:
        sign, whole, once, period = repeating.groups("")
        nines = (10 ** len(period) - 1) * 10 ** len(once)
        value = int(whole or 0) + (int(once + period) - int(once or 0)) * Fraction(1, nines)
        text = f"{sign}\\frac{{{value.numerator}}}{{{value.denominator}}}"
    base = _BASE.fullmatch(text)
    return (f"{base[1]}_{{{base[2] or base[3]}}}" if base else text), percent


def _outside(found: re.Match[str]) -> bool:
    """Whether something stands outside of all brackets; (1,234) is a pair."""
    before = found.string[: found.start()]
    return sum(map(before.count, "([{")) == sum(map(before.count, ")]}"))


def _value(text: str, reference: str) -> str:
    """The value that an equation gives to a name; an equation between unequal numbers gives none.

    Raises:
        _Unreadable: The left side is no name, or not equal to the right side.
    """
    text = re.sub(r"^\\?[A-Za-z]\s*\\in\b\s*", "", text)
    parts = [part.strip() for part in re.split(r"(?<![\\<>!])=|\\approx\b", text)]
    if len(parts) == 1:
        return text
    if "," in text and len(parts) > 2:  # x = 1, y = 2: the values in order
        named = re.sub(r"\b(?:and|or)\b", ",", text)
        found = [
            re.fullmatch(r"\s*\\?[A-Za-z](?:_\{?\w\}?)?\s*=([^=]+)", part) for part in named.rstrip(", ").split(",")
        ]
        if all(found):
            return ", ".join(match[1].strip() for match in found if match)
    value = parts[-1]
    if len(parts) > 6 or not value:
        raise _Unreadable("a chain of equations")
    for left in parts[:-1]:
        try:
            if not _NAMED.fullmatch(left) and not same_answer(left, value):
                raise _Unreadable("the two sides of the equation differ")
        except ValueError as error:
            raise _Unreadable("an equation that does not hold, or whose right side is no expression") from error
    return value


def _check_limits(text: str) -> None:
    """Raises _Unreadable for what could take ``math-verify`` long, or is no mathematics: words, two
    numbers side by side."""
    if _NUMBER.fullmatch(text) or _BASE.fullmatch(text):
        if len(text) > MAX_NUMBER_CHARS:
            raise _Unreadable(f"a number of more than {MAX_NUMBER_CHARS} digits")
        return
    if len(text) > MAX_CHARS:
        raise _Unreadable(f"longer than {MAX_CHARS} characters")
    if len(_COMMAND.findall(text)) > MAX_COMMANDS:
        raise _Unreadable(f"more than {MAX_COMMANDS} LaTeX commands")
    depth = deepest = 0
    for char in re.sub(r"\\[{}]", " ", text):
        depth += (char in "({[") - (char in ")}]")
        deepest = max(deepest, depth)
        if depth < 0:
            break
    if depth or deepest > MAX_DEPTH:
        raise _Unreadable("brackets that do not match" if depth else f"nested deeper than {MAX_DEPTH}")
    if _TWO_NUMBERS.search(text) or any(not 32 <= ord(char) < 127 for char in text):
        raise _Unreadable("two numbers without an operator, or signs that are no mathematics")
    if has_words(_COMMAND.sub(lambda match: match.group() if match.group() in ("\\begin", "\\end") else " ", text)):
        raise _Unreadable("words")
    if _REFUSED.search(text):
        raise _Unreadable("sums, integrals, limits and the like are not compared")
    if len(_FACTORIAL.findall(text)) != text.replace("!=", "").count("!") or text.count("!") > 4:
        raise _Unreadable("a factorial of more than 3 digits or of an expression")
    if _magnitude(text) > 10 * MAX_EXPONENT:
        raise _Unreadable("powers beyond the limit")
    if max(_num_terms(text), _num_terms_of_hidden_powers(text)) > MAX_TERMS:
        raise _Unreadable(f"more than {MAX_TERMS} terms once it is expanded")


def _num_terms(text: str) -> int:
    """A bound, from above, on the terms of an expression once its products and powers are multiplied out."""
    sums, products = [0], [1]  # of each open bracket: its finished terms, and those of the term that is being read
    place = 0
    while place < len(text):
        char = text[place]
        place += 1
        if char in "+-,&=<>|":
            sums[-1] += products[-1]
            products[-1] = 1
        elif char in "({[":
            sums.append(0)
            products.append(1)
        elif char in ")}]" and len(sums) > 1:
            inside = sums.pop() + products.pop()
            power = re.match(r"\s*\^", text[place:])
            if power and inside > 1:
                exponent = _argument(text, place + power.end())
                numbers = [min(int(digits), 9999) for digits in re.findall(r"[0-9]{1,5}", exponent)] or [1]
                count = min(max(sum(numbers), math.prod(numbers)), 9999)
                inside = math.comb(min(inside, MAX_TERMS + 1) + count - 1, count)
            products[-1] = min(products[-1] * inside, MAX_TERMS + 1)
    return sums[-1] + products[-1]


def _num_terms_of_hidden_powers(text: str) -> int:
    """The same where what a power raises is no bracket (bars, fractions, exponentials): as if it raised the whole expression."""
    letters = set(re.findall(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", " ", text))) - {"e"}
    if len(letters) < 2 or not _HIDDEN_POWERS.search(text):
        return 1
    terms = min(1 + len(re.findall("[+-]", text)), MAX_TERMS)
    count = min(max((int(digits) for digits in re.findall(r"[0-9]{1,5}", text)), default=1), 9999)
    return math.comb(terms + count - 1, count)


def _magnitude(text: str) -> float:
    """A bound, from above, on the digits that the numbers of an expression can come to; infinite for towers."""
    largest = max((len(digits) for digits in re.findall(r"[0-9]+", text)), default=1)
    if "!" in text or "binom" in text:
        largest = max(largest, 2600)
    highest, grouped, end = 1.0, 1.0, 0
    for found in _EXPONENTIALS.finditer(text):
        exponent = _argument(text, found.end())
        if "!" in exponent or "binom" in exponent:
            return float("inf")
        nested = _EXPONENTIALS.search(exponent)
        if text[found.end() :].lstrip()[len(exponent) :].lstrip()[:1] == "^":
            return float("inf")
        inner = _argument(exponent, nested.end()) if nested else ""
        if _EXPONENTIALS.search(inner) or (re.search(r"[0-9)}]\s*\^", exponent) and re.search("[0-9]", inner)):
            return float("inf")
        value = 1.0
        for digits in re.findall(r"[0-9]+", exponent):
            value *= max(1.0, float(digits[:12]))
        base = text[: found.start()].rstrip()[-1:]
        if base in ")}]!|" or found.group() != "^" or found.start() < end:
            grouped *= max(1.0, value)
        else:
            highest = max(highest, value)
        end = max(end, found.end() + len(exponent))
    return largest * highest * grouped


def _argument(text: str, start: int) -> str:
    """The group, or the token, that begins at a place."""
    rest = text[start:].lstrip()
    if rest[:1] not in ("{", "("):
        match = re.match(r"\\[A-Za-z]+(?:\s*\{[^{}]*\})*|[-+]?\w+", rest)
        return match.group() if match else rest[:1]
    depth = 0
    for place, char in enumerate(rest):
        depth += (char in "({[") - (char in ")}]")
        if depth == 0:
            return rest[: place + 1]
    return rest


def _as_number(text: str) -> Fraction | None:
    """The value of a plain number: a decimal, a fraction of integers, a mixed or a scientific one."""
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text.removesuffix("."))
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific:
        return Fraction(scientific[1]) * (Fraction(10) ** int(scientific[2]) if scientific[2] else int(scientific[3]))
    fraction = _FRACTION.fullmatch(text)
    if fraction is None:
        return None
    sign, whole, top, top_digit, bottom, bottom_digit, over, under = fraction.groups()
    upper, lower = int(top or top_digit or over), int(bottom or bottom_digit or under)
    if lower == 0 or (whole and (upper < 0 or lower < 0)):
        return None
    value = int(whole or 0) + Fraction(upper, lower)
    return -value if sign == "-" else value


def _repeats(number: Fraction) -> bool:
    """True where no decimal of finite length is equal to it."""
    rest = number.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest != 1


def _same_words(given: str, reference: str) -> bool:
    wanted = _plain_words(tidy(reference))
    given = given[: 4 * MAX_CHARS]
    clause = re.split(
        r"[.!?](?:\s|$)|, (?:it|they|there|that|this|he|she|we)\b|\s(?:because|since|as|who|which|with)\b|\s[(–—-]\s?|\n",
        given,
        maxsplit=1,
    )[0]
    if is_taken_back(given[len(clause) :]):
        return False
    if any(_plain_words(text) == wanted for text in (given, clause)):
        return True
    return len(wanted) == 1 and _choice(given) == wanted


def _choice(given: str) -> str:
    """The letter of the one choice that is named, at the beginning or at the end; empty where
    several are, or none, or it is denied."""
    text = re.sub(r"\\(?=[\s(),])", " ", _unwrap(given))
    named = re.match(r"(?:\w+ ){0,4}(?:\(([A-Za-z])\)|\b([A-Z])[).:](?=\s|$))", text) or re.search(
        r"(?:\b(?:is|be|option|choice|answer|choose|select|pick)|[:=])\s*(?:\(([A-Za-z])\)|([A-Z]))[.!]*$", text
    )
    if named is None or _NOT_CHOSEN.search(text[: named.end()]) or text.endswith("?"):
        return ""
    others = re.findall(r"\(([A-Za-z])\)|\b(?:and|or|,|/)\s*([B-J])\b", text)
    found = {(one or other).lower() for one, other in [named.groups(), *others]}
    return found.pop() if len(found) == 1 else ""


def _plain_words(text: str) -> str:
    text = re.sub(r"\\[(),\[\]]", " ", _unwrap(text))
    text = re.sub(r"[^A-Za-z0-9'+-]+", " ", text).strip().casefold()
    text = re.sub(r" is (?:the )?(?:correct|right)(?: answer| option| choice)?$", "", text)
    return re.sub(
        r"^(?:(?:the )?(?:final |correct )?(?:answer|option|choice)(?: is)? |(?:it|that|this) is |is )?"
        r"(?:option |choice |the )?",
        "",
        text,
    )


@lru_cache(maxsize=1)
def _library() -> tuple[Callable[..., list[Any]], Callable[..., bool], Any]:
    """``math-verify``'s parse and verify, and our configuration: its units and its search for boxes are off."""
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    normalization = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    config = math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization)
    return math_verify.parse, math_verify.verify, config


def _parse(text: str) -> Any:
    """What ``math-verify`` reads, or None."""
    parse, _, config = _library()
    found = parse(f"\\boxed{{{text}}}", [config], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def _verify(target: Any, answer: Any) -> bool:
    verify = _library()[1]
    equal = bool(verify(target, answer, allow_set_relation_comp=True, timeout_seconds=None))
    return equal and not _are_apart(target, answer)


def _are_apart(one: Any, other: Any) -> bool:
    """Whether both are exact numbers that differ: ``math-verify`` takes those for equal that differ by less than 1e-15.

    Below 1e-90 nobody is told apart: there what is zero, written as a difference, is rounding.
    """
    from sympy import Expr, Float

    if not all(isinstance(x, Expr) and x.is_number and not x.has(Float) for x in (one, other)):
        return False
    gap, *sizes = (abs(x.evalf(15)) for x in (one - other, one, other))
    return bool(gap.is_Float and max(sizes) > 1e-90 and gap > 1e-6 * max(sizes))


def _within_calls(work: Callable[[], _Result], limit: int) -> _Result | None:
    """What the work returns, or None where it takes more calls of Python functions than the limit.

    ``sympy`` remembers earlier results; they are dropped first, so that the count depends on the two answers alone.
    """
    from sympy.core.cache import clear_cache

    clear_cache()
    left = limit

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if event == "call":
            left -= 1
            if left < 0 and not frame.f_code.co_flags & inspect.CO_GENERATOR:  # raised in one that closes, it is lost
                raise _TooManyCalls

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = work()
    except _TooManyCalls:
        return None
    finally:
        sys.setprofile(before)
    return found if left >= 0 else None
