"""Layouts whose tensors hold several parameters one after another, as some engines keep q, k and v: none of ours does, the plan
takes them all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamarl.weight_sync.layout import Layout, Piece

__all__ = ["fuse"]


def fuse(layout: Layout, groups: Mapping[str, Sequence[str]], *, dim: int = 0) -> Layout:
    """Move pieces into fused tensors: on each rank its pieces of the members lie one after another along ``dim``.

    Args:
        groups: Fused tensor's name -> parameters in order (``{"qkv_proj.weight": ["q_proj.weight", ...]}``).
    """
    where = {name: (fused, position) for fused, names in groups.items() for position, name in enumerate(names)}
    ranks = []
    for pieces in layout.pieces:
        kept = [p for p in pieces if p.parameter not in where]
        moved = sorted((p for p in pieces if p.parameter in where), key=lambda p: where[p.parameter])
        offset: dict[str, int] = {}
        for piece in moved:
            fused, _ = where[piece.parameter]
            start = offset.get(fused, 0)
            origin = tuple(start if d == dim else 0 for d in range(len(piece.box)))
            kept.append(Piece(piece.parameter, piece.box, fused, origin))
            offset[fused] = start + piece.box[dim][1] - piece.box[dim][0]
        ranks.append(tuple(kept))
    return Layout(layout.parameters, tuple(ranks))
