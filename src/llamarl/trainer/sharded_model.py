"""What everyone who trains a model needs around its step: one rank's part of the model, where it
lies, and its ways out.

    folder ─▶ building ─▶ module ◀─ rounded ─ master weights ─┬─ stage, write ─▶ checkpoint ─▶ load
                                                              ├─ parameters_for_sync ─▶ generators
                                                              └─ park ─▶ host memory ─▶ unpark

``Trainer`` and ``Critic`` add the arithmetic of their step. A frozen model needs ``building`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.errors import CheckpointError, TrainingDiverged
from llamarl.models.adapters import base_name, base_parameters, merged, with_whole_factors
from llamarl.models.parallel import (
    ParallelLayout,
    ParameterShard,
    local_tensor,
    new_group,
    parameter_shards,
    shards_of_all_stages,
)
from llamarl.settings.trainer import LoraConfig, OptimizerConfig
from llamarl.trainer.building import Built, Module
from llamarl.trainer.optimizer import MasterWeights, TiedStages
from llamarl.trainer.parking import Parking
from llamarl.trainer.sharded_state import StagedState, read_state, stage, write_state

__all__ = ["ShardedModel"]


class ShardedModel(Generic[Module]):
    """A trained model on one rank of its role's mesh."""

    role: ClassVar[str]
    """Who trains it, for error messages."""
    counters: ClassVar[tuple[str, ...]]
    """Names of the attributes, whole numbers, that are saved and loaded with the weights."""

    def __init__(
        self,
        built: Built[Module],
        layout: ParallelLayout,
        optimizer: OptimizerConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        offload: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        """
        Args:
            dtype: That the module computes in; master weights are float32.
            offload: Keep master weights and moments in host memory.
            lora: What made the adapters, where these alone are trained.
        """
        self.module: Module = built.module
        self.layout = layout
        self.device, self.dtype, self.lora = device, dtype, lora
        # Checkpoints are written beside the training, so their collectives need a group of their own.
        self._save_group = new_group(backend="gloo") if layout.num_ranks > 1 else None
        parameters = self.module.parameters_by_name()
        own = parameter_shards(parameters, built.cuts, layout, "float32")
        self._shards = shards_of_all_stages(own, built.names, layout)
        """Of every parameter of the model, other stages' too: this rank's part of those is empty."""
        self.weights = MasterWeights(
            parameters,
            optimizer,
            layout,
            tensor_parallel_cuts=built.cuts,
            initial=built.initial,
            offload=offload,
            tied=_tied_stages(self._shards, layout),
            shards=self._shards,
        )
        self.parking = Parking(device)
        self._sync_shards = self._shards
        """The same of what is handed over."""
        if lora is not None and lora.hand_over == "merged":
            cuts = {base_name(name): cut for name, cut in built.cuts.items()}
            frozen = parameter_shards(base_parameters(self.module.model), cuts, layout, "float32")
            self._sync_shards = shards_of_all_stages(frozen, built.base_names, layout)
        self.num_skipped_in_a_row = 0
        self.before_update: Callable[[], None] = lambda: None
        """Called before the weights change: who reads them on another thread is waited for here."""
        self._handed_over: dict[str, Tensor] = {}  # while parked: merged copies in host memory

    def park(self) -> int:
        """Move this rank's parameters, master weights and moments out of the device, and give back
        what the tick has freed; returns the bytes moved (on a CPU none). Nobody may be reading what
        an earlier ``parameters_for_sync`` gave."""
        if self.parking.moves and self.lora is not None and self.lora.hand_over == "merged":
            self._handed_over = {name: tensor.to("cpu", copy=True) for name, tensor in self._merge()}
        kept, derived = self.weights.tensors_on_device()
        trained = self.module.parameters_by_name()
        kept += [local_tensor(p.detach()) for n, p in self.module.model.named_parameters() if n not in trained]
        return self.parking.park(kept, derived)

    def unpark(self) -> None:
        """Bring back what ``park`` moved, bit for bit."""
        self.parking.unpark()
        self.weights.copy_to_parameters()
        self._handed_over = {}

    def apply_gradients(self, loss: Tensor, lr: float, *, max_norm: float, empty: bool = False) -> tuple[float, bool]:
        """Take one optimizer step with the collected gradients, unless they or the loss are not finite.

        The loss counts for itself: a token of probability 0 makes it NaN while its gradient is 0,
        and the optimizer would step on by its moments. Both are sums over all ranks, so all decide alike.

        Args:
            loss: Scalar, over all ranks.
            max_norm: Gradients are scaled down to this global norm; 0 does not clip.
            empty: Nothing was to be learned: the weights stay.

        Returns:
            The gradient's norm before clipping, and False if something was not finite.
        """
        norm = self.weights.gradient_norm()
        both = torch.stack([norm, torch.isfinite(loss).to(norm)])
        grad_norm, is_finite = both.tolist()  # the step's host sync: everything was queued
        finite = math.isfinite(grad_norm) and bool(is_finite)
        if finite and not empty:
            if 0 < max_norm < grad_norm:
                self.weights.scale_gradients(max_norm / grad_norm)
            self.before_update()
            self.weights.step(lr)
        self.weights.drop_gradients()
        self.num_skipped_in_a_row = 0 if finite else self.num_skipped_in_a_row + 1
        return grad_norm, finite

    def check_divergence(self, tick: int, max_skipped: int, advice: str) -> None:
        """
        Raises:
            TrainingDiverged: More than ``max_skipped`` steps in a row were not finite.
        """
        if self.num_skipped_in_a_row > max_skipped:
            raise TrainingDiverged(
                f"{self.role}: tick {tick}: {self.num_skipped_in_a_row} steps in a row with a non-finite loss or gradient"
                f" (trainer.max_skipped_steps = {max_skipped}); weights are those before the first of them: {advice}, or look"
                " at the rewards of these ticks"
            )

    def parameters_for_sync(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """What is handed over: this rank's part of every parameter by its Hugging Face name, tied
        ones once; live float32 tensors, in host memory while parked. With adapters those alone, or
        merged copies, as ``lora.hand_over`` says: then every rank must call it.

        Args:
            dtype: Of merged copies, in which they travel: as they are made one by one, no more is held. None, and while
                parked: float32.
        """
        if self.lora is None or self.lora.hand_over != "merged" or self._handed_over:
            return dict(self._each_for_sync())
        return {name: tensor.to(dtype or torch.float32) for name, tensor in self._each_for_sync()}

    def copies_for_sync(self) -> dict[str, Tensor]:
        """Copies of ``parameters_for_sync`` in host memory; merged ones are made one by one."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._each_for_sync()}

    def _each_for_sync(self) -> Iterable[tuple[str, Tensor]]:
        if self.lora is not None and self.lora.hand_over == "merged":
            return self._handed_over.items() if self._handed_over else self._merge()
        return [(name, self.parking.where(tensor)) for name, tensor in self.weights.tensors.items()]

    def _merge(self) -> Iterator[tuple[str, Tensor]]:
        """One by one; where the weights lie now."""
        where = self.parking.where
        assert self.lora is not None
        frozen = {name: where(local_tensor(p.detach())) for name, p in base_parameters(self.module.model).items()}
        own = {name: where(tensor.detach()) for name, tensor in self.weights.tensors.items()}
        adapters = with_whole_factors(own, self._shards, self.layout, device=self.device)
        return merged(frozen, adapters, scaling=self.lora.alpha / self.lora.rank)

    def sync_layout(self) -> dict[str, ParameterShard]:
        """Global shape, dtype and this rank's slice of every parameter that is handed over: an
        empty one of what only other pipeline stages hold, which ``parameters_for_sync`` does not
        have."""
        return dict(self._sync_shards)

    def stage(self, extra: Mapping[str, Mapping[str, Tensor]] | None = None, *, copy: bool = True) -> StagedState:
        """This rank's state as it is now, copied to host memory: training may go on while ``write`` works.

        Args:
            extra: Kind -> more tensors to keep, by the names of ``parameters_for_sync``; nobody changes them any more.
            copy: False if nothing changes before ``write`` has ended.
        """
        values = {
            **{name: getattr(self, name) for name in self.counters},
            "fsdp": self.layout.fsdp,
            "tp": self.layout.tp,
            **{axis: self.layout.size(axis) for axis in ("pp", "cp", "ep") if self.layout.size(axis) > 1},
            "kinds": sorted(extra or {}),
        }
        tensors = {key: self.parking.where(tensor) for key, tensor in self.weights.state().items()}
        state = stage(tensors, self._shards, values, copy=copy)
        more = {f"{kind}/{name}": tensor for kind, tensors in (extra or {}).items() for name, tensor in tensors.items()}
        shards = stage(more, self.sync_layout(), {}, copy=False).shards
        return StagedState({**state.shards, **shards}, values)

    def write(self, state: StagedState, folder: Path) -> tuple[Path, ...]:
        """Write what all ranks staged into one folder; every rank calls it, on any thread. Returns this rank's files.

        Raises:
            CheckpointError: A rank could not write.
        """
        return write_state(Path(folder), state, rank=self.layout.rank, group=self._save_group)

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
        kinds = self.weights.kinds
        tensors, values = read_state(Path(folder), lambda k: self._shards if k in kinds else self.sync_layout())
        extra: dict[str, dict[str, Tensor]] = {kind: {} for kind in values.get("kinds", ())}
        if unknown := sorted({key.partition("/")[0] for key in tensors} - kinds - extra.keys()):
            raise CheckpointError(f"{self.role} state in {folder} is of another optimizer: it holds {unknown[0]!r}")
        try:
            self.weights.load_state(tensors)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{self.role} state in {folder} is of another model: {error}") from error
        for name in self.counters:
            setattr(self, name, values[name])
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if kind not in kinds and _is_here(self.sync_layout()[name], self.layout):
                extra[kind][name] = tensor
        return extra


def _is_here(shard: ParameterShard, layout: ParallelLayout) -> bool:
    return shard.stages is None or layout.pp_rank in shard.stages


def _tied_stages(shards: Mapping[str, ParameterShard], layout: ParallelLayout) -> TiedStages | None:
    """What several stages hold, which are the first and the last. Every rank calls it."""
    names = frozenset(name for name, shard in shards.items() if shard.stages is not None and len(shard.stages) > 1)
    if not names:
        return None
    stride = layout.ranks_of_stage
    pairs = [[rank, rank + (layout.pp - 1) * stride] for rank in range(stride)]
    assert all(shards[name].stages == (0, layout.pp - 1) for name in names), "only the ends of a decoder are tied"
    group: Any = dist.new_subgroups_by_enumeration(pairs)[0]
    if layout.pp_rank not in (0, layout.pp - 1):
        return None
    return TiedStages(names, group, counted=layout.pp_rank == 0)
