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
from torch import Tensor

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.algorithms.value import value_loss
from llamarl.errors import TrainingDiverged
from llamarl.models.loading import load_model_config
from llamarl.models.repeatable import demanded
from llamarl.trainer.batch import Microbatch
from llamarl.trainer.building import build_value_model, layout_of
from llamarl.trainer.config import CriticConfig
from llamarl.trainer.credit import value_targets
from llamarl.trainer.optimizer import learning_rate
from llamarl.trainer.pipeline import Forward, make_links
from llamarl.trainer.policy import ValueModel
from llamarl.trainer.scoring import Located, lay_out
from llamarl.trainer.sharded_model import ShardedModel
from llamarl.trainer.shared_prompts import can_share_prompts
from llamarl.types import Group

__all__ = ["Critic"]


class Critic(ShardedModel[ValueModel]):
    """Owns the value model and its optimizer on one rank of its (pp, fsdp, cp, tp) mesh."""

    role = "critic"
    counters = ("ticks_done", "num_skipped_in_a_row")

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
            model_path: Hugging Face folder of a language model or of an exported critic.
            algorithm: Says which responses train, and how GAE and KL make returns.
            num_ticks: Length of the run, for schedules that fall.

        Raises:
            ModelError: The model has no value form, or does not divide by ``tp``, ``pp``, ``cp`` or ``ep``.
            ValueError: ``fsdp * tp * pp * cp`` ranks are not there.
        """
        self.config, self.algorithm, self.num_ticks = config, algorithm, num_ticks
        self.ticks_done = 0
        self.num_skipped_in_a_row = 0
        learning_rate(config.optimizer, config.optimizer.warmup_ticks, num_ticks)  # a bad schedule fails now
        layout = layout_of(config, "critic", device)
        self.share_prompts = config.share_prompts and can_share_prompts(load_model_config(model_path))
        dtype = getattr(torch, config.dtype)
        built = build_value_model(
            model_path, layout, dtype=dtype, share_prompts=self.share_prompts, device=torch.device(device)
        )
        super().__init__(
            built, layout, config.optimizer, model_path=model_path, device=torch.device(device), dtype=dtype
        )
        self._links = make_links(self.module.model, layout, dtype=self.dtype, device=self.device)

    def step(self, groups: Sequence[Group], tick: int) -> tuple[list[Group], dict[str, float]]:
        """Value the batch with the version of ``tick`` ticks, then learn from it.

        Args:
            groups: This data-parallel rank's judged groups; its tensor- and context-parallel peers and pipeline stages get the
                same ones.

        Returns:
            The groups with ``values`` on every response that trains, and metrics over all ranks (docs/metrics.md). On another
            pipeline stage than the last, the groups as they came.

        Raises:
            ValueError: The tick is not the next one.
            TrainingDiverged: More than ``max_skipped_steps`` steps in a row with a non-finite loss or gradient.
        """
        if tick != self.ticks_done:
            raise ValueError(f"the critic has done {self.ticks_done} ticks, so its next is that, got {tick}")
        batch = lay_out(
            groups, self.algorithm, self.config, self.layout, share_prompts=self.share_prompts, device=self.device
        )
        num_tokens = int(self._sum([float(batch.num_tokens)])[0])
        lr = learning_rate(self.config.optimizer, tick, self.num_ticks)
        values: list[Tensor] = []
        targets: list[Tensor] = []
        first: dict[str, float] = {}
        skipped, clipped = 0, 0.0
        for update in range(self.config.updates_per_tick):
            loss, clipped = torch.zeros((), device=self.device), 0.0

            def forward(m: int, received: Tensor | None, update: int = update) -> Tensor:
                nonlocal loss, clipped
                estimates: Tensor = self.module(batch.microbatches[m], received)
                if not self.layout.is_last_stage:
                    return estimates
                if update == 0:
                    values.append(estimates.detach())
                    targets.append(self._targets(groups, [batch.located[i] for i in batch.packing[m]], values[m]))
                terms, outside = value_loss(estimates, targets[m], values[m], clip=self.config.value_clip)
                part = terms.sum() / max(1, num_tokens)
                loss = loss + part.detach()
                clipped += float(outside.sum()) if self.config.value_clip and update else 0.0
                return part

            self._forward_backward(batch.microbatches, forward)
            (total_loss,) = self._sum([self.layout.sum_over_stages(loss).item()])
            grad_norm, stepped = self._update(lr, total_loss, empty=num_tokens == 0)
            skipped += not stepped
            if update == 0:
                first = {"critic/loss": total_loss, "critic/grad_norm": grad_norm}
            self._count_skips(skipped=not stepped, tick=tick)
        self.ticks_done += 1
        metrics = first | self.layout.from_last_stage(lambda: self._fit(values, targets))
        metrics |= {"critic/lr": lr, "critic/skipped": float(skipped)}
        if self.config.value_clip:
            fraction = self.layout.from_last_stage(lambda: self._sum([clipped])[0] / max(1, num_tokens))
            metrics["critic/clipped_fraction"] = fraction
        if not self.layout.is_last_stage:
            return list(groups), metrics
        return batch.annotate(groups, values, "values"), metrics

    def _forward_backward(self, batches: Sequence[Microbatch], forward: Forward) -> None:
        """Make both passes of every micro-batch."""
        if self._links is None:
            for m in range(len(batches)):
                with demanded(self.device):
                    forward(m, None).backward()  # type: ignore[no-untyped-call]
            return
        with demanded(self.device):
            self._links.run(batches, forward, trains=True)

    def _targets(self, groups: Sequence[Group], items: Sequence[Located], values: Tensor) -> Tensor:
        """Returns of one micro-batch's tokens, [T], from the values that this tick's trainer will use."""
        parts = values.float().cpu().split([len(item.sequence.targets) for item in items])
        returns = [
            value_targets(groups[item.group].responses[item.response], part.numpy(), self.algorithm)
            for item, part in zip(items, parts, strict=True)
        ]
        joined = np.concatenate([*returns, np.zeros(0)])
        return torch.from_numpy(joined).to(values)

    def _update(self, lr: float, loss: float, *, empty: bool) -> tuple[float, bool]:
        """AdamW with what was gathered; (gradient norm, False if it or the loss was not finite and nothing changed)."""
        self.weights.collect_gradients()
        grad_norm = self.weights.gradient_norm().item()
        finite = math.isfinite(grad_norm) and math.isfinite(loss)
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
                f"critic: tick {tick}: {self.num_skipped_in_a_row} steps in a row with a non-finite loss or gradient"
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

    def export(self, folder: Path) -> None:
        """Write a folder that ``AutoModelForTokenClassification`` loads. All ranks call it; rank 0 writes.

        In float32, of its own weights: fewer bits would round what it has learned away.
        """
        self.write_model(folder, dtype=torch.float32, served_dtype=self.config.dtype, version=self.ticks_done)
