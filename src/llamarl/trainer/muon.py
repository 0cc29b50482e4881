"""Muon (Jordan et al. 2024; arXiv:2502.16982): a matrix moves along its momentum with all singular values made alike.

    momentum M <- m M + (1 - m) G        elementwise, so each rank keeps its part
    step     O ~ U V^T of (1 - m) G + m M = U S V^T        needs the whole matrix
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) O

The factor gives O the root mean square of an AdamW step, so one learning rate serves both. It is
``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, which makes O in bfloat16: on a GPU to
the bit. On a CPU O is made in float32, where the order of a sum on some mesh is not rounded up to a
part of the step. Where a mesh cuts matrices, every rank owns some, and the ranks of a stage take turns::

    round r:  parts of each owner's r-th matrix ──▶ owner: O ──▶ parts

so a rank never holds more than one whole matrix, and each is computed once. Parts travel in the
precision in which O is made.

Matrices are those inside the decoder's layers, experts one by one (they are cut between, not
within). Embedding, output layer, value head and vectors take what is handed in as ``rest``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llamarl.models.parallel import ParallelLayout, ParameterShard, shard_box
from llamarl.settings.trainer import OptimizerConfig
from llamarl.trainer.optimizer import Optimizer, make_adamw

__all__ = ["Muon", "make_muon", "orthogonal", "owners_in_turn"]

MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_EPSILON = 1e-7

_Box = tuple[tuple[int, int], ...]


def orthogonal(matrix: Tensor) -> Tensor:
    """U V^T of ``matrix`` = U S V^T, about: five Newton-Schulz steps leave singular values near 1.

    Args:
        matrix: [rows, columns]; computed in its dtype.
    """
    a, b, c = _COEFFICIENTS
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=_EPSILON)
    for _ in range(_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def owners_in_turn(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Share matrices out, and their work, evenly: of every rank its own, in the order of its rounds.

    Args:
        sizes: Elements of each matrix by name.
    """
    owned: list[list[str]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = load.index(min(load))
        owned[rank].append(name)
        load[rank] += sizes[name]
    return owned


def make_muon(
    config: OptimizerConfig,
    weights: Mapping[str, nn.Parameter],
    *,
    shards: Mapping[str, ParameterShard],
    layout: ParallelLayout,
    device: torch.device,
) -> Optimizer:
    """Muon for the matrices of layers and AdamW beside it; ``MakeOptimizer`` says what of."""
    matrices = {name: tensor for name, tensor in weights.items() if config.is_matrix(name, tensor.ndim)}
    adamw = make_adamw(config, {name: tensor for name, tensor in weights.items() if name not in matrices})
    if not matrices:
        return adamw
    lr, decay = config.lr, config.weight_decay
    muon = Muon(matrices, adamw.update, lr=lr, weight_decay=decay, shards=shards, layout=layout, device=device)
    return Optimizer(muon, {**adamw.kinds, **dict.fromkeys(matrices, ("momentum_buffer",))})


class Muon(torch.optim.Optimizer):
    """Moves this rank's parts of matrices; another optimizer moves the rest of the weights."""

    def __init__(
        self,
        matrices: Mapping[str, nn.Parameter],
        rest: torch.optim.Optimizer,
        *,
        lr: float,
        weight_decay: float,
        shards: Mapping[str, ParameterShard],
        layout: ParallelLayout,
        device: torch.device,
    ) -> None:
        """
        Args:
            matrices: This rank's parts, float32, by name: those that ``OptimizerConfig.is_matrix`` names.
            rest: Of other weights; it steps when this one does, and shares state and groups with it.
            shards: Which part of each this rank holds; empty: each is whole.
            device: Where collectives work, and matrices are computed: in bfloat16 on a GPU, in float32 on a CPU.
        """
        super().__init__(list(matrices.values()), {"lr": lr, "weight_decay": weight_decay})
        self._own = self.param_groups[0]
        self._rest = rest
        self.param_groups += rest.param_groups
        rest.state = self.state
        self._matrices = dict(matrices)
        self._device = device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._rank = layout.rank
        stage = range(layout.pp_rank * layout.ranks_of_stage, (layout.pp_rank + 1) * layout.ranks_of_stage)
        self._boxes: dict[str, dict[int, _Box]] = {}
        """Of matrices that are cut: rank of this stage -> its part."""
        for name, shard in shards.items() if layout.num_ranks > 1 else ():
            if name in self._matrices and len(shard.shape) == 2:
                boxes = {rank: shard_box(shard.shape, shard.cuts, layout, rank) for rank in stage}
                if len(set(boxes.values())) > 1:
                    self._boxes[name] = boxes
        self._shapes = {name: shards[name].shape if name in self._boxes else m.shape for name, m in matrices.items()}
        owned = owners_in_turn({name: math.prod(self._shapes[name]) for name in self._boxes}, len(stage))
        rounds = max(map(len, owned), default=0)
        self._rounds = [{stage[i]: names[r] for i, names in enumerate(owned) if r < len(names)} for r in range(rounds)]
        """Owner -> the matrix that it computes in a round; the same on all ranks of the stage."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move every weight that has a gradient; every rank of the stage calls it."""
        assert closure is None
        for name in self._matrices:
            if name not in self._boxes:
                self._move(name, _of_each(self._direction(name)))
        for owned in self._rounds:
            parts = {name: self._direction(name) for name in owned.values()}
            self._exchange(owned, parts)
            for name, part in parts.items():
                self._move(name, part)
        self._rest.step()

    def _direction(self, name: str) -> Tensor:
        """This rank's part of what is made orthogonal; the momentum takes the gradient in."""
        weight = self._matrices[name]
        assert weight.grad is not None
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(weight.grad, 1 - MOMENTUM)
        return weight.grad.lerp(momentum, MOMENTUM).to(self._device, self._dtype)

    def _move(self, name: str, orthogonal_part: Tensor) -> None:
        weight, lr = self._matrices[name], self._own["lr"]
        weight.mul_(1 - lr * self._own["weight_decay"])
        size = 0.2 * math.sqrt(max(self._shapes[name][-2:]))
        weight.add_(orthogonal_part.to(weight.device), alpha=-lr * size)

    def _exchange(self, owned: Mapping[int, str], parts: dict[str, Tensor]) -> None:
        """Replace this rank's parts of a round's matrices by those of the orthogonal ones."""
        mine = owned.get(self._rank)
        whole = None
        received: dict[int, Tensor] = {}
        if mine is not None:
            boxes = self._boxes[mine]
            first = {box: rank for rank, box in reversed(boxes.items())}  # of copies one is enough
            received = {rank: self._empty(box) for box, rank in first.items() if rank != self._rank and _size(box)}
        sent = {
            owner: parts[name].contiguous()
            for owner, name in owned.items()
            if owner != self._rank and self._sends(name)
        }
        _carry_out(sent, received)
        if mine is not None:
            whole = torch.empty(self._shapes[mine], dtype=self._dtype, device=self._device)
            for rank, part in {self._rank: parts[mine], **received}.items():
                whole[_slices(boxes[rank])] = part
            whole = orthogonal(whole)
            sent = {
                rank: whole[_slices(box)].contiguous()
                for rank, box in boxes.items()
                if rank != self._rank and _size(box)
            }
            parts[mine] = whole[_slices(boxes[self._rank])]
        else:
            sent = {}
        back = {owner: name for owner, name in owned.items() if owner != self._rank and parts[name].numel()}
        received = {owner: torch.empty_like(parts[name]).contiguous() for owner, name in back.items()}
        _carry_out(sent, received)
        parts.update({name: received[owner] for owner, name in back.items()})

    def _sends(self, name: str) -> bool:
        """Whether this rank is the first of those that hold its part of a matrix, and holds any."""
        boxes = self._boxes[name]
        own = boxes[self._rank]
        return bool(_size(own)) and self._rank == min(rank for rank, box in boxes.items() if box == own)

    def _empty(self, box: _Box) -> Tensor:
        return torch.empty([stop - start for start, stop in box], dtype=self._dtype, device=self._device)


def _of_each(matrix: Tensor) -> Tensor:
    """``orthogonal`` of a matrix, or of each in a stack."""
    if matrix.ndim == 2:
        return orthogonal(matrix)
    return torch.stack([orthogonal(one) for one in matrix]) if len(matrix) else matrix


def _carry_out(sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
    """Send to and receive from ranks, all at once, and wait."""
    work: Sequence[dist.P2POp] = [
        *(dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sorted(sent.items())),
        *(dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in sorted(received.items())),
    ]
    for request in dist.batch_isend_irecv(list(work)) if work else ():
        request.wait()


def _size(box: _Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _slices(box: _Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
