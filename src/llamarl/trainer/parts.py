"""An optimizer step whose parts are computed one after the other, before it is known how many tokens the step has.

    part ─▶ gradients with the weights of a step of one token and one sequence ─┬─ all parts ─▶ · 1 / tokens or sequences ─▶ AdamW
    part ─▶ ...                                                                 ─┘

Parts add up in their order, whenever each was computed, so the bits depend on how a tick was cut and on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.trainer.batch import TrainingSequence, parts_factor
from llamarl.trainer.statistics import StepStatistics

__all__ = ["JoinedParts", "PartOfStep", "join_parts"]


@dataclass(frozen=True, eq=False)
class PartOfStep:
    """A part whose gradients have been added up."""

    sequences: list[TrainingSequence]
    statistics: StepStatistics
    loss: Tensor
    """Scalar, detached, in the weights of a step of one token and one sequence; so are its gradients."""


@dataclass(frozen=True, eq=False)
class JoinedParts:
    """All parts of a step."""

    sequences: list[TrainingSequence]
    statistics: StepStatistics
    loss: Tensor
    """Scalar, of the step."""
    factor: float
    """What the gradients that were added up are to be multiplied by."""


def join_parts(parts: Sequence[PartOfStep], config: AlgorithmConfig) -> JoinedParts:
    """The step that parts, in order, make together; at least one."""
    num_tokens = sum(part.statistics.num_tokens for part in parts)
    num_sequences = sum(part.statistics.num_sequences for part in parts)
    factor = parts_factor(config, num_tokens=num_tokens, num_sequences=num_sequences) if num_tokens else 1.0
    loss = parts[0].loss.clone()
    for part in parts[1:]:
        loss += part.loss
    return JoinedParts(
        sequences=[sequence for part in parts for sequence in part.sequences],
        statistics=StepStatistics.joined([part.statistics for part in parts], factor),
        loss=loss * factor,
        factor=factor,
    )
