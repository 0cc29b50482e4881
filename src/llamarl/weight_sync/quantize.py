"""Quantize at the source, so that a quarter (int8, fp8) of the float32 bytes travel.

A matrix ``name`` travels as two parameters: its codes under its own name, and ``name.scale``, float32, one scale for each
row and each group of ``group`` columns. Both are ordinary parameters to the plan: a shard of the codes goes with the
matching shard of the scales, and every byte is proved. Symmetric, round half to even::

    scale = max |w| / 127 (int8) or / 448 (fp8 e4m3)        code = round(w / scale)        w ~ code * scale

The scale is taken over values that one source rank holds, so each rank quantizes alone. A group must therefore not
straddle two ranks: cuts along the last dimension must fall on multiples of ``group``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from llamarl.errors import WeightSyncError
from llamarl.weight_sync.dtypes import dtype_name, torch_dtype
from llamarl.weight_sync.layout import (
    SCALE_SUFFIX,
    Box,
    HeldShard,
    Layout,
    ParameterSpec,
    Piece,
    is_scale,
    layout_of_rank,
    replicated_layout,
)
from llamarl.weight_sync.sink import WeightVersion

__all__ = [
    "SCALE_SUFFIX",
    "QuantizedKind",
    "dequantize",
    "load_dequantized",
    "quantize",
    "quantize_shards",
    "quantized_layout",
]

QuantizedKind = Literal["int8", "fp8"]
_CODES: dict[QuantizedKind, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}


def quantize(weight: torch.Tensor, kind: QuantizedKind, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., rows, columns] and float32 scales [..., rows, ceil(columns / group)] of one or more matrices.

    A group of zeros has scale 0 and codes 0. The last group of a row may be shorter.
    """
    *rows, columns = weight.shape
    dtype, largest = _CODES[kind]
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % group)).view(*rows, -1, group)
    scale = padded.abs().amax(dim=-1) / largest
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    codes = padded * inverse[..., None]
    if kind == "int8":
        codes = codes.round_()
    codes = codes.clamp_(-largest, largest).to(dtype)
    return codes.view(*rows, -1)[..., :columns].contiguous(), scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """The matrices that ``codes`` and ``scale`` stand for, [..., rows, columns]."""
    columns = codes.shape[-1]
    return (codes.float() * scale.repeat_interleave(group, dim=-1)[..., :columns]).to(dtype)


def quantize_shards(
    tensors: Mapping[str, torch.Tensor],
    layout: Layout | Mapping[str, HeldShard] | None,
    *,
    rank: int,
    num_ranks: int,
    kind: QuantizedKind,
    group: int,
    chosen: Callable[[str, ParameterSpec], bool],
) -> tuple[dict[str, torch.Tensor], Layout]:
    """A payload's tensors and layout with the chosen matrices quantized.

    Args:
        layout: As in the payload.
        chosen: Which parameters to quantize; only matrices, and stacks of them (experts), are asked about.

    Raises:
        ValueError: A rank's shard begins or ends inside a group, or shares its local tensor with another parameter.
    """
    if layout is None:
        specs = {name: ParameterSpec(tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()}
        full = replicated_layout(specs, num_ranks)
    elif isinstance(layout, Layout):
        full = layout
    else:
        full = layout_of_rank(layout, rank, num_ranks)
    names = {n for n, spec in full.parameters.items() if len(spec.shape) >= 2 and chosen(n, spec)}
    result = quantized_layout(full, names, kind=kind, group=group)
    made = dict(tensors)
    for piece in full.pieces[rank]:
        if piece.parameter in names:
            if any(p.tensor == piece.tensor and p is not piece for p in full.pieces[rank]):
                raise ValueError(
                    f"{piece.parameter!r} shares the local tensor {piece.tensor!r}: quantize it before fusing"
                )
            made[piece.tensor], made[piece.tensor + SCALE_SUFFIX] = quantize(tensors[piece.tensor], kind, group)
    return made, result


def quantized_layout(layout: Layout, names: set[str], *, kind: QuantizedKind, group: int) -> Layout:
    """``layout`` with codes and scales in place of the parameters ``names``; for both sides.

    Raises:
        ValueError: A piece begins or ends inside a group.
    """
    parameters: dict[str, ParameterSpec] = {}
    for name, spec in layout.parameters.items():
        parameters[name] = spec
        if name in names:
            parameters[name] = ParameterSpec(spec.shape, dtype_name(_CODES[kind][0]))
            scales = (*spec.shape[:-1], math.ceil(spec.shape[-1] / group))
            parameters[name + SCALE_SUFFIX] = ParameterSpec(scales, "float32")
    ranks = []
    for pieces in layout.pieces:
        kept = list(pieces)
        for piece in pieces:
            if piece.parameter in names:
                width = layout.parameters[piece.parameter].shape[-1]
                box = _scale_box(piece, width, group)
                origin = (*piece.origin[:-1], piece.origin[-1] // group)
                kept.append(Piece(piece.parameter + SCALE_SUFFIX, box, piece.tensor + SCALE_SUFFIX, origin))
        ranks.append(tuple(kept))
    return Layout(parameters, tuple(ranks))


def load_dequantized(
    version: WeightVersion,
    tensors: Mapping[str, torch.Tensor],
    layout: Layout | None = None,
    *,
    num_sink_ranks: int = 1,
    rank: int = 0,
    group: int,
    deadline_s: float | None = None,
) -> int:
    """Load a version whose matrices travelled as codes into an engine's float tensors; returns the bytes pulled.

    Args:
        tensors, layout: As ``WeightVersion.load_into`` takes them, in terms of the float parameters.

    Raises:
        WeightSyncError: The codes are of a kind that is not known here, or as ``WeightVersion.load_into``.
        DeadlineExceeded: It took longer than ``deadline_s`` seconds, or, without one, than the channel's deadline.
    """
    sent = version.parameters
    names = {name.removesuffix(SCALE_SUFFIX) for name in sent if is_scale(sent, name)}
    if layout is None:
        specs = {name: ParameterSpec(tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()}
        layout = replicated_layout(specs, num_sink_ranks)
    kinds: dict[str, QuantizedKind] = {dtype_name(dtype): kind for kind, (dtype, _) in _CODES.items()}
    unknown = sorted(name for name in names if sent[name].dtype not in kinds)
    if unknown or len({sent[name].dtype for name in names}) > 1:
        found = ", ".join(sorted({sent[name].dtype for name in names}))
        raise WeightSyncError(
            f"version {version.version} brings {len(names)} quantized parameters ({(unknown or sorted(names))[0]}, ...) as "
            f"{found}; known is one of {', '.join(kinds)} for all: quantize them at the source by quantize_shards"
        )
    staged: dict[str, torch.Tensor] = dict(tensors)
    codes: list[str] = []
    for piece in layout.pieces[rank]:
        if piece.parameter in names and piece.tensor not in codes:
            shape = tensors[piece.tensor].shape
            staged[piece.tensor] = torch.empty(shape, dtype=torch_dtype(sent[piece.parameter].dtype))
            staged[piece.tensor + SCALE_SUFFIX] = torch.empty(*shape[:-1], math.ceil(shape[-1] / group))
            codes.append(piece.tensor)
    kind = kinds[sent[next(iter(names))].dtype] if names else "int8"
    wanted = quantized_layout(layout, names, kind=kind, group=group)
    pulled = version.load_into(staged, wanted, deadline_s)
    with torch.no_grad():
        for name in codes:
            live = tensors[name]
            live.copy_(dequantize(staged[name], staged[name + SCALE_SUFFIX], group, live.dtype))
    return pulled


def _scale_box(piece: Piece, width: int, group: int) -> Box:
    *rows, (start, stop) = piece.box
    if start % group or (stop % group and stop != width) or piece.origin[-1] % group:
        raise ValueError(
            f"{piece.parameter!r}: a rank holds columns {start} to {stop} of {width}, which cuts a group of {group} columns; "
            f"choose a group size that divides both"
        )
    return *rows, (start // group, math.ceil(stop / group))
