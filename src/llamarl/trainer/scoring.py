"""A frozen model's log-probs of every token that trains: the arithmetic of the reference executor.

The distribution is the policy's as the trainer sees it: the same packing of sequences, chunked output layer and sampling
temperature. The model lies over the (pp, fsdp, cp, tp) mesh of its own ranks, so it need not fit one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.models.loading import load_model_config, torch_dtype
from llamarl.models.parallel import make_layout
from llamarl.trainer.annotate import annotate, locate, microbatches, per_sequence
from llamarl.trainer.batch import pack_sequences
from llamarl.trainer.building import build_policy
from llamarl.trainer.config import ReferenceConfig
from llamarl.trainer.pipeline import logprobs_of, make_links
from llamarl.trainer.shared_prompts import can_share_prompts
from llamarl.types import Group

__all__ = ["FrozenScorer"]


class FrozenScorer:
    """One rank's part of a model that never changes."""

    def __init__(
        self,
        model_path: str | Path,
        config: ReferenceConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        device: str = "cpu",
    ) -> None:
        """
        Args:
            model_path: Hugging Face folder.
            algorithm: Says which responses train.
            temperature: The generator's.

        Raises:
            ModelError: The model is not supported, or not with this ``tp``, ``pp``, ``cp`` or ``ep``.
            ValueError: ``fsdp * tp * pp * cp`` ranks are not there, or ``temperature`` is 0.
        """
        self.config, self.algorithm, self.device = config, algorithm, device
        self.layout = make_layout(
            fsdp=config.fsdp,
            tp=config.tp,
            pp=config.pp,
            cp=config.cp,
            ep=config.ep,
            device=device,
            keys=("reference.fsdp", "reference.tp", "reference.pp", "reference.cp"),
        )
        self.share_prompts = config.share_prompts and can_share_prompts(load_model_config(model_path))
        dtype = torch_dtype(config.dtype, device=device, model=model_path)
        self.policy = build_policy(
            model_path,
            self.layout,
            temperature=temperature,
            dtype=dtype,
            chunk_tokens=config.logprob_chunk_tokens,
            share_prompts=self.share_prompts,
            device=torch.device(device),
            trained=False,
            section="reference",
        ).module
        self._links = make_links(self.policy.model, self.layout, dtype=dtype, device=torch.device(device))

    @torch.no_grad()
    def score(self, groups: Sequence[Group]) -> list[Group]:
        """This data-parallel rank's groups with ``reference_logprobs`` on every response that trains; as they came on another
        pipeline stage than the last."""
        located = locate(groups, self.algorithm)
        sequences = [item.sequence for item in located]
        packing = pack_sequences(
            sequences,
            max_tokens=self.config.max_tokens_per_microbatch,
            share_prompts=self.share_prompts,
            layout=self.layout,
            device=self.device,
        )
        batches = microbatches(
            sequences, packing, device=self.device, share_prompts=self.share_prompts, layout=self.layout
        )
        rows = logprobs_of(self.policy, batches, self._links)
        if not self.layout.is_last_stage:
            return list(groups)
        return annotate(groups, located, per_sequence(sequences, packing, rows), "reference_logprobs")
