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

from collections.abc import Callable, Sequence
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
    tokens, logprobs = _draw(logits, params, seeds, positions).cpu().numpy()
    ok = np.isfinite(logprobs)
    return Draws(np.where(ok, tokens, -1).astype(np.int64).tolist(), logprobs.tolist(), ok.tolist())


def _draw(logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """[2, N] fp64, which holds each exactly: tokens, and their log-probs. Of a row whose logits are
    not finite enough to sample from, the log-prob is not finite either."""
    logits_NV = logits.float()
    u_N = to_device(torch.from_numpy(uniforms(seeds, positions)), logits.device)
    alike: dict[tuple[_DrawRows, int], list[int]] = {}  # rows that are drawn together
    for i, p in enumerate(params):
        how = (_greedy, 0) if p.temperature == 0 else (_ranked, p.top_k) if _needs_candidates(p) else (_inverted, 0)
        alike.setdefault(how, []).append(i)
    if len(alike) == 1:
        ((draw_rows, _),) = alike
        return torch.stack([part.double() for part in draw_rows(logits_NV, params, u_N)])
    drawn = torch.empty((2, len(params)), dtype=torch.float64, device=logits.device)
    for (draw_rows, _), chosen in alike.items():
        (rows,) = indices([chosen], logits.device)
        tokens, logprobs = draw_rows(logits_NV[rows], [params[i] for i in chosen], u_N[rows])
        drawn[0, rows], drawn[1, rows] = tokens.double(), logprobs.double()
    return drawn


_DrawRows = Callable[[Tensor, Sequence[SamplingParams], Tensor], tuple[Tensor, Tensor]]
"""Logits [n, V], parameters and uniform numbers of rows that are drawn alike -> tokens and log-probs (fp32) [n]."""


def _greedy(logits: Tensor, params: Sequence[SamplingParams], u: Tensor) -> tuple[Tensor, Tensor]:
    tokens = logits.argmax(dim=-1)
    top = logits.gather(1, tokens[:, None])[:, 0]
    return tokens, top - top  # 0, or NaN


def _inverted(logits: Tensor, params: Sequence[SamplingParams], u: Tensor) -> tuple[Tensor, Tensor]:
    """From the whole vocabulary, or what min-p leaves of it."""
    if any(p.temperature != 1.0 for p in params):
        logits = logits / column([p.temperature for p in params], logits.device)
    weights = logits.softmax(dim=-1)  # NaN in a row stays in that row, and fills it
    if any(p.min_p > 0 for p in params):
        floor = column([p.min_p for p in params], logits.device)
        weights = torch.where(weights >= floor * weights.amax(dim=-1, keepdim=True), weights, 0.0)
    tokens, total = _invert(weights, u)
    return tokens, (weights.gather(1, tokens[:, None])[:, 0] / total).log().float()


def _ranked(logits: Tensor, params: Sequence[SamplingParams], u: Tensor) -> tuple[Tensor, Tensor]:
    """From the likeliest tokens: rows with top-k, the same for all, or top-p."""
    return _among_candidates(logits - logits.amax(dim=-1, keepdim=True), params, u)


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
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, index[:, None])[:, 0]
    inside = weights_NSW.gather(1, index[:, None, None].expand(-1, 1, _SLICE))[:, 0].double()  # [N, W]
    running = _running_sums(inside)
    # rounding may leave the target at or past the slice's own sum: then it is the slice's last possible token
    target = torch.minimum(target - before, torch.nextafter(running[:, -1], torch.zeros_like(before)))
    offset = (running <= target[:, None]).sum(dim=-1).clamp_(max=_SLICE - 1)
    return offset.add_(index, alpha=_SLICE).clamp_(max=V - 1)  # a row that is not finite must stay in range


def _running_sums(rows: Tensor) -> Tensor:
    """Along the last dimension. A single row has company on CUDA: alone it would take a scan whose
    order of sums varies."""
    if rows.is_cuda and len(rows) == 1:
        return rows.expand(2, -1).cumsum(dim=-1)[:1]
    return rows.cumsum(dim=-1)


def _among_candidates(
    shifted: Tensor, params: Sequence[SamplingParams], u: Tensor, candidates: int = _CANDIDATES
) -> tuple[Tensor, Tensor]:
    """As ``_ranked``.

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
            tokens[short], logprobs[short] = _among_candidates(shifted[short], of_short, u[short], 8 * width)
    return tokens, logprobs
