"""The trainer: one optimizer step a tick, or as many as asked, the same for every algorithm.

    scored groups ─▶ sequences ─▶ steps ─▶ micro-batches ─▶ log-probs ─▶ loss(tokens) · weights ─▶ backward
                                                                                      └─ all micro-batches, all ranks ─▶ optimizer

Every token's weight in its step's mean is fixed before the step's first forward pass, from counts
over the whole step and all ranks. So micro-batches simply add up: any split over them and over
ranks gives the same gradient, to rounding.

Version v is the weights after v ticks, whatever happened in them. A step with a non-finite loss or gradient, or
without a trained token, leaves weights and moments as they were; its tick still makes a version, so schedules and
staleness stay exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl.algorithms.registry import LOSSES, WITH_PROXIMAL_POLICY, find_loss
from llamarl.determinism import derive_seed
from llamarl.models.adapters import with_targets
from llamarl.models.precision import torch_dtype
from llamarl.observability.ledger import scored_tokens
from llamarl.progress import watch
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from llamarl.trainer.batch import Microbatch, TrainingSequence, make_sequences, token_weight
from llamarl.trainer.building import build_policy, layout_of
from llamarl.trainer.computes import Computes, Staged, Threaded
from llamarl.trainer.objective import microbatch_loss
from llamarl.trainer.optimizer import learning_rate
from llamarl.trainer.policy import Policy, TokenScores
from llamarl.trainer.sharded_model import ShardedModel
from llamarl.trainer.shared_prompts import row_attention
from llamarl.trainer.staleness import check_token_versions
from llamarl.trainer.statistics import StepStatistics, tick_metrics
from llamarl.trainer.step_plan import plan_of_rank
from llamarl.types import Group

__all__ = ["Trainer"]

_ADAPTER_SEED = 3
_CHECKPOINT_EVERY = {"none": 0, "selective": 2, "full": 1}


class Trainer(ShardedModel[Policy]):
    """Owns the policy and its optimizer on one rank of the (pp, fsdp, cp, tp) mesh."""

    role = "trainer"
    counters = ("policy_version", "num_skipped_in_a_row")

    def __init__(
        self,
        model_path: str | Path,
        config: TrainerConfig,
        optimizer: OptimizerConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        seed: int = 0,
        device: str = "cpu",
        num_ticks: int | None = None,
        lora: LoraConfig | None = None,
        has_reference: bool = False,
        max_staleness: int | None = None,
    ) -> None:
        """
        Args:
            model_path: Hugging Face folder of version 0.
            temperature: The generator's: log-probs are of the distribution sampled from.
            seed: Of what the trainer draws at random: how a tick's batch is cut into several optimizer steps, and the
                first values of adapters.
            device: ``cpu`` or ``cuda``.
            num_ticks: Length of the run, for schedules that fall.
            lora: With a rank, adapters are trained and the model is frozen.
            has_reference: Whether samples carry reference log-probs although ``algorithm.kl_coef`` is 0.
            max_staleness: A token older than so many versions ends the run; None: however old, it trains.

        Raises:
            ModelError: The model cannot be trained, or not with this ``tp``, ``pp`` or ``cp``.
            ValueError: ``fsdp * tp * pp * cp`` ranks are not there, or ``temperature`` is 0.
        """
        self.config, self.optimizer_config, self.algorithm = config, optimizer, algorithm
        self.num_ticks = num_ticks
        self.seed = seed
        self.max_staleness = max_staleness
        self.policy_version = 0
        self.metrics: dict[str, float] = {}
        """Of the last tick, also of one that diverged."""
        self.on_tokens: Callable[[Sequence[TrainingSequence], Tensor, Tensor], None] | None = None
        """Told of every micro-batch: its sequences, and of their tokens, end to end, the log-probs
        (detached) and which were clipped; of sequences that are not worth computing without either.
        Tensors are on the device; reading them there and then would wait for it."""
        self.has_reference = has_reference or algorithm.kl_coef > 0 or algorithm.distills
        self.loss = find_loss(algorithm.name)
        lora = with_targets(lora, model_path) if lora is not None and lora.rank else None
        learning_rate(optimizer, optimizer.warmup_ticks, num_ticks)  # a falling schedule without an end fails now
        layout = layout_of("trainer", config, device)
        dtype = torch_dtype(config.dtype, device=device, model=model_path)
        attention, share_prompts = row_attention(config, device, model_path)
        built = build_policy(
            model_path,
            layout,
            temperature=temperature,
            dtype=dtype,
            chunk_tokens=config.logprob_chunk_tokens,
            attention=attention,
            device=torch.device(device),
            entropy_needs_grad=algorithm.entropy_coef != 0,
            checkpoint_every=_CHECKPOINT_EVERY[config.activation_checkpointing],
            lora=lora,
            lora_seed=derive_seed(seed, _ADAPTER_SEED),
            replay=config.router == "replay",
        )
        self.policy = built.module
        super().__init__(
            built,
            layout,
            optimizer,
            device=torch.device(device),
            dtype=dtype,
            offload=config.offload_optimizer,
            lora=lora,
        )
        self.computes = self._make_computes(share_prompts)

    def _make_computes(self, share_prompts: bool) -> Computes:
        where = self.policy, self.layout, self.device
        settings: dict[str, Any] = {
            "max_tokens": self.config.microbatch_tokens,
            "share_prompts": share_prompts,
            "replay": self.config.router == "replay",
        }
        if self.layout.pp > 1:
            return Staged(*where, dtype=self.dtype, **settings)
        if self.device.type == "cpu" and self.layout.num_ranks == 1:
            return Threaded(*where, weights=self.weights, at_once=self.config.microbatches_at_once, **settings)
        return Computes(*where, **settings)

    def train(self, groups: Sequence[Group], tick: int) -> dict[str, float]:
        """All optimizer steps of a tick: version ``tick`` -> version ``tick + 1``.

        Args:
            groups: This data-parallel rank's scored groups; its tensor- and context-parallel peers
                and pipeline stages get the same ones.

        Returns:
            Metrics of the tick over all ranks; docs/trainer.md explains each.

        Raises:
            ValueError: The tick is not the next one, or a response was never judged.
            StaleTokenError: A token is older than ``max_staleness`` versions, or of a version that does not exist;
                raised on every data-parallel rank.
            TrainingDiverged: More than ``max_skipped_steps`` steps in a row with a non-finite loss or gradient.
        """
        if tick != self.policy_version:
            raise ValueError(f"the trainer holds version {self.policy_version}, so its next tick is that, got {tick}")
        assert not self.parking.parked, "the trainer is parked: call unpark first"
        self._check_versions(groups)
        lr = learning_rate(self.optimizer_config, tick, self.num_ticks)
        sequences = make_sequences(groups, self.algorithm, self._sum_over_data)
        self._check_experts(sequences)
        steps = self._plan_steps(groups, sequences, tick)
        statistics = [StepStatistics(step, self.policy_version, self.layout, self.device) for step in steps]
        counted = self._token_counts(groups, steps)
        norms: list[float] = []  # of the steps with a trained token
        num_skipped = 0
        for step, counts in zip(steps, statistics, strict=True):
            if not counts.num_tokens:
                continue
            grad_norm, updated = self._update(step, counts, lr)
            norms.append(grad_norm)
            num_skipped += not updated
            if self.num_skipped_in_a_row > self.config.max_skipped_steps:
                break
        self.policy_version += 1
        for counts in statistics:
            counts.sum_experts_over_stages()
        self.metrics = {
            **self.layout.from_last_stage(lambda: tick_metrics(statistics)),
            **counted,
            "policy_version": float(self.policy_version),
            "grad_norm": sum(norms) / max(1, len(norms)),
            "lr": lr,
            "step/skipped": float(num_skipped),
            "step/empty": float(len(steps) - len(norms)),
        }
        self.check_divergence(tick, self.config.max_skipped_steps, "lower optimizer.lr or algorithm.rho")
        return self.metrics

    def loss_on(self, groups: Sequence[Group]) -> float:
        """Mean of -log pi over the trained tokens of ``groups``, nats a token; NaN where there are
        none. Trains nothing.

        Args:
            groups: This data-parallel rank's, judged; every rank calls it, also one that has none.
        """
        without_reference = dataclasses.replace(self.algorithm, kl_coef=0.0)
        sequences = make_sequences(groups, without_reference, self._sum_over_data)
        packed = self.computes.pack(sequences)
        rows = [scores.logprobs for scores in self.computes.outputs(packed)]

        def mean() -> float:
            own = [float(-row.double().sum()) for row, one in zip(rows, packed, strict=True) if one.items]
            tokens = sum(len(s.targets) for s in sequences)
            surprise, count = self._sum_over_data(np.array([sum(own), tokens], np.float64)).tolist()
            return float(surprise / count) if count else math.nan

        return self.layout.from_last_stage(mean)

    def _token_counts(self, groups: Sequence[Group], steps: Sequence[Sequence[TrainingSequence]]) -> dict[str, float]:
        """Over all ranks: scored tokens that no step takes, and what further passes take again."""
        taken = {id(s): len(s.targets) for step in steps for s in step}
        passes = sum(len(s.targets) for step in steps for s in step)
        own = np.array([scored_tokens(groups) - sum(taken.values()), passes - sum(taken.values())], np.float64)
        unused, repeated = self._sum_over_data(own).tolist()
        return {"tokens/unused": unused} | ({"tokens/repeated": repeated} if self.config.steps_per_tick > 1 else {})

    def _update(self, sequences: list[TrainingSequence], statistics: StepStatistics, lr: float) -> tuple[float, bool]:
        """Take one optimizer step; (the gradient's norm before clipping, whether the weights were updated)."""
        loss = self._add_gradients(sequences, statistics)
        self.weights.collect_gradients()
        loss = self.layout.sum_over_data(self.layout.sum_over_stages(loss))
        return self.apply_gradients(loss, lr, max_norm=self.config.max_grad_norm)

    def _add_gradients(self, sequences: list[TrainingSequence], statistics: StepStatistics) -> Tensor:
        """Forward and backward passes of all micro-batches; the sum of their losses, a scalar, 0 on
        another stage than the last."""
        loss = torch.zeros((), device=self.device)
        worth = self._worth_computing(sequences)
        if self.on_tokens is not None and len(worth) < len(sequences):
            self.on_tokens([s for s in sequences if not s.has_signal], torch.zeros(0), torch.zeros(0, dtype=torch.bool))
        packed = self.computes.pack(worth, [self._token_weight(s, statistics) for s in worth])
        found = self.computes.losses(packed, lambda i, scores: self._loss_of(packed[i].microbatch, scores))
        taken: list[int] = []
        watch("training", "micro-batch", len(packed), lambda: len(taken))
        for number, (one, computed) in enumerate(zip(packed, found, strict=True)):
            taken.append(number)
            statistics.add_experts(computed.chosen_experts)
            if computed.loss is None:  # said on the last stage
                continue
            sums, clipped, policy_logprobs = computed.told
            if self.on_tokens is not None and one.items:
                self.on_tokens([worth[i] for i in one.items], policy_logprobs, clipped)
            batch = one.microbatch
            imitates = self.algorithm.imitates  # else the means leave rows to imitate out
            num_trained = sum(len(worth[i].targets) for i in one.items if imitates or not worth[i].terms.ce)
            statistics.add(sums, num_computed=batch.num_tokens, num_trained=num_trained)
            loss += computed.loss
        return loss

    def _loss_of(self, microbatch: Microbatch, scores: TokenScores) -> tuple[Tensor, Any]:
        loss, sums, clipped = microbatch_loss(
            self.loss, scores, microbatch, self.algorithm, has_reference=self.has_reference
        )
        return loss, (sums, clipped, scores.logprobs.detach())

    def _token_weight(self, sequence: TrainingSequence, statistics: StepStatistics) -> float:
        return token_weight(
            self.algorithm,
            num_own_tokens=len(sequence.targets),
            num_tokens=statistics.num_tokens,
            num_sequences=statistics.num_sequences,
        )

    def _check_versions(self, groups: Sequence[Group]) -> None:
        check_token_versions(
            groups,
            trainer_version=self.policy_version,
            max_staleness=self.max_staleness,
            rank=self.layout.fsdp_rank,
            num_ranks=self.layout.fsdp,
            sum_over_ranks=self._sum_over_data,
        )

    def _check_experts(self, sequences: Sequence[TrainingSequence]) -> None:
        """Refuse what the policy sampled without the experts to replay; what another model sampled has none."""
        if self.config.router == "replay" and any(s.experts is None and len(s.policy_versions) for s in sequences):
            raise ValueError(
                'trainer.router is "replay", but a response came without the experts that computed it: its generator noted none'
            )

    def _plan_steps(
        self, groups: Sequence[Group], sequences: list[TrainingSequence], tick: int
    ) -> list[list[TrainingSequence]]:
        """This rank's sequences of each optimizer step, in order."""
        if self.config.steps_per_tick == 1:
            return [sequences]
        steps = plan_of_rank(
            [groups[s.group].prompt.index for s in sequences],
            minibatches=self.config.minibatches,
            epochs=self.config.epochs,
            seed=self.seed,
            tick=tick,
            rank=self.layout.fsdp_rank,
            num_ranks=self.layout.fsdp,
            sum_over_ranks=self._sum_over_data,
        )
        if self.algorithm.name in WITH_PROXIMAL_POLICY:
            sequences = self._with_proximal_logprobs(sequences)
        return [[sequences[i] for i in step] for step in steps]

    def _with_proximal_logprobs(self, sequences: list[TrainingSequence]) -> list[TrainingSequence]:
        """The same sequences with log-probs under the present weights, which the tick's updates are
        about to leave. On another pipeline stage than the last, where no loss asks for them, the
        same as they were."""
        found = list(sequences)
        packed = self.computes.pack(sequences)
        for one, scores in zip(packed, self.computes.outputs(packed), strict=self.layout.is_last_stage):
            logprobs = scores.logprobs.float().cpu().numpy()
            ends = np.cumsum([len(sequences[i].targets) for i in one.items])
            for i, values in zip(one.items, np.split(logprobs, ends[:-1]), strict=False):
                found[i] = dataclasses.replace(sequences[i], proximal_logprobs=values)
        return found

    def _worth_computing(self, sequences: list[TrainingSequence]) -> list[TrainingSequence]:
        of_its_own = self.algorithm.term_weights.rl and self.algorithm.name not in LOSSES  # it alone knows what 0 means
        if not self.config.skip_zero_advantage or self.algorithm.entropy_coef or of_its_own:
            return sequences
        return [s for s in sequences if s.has_signal]

    def _sum_over_data(self, values: np.ndarray) -> np.ndarray:
        if self.layout.fsdp == 1:
            return values
        return self.layout.sum_over_data(torch.from_numpy(values).to(self.device)).cpu().numpy()
