"""A step's tokens over the ranks of an engine that have the same weights (``generator.cp``): all,
or beside ``tp`` the same part.

    step's row of T tokens ─▶ own m ─▶ decoder (heads over ranks in attention) ─▶ hidden states, [m, E]
    rows that are sampled or end a prompt ──gathered──▶ the same on every rank, [rows, E]
    experts that its tokens chose, where they are noted ──gathered──▶ the same on every rank
    samples, dealt over ranks ─▶ logits of own ones ─▶ sampler.py ──draws gathered──▶ the same on every rank
                                                     (with tp: cut_sampler.py)

Each draw is made by one rank, or by tensor-parallel ones, as it would be without the others; these
take its numbers. So output layer and sampling are shared work too, and ranks agree whatever their
processors round. What crosses between them in attention: ``models/paged_context.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llamarl.engine.cut_sampler import sample_over_ranks
from llamarl.engine.ranks import EngineRanks
from llamarl.engine.sampler import Draws, sample
from llamarl.engine.sequence import SamplingParams
from llamarl.errors import ModelError
from llamarl.models.decoder import changes_with_length
from llamarl.models.paged_context import HeadExchange, share_of
from llamarl.models.sizes import why_heads_not_shared, why_key_value_heads_not_shared
from llamarl.models.transfer import indices

__all__ = ["TokenRanks", "gather_draws", "sample_own", "why_tokens_not_cut"]


def why_tokens_not_cut(config: PretrainedConfig, num_ranks: int, *, tp: int = 1) -> str | None:
    """Why the tokens of a step cannot be cut over so many ranks; None: they can.

    Args:
        config: The model's.
        tp: Ranks over which heads are cut already; fits the model.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if reason := why_heads_not_shared(heads, tp=tp, cp=num_ranks):
        return reason
    if reason := why_key_value_heads_not_shared(heads // tp, max(1, kv_heads // tp), num_ranks):
        return reason
    if changes_with_length(config):
        return "the rotary embedding follows the longest position of a call, and ranks see other positions; set it to 1"
    return None


class TokenRanks:
    """This rank's part of each step.

    Args:
        ranks: With more than one part of the tokens.

    Raises:
        ModelError: The model cannot be cut so.
    """

    def __init__(self, ranks: EngineRanks, config: PretrainedConfig) -> None:
        if reason := why_tokens_not_cut(config, ranks.token_parts, tp=ranks.size):
            raise ModelError(f"generator.cp = {ranks.token_parts}: {reason}")
        self._ranks = ranks

    def exchange(self, num_tokens: int) -> HeadExchange:
        """Of a step of so many tokens, at least one."""
        return HeadExchange(self._ranks.part_group, self._ranks.token_parts, num_tokens)

    def own(self, values: list[int], heads: HeadExchange) -> list[int]:
        """Of one value a token those of own tokens, filled up with zeros: a rank without any computes those."""
        share = share_of(len(values), self._ranks.token_part, self._ranks.token_parts)
        return values[share.start : share.stop] + [0] * (heads.num_on_each - len(share))

    def rows(self, hidden: Tensor, wanted: Sequence[int], heads: HeadExchange) -> Tensor:
        """[len(wanted), E] hidden states of some of the step's tokens, the same on every rank.

        Args:
            hidden: [m, E] of own tokens.
            wanted: Places in the step's row, ascending.
        """
        m = heads.num_on_each
        of_ranks = [[row - rank * m for row in wanted if row // m == rank] for rank in range(self._ranks.token_parts)]
        most = max(map(len, of_ranks))
        if not most:
            return hidden[:0]
        own = of_ranks[self._ranks.token_part]
        (places,) = indices([own + [0] * (most - len(own))], hidden.device)
        gathered = self._ranks.gather_from_parts(hidden.index_select(0, places))
        return torch.cat([part[: len(rows)] for part, rows in zip(gathered, of_ranks, strict=True)])

    def all_tokens(self, own: Tensor, num_tokens: int) -> Tensor:
        """[T, ...] of the step's tokens, the same on every rank, from [m, ...] of own ones."""
        return self._ranks.gather_from_parts(own).flatten(0, 1)[:num_tokens]


def sample_own(
    logits: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    *,
    ranks: EngineRanks,
    vocabulary: int,
) -> Draws:
    """Draw one token a row; every rank calls with the same rows and gets the same draws.

    Args:
        logits: [own, V] of the rows that ``share_of`` deals to this rank, or its slices of them; not changed.
        params, seeds, positions: Of all rows, as of ``sample``.
        vocabulary: Size of the whole.
    """
    share = share_of(len(params), ranks.token_part, ranks.token_parts)
    own = slice(share.start, share.stop)
    drawn = Draws([], [], [], [])
    if share and ranks.size == 1:
        drawn = sample(logits, params[own], seeds[own], positions[own])
    elif share:
        drawn = sample_over_ranks(logits, params[own], seeds[own], positions[own], ranks=ranks, vocabulary=vocabulary)
    return gather_draws(drawn, len(params), ranks)


def gather_draws(own: Draws, count: int, ranks: EngineRanks) -> Draws:
    """All ranks' draws of ``count`` rows, in the order of the rows, bit for bit."""
    each = -(-count // ranks.token_parts)
    said = torch.zeros(4, each, dtype=torch.float64)
    values = [list(map(float, own.tokens)), own.logprobs, own.raw_logprobs, [float(fine) for fine in own.ok]]
    said[:, : len(own.tokens)] = torch.tensor(values, dtype=torch.float64)
    tokens, logprobs, raw_logprobs, ok = ranks.gather_from_parts(said).transpose(0, 1).flatten(1)[:, :count].tolist()
    return Draws([int(token) for token in tokens], logprobs, raw_logprobs, [bool(fine) for fine in ok])
