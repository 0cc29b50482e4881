"""Keeps what a tick's forward passes said of each token, for ``observability.trained_tokens``.
Nothing waits for the device.

micro-batch ──add──▶ tensors on the device ──responses──▶ one copy to the host, after the last update was queued
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from llamarl.observability.trained_tokens import TrainedResponse
from llamarl.trainer.batch import TrainingSequence
from llamarl.types import Group

__all__ = ["TokenLog"]


class TokenLog:
    """Of one tick on one rank. A response that several steps take is kept as the first of them saw it."""

    def __init__(self, groups: Sequence[Group]) -> None:
        """``groups`` are those that the sequences' ``group`` counts."""
        self._groups = groups
        self._parts: list[tuple[Sequence[TrainingSequence], Tensor, Tensor]] = []

    def add(self, part: Sequence[TrainingSequence], policy_logprobs: Tensor, clipped: Tensor) -> None:
        """Take a micro-batch: its sequences, and of their T tokens end to end log-probs and clipped
        ones, both [T]; or sequences that were not computed, with none."""
        if part:
            self._parts.append((part, policy_logprobs, clipped))

    def responses(self) -> list[TrainedResponse]:
        """All of them, in order of groups and samples. Waits for the device."""
        found: dict[tuple[int, int], TrainedResponse] = {}
        for part, policy_logprobs, clipped in self._parts:
            ends = np.cumsum([len(s.targets) for s in part])[:-1]
            of_each = zip(
                part,
                np.split(policy_logprobs.to(torch.float32).cpu().numpy(), ends),
                np.split(clipped.cpu().numpy(), ends),
                strict=True,
            )
            for sequence, logprobs, cut in of_each:
                found.setdefault(
                    (sequence.group, sequence.sample),
                    TrainedResponse(
                        prompt_index=self._groups[sequence.group].prompt.index,
                        sample_index=sequence.sample,
                        advantage=sequence.advantage,
                        policy_logprobs=logprobs,
                        clipped=cut,
                    ),
                )
        return [found[place] for place in sorted(found)]
