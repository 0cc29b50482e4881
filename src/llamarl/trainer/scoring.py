"""A number beside every trained token: what reference and critic share, and the reference's arithmetic.

    groups ──find──▶ sequences with their place ──pack──▶ micro-batches ──model──▶ [T] a sequence ──annotate──▶ groups

The groups keep their order and everything else they hold. Responses that cannot train pass as they are. A reference's
distribution is the policy's as the trainer sees it: the same packing of sequences, chunked output layer and sampling
temperature. Its model lies over the (fsdp, tp) mesh of its own ranks, so it need not fit one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llamarl.models.precision import torch_dtype
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import ReferenceConfig, TrainerConfig
from llamarl.trainer.batch import TrainingSequence, trainable, training_sequence
from llamarl.trainer.building import build_policy, layout_of
from llamarl.trainer.computes import Computes, Packed
from llamarl.trainer.shared_prompts import row_attention
from llamarl.types import Group

__all__ = ["FrozenScorer", "LaidOut", "Located", "lay_out"]


@dataclass(frozen=True, slots=True)
class Located:
    """A sequence and the response that it is of."""

    group: int
    response: int
    sequence: TrainingSequence


@dataclass(frozen=True, slots=True)
class LaidOut:
    """The responses of a batch that train, in micro-batches."""

    located: list[Located]
    packed: list[Packed]
    """Their items are indices into ``located``."""

    @property
    def num_tokens(self) -> int:
        """T of all sequences together."""
        return sum(len(item.sequence.targets) for item in self.located)

    def annotate(
        self,
        groups: Sequence[Group],
        rows: Sequence[Tensor],
        field: Literal["reference_logprobs", "top_tokens", "top_logprobs", "values"],
    ) -> list[Group]:
        """Write numbers beside the trained tokens of ``groups``; NaN, or token 0, on other tokens of their responses.

        Args:
            groups: Those that were laid out.
            rows: One [sum of T, ...] tensor a micro-batch.
        """
        changed: dict[tuple[int, int], npt.NDArray[Any]] = {}
        for one, values in zip(self.packed, rows, strict=True):
            items = [self.located[i] for i in one.items]
            held = values.detach().to(torch.float32 if values.is_floating_point() else torch.int32).cpu()
            parts = held.split([len(item.sequence.targets) for item in items])
            for item, part in zip(items, parts, strict=True):
                response = groups[item.group].responses[item.response]
                shape = len(response.tokens), *part.shape[1:]
                noted = np.full(shape, np.nan if part.is_floating_point() else 0, part.numpy().dtype)
                noted[np.flatnonzero(response.loss_mask)] = part.numpy()
                changed[item.group, item.response] = noted
        found = list(groups)
        for (g, r), noted in changed.items():
            responses = list(found[g].responses)
            responses[r] = dataclasses.replace(responses[r], **{field: noted})  # type: ignore[arg-type]
            found[g] = dataclasses.replace(found[g], responses=tuple(responses))
        return found


def lay_out(groups: Sequence[Group], algorithm: AlgorithmConfig, computes: Computes) -> LaidOut:
    """Find the responses that the trainer will train, in order, and pack them; their advantage is left at 0."""
    located = [
        Located(g, r, training_sequence(group, response, 0.0, g))
        for g, group in enumerate(groups)
        for r, response in enumerate(group.responses)
        if trainable(response, algorithm)
    ]
    return LaidOut(located, computes.pack([item.sequence for item in located]))


class FrozenScorer:
    """One rank's part of a model that does not learn."""

    def __init__(
        self,
        model_path: str | Path,
        config: ReferenceConfig,
        algorithm: AlgorithmConfig,
        trainer: TrainerConfig,
        *,
        temperature: float,
        num_tokens: int = 0,
        device: str = "cpu",
    ) -> None:
        """
        Args:
            model_path: Hugging Face folder.
            algorithm: Says which responses train.
            trainer: Says how micro-batches are packed.
            temperature: The generator's.
            num_tokens: Of the policy's vocabulary, of which a teacher with ``algorithm.teacher_top_k`` names the likeliest.

        Raises:
            ModelError: The model is not supported, or not with this ``tp``.
            ValueError: ``fsdp * tp`` ranks are not there, or ``temperature`` is 0.
        """
        self.algorithm = algorithm
        charged = algorithm.kl_coef > 0 and algorithm.kl_place == "reward"  # who is in a baseline, and may not train
        self._scored = dataclasses.replace(algorithm, train_truncated=True) if charged else algorithm
        self.layout = layout_of("reference", config, device)
        attention, share_prompts = row_attention(trainer, device, model_path)
        dtype = torch_dtype(config.dtype, device=device, model=model_path)
        policy = build_policy(
            model_path,
            self.layout,
            temperature=temperature,
            dtype=dtype,
            chunk_tokens=trainer.logprob_chunk_tokens,
            attention=attention,
            device=torch.device(device),
            trained=False,
        ).module
        self.tensors = {name: parameter.detach() for name, parameter in policy.model.named_parameters()}
        """Its weights by Hugging Face names, this rank's parts; what is written there is computed with."""
        policy.top_k, policy.top_below = algorithm.teacher_top_k, num_tokens
        max_tokens = 2 * trainer.microbatch_tokens
        self.computes = Computes(policy, self.layout, device, max_tokens=max_tokens, share_prompts=share_prompts)

    def score(self, groups: Sequence[Group]) -> list[Group]:
        """This data-parallel rank's groups with ``reference_logprobs`` on every response that trains, or whose reward
        pays for its KL, and with ``algorithm.teacher_top_k`` the likeliest tokens."""
        laid = lay_out(groups, self._scored, self.computes)
        found = self.computes.outputs(laid.packed)
        groups = laid.annotate(groups, [scores.logprobs for scores in found], "reference_logprobs")
        if self.algorithm.teacher_top_k:
            groups = laid.annotate(groups, [scores.top_tokens for scores in found], "top_tokens")
            groups = laid.annotate(groups, [scores.top_logprobs for scores in found], "top_logprobs")
        return list(groups)
