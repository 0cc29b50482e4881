"""The reward executor ends a run in which nearly everything fails, and says why."""

from typing import Any

import pytest
from made_responses import made_group, made_response

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.plain_values import to_bytes
from llamarl.config import validate
from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorContext, StepResult
from llamarl.executors.reward import RewardExecutor, reward_metrics
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.types import Failure, Group, Score

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
        return [made_group(made_response(i, tokens=[0] * 3, outcome=outcome) for i, outcome in enumerate(outcomes))]


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


# Metrics of rewards.


def group(*outcomes: Score | Failure) -> Group:
    return made_group(made_response(i, outcome=outcome) for i, outcome in enumerate(outcomes))


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


def test_a_group_whose_lengths_are_paid_differently_has_a_signal() -> None:
    """Both wrong, of 1 and of 2 tokens: -1 + 0.25 and -1 + 0.5 with cosine_length 2. Two of one length have none."""
    wrong = Score(value=0.0)
    groups = [
        made_group(made_response(i, tokens=[5] * n, outcome=wrong) for i, n in enumerate(ns)) for ns in ((1, 2), (2, 2))
    ]
    told = [reward_metrics(groups, algorithm=AlgorithmConfig(cosine_length=n))["groups/no_signal"] for n in (2, 0)]
    assert told == [1.0, 2.0]
