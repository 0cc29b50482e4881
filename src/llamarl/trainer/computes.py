"""Carries out a model's passes over micro-batches: in turn, a thread each, or in the stages of a pipeline.

    sequences ─pack─▶ micro-batches ─┬─ outputs ─▶ what the model says of each, nothing kept
                                     └─ losses ──▶ what the loss says of each; gradients are with the parameters

Trainer, critic, reference and reward model say what is computed and get results in the order of the micro-batches;
how that happens is known here alone. Gradients are added in this order too, so it changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from llamarl.models.decoder import changes_with_length
from llamarl.models.experts import Routing, watching
from llamarl.models.parallel import ParallelLayout
from llamarl.models.repeatable import demanded
from llamarl.settings.trainer import num_at_once
from llamarl.trainer.batch import Microbatch, TrainingSequence, make_microbatch, pack_sequences
from llamarl.trainer.context_parallel import ContextRanks
from llamarl.trainer.optimizer import MasterWeights
from llamarl.trainer.pipeline import Links
from llamarl.trainer.policy import Policy, ValueModel
from llamarl.trainer.side_by_side import in_order

__all__ = ["Computed", "Computes", "Loss", "Packed", "Staged", "Threaded"]

Loss = Callable[[int, Any], tuple[Tensor, Any]]
"""(Micro-batch, what the model says of it) -> its share of the loss, a scalar with grad, and what else is to be known
of it, detached. Threads may call it at the same time."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch, and which sequences it is made of; none where it only keeps step with other ranks."""

    items: list[int]
    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class Computed:
    """What is known of one micro-batch after its passes; all detached."""

    loss: Tensor | None
    """None on another pipeline stage than the last."""
    told: Any
    """What the loss told beside itself."""
    chosen_experts: Tensor | None
    """As ``Routing.counts`` gives it, of the sparse layers that are here; None of a dense model."""


class Computes:
    """One micro-batch after another, on one rank of a mesh without stages."""

    def __init__(
        self,
        module: Policy | ValueModel,
        layout: ParallelLayout,
        device: torch.device | str,
        *,
        max_tokens: int,
        share_prompts: bool,
        replay: bool = False,
    ) -> None:
        """
        Args:
            max_tokens: Of a micro-batch.
            share_prompts: Whether micro-batches hold a group's prompt once.
            replay: Routers are to choose the experts that the sequences know.
        """
        self.module, self.layout, self.device = module, layout, torch.device(device)
        self.max_tokens, self.share_prompts, self.replay = max_tokens, share_prompts, replay

    @property
    def at_once(self) -> int:
        """Micro-batches that are computed at the same time."""
        return 1

    def pack(self, sequences: Sequence[TrainingSequence], weights: Sequence[float] | None = None) -> list[Packed]:
        """Lay sequences out in micro-batches, of which every rank gets as many.

        Args:
            weights: Of each sequence's tokens in the step's mean; None: 1.
        """
        packing = pack_sequences(
            sequences,
            max_tokens=self.max_tokens,
            share_prompts=self.share_prompts,
            layout=self.layout,
            device=self.device,
            at_once=self.at_once,
        )
        return [
            Packed(
                items,
                make_microbatch(
                    [sequences[i] for i in items],
                    [1.0 if weights is None else weights[i] for i in items],
                    self.device,
                    share_prompts=self.share_prompts,
                    replay=self.replay,
                    context=ContextRanks.of(self.layout),
                ),
            )
            for items in packing
        ]

    @torch.no_grad()
    def outputs(self, packed: Sequence[Packed]) -> list[Any]:
        """What the model says of each; nothing on another stage than the last."""
        found = self._outputs(packed)
        if isinstance(self.module, FSDPModule):
            # it keeps what it gathered for its own parameters until a backward pass, and would compute with it again
            self.module.reshard()
        return found

    def losses(self, packed: Sequence[Packed], loss: Loss) -> Iterator[Computed]:
        """Forward and backward pass of each, in their order; its gradients are with the parameters when it comes."""
        for i in range(len(packed)):
            with demanded(self.device):
                total, told, routing = self._forward(i, packed[i].microbatch, loss)
                total.backward()  # type: ignore[no-untyped-call]
            yield Computed(total.detach(), told, self._chosen_experts(routing, packed[i].microbatch))

    def _outputs(self, packed: Sequence[Packed]) -> list[Any]:
        return [self.module(one.microbatch) for one in packed]

    def _forward(self, i: int, microbatch: Microbatch, loss: Loss) -> tuple[Tensor, Any, Routing]:
        routing = Routing(self.module.num_sparse_layers)
        with watching(routing):
            total, told = loss(i, self.module(microbatch))
        return total, told, routing

    def _chosen_experts(self, routing: Routing, microbatch: Microbatch) -> Tensor | None:
        if not self.module.num_sparse_layers:
            return None
        num_own = None if microbatch.own is None else microbatch.own.num_tokens
        counts = routing.counts(self.module.num_experts, num_own).to(self.device)
        return counts if microbatch.num_tokens else torch.zeros_like(counts)


class Threaded(Computes):
    """Several micro-batches at the same time, a thread each: of a lone rank on CPU cores."""

    def __init__(self, *args: Any, weights: MasterWeights, at_once: int, **settings: Any) -> None:
        """
        Args:
            weights: Gets the gradients.
            at_once: Micro-batches at the same time (``trainer.microbatches_at_once``).
        """
        super().__init__(*args, **settings)
        self._weights, self._asked = weights, at_once
        self._num_parameters = sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def at_once(self) -> int:
        return num_at_once(
            self._asked,
            threads=torch.get_num_threads(),
            num_parameters=self._num_parameters,
            reentrant=not changes_with_length(self.module.model.config),
        )

    def losses(self, packed: Sequence[Packed], loss: Loss) -> Iterator[Computed]:
        at_once = min(self.at_once, max(1, len(packed)))
        if at_once == 1:
            yield from super().losses(packed, loss)
            return
        parameters = list(self._weights.parameters.values())

        def compute(i: int) -> tuple[Computed, Sequence[Tensor | None]]:
            microbatch = packed[i].microbatch
            with demanded(self.device):
                total, told, routing = self._forward(i, microbatch, loss)
                gradients = torch.autograd.grad(total, parameters, allow_unused=True)
            return Computed(total.detach(), told, self._chosen_experts(routing, microbatch)), gradients

        for found, gradients in in_order(compute, range(len(packed)), at_once=at_once, threads=torch.get_num_threads()):
            self._weights.add_gradients(gradients)
            yield found


class Staged(Computes):
    """One stage of a pipeline: its passes in the pipeline's order."""

    def __init__(self, *args: Any, dtype: torch.dtype, **settings: Any) -> None:
        """
        Args:
            dtype: In which layers hand hidden states on.
        """
        super().__init__(*args, **settings)
        width = int(self.module.model.config.get_text_config().hidden_size)
        self._links = Links(self.layout, width=width, dtype=dtype, device=self.device)

    def losses(self, packed: Sequence[Packed], loss: Loss) -> Iterator[Computed]:
        found: list[Computed] = []

        def forward(i: int, received: Tensor | None) -> Tensor:
            microbatch, routing, total, told = packed[i].microbatch, Routing(self.module.num_sparse_layers), None, None
            with watching(routing):
                output = self.module(microbatch, received)
                if self.layout.is_last_stage:
                    total, told = loss(i, output)
            experts = self._chosen_experts(routing, microbatch)
            found.append(Computed(None if total is None else total.detach(), told, experts))
            hidden: Tensor = output[0]
            return hidden if total is None else total

        with demanded(self.device):
            self._links.run([one.microbatch for one in packed], forward, trains=True)
        return iter(found)

    def _outputs(self, packed: Sequence[Packed]) -> list[Any]:
        found: list[Any] = []

        def forward(i: int, received: Tensor | None) -> Tensor:
            output = self.module(packed[i].microbatch, received)
            if self.layout.is_last_stage:
                found.append(output)
            hidden: Tensor = output[0]
            return hidden

        self._links.run([one.microbatch for one in packed], forward, trains=False)
        return found
