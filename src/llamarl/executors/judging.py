"""How several verdicts on one response become its reward. Pure; no torch.

    [reward_model] ─▶ [judge] ─▶ ... ─▶ Response.verdict = Score(w1 s1 + w2 s2 + .., parts) ─┐
                                              the task's own reward, from the pool ───────────┴─▶ Response.outcome

Models that judge stand before the reward executor. Whoever of them fails a sample sets its outcome,
and nobody after it asks further; the reward executor adds what they made of the others to the
task's reward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from llamarl.settings.executors import TASK_PART
from llamarl.types import Failure, Group, Response, Score

__all__ = ["add_verdicts", "to_judge", "with_score", "zero_rewards"]


def to_judge(response: Response) -> bool:
    """Whether a model is asked about it: its generation came to an end, and nobody has failed it."""
    return response.outcome is None and response.finish_reason != "error"


def with_score(response: Response, score: float, *, name: str, weight: float) -> Response:
    """``response`` with ``weight * score`` added to its verdict, and ``score`` as the part
    ``name``; a score that is no finite number fails it."""
    if not math.isfinite(score):
        return dataclasses.replace(response, outcome=Failure(kind="not_a_number", detail=f"{name} gave {score}"))
    so_far = response.verdict or Score(value=0.0)
    verdict = Score(value=so_far.value + weight * score, parts={**so_far.parts, name: score})
    return dataclasses.replace(response, verdict=verdict)


def zero_rewards(groups: Sequence[Group]) -> list[Group]:
    """As a pool would leave them whose task gives 0: what already has an outcome keeps it.

    A response without a verdict is failed: nobody judged it.
    """

    def outcome(response: Response) -> Score | Failure:
        if response.outcome is not None:
            return response.outcome
        if not to_judge(response):
            detail = f"generation ended with finish_reason {response.finish_reason!r}"
            return Failure(kind="generation", detail=detail)
        if response.verdict is None:
            return Failure(kind="judge", detail="no model gave a verdict, and reward.weight is 0")
        return Score(value=0.0)

    return _changed(groups, lambda response: dataclasses.replace(response, outcome=outcome(response)))


def add_verdicts(groups: Sequence[Group], *, weight: float) -> list[Group]:
    """Rewards: ``weight`` times the task's, plus the verdicts of models, which are cleared.

    Where a model has judged, the task's own reward becomes the part ``task``, unless its weight is 0.
    What an environment gave turn by turn is the task's too: a critic that credits turns finds it weighted.
    """

    def total(response: Response) -> Response:
        outcome, verdict = response.outcome, response.verdict
        if isinstance(outcome, Score) and (verdict is not None or weight != 1.0):
            own = {TASK_PART: outcome.value} if verdict is not None and weight else {}
            before = verdict or Score(value=0.0)
            value = weight * outcome.value + before.value
            outcome = Score(value=value, parts={**before.parts, **own, **outcome.parts})
            if not math.isfinite(value):
                outcome = Failure(kind="not_a_number", detail=f"the sum of its rewards is {value}")
        turns = response.turns
        if weight != 1.0:
            turns = tuple(dataclasses.replace(turn, reward=weight * turn.reward) for turn in turns)
        return dataclasses.replace(response, outcome=outcome, verdict=None, turns=turns)

    return _changed(groups, total)


def _changed(groups: Sequence[Group], change: Callable[[Response], Response]) -> list[Group]:
    return [dataclasses.replace(group, responses=tuple(map(change, group.responses))) for group in groups]
