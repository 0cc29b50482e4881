"""The critic's arithmetic: values of a batch, then updates towards the returns that GAE makes of them.

    groups ─▶ micro-batches ─▶ V(s_t) before each trained token ─▶ groups with values ─▶ the trainer's advantages
                                   └─▶ returns (GAE) ─▶ (V - return)^2 / 2, mean over tokens ─▶ AdamW ─▶ next version

Version c of the critic is its weights after c ticks; batch c is valued by version c, then trained on. The first update's
forward pass is the one that gave the values, so valuing costs nothing more. As in the trainer, every token's weight is fixed
before the first pass: any split over micro-batches and ranks gives the same gradient, to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.algorithms.value import value_loss
from llamarl.errors import CheckpointError, TrainingDiverged
from llamarl.models.loading import load_model_config
from llamarl.models.onednn import use_onednn_linears
from llamarl.models.parallel import (
    apply_fully_shard,
    apply_tensor_parallel,
    gather_parameters,
    make_layout,
    parameter_shards,
)
from llamarl.models.repeatable import demanded
from llamarl.models.value import load_value_model, value_head
from llamarl.trainer.annotate import Located, annotate, locate, microbatches, per_sequence
from llamarl.trainer.batch import Microbatch, pack_sequences
from llamarl.trainer.config import CriticConfig
from llamarl.trainer.credit import value_targets
from llamarl.trainer.optimizer import MasterWeights, learning_rate
from llamarl.trainer.sharded_state import StagedState, read_state, stage, write_state
from llamarl.trainer.shared_prompts import can_share_prompts
from llamarl.trainer.storage import export_folder, source_dtype
from llamarl.types import Group

__all__ = ["Critic", "ValueModel"]


class ValueModel(nn.Module):
    """A value model that reads packed micro-batches."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        value_head(model)  # refuse one without

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers, first to last."""
        return list(self.model.base_model.layers)  # type: ignore[arg-type]  # a ModuleList in every decoder

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """By their Hugging Face names."""
        return dict(self.model.named_parameters())

    def forward(self, batch: Microbatch) -> Tensor:
        """Value before each trained token, [T], float32."""
        hidden = self.model.base_model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            packed_sequences=batch.packed,
        ).last_hidden_state[0]
        return value_head(self.model)(hidden.index_select(0, batch.positions)).squeeze(-1).float()


class Critic:
    """Owns the value model and its optimizer on one rank of its (fsdp, tp) mesh."""

    def __init__(
        self,
        model_path: str | Path,
        config: CriticConfig,
        algorithm: AlgorithmConfig,
        *,
        device: str = "cpu",
        num_ticks: int | None = None,
    ) -> None:
        """
        Args:
            model_path: Hugging Face folder of a language model or of an exported critic. Each rank reads it whole.
            algorithm: Says which responses train, and how GAE and KL make returns.
            num_ticks: Length of the run, for schedules that fall.

        Raises:
            ModelError: The model has no value form, or does not divide by ``tp``.
            ValueError: ``fsdp * tp`` ranks are not there.
        """
        self.config, self.algorithm, self.device = config, algorithm, device
        self.model_path, self.num_ticks = model_path, num_ticks
        self.ticks_done = 0
        self.num_skipped_in_a_row = 0
        learning_rate(config.optimizer, config.optimizer.warmup_ticks, num_ticks)  # a bad schedule fails now
        self.layout = make_layout(fsdp=config.fsdp, tp=config.tp, device=device)
        # Checkpoints are written beside the training, so their collectives need a group of their own.
        self._save_group = dist.new_group(backend="gloo") if self.layout.num_ranks > 1 else None
        self.share_prompts = config.share_prompts and can_share_prompts(load_model_config(model_path))
        attention = "llamarl_shared_prompts" if self.share_prompts else "llamarl_packed"
        model = load_value_model(model_path, device=device, attention=attention)
        cuts = apply_tensor_parallel(model, self.layout)
        if self.layout.num_ranks == 1:
            use_onednn_linears(model)
        dtype = getattr(torch, config.dtype)
        self.model = ValueModel(model)
        apply_fully_shard(self.model, self.model.layers, self.layout, dtype)
        initial = None
        if self.layout.fsdp == 1 and dtype != torch.float32:  # FSDP2 rounds as it gathers
            initial = {name: p.detach().clone() for name, p in self.model.parameters_by_name().items()}
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(dtype)
        parameters = self.model.parameters_by_name()
        self.weights = MasterWeights(
            parameters, config.optimizer, self.layout, tensor_parallel_cuts=cuts, initial=initial
        )
        self._shards = parameter_shards(parameters, cuts, self.layout, "float32")

    def step(self, groups: Sequence[Group], tick: int) -> tuple[list[Group], dict[str, float]]:
        """Value the batch with the version of ``tick`` ticks, then learn from it.

        Args:
            groups: This data-parallel rank's judged groups; tensor-parallel peers get the same ones.

        Returns:
            The groups with ``values`` on every response that trains, and metrics over all ranks (docs/metrics.md).

        Raises:
            ValueError: The tick is not the next one.
            TrainingDiverged: More than ``max_skipped_steps`` non-finite gradients in a row.
        """
        if tick != self.ticks_done:
            raise ValueError(f"the critic has done {self.ticks_done} ticks, so its next is that, got {tick}")
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
        num_tokens = int(self._sum([float(sum(len(s.targets) for s in sequences))])[0])
        lr = learning_rate(self.config.optimizer, tick, self.num_ticks)
        values: list[Tensor] = []
        targets: list[Tensor] = []
        first: dict[str, float] = {}
        skipped, clipped = 0, 0.0
        for update in range(self.config.updates_per_tick):
            loss, clipped = torch.zeros((), device=self.device), 0.0
            for m, batch in enumerate(batches):
                with demanded(self.device):
                    estimates = self.model(batch)
                    if update == 0:
                        values.append(estimates.detach())
                        targets.append(self._targets(groups, [located[i] for i in packing[m]], values[m]))
                    terms, outside = value_loss(estimates, targets[m], values[m], clip=self.config.value_clip)
                    part = terms.sum() / max(1, num_tokens)
                    part.backward()
                loss += part.detach()
                clipped += float(outside.sum()) if self.config.value_clip and update else 0.0
            grad_norm, stepped = self._update(lr, empty=num_tokens == 0)
            skipped += not stepped
            if update == 0:
                first = {"critic/loss": self._sum([loss.item()])[0], "critic/grad_norm": grad_norm}
            self._count_skips(skipped=not stepped, tick=tick)
        self.ticks_done += 1
        rows = per_sequence(sequences, packing, values)
        metrics = first | self._fit(values, targets) | {"critic/lr": lr, "critic/skipped": float(skipped)}
        if self.config.value_clip:
            metrics["critic/clipped_fraction"] = self._sum([clipped])[0] / max(1, num_tokens)
        return annotate(groups, located, rows, "values"), metrics

    def _targets(self, groups: Sequence[Group], items: Sequence[Located], values: Tensor) -> Tensor:
        """Returns of one micro-batch's tokens, [T], from the values that this tick's trainer will use."""
        parts = values.float().cpu().split([len(item.sequence.targets) for item in items])
        returns = [
            value_targets(groups[item.group].responses[item.response], part.numpy(), self.algorithm)
            for item, part in zip(items, parts, strict=True)
        ]
        joined = np.concatenate([*returns, np.zeros(0)])
        return torch.from_numpy(joined).to(values)

    def _update(self, lr: float, *, empty: bool) -> tuple[float, bool]:
        """AdamW with what was gathered; (gradient norm, False if it was not finite and nothing changed)."""
        self.weights.collect_gradients()
        grad_norm = self.weights.gradient_norm().item()
        finite = math.isfinite(grad_norm)
        if finite and not empty:
            if 0 < self.config.max_grad_norm < grad_norm:
                self.weights.scale_gradients(self.config.max_grad_norm / grad_norm)
            self.weights.step(lr)
        self.weights.drop_gradients()
        return grad_norm, finite

    def _count_skips(self, *, skipped: bool, tick: int) -> None:
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if skipped else 0
        if self.num_skipped_in_a_row > self.config.max_skipped_steps:
            raise TrainingDiverged(
                f"critic: tick {tick}: {self.num_skipped_in_a_row} non-finite gradients in a row"
                f" (critic.max_skipped_steps = {self.config.max_skipped_steps}): lower critic.optimizer.lr, or look at the"
                " rewards of these ticks; checkpoints taken so far are untouched"
            )

    def _fit(self, values: Sequence[Tensor], targets: Sequence[Tensor]) -> dict[str, float]:
        """How well the values foretold the returns, over the tokens of all ranks."""
        v = torch.cat([*values, torch.zeros(0, device=self.device)]).double()
        r = torch.cat([*targets, torch.zeros(0, device=self.device)]).double()
        sums = [float(len(v)), *(x.sum().item() for x in (v, r, r - v, r.square(), (r - v).square()))]
        count, *totals = self._sum(sums)
        value, target, error, targets2, errors2 = (total / max(1.0, count) for total in totals)
        spread = targets2 - target**2
        explained = 1.0 - (errors2 - error**2) / spread if spread > 1e-12 else 0.0
        return {
            "critic/explained_variance": explained,
            "critic/value_mean": value,
            "critic/return_mean": target,
        }

    def _sum(self, values: Sequence[float]) -> list[float]:
        """Each value added up over the data-parallel ranks."""
        return self.layout.sum_over_data(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()

    def stage(self, *, copy: bool = True) -> StagedState:
        """This rank's state now, so that learning may go on; ``copy`` False if nothing changes before it is written."""
        values = {"ticks_done": self.ticks_done, "num_skipped_in_a_row": self.num_skipped_in_a_row}
        return stage(self.weights.state(), self._shards, values, copy=copy)

    def write(self, state: StagedState, folder: Path) -> None:
        """Write what all ranks staged into one folder; every rank calls it, on any thread.

        Raises:
            CheckpointError: A rank could not write.
        """
        write_state(Path(folder), state, rank=self.layout.rank, group=self._save_group)

    def save(self, folder: Path) -> None:
        """``stage`` and ``write`` at once. All ranks give the same folder; ``load`` continues from it."""
        self.write(self.stage(copy=False), folder)

    def load(self, folder: Path) -> None:
        """Restore what ``write`` wrote: the same layout goes on with the same bits, another one to rounding.

        Raises:
            CheckpointError: Unreadable, incomplete, or of another model.
        """
        tensors, values = read_state(Path(folder), lambda _: self._shards)
        try:
            self.weights.load_state(tensors)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"critic state in {folder} is of another model: {error}") from error
        self.ticks_done, self.num_skipped_in_a_row = values["ticks_done"], values["num_skipped_in_a_row"]

    def export(self, folder: Path) -> None:
        """Write a folder that ``AutoModelForTokenClassification`` loads. All ranks call it; rank 0 writes."""
        tensors = {name: tensor.detach() for name, tensor in self.weights.tensors.items()}
        whole = gather_parameters(tensors, self._shards, self.layout)
        if self.layout.rank != 0:
            for _ in whole:  # send this rank's parts
                raise AssertionError("only rank 0 receives whole parameters")
            return
        export_folder(
            folder,
            self.model.model,
            whole,
            {name: shard.shape for name, shard in self._shards.items()},
            source=self.model_path,
            dtype=source_dtype(self.model_path),
        )
