"""Draws over a vocabulary that lies in slices on several ranks, here threads, against draws from whole rows."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_sampler import _logits, _params
from torch import Tensor

from llamarl.engine import cut_sampler
from llamarl.engine.cut_sampler import sample_over_ranks
from llamarl.engine.ranks import EngineRanks
from llamarl.engine.sampler import Draws, sample
from llamarl.engine.sequence import SamplingParams


class Meeting:
    """What the threads of one group put down for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Tensor] = [torch.empty(0)] * size
        self.most = 0
        """Numbers that one rank has put down at once."""

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        self.values[rank] = value.clone()
        self.most = max(self.most, value.numel())
        self.barrier.wait(timeout=20.0)
        found = list(self.values)
        self.barrier.wait(timeout=20.0)
        return found


class ThreadRanks(EngineRanks):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__()
        self.rank, self.size, self._meeting = rank, len(meeting.values), meeting

    def sum(self, part: Tensor) -> Tensor:
        return part.copy_(torch.stack(self._meeting.exchange(self.rank, part)).sum(dim=0))

    def max(self, values: Tensor) -> Tensor:
        return values.copy_(torch.stack(self._meeting.exchange(self.rank, values)).amax(dim=0))

    def gather(self, values: Tensor) -> Tensor:
        return torch.stack(self._meeting.exchange(self.rank, values))


def over_ranks(
    logits: Tensor, params: list[SamplingParams], seeds: list[int], positions: list[int], size: int
) -> tuple[list[Draws], Meeting]:
    """What each of ``size`` ranks draws."""
    V = logits.shape[1]
    step = -(-V // size)
    meeting = Meeting(size)

    def draw(rank: int) -> Draws:
        slice_ = logits[:, rank * step : (rank + 1) * step]
        return sample_over_ranks(slice_, params, seeds, positions, ranks=ThreadRanks(meeting, rank), vocabulary=V)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(draw, range(size))), meeting


def check_same(draws: list[Draws], expected: Draws) -> None:
    for drawn in draws:
        assert drawn.tokens == expected.tokens and drawn.ok == expected.ok
        for i, ok in enumerate(expected.ok):
            if ok:
                assert drawn.logprobs[i] == pytest.approx(expected.logprobs[i], abs=1e-5)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_rank_draws_what_one_rank_draws(size: int) -> None:
    params = [_params(temperature=(1.0, 0.7, 1.5)[i % 3]) for i in range(60)] + [_params(temperature=0.0)] * 4
    logits = torch.stack([_logits(i) for i in range(64)])
    seeds, positions = [1000 + i for i in range(64)], list(range(64))
    draws, _ = over_ranks(logits, params, seeds, positions, size)
    check_same(draws, sample(logits, params, seeds, positions))
    assert all(drawn == draws[0] for drawn in draws)  # also their log-probs, bit for bit
    assert len({token * size // 700 for token in draws[0].tokens}) > 1  # of several ranks' slices


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_no_rank_sends_its_logits(temperature: float) -> None:
    V = 60_000
    logits = torch.stack([_logits(i, vocabulary=V, scale=4.0) for i in range(3)])
    params = [_params(temperature=temperature)] * 3
    draws, meeting = over_ranks(logits, params, [1, 2, 3], [0, 1, 2], 4)
    check_same(draws, sample(logits, params, [1, 2, 3], [0, 1, 2]))
    assert meeting.most == 3 * 3  # three numbers a row


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_on_one_rank_fails_on_all_and_alone(bad: float) -> None:
    logits = torch.stack([_logits(i) for i in range(6)])
    logits[1, 650] = logits[3, 2] = logits[4, 300] = bad
    logits[2, :400] = -math.inf  # one rank has nothing to give
    params = [_params(), _params(), _params(), _params(temperature=0.0), _params(temperature=0.5), _params()]
    draws, _ = over_ranks(logits, params, [5] * 6, list(range(6)), 2)
    expected = sample(logits, params, [5] * 6, list(range(6)))
    assert expected.ok == [True, False, True, False, False, True]
    check_same(draws, expected)


def test_numbers_at_the_ends_of_a_slice_find_a_token_that_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a boundary of two ranks' shares, at 0 and next to 1, with slices that hold nothing likely."""
    row = torch.full((12,), -math.inf)
    row[[1, 2, 6, 7]] = 0.0  # rank 0 has two tokens, rank 1 two, rank 2 none
    numbers = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0 - 2.0**-53], dtype=torch.float64)
    look: Callable[..., object] = lambda seeds, positions: numbers.numpy()  # noqa: E731
    monkeypatch.setattr(cut_sampler, "uniforms", look)
    draws, _ = over_ranks(row.expand(5, 12), [_params()] * 5, [0] * 5, [0] * 5, 3)
    assert draws[0].tokens == [1, 2, 6, 7, 7]
    assert draws[2].logprobs == pytest.approx([math.log(0.25)] * 5)
