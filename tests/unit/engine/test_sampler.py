import math

import numpy as np
import pytest
import torch

from llamarl.engine.sampler import sample, uniforms
from llamarl.engine.sequence import SamplingParams

V = 700  # not a multiple of the sampler's slice


def _params(**changes: float) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 1, **changes})  # type: ignore[arg-type]


def _logits(seed: int = 0, scale: float = 2.0, vocabulary: int = V) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def _reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution, the slow way: sort, filter one after the other, renormalise."""
    p = torch.softmax(logits.double() / params.temperature, -1)
    order = p.argsort(descending=True)
    kept = order[: params.top_k] if params.top_k else order
    masses = p[kept] / p[kept].sum()
    nucleus, mass = [], 0.0
    for token, share in zip(kept.tolist(), masses.tolist(), strict=True):
        if mass >= params.top_p:
            break
        nucleus.append(token)
        mass += share
    survivors = [t for t in nucleus if p[t] >= params.min_p * p.max()]
    result = torch.zeros_like(p)
    result[survivors] = p[survivors] / p[survivors].sum()
    return result


FILTERS = [
    {},
    {"temperature": 0.6},
    {"top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.7, "min_p": 0.2},
    {"temperature": 3.0, "top_p": 0.999},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_samples_follow_the_filtered_distribution(filters: dict[str, float]) -> None:
    params, logits, n = _params(**filters), _logits(), 20_000
    draws = sample(logits.expand(n, V), [params] * n, [11] * n, range(n))  # type: ignore[arg-type]
    expected = _reference(logits, params) * n
    counts = torch.bincount(torch.tensor(draws.tokens), minlength=V).double()
    assert counts[expected == 0].sum() == 0
    big = expected >= 5
    cells = torch.cat([counts[big], counts[~big].sum()[None]])
    means = torch.cat([expected[big], expected[~big].sum()[None]])
    cells, means = cells[means > 0], means[means > 0]
    chi_square = ((cells - means) ** 2 / means).sum().item()
    freedom = len(cells) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations; the seeds are fixed
    logprobs = torch.tensor(draws.logprobs).double()
    torch.testing.assert_close(logprobs, (expected / n).log()[draws.tokens], atol=2e-5, rtol=1e-5)


def test_a_draw_does_not_depend_on_what_else_is_in_the_batch() -> None:
    rows = torch.stack([_logits(i) for i in range(14)])
    params = [_params(**FILTERS[i % len(FILTERS)]) for i in range(13)] + [_params(temperature=0.0)]
    seeds, positions = [1000 + i for i in range(14)], list(range(14))
    together = sample(rows, params, seeds, positions)
    for i in range(14):
        alone = sample(rows[i : i + 1], [params[i]], [seeds[i]], [positions[i]])
        assert alone.tokens == [together.tokens[i]]
        assert alone.logprobs == pytest.approx([together.logprobs[i]], abs=1e-6)


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = _logits(4)
    draws = sample(logits[None], [_params(temperature=0.0, top_k=3)], [5], [0])
    assert draws.tokens == [int(logits.argmax())]
    assert draws.logprobs == [0.0]  # certain under the distribution sampled from


def test_rows_that_are_not_finite_are_marked_and_do_not_touch_the_others() -> None:
    rows = torch.stack([_logits(1), _logits(2), _logits(3), _logits(4)])
    clean = sample(rows, [_params(top_p=0.9)] * 4, [1, 2, 3, 4], [0] * 4)
    rows[1, 17] = float("nan")
    rows[2, 5] = float("inf")
    for filters in FILTERS:
        draws = sample(rows, [_params(**filters)] * 4, [1, 2, 3, 4], [0] * 4)
        assert draws.ok == [True, False, False, True]
        assert draws.tokens[1:3] == [-1, -1]
    draws = sample(rows, [_params(top_p=0.9)] * 4, [1, 2, 3, 4], [0] * 4)
    assert (draws.tokens[0], draws.tokens[3]) == (clean.tokens[0], clean.tokens[3])


def test_wide_nucleus_over_a_large_vocabulary_widens_the_search() -> None:
    logits = torch.zeros(5000)  # uniform: the nucleus of 0.9 has 4500 tokens
    draws = sample(logits.expand(3000, -1), [_params(top_p=0.9)] * 3000, [1] * 3000, range(3000))  # type: ignore[arg-type]
    assert set(np.round(np.exp(draws.logprobs) * 4500, 2)) == {1.0}
    assert len(set(draws.tokens)) > 1500


def test_uniforms_are_a_function_of_seed_and_position_and_evenly_spread() -> None:
    u = uniforms([7] * 20_000, range(20_000))  # type: ignore[arg-type]
    assert 0.0 <= u.min() and u.max() < 1.0
    counts, _ = np.histogram(u, bins=50, range=(0.0, 1.0))
    assert ((counts - 400) ** 2 / 400).sum() < 49 + 4 * math.sqrt(98)
    assert uniforms([7, 8], [3, 3])[0] == u[3]
    assert uniforms([(1 << 64) - 1], [0])[0] != u[0]


def test_uniform_matches_splitmix64_in_plain_integers() -> None:
    from llamarl.determinism import _splitmix64

    expected = (_splitmix64(123456789012345678 ^ _splitmix64(42)) >> 11) / 2**53
    assert uniforms([123456789012345678], [42])[0] == expected


def test_a_draw_does_not_depend_on_neighbours_that_need_a_wider_search_among_equal_logits() -> None:
    V = 20_000
    steep = (_logits(1, 2.0, V)).bfloat16().float()  # many equal values, as in bf16
    flat = torch.zeros(V)
    for seed in range(40):
        own = _params(top_p=0.5)
        alone = sample(steep[None], [own], [seed], [0])
        beside = sample(
            torch.stack([flat, steep, flat]), [_params(top_p=0.99), own, _params(top_p=0.9)], [9, seed, 7], [0, 0, 0]
        )
        assert (beside.tokens[1], beside.logprobs[1]) == (alone.tokens[0], alone.logprobs[0])
