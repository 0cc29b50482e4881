"""Judging ends before the tick's deadline does, so that a judge that hangs costs samples and not the run."""

import dataclasses
import math
from typing import Any

import pytest
from made_responses import made_group, made_response

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import validate
from llamarl.executors import evaluator
from llamarl.executors.base import ExecutorContext
from llamarl.executors.evaluator import EvaluatorExecutor
from llamarl.executors.reward import RewardExecutor
from llamarl.types import Failure


class Pool:
    """Remembers what limit it was given."""

    limit_s: float | None = None

    def score(self, groups: list[Any], *, limit_s: float | None = None) -> list[Any]:
        self.limit_s = limit_s
        return groups


CONFIG = validate({"deadlines": {"step_s": 10}})
COMPLETIONS = ChannelSpec(name="completions", kind=ChannelKind.GATHER, source="generator", sink="judge")
VERSIONS = ChannelSpec(name="eval_weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="judge")
CONTEXT = ExecutorContext(name="judge", rank=0, num_ranks=1, device="cpu", run_dir=None, seed=0, reads=(COMPLETIONS,))


def test_the_reward_executor_gives_judging_nine_tenths_of_the_tick() -> None:
    executor = RewardExecutor(CONFIG, CONTEXT)
    executor.pool = pool = Pool()  # type: ignore[assignment]
    executor.step(0, {"completions": []})
    assert pool.limit_s == 9.0


def test_why_held_out_responses_fail_is_told_once_a_kind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor = EvaluatorExecutor(CONFIG, dataclasses.replace(CONTEXT, reads=(VERSIONS,)))
    executor.pool = Pool()  # type: ignore[assignment]
    executor.engine = executor.prompts = executor.params = executor.tokenizer = None  # type: ignore[assignment]
    failed = Failure(kind="exception", detail="KeyError: 'answer'")
    groups = [made_group(made_response(i, tokens=[0], outcome=failed) for i in range(2))]
    monkeypatch.setattr(evaluator, "sample_groups", lambda *_, **__: groups)
    for _ in range(2):
        metrics = executor.step(0, {"eval_weights": None}).metrics
    assert metrics["eval/failed"] == 2.0 and math.isnan(metrics["eval/accuracy"])
    assert [record.message for record in caplog.records] == [
        "held-out responses fail, from policy version 0: exception: KeyError: 'answer'"
    ]


def test_the_evaluator_takes_off_what_sampling_took(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = EvaluatorExecutor(CONFIG, dataclasses.replace(CONTEXT, reads=(VERSIONS,)))
    executor.pool = pool = Pool()  # type: ignore[assignment]
    executor.engine = executor.prompts = executor.params = executor.tokenizer = None  # type: ignore[assignment]
    clock = iter([100.0, 103.0, 200.0, 230.0])
    monkeypatch.setattr(evaluator, "running_s", lambda: next(clock))
    monkeypatch.setattr(evaluator, "sample_groups", lambda *_, **__: [])
    monkeypatch.setattr(evaluator, "evaluate", lambda groups, labels: {})
    executor.step(0, {"eval_weights": None})
    assert pool.limit_s == 6.0
    executor.step(0, {"eval_weights": None})
    assert pool.limit_s == pytest.approx(0.5)  # never nothing, or slow sampling alone would fail every sample
