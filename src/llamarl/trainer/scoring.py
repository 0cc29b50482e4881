"""A frozen model's log-probs of every token that trains: the arithmetic of the reference executor.

The distribution is the policy's as the trainer sees it: the same packing of sequences, chunked output layer and sampling
temperature. The model lies over the (fsdp, tp) mesh of its own ranks, so it need not fit one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.models.loading import load_model, load_model_config
from llamarl.models.onednn import use_onednn_linears
from llamarl.models.parallel import apply_fully_shard, apply_tensor_parallel, make_layout, parameter_shards
from llamarl.models.sharded_loading import can_stream, give_storage, make_skeleton, read_parts
from llamarl.trainer.annotate import annotate, locate, microbatches, pack_sequences, per_sequence
from llamarl.trainer.config import ReferenceConfig
from llamarl.trainer.logprobs import LogitTransform
from llamarl.trainer.policy import Policy, check_output_layer
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
            ModelError: The model is not supported, or not with this ``tp``.
            ValueError: ``fsdp * tp`` ranks are not there, or ``temperature`` is 0.
        """
        self.config, self.algorithm, self.device = config, algorithm, device
        self.layout = make_layout(fsdp=config.fsdp, tp=config.tp, device=device)
        self.share_prompts = config.share_prompts and can_share_prompts(load_model_config(model_path))
        self.policy = self._build(model_path, temperature)

    @torch.no_grad()
    def score(self, groups: Sequence[Group]) -> list[Group]:
        """This data-parallel rank's groups with ``reference_logprobs`` on every response that trains."""
        located = locate(groups, self.algorithm)
        sequences = [item.sequence for item in located]
        packing = pack_sequences(
            sequences,
            max_tokens=self.config.max_tokens_per_microbatch,
            share_prompts=self.share_prompts,
            layout=self.layout,
            device=self.device,
        )
        batches = microbatches(sequences, packing, device=self.device, share_prompts=self.share_prompts)
        rows = [self.policy(batch)[0] for batch in batches]
        return annotate(groups, located, per_sequence(sequences, packing, rows), "reference_logprobs")

    def _build(self, model_path: str | Path, temperature: float) -> Policy:
        dtype = getattr(torch, self.config.dtype)
        attention = "llamarl_shared_prompts" if self.share_prompts else "llamarl_packed"
        streamed = False
        if self.layout.num_ranks > 1:  # no rank may need memory for the whole
            model = make_skeleton(model_path, attention=attention)
            streamed = can_stream(model_path, model)
        if not streamed:
            model = load_model(model_path, dtype=torch.float32, device=self.device, attention=attention)
        transform = LogitTransform.of_model(model.config, temperature)
        if not streamed:
            check_output_layer(model, transform)
        cuts = apply_tensor_parallel(model, self.layout)
        if self.layout.num_ranks == 1:
            use_onednn_linears(model)
        policy = Policy(
            model, transform, chunk_tokens=self.config.logprob_chunk_tokens, entropy_needs_grad=False
        ).requires_grad_(False)
        apply_fully_shard(policy, policy.layers, self.layout, dtype)
        if streamed:
            give_storage(policy, torch.device(self.device))
            parameters = dict(policy.model.named_parameters())
            read_parts(model_path, parameters, parameter_shards(parameters, cuts, self.layout, "float32"))
        if self.layout.fsdp == 1 and dtype != torch.float32:  # FSDP2 rounds as it gathers
            for parameter in policy.parameters():
                parameter.data = parameter.data.to(dtype)
        return policy
