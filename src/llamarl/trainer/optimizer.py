"""The optimizer on this rank's float32 master weights; the learning rate as a function of the tick.

    compute parameter (dtype of forward) ──gradient, float32──▶ master [local part] ──optimizer──▶ copied back

AdamW is elementwise, so it works on local parts alone and knows nothing of meshes; Muon gathers matrices in turn
(``muon.py``). Which optimizer it is, only its maker knows (``config.OPTIMIZERS``, or a user's own): it says what it
keeps of each weight, and everything else goes by that. Where the
compute dtype is float32 the master *is* the parameter's storage. Otherwise a hook adds each
micro-batch's gradient to the master's in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llamarl.errors import ConfigError
from llamarl.import_path import call
from llamarl.models.parallel import Cut, ParallelLayout, ParameterShard, holds_first, local_tensor
from llamarl.settings.trainer import OPTIMIZERS, OptimizerConfig

__all__ = ["MakeOptimizer", "MasterWeights", "Optimizer", "TiedStages", "learning_rate", "make_adamw"]


def learning_rate(config: OptimizerConfig, tick: int, num_ticks: int | None) -> float:
    """Learning rate of the optimizer step at ``tick`` (0-based).

    Warm-up: tick w of W takes (w + 1) / (W + 1) of the peak, so that the first step already moves. Then constant, or
    down to ``min_lr_ratio`` of the peak at tick ``decay_ticks - 1``, where 0 stands for ``num_ticks``.

    Raises:
        ValueError: The schedule falls but the run has no known end.
    """
    if tick < config.warmup_ticks:
        return config.lr * (tick + 1) / (config.warmup_ticks + 1)
    if config.schedule == "constant":
        return config.lr
    num_ticks = config.decay_ticks or num_ticks
    if num_ticks is None:
        raise ValueError(f"optimizer.schedule {config.schedule!r} needs the number of ticks of the run")
    falling = max(1, num_ticks - 1 - config.warmup_ticks)
    progress = min(1.0, (tick - config.warmup_ticks) / falling)
    shape = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer of PyTorch's, and what it keeps."""

    update: torch.optim.Optimizer
    """Its groups' ``lr`` is set before each step."""
    kinds: Mapping[str, tuple[str, ...]]
    """Name of each weight -> names of the tensors in its state once it was updated: of its shape, or scalars."""


class MakeOptimizer(Protocol):
    """What ``optimizer.name`` stands for."""

    def __call__(
        self,
        config: OptimizerConfig,
        weights: Mapping[str, nn.Parameter],
        *,
        shards: Mapping[str, ParameterShard],
        layout: ParallelLayout,
        device: torch.device,
    ) -> Optimizer:
        """
        Args:
            weights: This rank's parts, float32, by name.
            shards: Which part of each this rank holds; empty: each is whole.
            device: Where collectives work.
        """
        ...


def make_adamw(config: OptimizerConfig, weights: Mapping[str, nn.Parameter], **mesh: Any) -> Optimizer:
    """AdamW with decay of matrices alone. It looks at no mesh."""
    adamw = torch.optim.AdamW(
        [
            {"params": [t for t in weights.values() if t.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [t for t in weights.values() if t.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    return Optimizer(adamw, dict.fromkeys(weights, ("step", "exp_avg", "exp_avg_sq")))


def _make(config: OptimizerConfig, weights: Mapping[str, nn.Parameter], **mesh: Any) -> Optimizer:
    """The optimizer that ``optimizer.name`` names.

    Raises:
        ConfigError: A user's own cannot be imported, raises, or does not say what it keeps of every weight.
    """
    made = call(OPTIMIZERS.get(config.name, (config.name,))[0], "optimizer.name", config, weights, **mesh)
    if not isinstance(made, Optimizer) or made.kinds.keys() != weights.keys():
        got = f"a {type(made).__name__}" if not isinstance(made, Optimizer) else f"kinds of {len(made.kinds)} weights"
        raise ConfigError.at(
            "optimizer.name",
            f"{config.name!r} returned {got}: it returns llamarl.trainer.optimizer.Optimizer, with the names of the tensors "
            f"that it keeps of each of the {len(weights)} weights",
        )
    return made


@dataclass(frozen=True)
class TiedStages:
    """Weights that the first pipeline stage and the last both hold: each computes a part of their
    gradient, and both make the same update of the sum."""

    names: frozenset[str]
    group: dist.ProcessGroup
    """The two ranks."""
    counted: bool
    """Whether this rank's copy is the one that counts in the gradient's norm."""


class MasterWeights:
    """This rank's float32 weights and their optimizer's state, and the way from gradients to the next version."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        layout: ParallelLayout,
        *,
        tensor_parallel_cuts: Mapping[str, Cut],
        initial: Mapping[str, Tensor] | None = None,
        offload: bool = False,
        tied: TiedStages | None = None,
        shards: Mapping[str, ParameterShard] | None = None,
    ) -> None:
        """
        Args:
            parameters: What the model computes with, by name; any dtype.
            shards: Which part of each this rank holds; None: each is whole.
            tied: Those of them that another stage holds too.
            initial: Float32 values of ``parameters`` before they were rounded, if they were; they become the masters.
            offload: Keep masters and the optimizer's state in host memory, apart from the parameters.
        """
        self.parameters = dict(parameters)
        self.layout = layout
        self._cuts = tensor_parallel_cuts
        self._tied = tied
        self.tensors: dict[str, nn.Parameter] = {}
        """Name -> this rank's part of the master weight, float32."""
        self._apart: set[str] = set()
        """Masters that do not share storage with their parameter."""
        for name, parameter in self.parameters.items():
            local = local_tensor(parameter.detach())
            apart = offload or local.dtype != torch.float32
            if local.dtype != torch.float32:
                assert initial is not None, "rounded parameters need their float32 originals"
                local = initial[name].to("cpu" if offload else local.device, torch.float32)
            elif offload:
                local = local.to("cpu", copy=True)
            self.tensors[name] = nn.Parameter(local)
            if apart:
                self._apart.add(name)
                if not isinstance(parameter, DTensor):  # FSDP2 adds up its own gradients, in float32 already
                    # a hook that knew these weights would keep all of them for good: Python does not see into one
                    parameter.register_post_accumulate_grad_hook(partial(_hand_over, self.tensors[name]))
        device = next(iter(self.parameters.values())).device
        self.optimizer = _make(config, self.tensors, shards=shards or {}, layout=layout, device=device)
        self._unchecked = "" if config.name in OPTIMIZERS else _groups(self.optimizer.update)
        """Of an optimizer of the user's own before its first step: its groups."""
        self.kinds = frozenset({"weight"}.union(*self.optimizer.kinds.values()))
        """Of the tensors in ``state``."""

    @torch.no_grad()
    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's, in the order of ``parameters``, as its backward pass would have;
        none where it has done so."""
        for (name, parameter), gradient in zip(self.parameters.items(), gradients, strict=bool(gradients)):
            if gradient is None:
                continue
            if name in self._apart:
                _add_to(self.tensors[name], gradient)
            else:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def collect_gradients(self) -> None:
        """Take the gradients over from the compute parameters; call once, after the last backward pass."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.tensors[name].grad = local_tensor(parameter.grad).to(self.tensors[name])
                parameter.grad = None
            if self.tensors[name].grad is None:  # a rank beside whose rows nothing happened
                self.tensors[name].grad = torch.zeros_like(self.tensors[name])
        if self._tied is not None:
            for name in sorted(self._tied.names):
                gradient = self.tensors[name].grad
                assert gradient is not None
                dist.all_reduce(gradient, group=self._tied.group)

    def gradient_norm(self) -> Tensor:
        """Global 2-norm over all ranks, a scalar on the device; each element counted once."""
        whole: list[Tensor] = []
        cut: list[Tensor] = []
        for name, tensor in self.tensors.items():
            assert tensor.grad is not None
            if self._tied is not None and name in self._tied.names and not self._tied.counted:
                continue
            if (how := self._cuts.get(name)) is None:
                whole.append(torch.linalg.vector_norm(tensor.grad))
            elif holds_first(how, self.layout):
                cut.append(torch.linalg.vector_norm(tensor.grad))
        device = next(iter(self.parameters.values())).device  # where collectives work
        zero = torch.zeros((), device=next(iter(self.tensors.values())).device)
        squares = torch.stack([_sum_of_squares(whole, zero), _sum_of_squares(cut, zero)]).to(device)
        if self.layout.tp > 1:
            dist.all_reduce(squares[1:], group=self.layout.group("tp"))
        return self.layout.sum_over_shards(self.layout.sum_over_stages(squares.sum())).sqrt()

    def scale_gradients(self, factor: float) -> None:
        for tensor in self.tensors.values():
            assert tensor.grad is not None
            tensor.grad.mul_(factor)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update with the collected gradients, then the compute parameters follow.

        Raises:
            ConfigError: An optimizer of the user's own keeps what no checkpoint would hold.
        """
        for group in self.optimizer.update.param_groups:
            group["lr"] = lr
        self.optimizer.update.step()
        if self._unchecked:
            self._check_kept(self._unchecked)
            self._unchecked = ""
        self.copy_to_parameters()

    def _check_kept(self, groups: str) -> None:
        for name, tensor in self.tensors.items():
            kept = self.optimizer.update.state.get(tensor, {})
            fits = all(isinstance(v, Tensor) and v.shape in (tensor.shape, ()) for v in kept.values())
            if kept and (kept.keys() != set(self.optimizer.kinds[name]) or not fits):
                shapes = {
                    kind: tuple(getattr(v, "shape", ())) if isinstance(v, Tensor) else v for kind, v in kept.items()
                }
                raise ConfigError.at(
                    "optimizer.name",
                    f"keeps {shapes} of {name}, whose part is {tuple(tensor.shape)}, and said "
                    f"{self.optimizer.kinds[name]}: checkpoints hold what it names, tensors of the part's shape or scalars, "
                    "and a resume needs all of it",
                )
        if _groups(self.optimizer.update) != groups:
            raise ConfigError.at(
                "optimizer.name",
                "changes its groups in a step, which no checkpoint holds: keep it as scalars in each weight's state",
            )

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """Round the masters into the compute parameters; nothing to do where they share storage."""
        for name, parameter in self.parameters.items():
            if name in self._apart:
                local_tensor(parameter.detach()).copy_(self.tensors[name])

    def drop_gradients(self) -> None:
        self.optimizer.update.zero_grad(set_to_none=True)
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors_on_device(self) -> tuple[list[Tensor], list[Tensor]]:
        """What makes up the state, and what ``copy_to_parameters`` makes of it; both as plain local tensors.

        What was offloaded is on the host and counts as state all the same.
        """
        of_each = self.optimizer.update.state.values()
        kept = [value for entry in of_each for value in entry.values() if isinstance(value, Tensor)]
        kept += [tensor.detach() for tensor in self.tensors.values()]
        derived = [local_tensor(self.parameters[name].detach()) for name in sorted(self._apart)]
        return kept, derived

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on: ``weight/NAME``, and once stepped what the optimizer keeps."""
        state: dict[str, Tensor] = {f"weight/{name}": t.detach() for name, t in self.tensors.items()}
        for name, tensor in self.tensors.items():
            for kind, value in self.optimizer.update.state.get(tensor, {}).items():
                state[f"{kind}/{name}"] = value
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave.

        Raises:
            KeyError: A weight is missing, or a part of its optimizer's state.
            ValueError: A tensor has another shape than this rank's part.
        """
        for name, tensor in self.tensors.items():
            weight = state[f"weight/{name}"]
            if weight.shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(weight.shape)}, this rank holds {tuple(tensor.shape)}")
            tensor.copy_(weight)
            kinds = self.optimizer.kinds[name]
            if any(f"{kind}/{name}" in state for kind in kinds):
                kept = {kind: state[f"{kind}/{name}"].to(tensor.device).clone() for kind in kinds}
                self.optimizer.update.state[tensor] = kept
            else:
                self.optimizer.update.state.pop(tensor, None)
        self.copy_to_parameters()


def _groups(update: torch.optim.Optimizer) -> str:
    """What its groups hold beside weights and the rate that a run sets."""
    return repr([{k: v for k, v in group.items() if k not in ("params", "lr")} for group in update.param_groups])


def _hand_over(master: nn.Parameter, parameter: Tensor) -> None:
    """Add a parameter's gradient to its master's."""
    _add_to(master, local_tensor(parameter.grad))  # type: ignore[arg-type]
    parameter.grad = None


def _add_to(master: nn.Parameter, gradient: Tensor) -> None:
    gradient = gradient.to(master.device, torch.float32)
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)


def _sum_of_squares(norms: list[Tensor], zero: Tensor) -> Tensor:
    return torch.stack(norms).square().sum() if norms else zero
