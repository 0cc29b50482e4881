"""Context parallelism: each rank computes a part of every row of tokens, and inside attention all
tokens for a part of the heads.

    rank r                    tokens r * n .. (r + 1) * n of the row, all heads     [1, H, n, D]
    q, k, v ──exchange──▶     all N tokens, heads r * H/cp .. (r + 1) * H/cp        [1, H/cp, N, D]
    the trainer's own attention of the whole row: packed sequences, shared prompts, windows, soft caps
    output ──exchange──▶      own tokens, all heads                                 [1, n, H, D]

This is DeepSpeed-Ulysses (arXiv:2309.14509). Everything but attention works on single tokens, so a
rank's activations and its share of every other product are a part of the row's, and attention needs
to know nothing of it: packed documents stay apart, and a group's prompt stays shared, as on one
rank. Two exchanges a layer and pass carry every query, key, value and output once.

Rules. n = ceil(N / cp): the row is filled up at its end with tokens that attention never sees, that
no loss reads, and whose gradient is therefore 0. Query heads divide by cp. Key-value heads that do
not are repeated, as often as it takes, on their way.

Log-probs of a rank's tokens are put together into those of the whole row, and every rank of ``cp``
computes the whole loss of them: so losses that look at whole sequences, and all counts and
statistics, are those of one rank, and only gradients are parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from llamarl.errors import ModelError
from llamarl.models.attention import PackedSequences, attending, register_attention
from llamarl.models.collectives import ExchangeParts, SumOverRanks
from llamarl.models.parallel import ParallelLayout
from llamarl.models.stages import Stage
from llamarl.trainer.shared_prompts import SharedPrompts, shared_prompt_attention

__all__ = ["CONTEXT_ATTENTION", "ContextRanks", "OwnTokens", "RowOverRanks", "check_context_parallel", "cut_row"]

CONTEXT_ATTENTION = "llamarl_context_parallel"
"""Name in transformers' attention interface. To take it from here is to have it registered."""


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """The ranks that share a row, and this one among them."""

    group: dist.ProcessGroup
    rank: int
    num_ranks: int

    @classmethod
    def of(cls, layout: ParallelLayout) -> ContextRanks | None:
        """None where each row is one rank's."""
        return None if layout.cp == 1 else cls(layout.group("cp"), layout.cp_rank, layout.cp)


@dataclass(frozen=True, slots=True)
class RowOverRanks:
    """What attention within a row is told whose tokens lie over ranks."""

    whole: PackedSequences | SharedPrompts
    """Which of the row's tokens may see which."""
    ranks: ContextRanks

    @property
    def num_tokens(self) -> int:
        """N, of the whole row."""
        return self.whole.num_tokens

    @property
    def num_on_each(self) -> int:
        """n, of each rank, with what the row is filled up with."""
        return -(-self.num_tokens // self.ranks.num_ranks)

    def own(self, values: Tensor, *, fill: int) -> Tensor:
        """This rank's n of N values, one a token along the first dimension."""
        start = self.ranks.rank * self.num_on_each
        part = values[start : start + self.num_on_each]
        return torch.cat([part, values.new_full((self.num_on_each - len(part), *values.shape[1:]), fill)])


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """Which of a row's N tokens, and of the T trained ones, this rank computes."""

    num_tokens: int
    """Own tokens of the row; the others of the n are filled up."""
    num_trained: int
    """T."""
    places: Tensor
    """[t] own ones among the T trained tokens, ascending."""
    ranks: ContextRanks

    def whole(self, values: Tensor) -> Tensor:
        """[T, ...] of all ranks from [t, ...] of this one; the gradient is this rank's part of theirs. Every rank calls it."""
        row = values.new_zeros(self.num_trained, *values.shape[1:]).index_copy(0, self.places, values)
        joined: Tensor = SumOverRanks.apply(row, self.ranks.group)  # each element has one that is not 0
        return joined


def cut_row(row: RowOverRanks, positions: Tensor) -> tuple[OwnTokens, Tensor]:
    """Which trained tokens are this rank's.

    Args:
        positions: [T] where in the row each trained token is predicted; on the CPU, so that their number is known here.

    Returns:
        Which they are, and where among its n tokens each of them is predicted, [t].
    """
    start = row.ranks.rank * row.num_on_each
    (places,) = torch.where((positions >= start) & (positions < start + row.num_on_each))
    num_tokens = min(max(row.num_tokens - start, 0), row.num_on_each)
    return OwnTokens(num_tokens, len(positions), places, row.ranks), positions[places] - start


def _attention_over_ranks(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *, packing: Any, **settings: Any
) -> Tensor:
    """The function behind ``CONTEXT_ATTENTION``: query [1, H, n, D], key and value [1, KV, n, D] of
    own tokens -> [1, n, H, D]. Under any other packing than ``RowOverRanks`` it is the trainer's
    attention on one rank."""
    if isinstance(packing, _EachForItself):
        heads_each = query.shape[1] // value.shape[1]
        return value.repeat_interleave(heads_each, dim=1).transpose(1, 2)
    if not isinstance(packing, RowOverRanks):
        return shared_prompt_attention(module, query, key, value, packing=packing, **settings)
    row = packing
    ranks, N = row.ranks, row.num_tokens
    cp = ranks.num_ranks
    _, H, n, D = query.shape
    copies = cp // math.gcd(cp, key.shape[1])
    if copies > 1:
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    parts = torch.cat([x[0].reshape(cp, -1, n, D) for x in (query, key, value)], dim=1)
    whole = ExchangeParts.apply(parts, ranks.group).transpose(0, 1).reshape(1, -1, cp * n, D)[:, :, :N]
    q, k, v = whole.split([x.shape[1] // cp for x in (query, key, value)], dim=1)
    out = shared_prompt_attention(module, q, k, v, packing=row.whole, **settings)
    filled = F.pad(out[0], (0, 0, 0, 0, 0, cp * n - N)).view(cp, n, -1, D)
    return ExchangeParts.apply(filled, ranks.group).transpose(0, 1).reshape(1, n, H, D)


register_attention(CONTEXT_ATTENTION, _attention_over_ranks)


class _EachForItself:
    """No token sees another; its attention's output is its value."""


@torch.no_grad()
def check_context_parallel(model: PreTrainedModel, num_ranks: int, *, key: str = "trainer.cp") -> None:
    """Prove on a few tokens that nothing but attention looks at more than one token, so that a row may be cut.

    Args:
        model: A small copy of the architecture, with ``CONTEXT_ATTENTION``.
        num_ranks: Over which rows are to be cut.
        key: The configuration key of that number, to name in the error.

    Raises:
        ModelError: It does: this architecture cannot be cut so.
    """
    positions = torch.arange(8, device=model.device)[None]
    ids = (3 * positions + 2) % model.config.get_text_config().vocab_size
    stage = Stage(model)
    with attending(_EachForItself()):
        whole = stage.hidden_states(model, ids, positions)
        parts = [stage.hidden_states(model, ids[:, at], positions[:, at]) for at in (slice(0, 3), slice(3, 8))]
    if not torch.allclose(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4):
        raise ModelError(
            f"{key} = {num_ranks}: {type(model).__name__} looks at several tokens outside of attention, so its rows cannot be cut: "
            f"set {key} to 1"
        )
