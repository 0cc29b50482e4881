"""The reward executor ends a run in which nearly everything fails, and says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.plain_values import to_bytes
from llamarl.config import validate
from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorContext, StepResult
from llamarl.executors.reward import RewardExecutor
from llamarl.types import Failure, Group, Prompt, Response, Score

COMPLETIONS = ChannelSpec(name="completions", kind=ChannelKind.GATHER, source="generator", sink="reward")
CONTEXT = ExecutorContext(name="reward", rank=0, num_ranks=1, device="cpu", run_dir=None, seed=0, reads=(COMPLETIONS,))
BROKEN = Failure(kind="exception", detail="ValueError: no number")
SLOW = Failure(kind="timeout", detail="20 s")


class Pool:
    """Fails so many of ten samples, one of them (if any) by timeout."""

    num_failed = 0

    def score(self, groups: list[Any], *, limit_s: float | None = None) -> list[Any]:
        outcomes = [*[BROKEN] * (self.num_failed - 1), *[SLOW] * (self.num_failed > 0)]
        outcomes += [Score(value=1.0)] * (10 - len(outcomes))  # type: ignore[list-item]
        responses = tuple(
            Response(
                prompt_index=0,
                sample_index=i,
                tokens=np.zeros(3, np.int32),
                behavior_logprobs=np.zeros(3, np.float32),
                policy_versions=np.zeros(3, np.int32),
                loss_mask=np.ones(3, np.bool_),
                text="",
                finish_reason="stop",
                outcome=outcome,
            )
            for i, outcome in enumerate(outcomes)
        )
        return [Group(prompt=Prompt(index=0, tokens=np.zeros(1, np.int32), text=""), responses=responses)]


def ticks(num_failed: list[int], reward: dict[str, Any] | None = None) -> list[StepResult]:
    executor = RewardExecutor(validate({"reward": reward or {}}), CONTEXT)
    executor.pool = pool = Pool()  # type: ignore[assignment]
    results = []
    for tick, count in enumerate(num_failed):
        pool.num_failed = count
        results.append(executor.step(tick, {"completions": []}))
    return results


@pytest.mark.parametrize(
    "state", [b'{"spares":[1,2]}', to_bytes([]), to_bytes({"spares": (1, 2), "failed": [("x", 3)], "stop": 7})]
)
def test_a_journal_that_this_executor_did_not_write_is_refused(state: bytes) -> None:
    executor = RewardExecutor(validate({"dynamic_sampling": {"enabled": True}}), CONTEXT)
    executor.restore(executor.journal(0), 0)
    with pytest.raises((ValueError, TypeError)):
        executor.restore(state, 0)


def test_three_ticks_of_failures_end_the_run_with_the_commonest_causes_and_counts() -> None:
    results = ticks([10, 10, 9, 10, 10, 10, 0])
    assert [bool(result.stop) for result in results] == [False] * 5 + [
        True,
        True,
    ]  # 9 of 10 is the limit, not beyond it
    lines = results[5].stop.splitlines()
    assert lines[0].startswith("reward: more than 90% of the samples of ticks 3 to 5 have no reward")
    assert lines[1:3] == ["  27 x exception: ValueError: no number", "  3 x timeout: 20 s"]
    assert results[0].failures == {"exception: ValueError: no number": 9, "timeout: 20 s": 1}
    assert results[0].metrics["tokens/failed"] == 30.0 and results[6].failures == {}


def test_the_share_and_the_number_of_ticks_are_the_users() -> None:
    results = ticks([3, 2], {"max_failed_fraction": 0.25, "max_failed_ticks": 1})
    assert "samples of tick 0 have no reward" in results[0].stop and results[1].stop == results[0].stop
    assert not any(result.stop for result in ticks([10] * 9, {"max_failed_fraction": 1.0}))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"max_failed_fraction": 1.5}, r"max_failed_fraction must be in \[0, 1\]"),
        ({"max_failed_ticks": 0}, "max_failed_ticks must be >= 1"),
    ],
)
def test_wrong_limits_are_refused_by_name(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        validate({"reward": settings})
