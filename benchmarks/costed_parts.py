"""An engine that computes nothing and a trainer that waits after its work, so that what is measured is when a tick's parts are done, on
whatever machine: ``streaming.py`` beside it. Options of each are the keyword arguments of ``Costs``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamarl.config import RunConfig
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.executors.base import ExecutorContext, StepResult
from llamarl.executors.trainer import TrainerExecutor
from llamarl.planner.lengths import lognormal
from llamarl.types import Group

__all__ = ["CostedEngine", "Costs", "PartCostedTrainer"]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds."""

    decode_s: float = 0.006
    """A decode step, whatever its size."""
    sequence_s: float = 0.00045
    """More for each sequence in it."""
    update_s: float = 0.03
    """A trainer's tick, whatever its size."""
    token_s: float = 0.0003
    """More for each token of its batch, prompts included."""
    mean: float = 32.0
    """Tokens of a response: log-normal, by prompt and sample."""
    sigma: float = 0.7


class CostedEngine(NativeEngine):
    """Writes the same token until a response is as long as it is to be; at most ``max_sequences`` at once, in order of admission."""

    def __init__(self, model_path: Any, config: Any, **where: Any) -> None:
        super().__init__(model_path, config, **where)
        self._costs = Costs(**config.options)
        self._inside: list[TokenSequence] = []
        self._slots = config.max_sequences

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        self._inside += sequences

    @property
    def has_work(self) -> bool:
        return bool(self._inside)

    def suspend(self) -> list[TokenSequence]:
        left, self._inside = self._inside, []
        return left

    def step(self) -> list[TokenSequence]:
        until = time.monotonic() + self._costs.decode_s
        decoding = self._inside[: self._slots]
        for sequence in decoding:
            sequence.tokens.append(5)
            sequence.logprobs.append(-1.0)
            sequence.raw_logprobs.append(-1.0)
            sequence.policy_versions.append(self.policy_version)
            sequence.loss_mask.append(True)
            if len(sequence.tokens) >= self._length(sequence):
                sequence.finish_reason = "stop"
        self._inside = [sequence for sequence in self._inside if not sequence.finished]
        time.sleep(max(0.0, until + self._costs.sequence_s * len(decoding) - time.monotonic()))
        return [sequence for sequence in decoding if sequence.finished]

    def _length(self, sequence: TokenSequence) -> int:
        rng = np.random.default_rng([sequence.prompt_index, sequence.sample_index])
        limit = sequence.params.max_new_tokens
        return int(lognormal(self._costs.mean, self._costs.sigma, limit).sample(1, rng)[0])


class PartCostedTrainer(TrainerExecutor):
    """A part takes as long as its tokens, whenever it is done; the update takes its own time."""

    def __init__(self, config: RunConfig, context: ExecutorContext) -> None:
        super().__init__(config, context)
        self._costs = Costs(**context.options)
        self._paid = 0
        """Tokens of the next tick that have taken their time."""

    def take_part(self, tick: int, part: int, items: Sequence[Group]) -> bool:
        until = time.monotonic() + self._costs.token_s * _tokens(items)
        taken = super().take_part(tick, part, items)
        if taken:
            self._paid += _tokens(items)
            time.sleep(max(0.0, until - time.monotonic()))
        return taken

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        left = _tokens(self.items_of(inputs)) - self._paid
        until = time.monotonic() + self._costs.token_s * left + self._costs.update_s
        self._paid = 0
        result = super().step(tick, inputs)
        time.sleep(max(0.0, until - time.monotonic()))
        return result


def _tokens(groups: Sequence[Group]) -> int:
    return sum(group.num_tokens for group in groups)
