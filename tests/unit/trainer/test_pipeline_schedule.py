"""One forward, one backward: against tables worked by hand, and carried out by threads."""

import queue
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llamarl.trainer.pipeline import Action, run_stage, schedule

COST = {"F": 1, "B": 2}


def words(actions: Sequence[Action]) -> str:
    return " ".join(f"{kind}{i}" for kind, i in actions)


def most_alive(actions: list[Action]) -> int:
    """Most micro-batches at once whose forward pass is done and whose backward pass is not."""
    alive = most = 0
    for kind, _ in actions:
        alive += 1 if kind == "F" else -1
        most = max(most, alive)
    return most


def test_fewer_micro_batches_than_stages_by_hand() -> None:
    assert words(schedule(0, 4, 2)) == "F0 F1 B0 B1"
    assert words(schedule(2, 4, 2)) == "F0 F1 B0 B1"
    assert words(schedule(3, 4, 2)) == "F0 B0 F1 B1"
    assert schedule(0, 4, 0) == []


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 8, 20])
def test_a_stage_keeps_no_more_micro_batches_than_there_are_stages_from_it_on(
    num_stages: int, num_microbatches: int
) -> None:
    for stage in range(num_stages):
        actions = schedule(stage, num_stages, num_microbatches)
        assert most_alive(actions) == min(num_stages - stage, num_microbatches)
        for kind in ("F", "B"):
            assert [i for k, i in actions if k == kind] == list(range(num_microbatches))


def finish_times(num_stages: int, num_microbatches: int) -> float:
    """When the last pass ends, each begun as soon as its stage is free and what it reads is there; raises if nobody can go on."""
    left = [schedule(stage, num_stages, num_microbatches) for stage in range(num_stages)]
    free = [0] * num_stages
    ends: dict[tuple[str, int, int], int] = {}
    while any(left):
        ready = []
        for stage, actions in enumerate(left):
            if actions:
                kind, i = actions[0]
                other = stage - 1 if kind == "F" else stage + 1
                needs = (kind, i, other) if 0 <= other < num_stages else None
                if needs is None or needs in ends:
                    ready.append((max(free[stage], ends.get(needs, 0) if needs else 0), stage))
        assert ready, "every stage waits for another"
        start, stage = min(ready)
        kind, i = left[stage].pop(0)
        ends[kind, i, stage] = free[stage] = start + COST[kind]
    return max(free)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 2), (2, 8), (3, 4), (4, 4), (4, 16), (8, 32)])
def test_with_equal_costs_the_pipeline_is_idle_for_the_share_that_theory_says(
    num_stages: int, num_microbatches: int
) -> None:
    busy = num_microbatches * sum(COST.values())
    whole = finish_times(num_stages, num_microbatches)
    assert 1 - busy / whole == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))


class _ByQueues:
    """Neighbours in threads of one process."""

    def __init__(self, stage: int, num_stages: int, hidden: list[Any], gradients: list[Any]) -> None:
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self._stage, self._hidden, self._gradients = stage, hidden, gradients

    def send_hidden(self, microbatch: int, hidden: Tensor) -> None:
        self._hidden[self._stage].put((microbatch, hidden.clone()))

    def receive_hidden(self, microbatch: int) -> Tensor:
        number, hidden = self._hidden[self._stage - 1].get(timeout=20)
        assert number == microbatch
        return hidden

    def send_gradient(self, microbatch: int, gradient: Tensor) -> None:
        self._gradients[self._stage].put((microbatch, gradient.clone()))

    def receive_gradient(self, microbatch: int) -> Tensor:
        number, gradient = self._gradients[self._stage + 1].get(timeout=20)
        assert number == microbatch
        return gradient

    def finish(self) -> None:
        pass


def test_stages_add_up_the_gradients_of_the_whole_over_micro_batches_of_unlike_sizes() -> None:
    torch.manual_seed(0)
    num_stages, sizes = 3, [3, 1, 5, 2, 4]
    layers = [nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Tanh()) for _ in range(num_stages)]
    inputs = [torch.randn(1, n, 4, dtype=torch.float64) for n in sizes]
    sum((nn.Sequential(*layers)(x).square().sum() for x in inputs), torch.zeros(())).backward()
    expected = [[p.grad.clone() for p in layer.parameters() if p.grad is not None] for layer in layers]
    for layer in layers:
        layer.zero_grad()
    hidden, gradients = ([queue.Queue[Any]() for _ in layers] for _ in range(2))
    kept = [0] * num_stages

    def work(stage: int) -> None:
        def forward(i: int, received: Tensor | None) -> Tensor:
            out: Tensor = layers[stage](inputs[i] if received is None else received)
            return out.square().sum() if stage == num_stages - 1 else out

        neighbours = _ByQueues(stage, num_stages, hidden, gradients)
        kept[stage] = run_stage(schedule(stage, num_stages, len(sizes)), neighbours, forward)

    threads = [threading.Thread(target=work, args=(stage,), daemon=True) for stage in range(num_stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert kept == [3, 2, 1]  # as many as there are stages from it on
    for layer, wanted in zip(layers, expected, strict=True):
        for parameter, gradient in zip(layer.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)
