"""Which tensor-parallel sizes fit a model, and how layers divide into pipeline stages. No
torch, so that a wrong size is refused before any process starts.

query heads, MLP width     cut over all ranks, evenly
vocabulary                 cut over all ranks; the last part may be smaller
key-value heads            cut over all ranks; where these are more, ``tp / heads`` neighbouring ranks hold the same head
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from llamarl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = [
    "KEY_VALUE_LAYERS",
    "check_tensor_parallel_size",
    "experts_of",
    "fitting_sizes",
    "layers_of_stages",
    "part_of_rank",
    "whole_experts",
    "why_experts_not_spread",
    "why_heads_not_shared",
    "why_vocabulary_not_cut",
]

KEY_VALUE_LAYERS = ("k_proj", "v_proj")
"""Layers with rows for each key-value head, in every family that may have fewer of these than query heads."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def fitting_sizes(num_heads: int, num_key_value_heads: int, intermediate_size: int) -> list[int]:
    """Every size that divides heads and intermediate size, and divides or is a multiple of the
    key-value heads; ascending."""
    kv = num_key_value_heads
    return [
        n
        for n in range(1, num_heads + 1)
        if num_heads % n == 0 and intermediate_size % n == 0 and (kv % n == 0 or n % kv == 0)
    ]


def why_heads_not_shared(num_heads: int, *, tp: int, cp: int) -> str | None:
    """Why context-parallel ranks cannot share the query heads that tensor parallelism leaves on
    each rank; None: they can."""
    if num_heads % (tp * cp) == 0:
        return None
    sizes = [n for n in range(1, num_heads // tp + 1) if num_heads % (tp * n) == 0]
    beside = f" that tp {tp} leaves on a rank" if tp > 1 else ""
    return (
        f"each rank takes some whole query heads inside attention, and the {num_heads // tp}{beside} do not divide by {cp}; "
        f"sizes that fit: {', '.join(map(str, sizes))}"
    )


def why_vocabulary_not_cut(size: int, tp: int) -> str | None:
    """Why so many ranks cannot each hold a part of the vocabulary, as ``torch.chunk`` cuts it; None: they can."""
    if (tp - 1) * -(-size // tp) < size:
        return None
    return f"a vocabulary of {size} leaves some of {tp} tensor-parallel ranks without a token: take fewer"


def part_of_rank(num_ranks: int, rank: int, at_most: int | None = None) -> tuple[int, int]:
    """(number of parts, the part of ``rank``) of something cut over ranks into ``at_most`` parts; None: one a rank.

    Where there are more ranks, neighbours hold the same part: of 8 ranks and 2 parts, ranks 0 to 3 hold the first.
    """
    parts = num_ranks if at_most is None else min(num_ranks, at_most)
    return parts, rank // (num_ranks // parts)


def whole_experts(sizes: Iterable[int], num_experts: int) -> list[int]:
    """Of these sizes, those by which each rank gets as many whole experts; all, of a model without any."""
    return [n for n in sizes if num_experts % n == 0]


def why_experts_not_spread(experts: int, *, tp: int, ep: int) -> str | None:
    """Why ``tp * ep`` ranks cannot each hold as many whole experts; None: they can."""
    if not experts:
        return "this model has no experts; set it to 1"
    if experts % (tp * ep):
        fitting = ", ".join(str(n) for n in range(1, experts + 1) if experts % (tp * n) == 0)
        return f"it does not divide {experts} experts" + (f" over tp {tp}" * (tp > 1)) + f"; sizes that fit: {fitting}"
    return None


def experts_of(config: Mapping[str, Any]) -> int:
    """Of each sparse layer, by the object of a ``config.json``; 0: there are none, or it does not say."""
    return next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)


def layers_of_stages(num_layers: int, num_stages: int) -> list[range]:
    """Which layers each stage holds: as evenly as possible. What is left over goes to the stages in
    the middle, then to the first: the last has the output layer to compute as well.
    """
    each, left = divmod(num_layers, num_stages)
    longer = [*range(1, num_stages - 1), 0][:left]
    found, start = [], 0
    for stage in range(num_stages):
        stop = start + each + (stage in longer)
        found.append(range(start, stop))
        start = stop
    return found


def check_tensor_parallel_size(config: PretrainedConfig, tp: int, *, key: str = "trainer.tp") -> None:
    """Compare a configured size with a decoder.

    Args:
        config: As transformers reads it: a ``config.json`` may leave out what is as in the first model of its family.
        key: The configuration key to name in the error.

    Raises:
        ModelError: The size does not divide the model; names the sizes that would.
    """
    heads, intermediate = config.num_attention_heads, config.intermediate_size
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    sizes = whole_experts(fitting_sizes(heads, key_value_heads, intermediate), experts_of(config.to_dict()))
    if tp not in sizes:
        raise ModelError(
            f"{key} = {tp} does not divide this model's {heads} heads and intermediate size {intermediate}, or neither"
            f" divides its {key_value_heads} key-value heads nor is a multiple of them; sizes that fit:"
            f" {', '.join(map(str, sizes))}"
        )
    if reason := why_vocabulary_not_cut(config.vocab_size, tp):
        raise ModelError(f"{key} = {tp}: {reason}")
