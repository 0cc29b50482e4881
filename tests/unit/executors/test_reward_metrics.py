"""What the reward executor says of a batch."""

from __future__ import annotations

import numpy as np

from llamarl.executors.reward import reward_metrics
from llamarl.types import Failure, Group, Prompt, Response, Score


def group(*outcomes: Score | Failure) -> Group:
    prompt = Prompt(index=0, text="?", tokens=np.array([1], dtype=np.int32))
    responses = tuple(
        Response(
            prompt_index=0,
            sample_index=i,
            tokens=np.array([2], dtype=np.int32),
            behavior_logprobs=np.array([-1.0], dtype=np.float32),
            policy_versions=np.array([0], dtype=np.int32),
            loss_mask=np.array([True]),
            text="!",
            finish_reason="stop",
            outcome=outcome,
        )
        for i, outcome in enumerate(outcomes)
    )
    return Group(prompt=prompt, responses=responses)


def test_parts_are_averaged_over_the_responses_that_have_them() -> None:
    metrics = reward_metrics(
        [
            group(Score(value=1.0, parts={"correct": 1.0, "steps": 4.0}), Score(value=0.0, parts={"correct": 0.0})),
            group(Score(value=1.0, parts={"correct": 1.0}), Failure(kind="timeout", detail="")),
        ]
    )
    assert metrics["reward/parts/correct"] == 2 / 3
    assert metrics["reward/parts/steps"] == 4.0
    assert (metrics["reward/mean"], metrics["reward/failed"]) == (2 / 3, 1.0)
    assert metrics["groups/no_signal"] == 1.0  # one verdict alone has nothing to be compared with
