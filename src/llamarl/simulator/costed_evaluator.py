"""The evaluator that only takes time: a whole batch of held-out prompts where a version is due, nothing at other ticks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llamarl.executors.base import ExecutorContext
from llamarl.simulator.batching import decode_s, schedule
from llamarl.simulator.scenario import Scenario
from llamarl.simulator.virtual_clock import TimedStep

__all__ = ["CostedEvaluator"]

_EVALUATOR = 7  # stream of random numbers; costed.py and simulate.py have the others


class CostedEvaluator:
    """Decodes as one replica of the generator does."""

    def __init__(self, scenario: Scenario, context: ExecutorContext) -> None:
        self.scenario = scenario

    def initial_token(self, channel: str, source_tick: int) -> Any:
        raise ValueError(f"channel {channel!r} leaves the evaluator with a delay; only weights may have one")

    def step(self, tick: int, inputs: Mapping[str, Any]) -> TimedStep:
        s = self.scenario
        evaluation = s.evaluation
        assert evaluation is not None, "a job without evaluation has no evaluator"
        if not evaluation.due(tick, s.num_ticks):
            return TimedStep(duration_s=0.0)
        samples = evaluation.prompts * evaluation.samples_per_prompt
        lengths = s.lengths.sample(samples, np.random.default_rng([s.seed, _EVALUATOR, tick]))
        rows = lengths.reshape(1, -1)
        plan = schedule(rows, evaluation.slots)
        cost = evaluation.generator
        seconds = decode_s(plan, np.zeros_like(rows), plan.end.max(axis=1), s.prompt_tokens, cost)
        prompts = np.array([float(evaluation.prompts * s.prompt_tokens)])
        seconds = seconds + cost.prefill_s(prompts, np.array([s.prompt_tokens / 2.0]))
        duration = float(seconds[0]) + cost.tick_s
        return TimedStep(duration_s=duration, spans=(("evaluate", 0.0, duration),))

    def save(self) -> Any:
        return None

    def load(self, state: Any) -> None:
        pass
