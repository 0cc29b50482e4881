"""Draws tokens, and says how likely each draw was.

One uniform number a token, from a hash of (sequence seed, position): no generator state, so a draw
does not depend on what else is in the batch, and a resumed sequence draws what it would have drawn.
The token is the inverse of the cumulative distribution at that number, found in two levels (sums of
slices of the vocabulary, then inside one slice), which costs a few passes over the logits and no
sort. Filters (in the order top-k, top-p, min-p, each on what the earlier one left, as in
``transformers``) look at the likeliest tokens only.

The log-prob that comes back is under the distribution sampled from, the mu of importance sampling.

On a GPU everything is queued and read back once, at the end; only top-p without top-k asks in
between, whether the tokens it looked at first were enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llamarl.engine.sequence import SamplingParams
from llamarl.models.transfer import indices, to_device

__all__ = ["Draws", "column", "find_in_slices", "in_slices", "is_filtered", "sample", "uniforms"]

_SLICE = 256  # vocabulary entries summed into one first-level entry
_CANDIDATES = 1024  # likeliest tokens looked at first when only top-p asks


@dataclass(frozen=True, slots=True)
class Draws:
    """One entry a row. A row whose logits are not finite enough to sample from has ``ok`` False and token -1."""

    tokens: list[int]
    logprobs: list[float]
    ok: list[bool]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): the upper 53 bits of splitmix64 chained over both."""
    with np.errstate(over="ignore"):
        state = np.array(seeds, dtype=np.uint64) ^ _splitmix64(np.array(positions, dtype=np.uint64))
        return (_splitmix64(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> Draws:
    """Draw one token a row.

    Args:
        logits: [N, V]; not changed.
        params: [N]; temperature 0 takes the likeliest token, whose log-prob under the (one-point) distribution is 0.
        seeds: [N] 64-bit seeds of the sequences.
        positions: [N] index in its response of the token being drawn.
    """
    tokens, logprobs, ok = _draw(logits, params, seeds, positions).tolist()
    return Draws([int(token) for token in tokens], logprobs, [bool(value) for value in ok])


def _draw(logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """[3, N] fp64, which holds each exactly: tokens, their log-probs, whether the row is ok."""
    logits_NV = logits.float()
    N = len(params)
    top_N = logits_NV.amax(dim=-1)
    u_N = to_device(torch.from_numpy(uniforms(seeds, positions)), logits.device)

    raw_NV = logits_NV.softmax(dim=-1)  # NaN in a row stays in that row
    log_norm_N = top_N - raw_NV.amax(dim=-1).log()  # the likeliest token has probability exp(top) / total
    ok_N = log_norm_N.isfinite()
    greedy = [i for i, p in enumerate(params) if p.temperature == 0]
    tokens_N = torch.zeros(N, dtype=torch.int64, device=logits.device)
    logprobs_N = torch.zeros_like(log_norm_N)
    if greedy:
        whole = len(greedy) == N
        rows = _rows(greedy, N, logits.device)
        tokens_N[rows] = (logits_NV if whole else logits_NV[rows]).argmax(dim=-1)

    dense = [i for i, p in enumerate(params) if p.temperature > 0 and not _needs_candidates(p)]
    ranked = [i for i, p in enumerate(params) if p.temperature > 0 and _needs_candidates(p)]
    if dense:
        tempered = any(params[i].temperature != 1.0 for i in dense)
        whole = len(dense) == N
        rows = _rows(dense, N, logits.device)
        weights = raw_NV if whole else raw_NV[rows]
        if tempered:
            temperature = column([params[i].temperature for i in dense], logits.device)
            weights = ((logits_NV if whole else logits_NV[rows]) / temperature).softmax(dim=-1)
        if any(params[i].min_p > 0 for i in dense):
            floor = column([params[i].min_p for i in dense], logits.device)
            weights = torch.where(weights >= floor * weights.amax(dim=-1, keepdim=True), weights, 0.0)
        chosen, total = _invert(weights, u_N if whole else u_N[rows])
        tokens_N[rows] = chosen
        logprobs_N[rows] = (weights.gather(1, chosen[:, None])[:, 0].double() / total).log().float()
    for rows_list in _rows_by_width(ranked, params):
        (rows,) = indices([rows_list], logits.device)
        chosen, logprob = _sample_ranked(logits_NV[rows] - top_N[rows, None], [params[i] for i in rows_list], u_N[rows])
        tokens_N[rows] = chosen
        logprobs_N[rows] = logprob

    ok_N &= logprobs_N.isfinite()
    tokens_N = torch.where(ok_N, tokens_N, -1)
    return torch.stack([tokens_N.double(), logprobs_N.double(), ok_N.double()])


def _rows(chosen: list[int], total: int, device: torch.device) -> Tensor | slice:
    return slice(None) if len(chosen) == total else indices([chosen], device)[0]


def column(values: list[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return to_device(torch.tensor(values, dtype=dtype), device)[:, None]


def is_filtered(params: SamplingParams) -> bool:
    """Whether some tokens cannot be drawn."""
    return _needs_candidates(params) or params.min_p > 0.0


def _needs_candidates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _invert(weights: Tensor, u_N: Tensor) -> tuple[Tensor, Tensor]:
    """Index where the running sum of each row passes ``u`` times its total, and the totals (fp64).

    Args:
        weights: [N, V], >= 0.
        u_N: [N] fp64 in [0, 1).
    """
    weights_NSW, sums = in_slices(weights)
    total = sums[:, -1]
    return find_in_slices(weights_NSW, sums, u_N * total, weights.shape[1]), total


def in_slices(weights: Tensor) -> tuple[Tensor, Tensor]:
    """[N, V] as [N, slices, W], filled up with zeros, and the running sums of the slices, [N, slices] fp64."""
    N, V = weights.shape
    slices = -(-V // _SLICE)
    if V % _SLICE:
        weights = torch.nn.functional.pad(weights, (0, slices * _SLICE - V))
    weights_NSW = weights.view(N, slices, _SLICE)
    return weights_NSW, _running_sums(weights_NSW.sum(dim=-1).double())


def find_in_slices(weights_NSW: Tensor, sums: Tensor, target: Tensor, V: int) -> Tensor:
    """Index where the running sum of each row passes ``target``, [N] fp64; ``in_slices`` gives the rest."""
    slices = sums.shape[1]
    index = (sums <= target[:, None]).sum(dim=-1).clamp_(max=slices - 1)
    before = torch.where(index > 0, sums.gather(1, (index - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = weights_NSW[torch.arange(len(sums), device=sums.device), index].double()  # [N, W]
    running = _running_sums(inside)
    # rounding may leave the target at or past the slice's own sum: then it is the slice's last possible token
    target = torch.minimum(target - before, torch.nextafter(running[:, -1], torch.zeros_like(before)))
    offset = (running <= target[:, None]).sum(dim=-1).clamp_(max=_SLICE - 1)
    return (index * _SLICE + offset).clamp_(max=V - 1)  # a row that is not finite must stay in range


def _running_sums(rows: Tensor) -> Tensor:
    """Along the last dimension. A single row has company on CUDA: alone it would take a scan whose
    order of sums varies."""
    if rows.is_cuda and len(rows) == 1:
        return rows.expand(2, -1).cumsum(dim=-1)[:1]
    return rows.cumsum(dim=-1)


def _rows_by_width(rows: list[int], params: Sequence[SamplingParams]) -> list[list[int]]:
    """Rows with the same top-k together: each set needs as many candidates."""
    sets: dict[int, list[int]] = {}
    for i in rows:
        sets.setdefault(params[i].top_k, []).append(i)
    return list(sets.values())


def _sample_ranked(
    shifted: Tensor, params: list[SamplingParams], u: Tensor, candidates: int = _CANDIDATES
) -> tuple[Tensor, Tensor]:
    """Rows with top-k (the same for all) or top-p: tokens and their log-probs.

    Args:
        shifted: [n, V] logits less their maximum, at temperature 1.
        candidates: Likeliest tokens looked at where only top-p asks; rows whose candidates do not
            reach it are searched again.
    """
    V, device = shifted.shape[1], shifted.device
    scaled = shifted / column([p.temperature for p in params], device)
    top_k = min(params[0].top_k, V)
    width = top_k or min(candidates, V)
    values, indices = scaled.topk(width, dim=-1)  # sorted, likeliest first
    weights = values.exp()
    share = _running_sums(weights.double())
    mass = share[:, -1:] if top_k else scaled.exp().sum(dim=-1, keepdim=True).double()
    wanted = column([p.top_p for p in params], device, torch.float64) * mass
    # the smallest set that reaches top_p: a token stays if those before it have not reached it yet
    keep = (share - weights.double() < wanted) & (weights >= column([p.min_p for p in params], device))
    keep[:, 0] = True
    chosen, kept_total = _invert(torch.where(keep, weights, 0.0), u)
    tokens = indices.gather(1, chosen[:, None])[:, 0]
    logprobs = (values.gather(1, chosen[:, None])[:, 0].double() - kept_total.log()).float()
    if not top_k and width < V:
        # Apart from the others: the order among equal logits depends on how many are asked for, and
        # a row's draw must not depend on its neighbours. A row of NaN compares False, and is not
        # searched.
        short = (share[:, -1:] < wanted)[:, 0].nonzero()[:, 0]
        if len(short):
            of_short = [params[i] for i in short.tolist()]
            tokens[short], logprobs[short] = _sample_ranked(shifted[short], of_short, u[short], 8 * width)
    return tokens, logprobs
