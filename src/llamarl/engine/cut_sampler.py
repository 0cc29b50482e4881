"""Draws tokens where each tensor-parallel rank has its slice of the logits; nobody puts the slices together.

    each rank    its slice's maximum, sums of weights, likeliest token ──▶ all      a few numbers a row
    all ranks    the rank whose share of the running sum holds the row's uniform number: its owner
    the owner    finds the token in its slice, and says it with its log-prob ──▶ all

The draws are those of ``sampler.py``: the same uniform number a token, the same running sum over
the vocabulary in the order of its tokens. Sums are added up in another order, so a token may differ
where the number falls within rounding of a boundary. There are no filters: nobody trains on filtered
samples, and who evaluates or generates with them has one rank.

What decides is compared by all ranks on the same numbers, in single additions and comparisons, or
said by one rank; so ranks agree even where their processors' exponentials differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llamarl.engine.ranks import EngineRanks
from llamarl.engine.sampler import Draws, column, find_in_slices, in_slices, uniforms
from llamarl.engine.sequence import SamplingParams
from llamarl.models.transfer import to_device

__all__ = ["sample_over_ranks"]


def sample_over_ranks(
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
        logits: [N, this rank's slice of the vocabulary]; not changed.
        params, seeds, positions: As of ``sample``, without filters.
        vocabulary: Size of the whole.
    """
    local = logits.float()
    device, first = local.device, ranks.first_token(vocabulary)
    u_N = to_device(torch.from_numpy(uniforms(seeds, positions)), device)
    own_top_N, best_N = local.max(dim=-1)
    top_N = ranks.max(own_top_N.clone())
    raw = (local - top_N[:, None]).exp_()
    temperature = column([p.temperature or 1.0 for p in params], device)
    weights = raw
    if any(p.temperature not in (0.0, 1.0) for p in params):
        weights = ((local - top_N[:, None]) / temperature).exp_()
    weights_NSW, sums = in_slices(weights)
    shares = ranks.gather(torch.stack([raw.sum(dim=-1).double(), sums[:, -1], own_top_N.double()]))  # [R, 3, N]
    log_norm_N = top_N + _added_up(shares[:, 0])[-1].log().float()

    # the rank in whose share of the running sum the number falls
    running = _added_up(shares[:, 1])
    total = running[-1]
    target = torch.minimum(u_N * total, torch.nextafter(total, torch.zeros_like(total)))
    owner = (torch.stack(running) <= target).sum(dim=0)
    before = torch.stack([torch.zeros_like(total), *running])[ranks.rank]
    own_total = sums[:, -1]
    inside = torch.minimum(target - before, torch.nextafter(own_total, torch.zeros_like(own_total))).clamp_(min=0.0)
    place = find_in_slices(weights_NSW, sums, inside, local.shape[1])
    logprob = (weights.gather(1, place[:, None])[:, 0].double() / total).log()

    # greedy rows: the first rank that has the maximum; its token's log-prob is 0
    greedy = to_device(torch.tensor([p.temperature == 0 for p in params]), device)
    has_top = shares[:, 2] == top_N.double()
    owner = torch.where(greedy, has_top.int().argmax(dim=0), owner)
    place = torch.where(greedy, best_N, place)
    logprob = torch.where(greedy, 0.0, logprob)

    said = torch.stack([(place + first).double(), logprob.float().double()])
    said = ranks.sum(torch.where(owner == ranks.rank, said, 0.0))
    ok_N = log_norm_N.isfinite() & said[1].isfinite()
    tokens, logprobs, ok = torch.cat([said, ok_N[None].double()]).tolist()
    return Draws(
        [int(token) if fine else -1 for token, fine in zip(tokens, ok, strict=True)],
        logprobs,
        [bool(fine) for fine in ok],
    )


def _added_up(parts: Tensor) -> list[Tensor]:
    """Running sums over the first dimension, one addition after the other: no processor has a choice of order."""
    sums = [parts[0]]
    for part in parts[1:]:
        sums.append(sums[-1] + part)
    return sums
