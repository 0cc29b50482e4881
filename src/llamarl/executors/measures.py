"""What people report of a model on held-out prompts, from judged responses. Pure.

    n responses to each prompt, c of them right ─▶ pass@1, pass@k, majority, best of n: a value and its interval each

Every measure is a mean over prompts of a number from 0 to 1, so all have the same interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from llamarl.environments.answers import extract_answer, is_number, last_number, tidy
from llamarl.types import RIGHT, Group, Response, Score

__all__ = ["Measure", "answered", "best_of", "majority", "mean_of", "measures", "pass_at_k"]

_Z = 1.959964
"""Of 95 %."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A mean over prompts, and where it lies with 95 % confidence."""

    value: float
    low: float
    high: float


def mean_of(shares: Sequence[float]) -> Measure:
    """Mean of numbers from 0 to 1, one a prompt, with Wilson's interval (1927).

    Of numbers that are all 0 or 1 it is Wilson's own. Others vary less than such with their mean,
    so for them it is wider than it must be. NaN where there is no prompt.
    """
    n = len(shares)
    if not n:
        return Measure(math.nan, math.nan, math.nan)
    p = sum(shares) / n
    middle, spread = (p + _Z**2 / (2 * n)), _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n * n))
    whole = 1 + _Z**2 / n
    return Measure(p, max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole))


def pass_at_k(n: int, right: int, k: int) -> float:
    """Chance that one of k responses drawn from n without replacement is right, of which ``right``
    are: unbiased for k fresh ones (Chen et al., arXiv:2107.03374).
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(responses: Sequence[Response], *, numeric: bool) -> bool:
    """Whether the answer that most responses give is right; of equally many the one given first.

    Where no answer can be read, the last line is taken for it. Responses without a line, or without a verdict, do not vote.
    """
    votes = [(_voted(r.text, numeric), r) for r in responses if isinstance(r.outcome, Score)]
    counts = Counter(answer for answer, _ in votes if answer is not None)
    if not counts:
        return False
    chosen = max(counts, key=lambda answer: counts[answer])  # the first of the most frequent ones
    return next(_is_right(r) for answer, r in votes if answer == chosen)


def best_of(responses: Sequence[Response], scores: Sequence[float]) -> bool:
    """Whether the response that a reward model rates highest is right; of equal ones the first. NaN is
    no rating, and a response without a verdict is not asked for."""
    rated = [(s, r) for s, r in zip(scores, responses, strict=True) if not math.isnan(s) and _is_judged(r)]
    return bool(rated) and _is_right(max(rated, key=lambda one: one[0])[1])


def measures(groups: Sequence[Group], ratings: Sequence[Sequence[float]] | None = None) -> Mapping[str, Measure]:
    """``pass@1``, ``pass@k`` for k = 2, 4, .. and n, ``majority@n`` and, rated, ``best_of@n``.

    n is the fewest responses with a verdict that any prompt has. Prompts without any are left out.

    Args:
        ratings: A reward model's score of each response; NaN where it has none.
    """
    rated = ratings if ratings is not None else [()] * len(groups)
    pairs = [(g, own) for g, own in zip(groups, rated, strict=True) if any(_is_judged(r) for r in g.responses)]
    counts = [(sum(map(_is_judged, g.responses)), sum(map(_is_right, g.responses))) for g, _ in pairs]
    n = min((judged for judged, _ in counts), default=0)
    found = {"pass@1": mean_of([right / judged for judged, right in counts])}
    if n < 2:
        return found
    for k in sorted({2**i for i in range(1, n.bit_length()) if 2**i <= n} | {n}):
        found[f"pass@{k}"] = mean_of([pass_at_k(judged, right, k) for judged, right in counts])
    found[f"majority@{n}"] = mean_of([majority(g.responses, numeric=_is_numeric(g)) for g, _ in pairs])
    if ratings is not None:
        found[f"best_of@{n}"] = mean_of([best_of(g.responses, own) for g, own in pairs])
    return found


def answered(groups: Sequence[Group]) -> float:
    """Share of responses in which an answer is found, right or wrong; NaN where the task has a form of its own: fewer
    are found than are right, or none."""
    found = [extract_answer(r.text, numeric=_is_numeric(g)) is not None for g in groups for r in g.responses]
    right = sum(_is_right(r) for g in groups for r in g.responses)
    return sum(found) / len(found) if any(found) and sum(found) >= right else math.nan


def _voted(text: str, numeric: bool) -> str | None:
    """What a response votes for: equal numbers, and formulas that LaTeX shows alike, are one answer however written."""
    said = extract_answer(text, numeric=numeric) or next(reversed(text.strip().splitlines()), "")
    number = last_number(said) if numeric else None
    return str(Fraction(number)) if number else "".join(tidy(said).split()) or None


def _is_judged(response: Response) -> bool:
    return isinstance(response.outcome, Score)


def _is_right(response: Response) -> bool:
    return isinstance(response.outcome, Score) and response.outcome.value >= RIGHT


def _is_numeric(group: Group) -> bool:
    return group.prompt.answer is not None and is_number(group.prompt.answer)
