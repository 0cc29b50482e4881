"""The critic's arithmetic: values of a batch, then updates towards the returns that GAE makes of them.

    groups ─▶ micro-batches ─▶ V(s_t) before each trained token ─▶ groups with values ─▶ the trainer's advantages
                                   └─▶ returns (GAE) ─▶ (V - return)^2 / 2, mean over tokens ─▶ AdamW ─▶ next version

Version c of the critic is its weights after c ticks; batch c is valued by version c, then trained
on. The first update's forward pass is the one that gave the values, so valuing costs nothing more.
As in the trainer, every token's weight is fixed before the first pass: any split over micro-batches
and ranks gives the same gradient, to rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llamarl.models.precision import torch_dtype
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import CriticConfig, OptimizerConfig, TrainerConfig
from llamarl.trainer.building import build_value_model, layout_of
from llamarl.trainer.computes import Computes
from llamarl.trainer.credit import value_targets
from llamarl.trainer.optimizer import learning_rate
from llamarl.trainer.policy import ValueModel
from llamarl.trainer.scoring import LaidOut, lay_out
from llamarl.trainer.sharded_model import ShardedModel
from llamarl.trainer.shared_prompts import row_attention
from llamarl.types import Group

__all__ = ["Critic", "value_loss"]


class Critic(ShardedModel[ValueModel]):
    """Owns the value model and its optimizer on one rank of its (fsdp, tp) mesh."""

    role = "critic"
    counters = ("ticks_done", "num_skipped_in_a_row")

    def __init__(
        self,
        model_path: str | Path,
        config: CriticConfig,
        algorithm: AlgorithmConfig,
        trainer: TrainerConfig,
        optimizer: OptimizerConfig,
        *,
        device: str = "cpu",
        num_ticks: int | None = None,
    ) -> None:
        """
        Args:
            model_path: Hugging Face folder of a language model or of an exported critic.
            algorithm: Says which responses train, and how GAE and KL make returns.
            trainer: Says precision, micro-batches and limits on gradients.
            optimizer: Says AdamW's constants and schedule, but for its rate and warm-up.
            num_ticks: Length of the run, for schedules that fall.

        Raises:
            ModelError: The model has no value form, or does not divide by ``tp``.
            ValueError: ``fsdp * tp`` ranks are not there.
        """
        self.config, self.algorithm, self.trainer, self.num_ticks = config, algorithm, trainer, num_ticks
        self.optimizer = dataclasses.replace(optimizer, lr=config.lr, warmup_ticks=config.warmup_ticks)
        self.ticks_done = 0
        self.made: tuple[list[Group], dict[str, float]] = [], {}
        """By the last step."""
        learning_rate(self.optimizer, config.warmup_ticks, num_ticks)  # a bad schedule fails now
        layout = layout_of("critic", config, device)
        attention, share_prompts = row_attention(trainer, device, model_path)
        dtype = torch_dtype(trainer.dtype, device=device, model=model_path)
        built = build_value_model(model_path, layout, dtype=dtype, attention=attention, device=torch.device(device))
        super().__init__(built, layout, self.optimizer, device=torch.device(device), dtype=dtype)
        max_tokens = trainer.microbatch_tokens
        self.computes = Computes(built.module, layout, device, max_tokens=max_tokens, share_prompts=share_prompts)

    def step(self, groups: Sequence[Group], tick: int) -> tuple[list[Group], dict[str, float]]:
        """Value the batch with the version of ``tick`` ticks, then learn from it.

        Args:
            groups: This data-parallel rank's judged groups; its tensor-parallel peers get the same ones.

        Returns:
            The groups with ``values`` on every response that trains, and metrics over all ranks (docs/metrics.md).

        Raises:
            ValueError: The tick is not the next one.
            TrainingDiverged: More than ``max_skipped_steps`` steps in a row with a non-finite loss or gradient; the tick
                is done all the same, and ``made`` is what it would have returned.
        """
        if tick != self.ticks_done:
            raise ValueError(f"the critic has done {self.ticks_done} ticks, so its next is that, got {tick}")
        laid = lay_out(groups, self.algorithm, self.computes)
        num_tokens = int(self._sum([float(laid.num_tokens)])[0])
        lr = learning_rate(self.optimizer, tick, self.num_ticks)
        values: list[Tensor] = []
        targets: list[Tensor] = []
        first: dict[str, float] = {}
        skipped, clipped = 0, 0.0

        def loss_of(m: int, estimates: Tensor) -> tuple[Tensor, Tensor]:
            if m == len(values):  # the tick's first update
                values.append(estimates.detach())
                targets.append(self._targets(groups, laid, m, values[m]))
            terms, outside = value_loss(estimates, targets[m], values[m], clip=self.config.value_clip)
            return terms.sum() / max(1, num_tokens), outside

        for update in range(self.config.updates_per_tick):
            loss, clipped = torch.zeros((), device=self.device), 0.0
            for computed in self.computes.losses(laid.packed, loss_of):
                assert computed.loss is not None, "a critic has no stages"
                loss = loss + computed.loss
                clipped += float(computed.told.sum()) if self.config.value_clip and update else 0.0
            (total_loss,) = self._sum([loss.item()])
            self.weights.collect_gradients()
            grad_norm, stepped = self.apply_gradients(
                torch.tensor(total_loss), lr, max_norm=self.trainer.max_grad_norm, empty=num_tokens == 0
            )
            skipped += not stepped
            if update == 0:
                first = {"critic/loss": total_loss, "critic/grad_norm": grad_norm}
            if self.num_skipped_in_a_row > self.trainer.max_skipped_steps:
                break
        self.ticks_done += 1
        metrics = first | self._fit(values, targets) | {"critic/lr": lr, "critic/skipped": float(skipped)}
        if self.config.value_clip:
            metrics["critic/clipped_fraction"] = self._sum([clipped])[0] / max(1, num_tokens)
        self.made = laid.annotate(groups, values, "values"), metrics
        self.check_divergence(tick, self.trainer.max_skipped_steps, "lower critic.lr")
        return self.made

    def _targets(self, groups: Sequence[Group], laid: LaidOut, m: int, values: Tensor) -> Tensor:
        """Returns of a micro-batch's tokens, [T], from the values that this tick's trainer will use."""
        items = [laid.located[i] for i in laid.packed[m].items]
        parts = values.float().cpu().split([len(item.sequence.targets) for item in items])
        returns = [
            value_targets(groups[item.group].responses[item.response], part.numpy(), self.algorithm)
            for item, part in zip(items, parts, strict=True)
        ]
        joined = np.concatenate([*returns, np.zeros(0)])
        return torch.from_numpy(joined).to(values)

    def _fit(self, values: Sequence[Tensor], targets: Sequence[Tensor]) -> dict[str, float]:
        """How well the values foretold the returns, over the tokens of all ranks."""
        v = torch.cat([*values, torch.zeros(0, device=self.device)]).double()
        r = torch.cat([*targets, torch.zeros(0, device=self.device)]).double()
        sums = [float(len(v)), *(x.sum().item() for x in (v, r, r - v, r.square(), (r - v).square()))]
        count, *totals = self._sum(sums)
        value, target, error, targets2, errors2 = (total / max(1.0, count) for total in totals)
        spread = targets2 - target**2
        explained = 1.0 - (errors2 - error**2) / spread if spread > 1e-12 else 0.0
        return {"critic/explained_variance": explained, "critic/value_mean": value, "critic/return_mean": target}

    def _sum(self, values: Sequence[float]) -> list[float]:
        """Each value added up over the data-parallel ranks."""
        return self.layout.sum_over_data(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()


def value_loss(estimates: Tensor, returns: Tensor, earlier: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """Half the squared error a token, with PPO's optional clipping of the estimate's move. Not averaged.

    With ``clip`` c the loss is the larger of the plain error and that of ``earlier + clip(V - earlier, -c, c)``: an
    estimate that has already moved further than c towards its return gets no more gradient (as in the code of
    arXiv:1707.06347's authors; arXiv:2005.12729 finds little use in it).

    Args:
        estimates: V, [T], with grad.
        returns: What V should be, [T].
        earlier: V as first estimated in this tick, [T].
        clip: In units of reward; 0 is off.

    Returns:
        Losses [T], and [T] bool: V has moved further than ``clip``, and the clipped error was the larger.
    """
    plain = (estimates - returns).square()
    if not clip:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    move = estimates - earlier
    bounded = (earlier + move.clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, bounded) / 2, ((move.abs() > clip) & (bounded > plain)).detach()
