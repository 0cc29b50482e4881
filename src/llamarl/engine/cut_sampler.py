"""Draws tokens where each tensor-parallel rank has its slice of the logits; nobody puts the slices together.

    each rank    its slice's maximum, sums of weights, likeliest token ──▶ all      a few numbers a row
    all ranks    the rank whose share of the running sum holds the row's uniform number: its owner
    the owner    finds the token in its slice, and says it with its log-probs ──▶ all
    top-k, top-p: the likeliest tokens of each slice ──▶ rank 0, which draws among them

The draws are those of ``sampler.py``: the same uniform number a token, the same running sum over
the vocabulary in the order of its tokens, the same filters. Sums are added up in another order, so
a token may differ where the number falls within rounding of a boundary, and among equal logits at
the edge of top-k.

What decides is compared by all ranks on the same numbers, in single additions and comparisons, or
done by one rank; so ranks agree even where their processors' exponentials differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llamarl.engine.ranks import EngineRanks
from llamarl.engine.sampler import (
    Draws,
    among_likeliest,
    candidates_for,
    column,
    find_in_slices,
    in_slices,
    needs_candidates,
    rows_by_width,
    uniforms,
)
from llamarl.engine.sequence import SamplingParams
from llamarl.models.transfer import indices, to_device

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
        params, seeds, positions: As of ``sample``.
        vocabulary: Size of the whole.
    """
    local = logits.float()
    device, first, N = local.device, ranks.first_token(vocabulary), len(params)
    u_N = to_device(torch.from_numpy(uniforms(seeds, positions)), device)
    own_top_N, best_N = local.max(dim=-1)
    top_N = ranks.max(own_top_N.clone())
    raw = (local - top_N[:, None]).exp_()
    temperature = column([p.temperature or 1.0 for p in params], device)
    weights = raw
    if any(p.temperature not in (0.0, 1.0) for p in params):
        weights = ((local - top_N[:, None]) / temperature).exp_()
    dense = [p.temperature > 0 and not needs_candidates(p) for p in params]
    if any(p.min_p > 0 for p, is_dense in zip(params, dense, strict=True) if is_dense):
        floor = column([p.min_p if is_dense else 0.0 for p, is_dense in zip(params, dense, strict=True)], device)
        weights = torch.where(weights >= floor, weights, 0.0)  # the likeliest token has weight 1
    weights_NSW, sums = in_slices(weights)
    shares = ranks.gather(torch.stack([raw.sum(dim=-1).double(), sums[:, -1], own_top_N.double()]))  # [R, 3, N]
    log_norm_N = top_N + _added_up(shares[:, 0])[-1].log().float()

    # dense rows: the rank in whose share of the running sum the number falls
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

    raw_logprob = (local.gather(1, place[:, None])[:, 0] - log_norm_N).double()
    owned = owner == ranks.rank
    said = torch.stack([(place + first).double(), logprob.float().double(), raw_logprob])
    said = torch.where(owned, said, 0.0)
    ranked = [i for i, p in enumerate(params) if p.temperature > 0 and needs_candidates(p)]
    for rows in rows_by_width(ranked, params):
        (where,) = indices([rows], device)
        chosen = _draw_among_likeliest(
            local[where], top_N[where], log_norm_N[where], [params[i] for i in rows], u_N[where], total[where],
            ranks=ranks, vocabulary=vocabulary,
        )  # fmt: skip
        said[:, where] = chosen if ranks.is_stage_leader else 0.0
    said = ranks.sum(said)
    ok_N = log_norm_N.isfinite() & said[1].isfinite()
    tokens, logprobs, raw_logprobs, ok = torch.cat([said, ok_N[None].double()]).tolist()
    assert len(tokens) == N
    return Draws(
        [int(token) if fine else -1 for token, fine in zip(tokens, ok, strict=True)],
        logprobs,
        raw_logprobs,
        [bool(fine) for fine in ok],
    )


def _added_up(parts: Tensor) -> list[Tensor]:
    """Running sums over the first dimension, one addition after the other: no processor has a choice of order."""
    sums = [parts[0]]
    for part in parts[1:]:
        sums.append(sums[-1] + part)
    return sums


def _draw_among_likeliest(
    local: Tensor,
    top: Tensor,
    log_norm: Tensor,
    params: list[SamplingParams],
    u: Tensor,
    mass: Tensor,
    *,
    ranks: EngineRanks,
    vocabulary: int,
    candidates: int | None = None,
) -> Tensor:
    """Rows with top-k (the same for all) or top-p: tokens, log-probs and unfiltered log-probs, [3, n] fp64, on rank 0.

    Args:
        mass: [n] fp64, the sum of the tempered weights over the whole vocabulary.
        candidates: Likeliest tokens looked at where only top-p asks; rows whose candidates do not
            reach it are searched again.
    """
    width = candidates_for(params, vocabulary) if candidates is None else candidates_for(params, vocabulary, candidates)
    most = min(width, -(-vocabulary // ranks.size))  # that one slice may have to give
    values, tokens = local.topk(min(most, local.shape[1]), dim=-1)
    tokens = (tokens + ranks.first_token(vocabulary)).int()
    if short := most - values.shape[1]:
        values = torch.nn.functional.pad(values, (0, short), value=-torch.inf)
        tokens = torch.nn.functional.pad(tokens, (0, short))
    gathered = ranks.gather_on_leader(torch.stack([values.view(torch.int32), tokens]))  # bits of both, in one message
    said = torch.zeros(3, len(params), dtype=torch.float64, device=local.device)
    unreached = torch.zeros(len(params), dtype=torch.uint8, device=local.device)
    if gathered is not None:
        logits = gathered[:, 0].view(torch.float32).movedim(0, 1).flatten(1)
        names = gathered[:, 1].movedim(0, 1).flatten(1)
        scaled = (logits - top[:, None]) / column([p.temperature for p in params], local.device)
        best, order = scaled.sort(dim=-1, descending=True, stable=True)
        best, order = best[:, :width], order[:, :width]
        by_top_k = params[0].top_k > 0
        chosen, logprobs, reached = among_likeliest(best, params, u, None if by_top_k else mass[:, None])
        at = order.gather(1, chosen[:, None])
        said[0] = names.gather(1, at)[:, 0].double()
        said[1] = logprobs.double()
        said[2] = (logits.gather(1, at)[:, 0] - log_norm).double()
        if not by_top_k and width < vocabulary:
            unreached = (~reached).to(torch.uint8)
    if params[0].top_k == 0 and width < vocabulary:
        rest = ranks.from_leader(unreached).nonzero()[:, 0]
        if len(rest):
            said[:, rest] = _draw_among_likeliest(
                local[rest], top[rest], log_norm[rest], [params[i] for i in rest.tolist()], u[rest], mass[rest],
                ranks=ranks, vocabulary=vocabulary, candidates=8 * width,
            )  # fmt: skip
    return said
