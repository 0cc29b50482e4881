"""What a node between reward and trainer needs to write a number beside every trained token.

    groups ──find──▶ sequences with their place ──pack──▶ micro-batches ──model──▶ [T] a sequence ──annotate──▶ groups

The groups keep their order and everything else they hold. Responses that cannot train pass as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.models.parallel import ParallelLayout
from llamarl.trainer.batch import Microbatch, TrainingSequence, make_microbatch, trainable, training_sequence
from llamarl.trainer.context_parallel import ContextRanks
from llamarl.types import Group, Response

__all__ = ["Located", "annotate", "locate", "microbatches", "per_sequence"]


@dataclass(frozen=True, slots=True)
class Located:
    """A sequence and the response that it is of."""

    group: int
    response: int
    sequence: TrainingSequence


def locate(groups: Sequence[Group], algorithm: AlgorithmConfig) -> list[Located]:
    """The responses that the trainer will train, in order; their advantage is left at 0."""
    return [
        Located(g, r, training_sequence(group, response, 0.0, g))
        for g, group in enumerate(groups)
        for r, response in enumerate(group.responses)
        if trainable(response, algorithm)
    ]


def per_sequence(
    sequences: Sequence[TrainingSequence], packing: Sequence[Sequence[int]], rows: Sequence[Tensor]
) -> list[npt.NDArray[np.float32]]:
    """One [T] array a sequence from one [sum of T] tensor a micro-batch."""
    found: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(sequences)
    for items, values in zip(packing, rows, strict=True):
        parts = values.detach().float().cpu().split([len(sequences[i].targets) for i in items])
        for i, part in zip(items, parts, strict=True):
            found[i] = part.numpy()
    return found


def microbatches(
    sequences: Sequence[TrainingSequence],
    packing: Sequence[Sequence[int]],
    *,
    device: str | torch.device,
    share_prompts: bool,
    layout: ParallelLayout,
) -> list[Microbatch]:
    """Tensors of each micro-batch, of this rank's part of it; every token weighs 1."""
    context = ContextRanks.of(layout)
    return [
        make_microbatch(
            [sequences[i] for i in items],
            [1.0] * len(items),
            torch.device(device),
            share_prompts=share_prompts,
            context=context,
        )
        for items in packing
    ]


def annotate(
    groups: Sequence[Group],
    located: Sequence[Located],
    rows: Sequence[npt.NDArray[np.float32]],
    field: Literal["reference_logprobs", "values"],
) -> list[Group]:
    """The groups with ``rows[i]`` written beside the trained tokens of ``located[i]``; NaN on its other tokens."""
    changed: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
    for item, row in zip(located, rows, strict=True):
        response = groups[item.group].responses[item.response]
        noted = np.full(len(response.tokens), np.nan, np.float32)
        noted[np.flatnonzero(response.loss_mask)] = row
        changed[item.group, item.response] = noted
    return [
        dataclasses.replace(
            group,
            responses=tuple(
                _with(response, field, changed[g, r]) if (g, r) in changed else response
                for r, response in enumerate(group.responses)
            ),
        )
        for g, group in enumerate(groups)
    ]


def _with(
    response: Response, field: Literal["reference_logprobs", "values"], noted: npt.NDArray[np.float32]
) -> Response:
    if field == "values":
        return dataclasses.replace(response, values=noted)
    return dataclasses.replace(response, reference_logprobs=noted)
