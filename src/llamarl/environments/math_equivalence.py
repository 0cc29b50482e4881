"""Whether two written answers are equal as mathematics: ``math-verify`` behind size limits.

    written ──tidy: wrappers, currency, units, separators──▶ expression ──within limits?──▶ math-verify ──▶ equal or not
                                                    └─ both plain numbers: compared exactly, without it

A policy chooses what is parsed here, so it must not be able to buy time or an error with it: what is longer, deeper or
greater than the limits below, or takes more calls to compare, is a wrong answer. The limits are counts of
characters and of calls, never seconds, so that a slow machine gives the same verdict. ``math-verify``'s own time limits
are off: they are alarms in seconds, and the reward pool has its own for what nobody foresaw.

The *reference* comes from a file. If it cannot be read, every answer to it would be wrong, so that is an error.
"""

from __future__ import annotations

import logging
import re
import sys
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property, lru_cache
from types import FrameType
from typing import Any, TypeVar

__all__ = ["check_reference", "is_words", "same_answer", "why_unreadable"]

MAX_CHARS = 300
"""Of an expression for ``math-verify``, wrappers apart."""
MAX_NUMBER_CHARS = 1000
"""Of a plain decimal number."""
MAX_DEPTH = 8
"""Brackets within brackets."""
MAX_COMMANDS = 60
MAX_EXPONENT = 1000
"""Product of the exponents that can stand over one another, and of the digits of what they raise, over 10."""
MAX_PARSE_CALLS = 3_000_000
"""Python calls that reading one expression may take; the limits above keep it far below."""
MAX_COMPARE_CALLS = 600_000
"""Python calls that one comparison may take; a common one takes some ten thousand, a trigonometric identity 200,000."""

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "∕": "/", "⁄": "/",
    "π": "\\pi ", "∞": "\\infty ", "°": "^\\circ ", "≤": "\\le ", "≥": "\\ge ", "∪": "\\cup ", "∩": "\\cap ",
    "±": "\\pm ", "∈": "\\in ", "θ": "\\theta ", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}",
    "⅓": "\\frac{1}{3}", "⅔": "\\frac{2}{3}", "′": "'", "’": "'", "≈": "=", "：": ":", "，": ",",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z]|\([^()]*\)|\{[^{}]*\})")
_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|mathit|operatorname|rm)\s*"
_WHOLE_TEXT = re.compile(rf"(?:{_TEXT}|\\boxed\s*|\\fbox\s*)?\{{((?:[^{{}}]|\\[{{}}]|\{{[^{{}}]*\}})*)\}}")
_WRAPPERS = (
    ("$$", "$$"),
    ("$", "$"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("**", "**"),
    ("__", "__"),
    ("*", "*"),
    ("`", "`"),
)
_SPACES = re.compile(
    r"(?<!\\)\\(?:[,;:! ]|quad\b|qquad\b|displaystyle\b|left(?![a-zA-Z])|right(?![a-zA-Z])|[bB]igg?[lr]?(?![a-z]))"
)
_GROUP_GAP = re.compile(r"(?<=[0-9])(?:\\[,;:! ]|\{,\}\s*|,\s*\\!\s*|~|,\\,)(?=[0-9]{3}(?![0-9]))")
_COMMAS = re.compile(r"(?<![\d.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")
_SPACED = re.compile(r"[-+]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?")
_CURRENCY = re.compile(
    r"(?:\bUSD|\bUS|\bEUR|\bGBP|\bRs\.?|\bINR)?\s*(?:\\?\$|€|£|¥|₹|\\pounds|\\euro)\s*|\b(?:USD|EUR|GBP|Rs\.?|INR)\s+(?=\d)"
)
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:\\?text\{?[CF]\}?|[CF]\b)?|\\degree\b")
_TEXT_UNIT = re.compile(rf"(?<=[^\s\\=+*/<>-])\s*((?:{_TEXT}\{{[^{{}}]*\}}\s*(?:\^\s*\{{?[0-9]\}}?)?[\s/.]*)+)$")
_TEXT_LEAD = re.compile(rf"^{_TEXT}\{{([^{{}}]*)\}}\s*(?=\S)")
_WORD_UNIT = re.compile(
    r"(?<=[0-9)}\]%!])(?:\s+([A-Za-zµμ][^0-9=+*<>^\\{}]*)"
    r"|((?:c|m|k|d)?m|k?g|mg|s|h|hrs?|mins?|secs?|lbs?|oz|ft|in|mph|km/h|kmph|m/s|m[lL]|[lL]|cents?|am|pm|k?W|yrs?))"
    r"(\s*\^?\s*\{?[23²³]?\}?)\.?$"
)
_NOT_UNITS = frozenset(
    "half halves third thirds fourth fourths fifth fifths tenth tenths hundredths thousandths squared cubed factorial "
    "plus minus times divided over or and to modulo mod percentage-points pi sqrt root negative not more-or-less is "
    "if but per-cent no wrong".split()
)
_MULTIPLIERS = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12, "dozens": 12,
}  # fmt: skip
_PERCENT = re.compile(r"\s*\\?%\s*$")
_PERCENT_WORD = re.compile(r"\s*(?:\bpercent(?:age)?|\bper cent|\bpct)\b(?!\s*points)", re.IGNORECASE)
_E_NOTATION = re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]+)(?![\w.])")
_MIXED = re.compile(r"(?<![\w.}/^])([0-9]+)\s+(?:and\s+)?([0-9]+)\s*/\s*([0-9]+)(?![\w./])")
_POWER = re.compile(r"(?:\^|\*\*)\s*([-+]?[0-9]+(?:\.[0-9]+)?)(?![0-9])")
_POWER_GROUP = re.compile(r"(?:\^|\*\*)\s*\(([^()]*)\)")
_TWO_NUMBERS = re.compile(r"[0-9]\s+\.?[0-9]|[0-9]\.[0-9]+\.|\.\.|[0-9]\.(?![0-9])")
_BASE = re.compile(r"[\(\[{]?((?=[A-F]*[0-9])[0-9A-F]+)[)\]}]?_\s*(?:\{\s*([0-9]+)\s*\}|([0-9]+))")
_REPEATING = re.compile(r"([-+]?)([0-9]{0,20})\.([0-9]{0,20})\\overline\s*\{\s*([0-9]{1,20})\s*\}")
_CLOCK = re.compile(r"[0-9]{1,2}\s*:\s*[0-5][0-9]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_FUNCTIONS = frozenset(
    "sqrt sin cos tan cot sec csc log ln exp arcsin arccos arctan sinh cosh tanh inf infinity pi and or".split()
)
_FUNCTION_WORD = re.compile(
    r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan|pi|theta)(?![A-Za-z])"
)
_REFUSED = re.compile(
    r"\\(?:sum|prod|coprod|[io]*int|lim|limsup|liminf|det|max|min|gcd|lcm|partial|nabla|frac\s*\{?d\}?\s*\{d|"
    r"Gamma\s*[({]|zeta\s*[({]|operatorname|mathop|[dt]?binom(?!\s*\{[0-9a-z+\-]{1,4}\}\s*\{[0-9a-z+\-]{1,4}\})|choose)|\)\s*_"
)
_FACTORIAL = re.compile(r"(?:(?<![0-9.])[0-9]{1,3}|(?<![a-zA-Z])[a-z]|\([0-9]?[a-z](?:[+-][0-9]{1,2})?\))\s*!(?!!)")
_EXPONENTIALS = re.compile(r"\^|\\(?:exp|sinh|cosh|tanh)\b")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_SCIENTIFIC = re.compile(r"([-+]?[0-9]*\.?[0-9]+)\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{\s*([-+]?[0-9]{1,3})\s*\}")
_INT_FRACTION = re.compile(
    r"([-+]?)\s*(?:([0-9]+)\s*)?\\[dtc]?frac\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))\s*(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))"
    r"|([-+]?[0-9]+)\s*/\s*([0-9]+)"
)
_ASSIGNED = re.compile(
    r"\\?[A-Za-z]+'?(?:_\{?\w+\}?)?(?:\s*\([^()=]*\))?|[A-Za-z\\\s+\-(){},'|]+|\\(?:angle|triangle|overline|text)\b.*"
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’\-]*(?:[\s,]+[A-Za-z][A-Za-z'’\-]*)*|\(\s*[A-Za-z]\s*\)|[A-Za-z]\s*\)")


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
    if is_words(reference):
        return _plain_words(given, reference)
    target = _reference(reference)
    try:
        answer, answer_percent = _tidy(given, target.text)
        target_text, percent = target.text, target.percent
        if not _relation(target_text):
            answer = _right_side(answer, target_text)
        if _squeezed(answer) == _squeezed(target_text):
            return True
        if _CLOCK.fullmatch(answer) and _CLOCK.fullmatch(target_text):
            return False
        base, target_base = _BASE.fullmatch(answer), _BASE.fullmatch(target_text)
        if base or target_base:  # 52 in base 8: the digits must be the same, and the base where it is said
            if base and target_base:
                return base.group() == target_base.group()
            return target_base is not None and answer == target_base[1]
        number = _as_number(answer)
        if number is not None and target.number is not None:
            values = {number, number / 100} if answer_percent != percent else {number}
            if percent and not answer_percent:
                values = {number, number * 100}
            if target.number in values:
                return True
            if not (_repeating(number) ^ _repeating(target.number)):
                return False  # two fractions, or two decimals: equal or not, without rounding
        _check_limits(answer)
    except _Unreadable:
        return False
    if target.parsed is None:
        raise ValueError(f"reference answer {reference!r:.80} is none that math-verify reads")
    parsed = _within_calls(lambda: _parse(answer), MAX_PARSE_CALLS)
    return parsed is not None and _within_calls(lambda: _verify(target.parsed, parsed), MAX_COMPARE_CALLS) is True


def is_words(reference: str) -> bool:
    """True for a reference that is words or a choice's letter (``\\text{east}``, ``Navin``, ``(C)``), not mathematics."""
    text = _unwrap(reference)
    if text != reference.strip() and len(text) == 1 and text.isalpha():
        return "text" in reference or "mathrm" in reference or "mbox" in reference
    if _WORDS.fullmatch(text) is None:
        return False
    return "(" in text or ")" in text or (len(text) >= 3 and text.lower() not in _FUNCTIONS and not _all_short(text))


def check_reference(reference: str) -> None:
    """The cheap half of ``why_unreadable``, without ``math-verify``.

    Raises:
        ValueError: The reference is over a limit or is no expression; says which.
    """
    if is_words(reference):
        return
    _check_limits(_tidy(reference, "")[0])


def why_unreadable(reference: str) -> str:
    """Why no answer could be compared with this reference; empty if all is well."""
    try:
        if is_words(reference):
            return ""
        target = _reference(reference)
    except ValueError as error:
        return str(error)
    return (
        ""
        if target.number is not None or target.parsed is not None or _BASE.fullmatch(target.text)
        else "math-verify cannot parse it"
    )


class _Reference:
    """A reference, read once for all answers to its question."""

    def __init__(self, written: str) -> None:
        self.text, self.percent = _tidy(written, "")
        self.number = _as_number(self.text)
        _check_limits(self.text)

    @cached_property
    def parsed(self) -> Any:
        """What ``math-verify`` makes of it, or None."""
        return _parse(self.text)


@lru_cache(maxsize=256)
def _reference(written: str) -> _Reference:
    return _Reference(written)


def _unwrap(text: str) -> str:
    """Without what stands around the whole: dollars, bold, quotes, boxes, ``\\text``, full stops."""
    text = text.strip()
    for _ in range(8):
        before = text
        text = text.strip(' \t\r\n"“”').rstrip(",;:.!") if not text.endswith("!") else text.strip()
        if text.endswith("\\"):
            text = text[:-1]
        for left, right in _WRAPPERS:
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                inside = text[len(left) : -len(right)]
                if left not in inside and right not in inside:
                    text = inside
                    break
        whole = (
            _WHOLE_TEXT.fullmatch(text)
            if text[:1] in "\\{" and text.endswith("}") and len(text) <= 4 * MAX_CHARS
            else None
        )
        if whole and text[0] == "\\":
            text = whole[1]
        elif whole and "," not in text:
            text = whole[1]
        text = text.strip()
        if text == before:
            break
    return text


def _tidy(written: str, reference: str) -> tuple[str, bool]:
    """The expression in what was written, as LaTeX that ``math-verify`` reads, and whether a percent sign stood behind it.

    Raises:
        _Unreadable: There is none: too long, or words.
    """
    if len(written) > 4 * MAX_CHARS:
        raise _Unreadable(f"longer than {4 * MAX_CHARS} characters")
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}", written)
    text = _ROOT.sub(lambda match: "\\sqrt{" + match[1].strip("(){}") + "}", text)
    for sign, latex in _UNICODE.items():
        text = text.replace(sign, latex)
    text = _unwrap(unicodedata.normalize("NFKC", text))
    text = _GROUP_GAP.sub("", text)
    text = _SPACES.sub(" ", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = _CURRENCY.sub("", text).replace("$", "").replace("~", " ")
    text = _unwrap(_DEGREES.sub(" ", text))
    for _ in range(3):
        lead = _TEXT_LEAD.match(text)
        if lead and not re.search(r"\d|\bnot\b", lead[1]):
            text = text[lead.end() :].lstrip("=: ")
    text, percent, factor = _without_unit(text, reference)
    text = _unwrap(text)
    text = text.lstrip("=").strip()
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    text = _plain_separators(text)
    text = _E_NOTATION.sub(r"\1\\times 10^{\2}", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _POWER_GROUP.sub(r"^{\1}", text)
    text = _POWER.sub(r"^{\1}", text)
    text = re.sub(r"_\s*([0-9])(?=\s)", r"_{\1}", text)
    text = re.sub(r"(?<=[0-9])\s*[xX]\s*(?=[0-9])", r"\\times ", text).replace("**", "^")
    text = (
        re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", _FUNCTION_WORD.sub(r"\\\1", text))
        .replace("\\infinity", "\\infty")
        .strip()
    )
    if factor != 1:
        number = _as_number(text)
        if number is None:
            raise _Unreadable("a multiplier behind no number")
        text = _written(number * factor)
    if not text:
        raise _Unreadable("empty")
    repeating = _REPEATING.fullmatch(text)
    if repeating:
        sign, whole, once, again = repeating.groups("")
        nines = (10 ** len(again) - 1) * 10 ** len(once)
        value = int(whole or 0) + (int(once + again) - int(once or 0)) * Fraction(1, nines)
        text = _written(-value if sign == "-" else value)
    base = _BASE.fullmatch(text)
    return (f"{base[1]}_{{{base[2] or base[3]}}}" if base else text), percent


def _without_unit(text: str, reference: str) -> tuple[str, bool, int]:
    """The quantity without percent sign and unit; whether there was a percent sign; the factor a word stands for."""
    factor, percent = 1, False
    text = _PERCENT_WORD.sub("\\%", text)
    for _ in range(4):
        text = text.rstrip(" .,;")
        found = _PERCENT.search(text)
        if found:
            text, percent = text[: found.start()], True
            continue
        unit = _TEXT_UNIT.search(text)
        if unit:
            words = re.sub(rf"{_TEXT}\{{|[}}\\]", " ", unit[1]).split()
        else:
            unit = _WORD_UNIT.search(text)
            if unit is None:
                break
            words = (unit[1] or unit[2]).split()
            short = len(words) == 1 and len(words[0].rstrip(".")) == 1
            if (
                short
                and (re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", reference) or words[0] not in "mgshlLAVWNJKCF")
            ) or (unit[2] and re.search(rf"(?<![\\A-Za-z]){re.escape(unit[2][0])}(?![A-Za-z])", reference)):
                break
        bare = [word.strip(".,;:!()'\"").lower() for word in words]
        if bare and bare[0] in _MULTIPLIERS:
            factor *= _MULTIPLIERS[bare[0]]
            rest = " ".join(words[1:])
            text = text[: unit.start()] + (f" {rest}" if rest else "")
            continue
        if bare and (bare[0] in _NOT_UNITS or "or" in bare[:2] or (bare[0] == "and")):
            raise _Unreadable("the words behind it make it another quantity")
        text = text[: unit.start()]
    return text.strip(), percent, factor


def _plain_separators(text: str) -> str:
    """Thousands separators outside of brackets removed; inside, where a comma parts two entries, a space set behind it."""
    if not any(sign in text for sign in "([{"):
        return _COMMAS.sub(lambda match: match.group().replace(",", ""), text)
    return re.sub(r",(?=\S)", ", ", text)


def _relation(text: str) -> bool:
    return re.search(r"(?<![\\<>!])=|<|>|\\(?:leq?|geq?|lt|gt|neq?|in)\b", text) is not None


def _right_side(text: str, reference: str) -> str:
    """The value that an equation gives to a name; an equation between unequal numbers gives none.

    Raises:
        _Unreadable: The left side is no name, or not equal to the right side.
    """
    membership = re.match(r"\\?[A-Za-z]\s*\\in\b\s*", text)
    if membership:
        return text[membership.end() :]
    parts = [part.strip() for part in re.split(r"(?<![\\<>!])=|\\approx\b", text)]
    if len(parts) == 1:
        return text
    if "," in text and len(parts) > 2:  # x = 1, y = 2: the values in order
        named = re.fullmatch(r"(?:\s*\\?[A-Za-z](?:_\w)?\s*=([^=,]+),?)+", re.sub(r"\b(?:and|or)\b", ",", text))
        if named:
            return ", ".join(value.strip() for value in re.findall(r"=([^=,]+)", re.sub(r"\b(?:and|or)\b", ",", text)))
    value = parts[-1]
    if len(parts) > 6 or not value:
        raise _Unreadable("a chain of equations")
    for left in parts[:-1]:
        if _ASSIGNED.fullmatch(left):
            continue
        try:
            equal = same_answer(left, value)
        except ValueError as error:
            raise _Unreadable("an equation whose right side is no expression") from error
        if not equal:
            raise _Unreadable("the two sides of the equation differ")
    return value


def _check_limits(text: str) -> None:
    """Raises _Unreadable for what could take ``math-verify`` long, or is no mathematics: words, two numbers side by side."""
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
    plain = re.sub(rf"{_TEXT}\{{[^{{}}]*\}}|\\(?:begin|end)\s*\{{[a-z*]+\}}", " ", text)
    for word in re.findall(r"[A-Za-z]{4,}", _COMMAND.sub(" ", plain)):
        if word.lower() not in _FUNCTIONS:
            raise _Unreadable(f"a word, {word[:20]!r}")
    if _REFUSED.search(text):
        raise _Unreadable("sums, integrals, limits and the like are not compared")
    if len(_FACTORIAL.findall(text)) != text.replace("!=", "").count("!") or text.count("!") > 4:
        raise _Unreadable("a factorial of more than 3 digits or of an expression")
    if _magnitude(text) > 10 * MAX_EXPONENT:
        raise _Unreadable("powers beyond the limit")


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
    text = text.strip()
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text.removesuffix("."))
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific:
        return Fraction(scientific[1]) * Fraction(10) ** int(scientific[2])
    fraction = _INT_FRACTION.fullmatch(text)
    if fraction is None:
        return None
    sign, whole, top, top_digit, bottom, bottom_digit, over, under = fraction.groups()
    upper, lower = int(top or top_digit or over), int(bottom or bottom_digit or under)
    if lower == 0 or (whole and (upper < 0 or lower < 0)):
        return None
    value = (int(whole) if whole else 0) + Fraction(upper, lower)
    return -value if sign == "-" else value


def _written(number: Fraction) -> str:
    return str(number.numerator) if number.denominator == 1 else f"\\frac{{{number.numerator}}}{{{number.denominator}}}"


def _repeating(number: Fraction) -> bool:
    """True where no decimal of finite length is equal to it."""
    rest = number.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest != 1


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _all_short(text: str) -> bool:
    return all(len(word) < 3 for word in text.split())


def _plain_words(given: str, reference: str) -> bool:
    wanted = _normal_words(reference)
    given = given[: 4 * MAX_CHARS]
    clause = re.split(r"[.!?](?:\s|$)|\s(?:because|since|as|who|which|with)\b|\s[(–—-]\s?|\n", given, maxsplit=1)[0]
    if any(_normal_words(text) == wanted for text in (given, clause)):
        return True
    choice = re.findall(r"\(([A-Za-z])\)", given)
    return len(wanted) == 1 and len(choice) == 1 and choice[0].lower() == wanted and _unwrap(given).find("(") < 16


def _normal_words(text: str) -> str:
    text = re.sub(rf"{_TEXT}\{{|\\[(),\[\]]", " ", _unwrap(text))
    text = re.sub(r"[^A-Za-z0-9'+-]+", " ", text.replace("’", "'")).strip().casefold()
    return re.sub(
        r"^(?:(?:the )?(?:final )?answer(?: is)? |(?:it|that|this) is |is )?(?:option |choice |the )?",
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
    return bool(verify(target, answer, allow_set_relation_comp=True, timeout_seconds=None))


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
            if left < 0:
                sys.setprofile(None)
                raise _TooManyCalls

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        return work()
    except _TooManyCalls:
        return None
    finally:
        sys.setprofile(before)
