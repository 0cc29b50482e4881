"""Where a parameter lies in a published folder, if not as one tensor under its own name.

    model.layers.0.mlp.experts.gate_up_proj [E, 2I, H]  ◀─ model.layers.0.mlp.experts.0.gate_proj.weight [I, H]   rows 0 .. I of expert 0
                                                        ◀─ model.layers.0.mlp.experts.0.up_proj.weight   [I, H]   rows I .. 2I
                                                        ◀─ ...

transformers knows how each architecture is written (its weight conversions); what it does to numbered tensors says which piece goes
where. So each rank reads its own experts, and none the whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

__all__ = ["StoredPart", "find_parts"]

Box = tuple[tuple[int, int], ...]
"""(start, stop) a dimension."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored tensor that is a part of a parameter."""

    name: str
    box: Box
    """Of the parameter. Dimensions that the stored tensor lacks are leading ones of one entry."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)


def find_parts(
    model: PreTrainedModel,
    stored: Collection[str],
    shape_of: Callable[[str], tuple[int, ...]],
    new: Collection[str] = (),
) -> dict[str, list[StoredPart]] | None:
    """Parameter -> the stored tensors that make it; None if some parameter is not there as transformers would write it, in pieces that
    are whole experts, or halves of them.

    Args:
        stored: Names of the stored tensors.
        shape_of: Of one of them.
        new: Parameters that need not be there: they have no parts then.
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = {name: [StoredPart(name, _whole(shape))] for name, shape in shapes.items() if name in stored}
    found |= _pieces(model, {name: shape for name, shape in shapes.items() if name not in found})
    for name, shape in shapes.items():
        if name in new and name not in stored:
            found[name] = []
            continue
        parts = found.get(name, [])
        if sum(_numel(part.shape) for part in parts) != _numel(shape):
            return None
        if any(part.name not in stored for part in parts):
            return None
        if any(not _fits(part, shape_of(part.name)) for part in parts if part.name != name):
            return None
    return found


def _pieces(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[StoredPart]]:
    """Of parameters that are not stored under their own names. Each is stood for by a small tensor of numbers: a row an expert, two
    where its rows may come from two matrices."""
    probes: dict[str, Tensor] = {}
    sizes = []
    for name, shape in shapes.items():
        small = (shape[0], 2, 1) if len(shape) == 3 and shape[1] % 2 == 0 else (1,) * len(shape)
        sizes.append(_numel(small))
        probes[name] = torch.empty(small)
    starts = [0, *accumulate(sizes)]
    for start, (name, probe) in zip(starts, list(probes.items()), strict=False):
        probes[name] = torch.arange(start, start + probe.numel()).view(probe.shape)
    names = list(probes)
    found: dict[str, list[StoredPart]] = {name: [] for name in names}
    for stored, piece in revert_weight_conversion(model, dict(probes)).items():
        numbers = piece.flatten().tolist()
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            continue  # neither whole experts nor halves
        owner = bisect_right(starts, numbers[0]) - 1
        name, first = names[owner], numbers[0] - starts[owner]
        if (box := _box(shapes[name], tuple(probes[name].shape), first, len(numbers))) is not None:
            found[name].append(StoredPart(stored, box))
    return found


def _box(shape: tuple[int, ...], probe: tuple[int, ...], first: int, count: int) -> Box | None:
    """What ``count`` consecutive numbers of a probe stand for, from the ``first`` on; None: nothing rectangular."""
    if count == _numel(probe):
        return _whole(shape)
    expert, row = divmod(first, 2)
    if count > 2 or (count == 2 and row):
        return None
    half = shape[1] // 2
    rows = (0, shape[1]) if count == 2 else (row * half, (row + 1) * half)
    return ((expert, expert + 1), rows, (0, shape[2]))


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _fits(part: StoredPart, stored: tuple[int, ...]) -> bool:
    lacking = len(part.shape) - len(stored)
    return stored == part.shape[lacking:] and all(size == 1 for size in part.shape[:lacking])
