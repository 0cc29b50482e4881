"""The trainer: one optimizer step a tick, or as many as asked, the same for every algorithm.

    scored groups ─▶ sequences ─▶ steps ─▶ micro-batches ─▶ log-probs ─▶ loss(tokens) · weights ─▶ backward
                                                                                      └─ all micro-batches, all ranks ─▶ AdamW

Every token's weight in its step's mean is fixed before the step's first forward pass, from counts over the whole step and
all ranks. So parts simply add up: any split over micro-batches and ranks gives the same gradient, to rounding.

Version v is the weights after v ticks, whatever happened in them. A step with a non-finite gradient or without a trained
token leaves weights and moments as they were; its tick still makes a version, so schedules and staleness stay exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.algorithms.base import TokenBatch
from llamarl.algorithms.config import AlgorithmConfig
from llamarl.algorithms.diagnostics import token_statistics
from llamarl.algorithms.kl import ESTIMATORS as KL_ESTIMATORS
from llamarl.algorithms.masking import ratio_keep_mask
from llamarl.algorithms.registry import LOSSES, WITH_PROXIMAL_POLICY
from llamarl.errors import CheckpointError, TrainingDiverged
from llamarl.models.adapters import base_name, merged, whole_shards, write_adapter_folder
from llamarl.models.folders import resolve_model_path
from llamarl.models.loading import load_model_config
from llamarl.models.parallel import (
    ParameterShard,
    gather_parameters,
    local_tensor,
    make_layout,
    parameter_shards,
)
from llamarl.models.repeatable import demanded
from llamarl.seeding import derive_seed
from llamarl.trainer.batch import (
    Microbatch,
    TrainingSequence,
    make_microbatch,
    make_sequences,
    pack_sequences,
    token_weight,
)
from llamarl.trainer.building import build_policy
from llamarl.trainer.config import LoraConfig, OptimizerConfig, TrainerConfig
from llamarl.trainer.optimizer import MasterWeights, learning_rate
from llamarl.trainer.parking import Parking
from llamarl.trainer.sharded_state import StagedState, read_state, stage, write_state
from llamarl.trainer.shared_prompts import can_share_prompts
from llamarl.trainer.statistics import StepStatistics, tick_metrics
from llamarl.trainer.step_plan import Row, gather_rows, plan_steps
from llamarl.trainer.storage import export_folder, source_dtype
from llamarl.types import Group

__all__ = ["Trainer"]

_ADAPTER_SEED = 3
_CHECKPOINT_EVERY = {"none": 0, "selective": 2, "full": 1}


class Trainer:
    """Owns the policy and its optimizer on one rank of the (fsdp, tp) mesh."""

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
    ) -> None:
        """
        Args:
            model_path: Hugging Face folder of version 0.
            temperature: The generator's: log-probs are of the distribution sampled from.
            seed: Of what the trainer draws at random: how a tick's batch is cut into several optimizer steps, and the
                first values of adapters.
            device: ``cpu`` or ``cuda``.
            num_ticks: Length of the run, for schedules that fall.
            lora: With a rank, adapters are trained and the model is frozen; one rank only.
            has_reference: Whether samples carry reference log-probs although ``algorithm.kl_coef`` is 0.

        Raises:
            ModelError: The model cannot be trained, or not with this ``tp``.
            ValueError: ``fsdp * tp`` ranks are not there, or ``temperature`` is 0.
        """
        self.config, self.optimizer_config, self.algorithm = config, optimizer, algorithm
        self.model_path, self.device, self.num_ticks = model_path, torch.device(device), num_ticks
        self.seed = seed
        self.policy_version = 0
        self.num_skipped_in_a_row = 0
        self.before_update: Callable[[], None] = lambda: None
        """Called before the weights change: who reads them on another thread is waited for here."""
        self.has_reference = has_reference or algorithm.kl_coef > 0
        self.loss = LOSSES[algorithm.name]
        self.lora = lora if lora is not None and lora.rank else None
        self.layout = make_layout(fsdp=config.fsdp, tp=config.tp, device=device)
        # Checkpoints are written beside the training, so their collectives need a group of their own.
        self._save_group = dist.new_group(backend="gloo") if self.layout.num_ranks > 1 else None
        learning_rate(optimizer, optimizer.warmup_ticks, num_ticks)  # a falling schedule without an end fails now
        self.share_prompts = config.share_prompts and can_share_prompts(load_model_config(model_path))
        built = build_policy(
            model_path,
            self.layout,
            temperature=temperature,
            dtype=getattr(torch, config.dtype),
            chunk_tokens=config.logprob_chunk_tokens,
            share_prompts=self.share_prompts,
            device=self.device,
            entropy_needs_grad=algorithm.entropy_coef != 0,
            checkpoint_every=_CHECKPOINT_EVERY[config.activation_checkpointing],
            lora=self.lora,
            lora_seed=derive_seed(seed, _ADAPTER_SEED),
        )
        self.policy = built.policy
        self.weights = MasterWeights(
            self.policy.parameters_by_name(),
            optimizer,
            self.layout,
            tensor_parallel_cuts=built.cuts,
            initial=built.initial,
            offload=config.offload_optimizer,
        )
        self.parking = Parking(self.device)
        self._handed_over: dict[str, Tensor] = {}  # while parked: merged copies in host memory
        self._shards = parameter_shards(self.policy.parameters_by_name(), built.cuts, self.layout, "float32")
        self._sync_shards = self._shards if self.lora is None else whole_shards(self.parameters_for_sync())

    def train(self, groups: Sequence[Group], tick: int) -> dict[str, float]:
        """All optimizer steps of a tick: version ``tick`` -> version ``tick + 1``.

        Args:
            groups: This data-parallel rank's scored groups; tensor-parallel peers get the same ones.

        Returns:
            Metrics of the tick over all ranks; docs/trainer.md explains each.

        Raises:
            ValueError: The tick is not the next one, or a response was never judged.
            TrainingDiverged: More than ``max_skipped_steps`` non-finite gradients in a row.
        """
        if tick != self.policy_version:
            raise ValueError(f"the trainer holds version {self.policy_version}, so its next tick is that, got {tick}")
        assert not self.parking.parked, "the trainer is parked: call unpark first"
        sequences = make_sequences(groups, self.algorithm, self._sum_over_data)
        steps, planned = self._plan_steps(groups, sequences, tick)
        statistics = [StepStatistics(step, self.policy_version, self.layout, self.device) for step in steps]
        lr = learning_rate(self.optimizer_config, tick, self.num_ticks)
        norms: list[float] = []  # of the steps with a trained token
        for step, counts in zip(steps, statistics, strict=True):
            if not counts.num_tokens:
                continue
            norms.append(self._update(step, counts, lr))
            self.num_skipped_in_a_row = 0 if math.isfinite(norms[-1]) else self.num_skipped_in_a_row + 1
            if self.num_skipped_in_a_row > self.config.max_skipped_steps:
                break
        self.policy_version += 1
        self._check_divergence(tick)
        num_skipped = sum(not math.isfinite(norm) for norm in norms)
        return {
            **tick_metrics(statistics),
            **planned,
            "policy_version": float(self.policy_version),
            "grad_norm": sum(norms) / max(1, len(norms)),
            "lr": lr,
            "step/skipped": float(num_skipped),
            "step/empty": float(len(steps) - len(norms)),
        }

    def _update(self, sequences: list[TrainingSequence], statistics: StepStatistics, lr: float) -> float:
        """One optimizer step; returns the gradient's norm before clipping. One that is not finite changes nothing."""
        for microbatch in self._microbatches(self._worth_computing(sequences), statistics):
            with demanded(self.device):
                self._forward_backward(microbatch, statistics)
        self.weights.collect_gradients()
        norm = self.weights.gradient_norm()
        grad_norm = norm.item()  # the step's host sync: everything was queued before it
        if math.isfinite(grad_norm):
            if 0 < self.config.max_grad_norm < grad_norm:
                self.weights.scale_gradients(self.config.max_grad_norm / grad_norm)
            self.before_update()
            self.weights.step(lr)
        self.weights.drop_gradients()
        return grad_norm

    def _plan_steps(
        self, groups: Sequence[Group], sequences: list[TrainingSequence], tick: int
    ) -> tuple[list[list[TrainingSequence]], dict[str, float]]:
        """This rank's sequences of each optimizer step, in order; and what the plan has to say for the metrics."""
        if not self.config.plans_steps:
            return [sequences], {}
        own: dict[tuple[int, int], int] = {}
        rows: list[Row] = []
        for i, s in enumerate(sequences):
            prompt = groups[s.group].prompt.index
            place = rows[-1].response + 1 if rows and rows[-1].prompt == prompt else 0
            rows.append(Row(prompt=prompt, response=place, num_tokens=len(s.targets), advantage=s.advantage))
            own[prompt, place] = i
        everyone = gather_rows(
            rows, rank=self.layout.fsdp_rank, num_ranks=self.layout.fsdp, sum_over_ranks=self._sum_over_data
        )
        plan = plan_steps(everyone, self.config, seed=self.seed, tick=tick)
        if len(plan.steps) > 1 and self.algorithm.name in WITH_PROXIMAL_POLICY:
            sequences = self._with_proximal_logprobs(sequences)
        # ascending, so that the responses of a group stay neighbours
        steps = [[sequences[i] for i in sorted(own[key] for key in step if key in own)] for step in plan.steps]
        metrics = {"samples/unused": float(plan.num_unused)}
        if plan.budget_share is not None:
            metrics["tokens/budget_share"] = plan.budget_share
        return steps, metrics

    @torch.no_grad()
    def _with_proximal_logprobs(self, sequences: list[TrainingSequence]) -> list[TrainingSequence]:
        """The same sequences with log-probs under the present weights, which the tick's updates are about to leave."""
        found = list(sequences)
        for items in self._pack(sequences):
            part = [sequences[i] for i in items]
            microbatch = make_microbatch(part, [1.0] * len(part), self.device, share_prompts=self.share_prompts)
            logprobs = self.policy(microbatch)[0].float().cpu().numpy()
            ends = np.cumsum([len(s.targets) for s in part])
            for i, values in zip(items, np.split(logprobs, ends[:-1]), strict=False):
                found[i] = dataclasses.replace(sequences[i], proximal_logprobs=values)
        self.policy.forget_gathered_weights()
        return found

    def _forward_backward(self, microbatch: Microbatch, statistics: StepStatistics) -> None:
        """Add one micro-batch's share to the gradients and to the statistics."""
        policy_logprobs, entropy = self.policy(microbatch)
        mask = torch.ones_like(microbatch.targets, dtype=torch.bool)
        batch = TokenBatch(
            policy_logprobs=policy_logprobs,
            behavior_logprobs=microbatch.behavior_logprobs,
            advantages=microbatch.advantages,
            loss_mask=mask,
            sequence_ids=microbatch.sequence_ids,
            num_sequences=microbatch.num_sequences,
            proximal_logprobs=microbatch.proximal_logprobs,
        )
        terms = self.loss(batch, self.algorithm)
        losses, sums = terms.losses, {}
        if self.algorithm.ratio_mask != "none":
            keep = ratio_keep_mask(batch, self.algorithm)
            losses = torch.where(keep, losses, 0.0)
            sums["ratio/masked_fraction"] = (mask & ~keep).sum().to(losses.dtype)
        sums["loss/policy"] = (losses.detach() * microbatch.weights).sum()
        if self.algorithm.entropy_coef:
            losses = losses - self.algorithm.entropy_coef * entropy
        kl = self._reference_kl(policy_logprobs, microbatch)
        if kl is not None:
            if self.algorithm.kl_in_loss:
                losses = losses + self.algorithm.kl_coef * kl
            sums["kl/reference"] = kl.detach().sum()
        (losses * microbatch.weights).sum().backward()
        sums |= token_statistics(policy_logprobs, microbatch.behavior_logprobs, entropy, mask, terms.clipped)
        statistics.add(sums, num_computed=microbatch.num_tokens, num_trained=len(microbatch.targets))

    def _reference_kl(self, policy_logprobs: Tensor, microbatch: Microbatch) -> Tensor | None:
        """KL(policy || reference) a trained token, [T]; None in a job without a reference."""
        if not self.has_reference:
            return None
        if microbatch.reference_logprobs is None:
            raise ValueError(
                "the samples carry no reference log-probs, which algorithm.kl_coef > 0 needs:"
                " wire a reference executor before the trainer"
            )
        return KL_ESTIMATORS[self.algorithm.kl_estimator](microbatch.reference_logprobs - policy_logprobs)

    def _worth_computing(self, sequences: list[TrainingSequence]) -> list[TrainingSequence]:
        terms_beside_the_policy = self.algorithm.kl_in_loss or self.algorithm.entropy_coef
        if not self.config.skip_zero_advantage or terms_beside_the_policy:
            return sequences
        return [s for s in sequences if s.has_signal]

    def _pack(self, sequences: list[TrainingSequence]) -> list[list[int]]:
        return pack_sequences(
            sequences,
            max_tokens=self.config.max_tokens_per_microbatch,
            share_prompts=self.share_prompts,
            layout=self.layout,
            device=self.device,
        )

    def _microbatches(self, sequences: list[TrainingSequence], statistics: StepStatistics) -> list[Microbatch]:
        """Packed and weighted."""
        weights = [
            token_weight(
                self.algorithm,
                num_own_tokens=len(s.targets),
                num_tokens=statistics.num_tokens,
                num_sequences=statistics.num_sequences,
            )
            for s in sequences
        ]
        return [
            make_microbatch(
                [sequences[i] for i in items],
                [weights[i] for i in items],
                self.device,
                share_prompts=self.share_prompts,
            )
            for items in self._pack(sequences)
        ]

    def _sum_over_data(self, values: np.ndarray) -> np.ndarray:
        if self.layout.fsdp == 1:
            return values
        return self.layout.sum_over_data(torch.from_numpy(values).to(self.device)).cpu().numpy()

    def _check_divergence(self, tick: int) -> None:
        if self.num_skipped_in_a_row > self.config.max_skipped_steps:
            raise TrainingDiverged(
                f"trainer: tick {tick}: {self.num_skipped_in_a_row} non-finite gradients in a row"
                f" (trainer.max_skipped_steps = {self.config.max_skipped_steps}); weights are those before the first"
                " of them: lower optimizer.lr or algorithm.rho, or look at the rewards of these ticks"
            )

    def park(self) -> int:
        """Move this rank's parameters, master weights and moments out of the device, and give back what the tick has freed;
        returns the bytes moved (on a CPU none). Nobody may be reading what an earlier ``parameters_for_sync`` gave."""
        if self.parking.moves and self.lora is not None and self.lora.hand_over == "merged":
            self._handed_over = {name: tensor.to("cpu", copy=True) for name, tensor in self._merge()}
        kept, derived = self.weights.tensors_on_device()
        trained = self.policy.parameters_by_name()
        kept += [local_tensor(p.detach()) for n, p in self.policy.model.named_parameters() if n not in trained]
        return self.parking.park(kept, derived)

    def unpark(self) -> None:
        """Bring back what ``park`` moved, bit for bit."""
        self.parking.unpark()
        self.weights.copy_to_parameters()
        self._handed_over = {}

    def parameters_for_sync(self) -> dict[str, Tensor]:
        """What is handed over: this rank's part of every parameter by its Hugging Face name, tied ones once; live float32
        tensors, in host memory while parked. With adapters those alone, or merged copies, as ``lora.hand_over`` says."""
        if self.lora is not None and self.lora.hand_over == "merged":
            return self._merged()
        return {name: self.parking.where(tensor) for name, tensor in self.weights.tensors.items()}

    def _merged(self) -> dict[str, Tensor]:
        return self._handed_over or dict(self._merge())

    def _merge(self) -> Iterator[tuple[str, Tensor]]:
        """One by one; where the weights lie now."""
        assert self.lora is not None
        where = self.parking.where
        frozen = {base_name(n): where(p) for n, p in self.policy.model.named_parameters() if not p.requires_grad}
        adapters = {name: where(tensor) for name, tensor in self.weights.tensors.items()}
        return merged(frozen, adapters, scaling=self.lora.alpha / self.lora.rank)

    def sync_layout(self) -> dict[str, ParameterShard]:
        """Global shape, dtype and this rank's slice of every parameter of ``parameters_for_sync``."""
        return dict(self._sync_shards)

    def stage(self, extra: Mapping[str, Mapping[str, Tensor]] | None = None, *, copy: bool = True) -> StagedState:
        """This rank's state as it is now, copied to host memory: training may go on while ``write`` works.

        Args:
            extra: Kind -> more tensors to keep, by the names of ``parameters_for_sync``; nobody changes them any more.
            copy: False if nothing changes before ``write`` has ended.
        """
        values = {
            "policy_version": self.policy_version,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
            "fsdp": self.layout.fsdp,
            "tp": self.layout.tp,
            "kinds": sorted(extra or {}),
        }
        tensors = {key: self.parking.where(tensor) for key, tensor in self.weights.state().items()}
        state = stage(tensors, self._shards, values, copy=copy)
        more = {f"{kind}/{name}": tensor for kind, tensors in (extra or {}).items() for name, tensor in tensors.items()}
        shards = stage(more, self.sync_layout(), {}, copy=False).shards
        return StagedState({**state.shards, **shards}, values)

    def write(self, state: StagedState, folder: Path) -> None:
        """Write what all ranks staged into one folder; every rank calls it, on any thread.

        Raises:
            CheckpointError: A rank could not write.
        """
        write_state(Path(folder), state, rank=self.layout.rank, group=self._save_group)

    def save(self, folder: Path) -> None:
        """``stage`` and ``write`` at once. All ranks give the same folder; ``load`` continues from it."""
        self.write(self.stage(copy=False), folder)

    def load(self, folder: Path) -> dict[str, dict[str, Tensor]]:
        """Restore what ``write`` wrote: the same layout goes on with the same bits, another one to rounding.

        Returns:
            The ``extra`` that was staged, this rank's part.

        Raises:
            CheckpointError: Unreadable, incomplete, or of another model.
        """
        kinds = MasterWeights.KINDS
        tensors, values = read_state(Path(folder), lambda k: self._shards if k in kinds else self.sync_layout())
        try:
            self.weights.load_state(tensors)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"trainer state in {folder} is of another model: {error}") from error
        self.policy_version = values["policy_version"]
        self.num_skipped_in_a_row = values["num_skipped_in_a_row"]
        extra: dict[str, dict[str, Tensor]] = {kind: {} for kind in values["kinds"]}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if kind not in kinds:
                extra[kind][name] = tensor
        return extra

    def export_adapter(self, folder: Path) -> None:
        """Write the adapters as a folder that ``peft`` loads."""
        assert self.lora is not None, "no adapters are trained"
        adapters = {name: self.parking.where(tensor) for name, tensor in self.weights.tensors.items()}
        write_adapter_folder(
            Path(folder), adapters, rank=self.lora.rank, alpha=self.lora.alpha, targets=self.lora.targets,
            base=str(resolve_model_path(self.model_path)),
        )  # fmt: skip

    def export(self, folder: Path) -> None:
        """Write the current version as a Hugging Face folder, adapters merged. All ranks call it; rank 0 writes, file by file."""
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(self.config.export_dtype)
        tensors, shards = self.parameters_for_sync(), self._shards
        if self.lora is not None:
            tensors = self._merged()
            shards = whole_shards(tensors)
        whole = gather_parameters(tensors, shards, self.layout)
        if self.layout.rank != 0:
            for _ in whole:  # send this rank's parts
                raise AssertionError("only rank 0 receives whole parameters")
            return
        export_folder(
            Path(folder),
            self.policy.model,
            whole,
            {name: shard.shape for name, shard in shards.items()},
            source=self.model_path,
            dtype=dtype or source_dtype(self.model_path),
        )
