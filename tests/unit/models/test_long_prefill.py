"""Prompts whose chunks attend to a long past, a few queries at a time, against attention written out."""

import pytest
import torch
from launches import LargestTensor
from torch import Tensor

from llamarl.models import paged_attention
from llamarl.models.paged_attention import PrefillChunk, most_rows, prefill_attention

BLOCK, HEADS, KV, D = 4, 4, 2, 8


def attend(
    start: int, tokens: int, *, window: int | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor, int]:
    """Of ``tokens`` queries after ``start`` tokens: what the engine computes, what is right, and the most elements of a tensor."""
    rng = torch.Generator().manual_seed(start + tokens)
    length = start + tokens
    blocks = torch.arange(-(-length // BLOCK)) + 1
    keys, values = (torch.randn(len(blocks) + 1, BLOCK, KV, D, generator=rng) for _ in range(2))
    query = torch.randn(tokens, HEADS, D, generator=rng)
    flat_k, flat_v = (x[1:].reshape(-1, KV, D)[:length] for x in (keys, values))
    chunk = PrefillChunk(0, tokens, start, blocks)
    own = [x[None, start:].transpose(1, 2) for x in (flat_k, flat_v)]
    with LargestTensor() as largest, torch.no_grad():
        found = prefill_attention(
            chunk, query, own[0], own[1], keys, values, scale=D**-0.5, window=window, softcap=softcap
        )
    wanted = torch.empty_like(query)
    for t in range(tokens):
        seen = slice(0 if window is None else max(0, start + t - window + 1), start + t + 1)
        for h in range(HEADS):
            scores = flat_k[seen, h // (HEADS // KV)] @ query[t, h] * D**-0.5
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            wanted[t, h] = scores.softmax(0) @ flat_v[seen, h // (HEADS // KV)]
    return found, wanted, largest.elements


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 6, 20])
@pytest.mark.parametrize("start", [0, 13])
@pytest.mark.parametrize("scores", [1, 64, 200])
def test_queries_a_few_at_a_time_see_what_they_see_at_once(
    monkeypatch: pytest.MonkeyPatch, scores: int, start: int, window: int | None, softcap: float | None
) -> None:
    monkeypatch.setattr(paged_attention, "_MOST_SCORES", scores)
    found, wanted, _ = attend(start, 11, window=window, softcap=softcap)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_few_queries_and_the_keys_that_they_may_see_by_hand() -> None:
    chunk = PrefillChunk(0, 5, 6, torch.arange(3))
    assert list(chunk.rows(None, 20)) == [(0, 2, 0, 8), (2, 4, 0, 10), (4, 5, 0, 11)]
    assert list(chunk.rows(3, 8)) == [(0, 2, 4, 8), (2, 4, 6, 10), (4, 5, 8, 11)]
    assert chunk.allowed_in(next(chunk.rows(3, 8)), 3)[0, 0].tolist() == [
        [True, True, True, False],
        [False, True, True, True],
    ]


@pytest.mark.parametrize(("keys", "scores", "rows"), [(1, 1, 1), (10, 3, 1), (7, 16, 2), (7, 15, 1), (1, 9, 3)])
def test_most_rows_by_hand(keys: int, scores: int, rows: int) -> None:
    assert most_rows(keys, scores) == rows


def test_no_tensor_grows_with_queries_times_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "_MOST_SCORES", 1 << 14)
    found, wanted, largest = attend(4000, 64)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert largest < 1.2 * (4064 * KV * D) < 64 * 4064
