"""A frozen judge model on a device of its own, between reward and trainer.

    generator ── completions ──▶ reward ── scored ──▶ judge2 ── weighed ──▶ trainer

The judge adds to each reward how plain a language model finds the response: option ``weight`` times the mean log-prob of its
tokens. Run: llamarl train examples/executors/judge_model.toml
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from llamarl.executors.base import BaseExecutor, StepResult
from llamarl.settings.trainer import ReferenceConfig
from llamarl.trainer.scoring import FrozenScorer
from llamarl.types import Group, Response, Score

__all__ = ["JudgeModel"]


class JudgeModel(BaseExecutor):
    """Holds the model of option ``path``, which never changes: so there is no state to save.

    A sample that the reward before failed stays failed; one of which nothing trains keeps its reward.
    """

    def setup(self) -> None:
        self.model = FrozenScorer(
            self.context.options["path"],
            ReferenceConfig(),
            self.config.algorithm,  # says which tokens train: these are judged
            self.config.trainer,  # says how they are packed
            temperature=1.0,
            device=self.context.device,
        )

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        groups: list[Group] = self.items_of(inputs)
        judged = [self._judged(group, seen) for group, seen in zip(groups, self.model.score(groups), strict=True)]
        outcomes = [response.outcome for group in judged for response in group.responses]
        verdicts = [found.parts["judge"] for found in outcomes if isinstance(found, Score) and "judge" in found.parts]
        mean = float(np.mean(verdicts)) if verdicts else float("nan")
        return StepResult(outputs=self.outputs_of(judged), metrics={"judge/logprob_mean": mean})

    def _judged(self, group: Group, seen: Group) -> Group:
        pairs = zip(group.responses, seen.responses, strict=True)
        return dataclasses.replace(group, responses=tuple(self._add(response, other) for response, other in pairs))

    def _add(self, response: Response, seen: Response) -> Response:
        """``response`` with a verdict; ``seen`` is the same with the model's log-probs (NaN on what does not train)."""
        if not isinstance(response.outcome, Score) or seen.reference_logprobs is None:
            return response
        logprobs = seen.reference_logprobs[~np.isnan(seen.reference_logprobs)]
        if not len(logprobs):
            return response
        verdict = float(logprobs.mean(dtype=np.float64))
        total = response.outcome.value + self.context.options["weight"] * verdict
        return dataclasses.replace(
            response, outcome=Score(value=total, parts={**response.outcome.parts, "judge": verdict})
        )

    def close(self) -> None:
        self.__dict__.pop("model", None)
