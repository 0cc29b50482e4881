"""The schedule that follows from delays and capacities, against hand-worked orders."""

import random

import pytest
from test_controller import job

from llamarl.controller.marking import Marking


def start(max_staleness: int, num_ticks: int, first_tick: int = 0) -> Marking:
    ticks = range(first_tick - max_staleness - 1, first_tick)
    tokens = {"weights": {t: (max(0, t + 1),) for t in ticks}}
    return Marking(job(max_staleness), first_tick=first_tick, num_ticks=num_ticks, initial_tokens=tokens)


def finish(marking: Marking, executor: str, tick: int) -> None:
    """Each executor's token is its tick; the trainer's is the version it made."""
    value = tick + 1 if executor == "trainer" else tick
    marking.complete(executor, tick, {c.name: (value,) for c in marking.graph.outputs[executor]})


def test_staleness_1_starts_batch_1_while_batch_0_is_rewarded() -> None:
    marking = start(1, num_ticks=3)
    assert [(f.executor, f.tick) for f in marking.ready()] == [("generator", 0)]
    finish(marking, "generator", 0)
    assert [(f.executor, f.tick) for f in marking.ready()] == [("generator", 1), ("reward", 0)]
    finish(marking, "generator", 1)
    assert marking.ready() == []  # batch 2 needs version 1, which needs batch 0 trained
    assert "token 0 of channel 'weights' from 'trainer'" in marking.describe()


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_whatever_finishes_first_batch_k_is_made_by_version_k_minus_max_staleness(max_staleness: int) -> None:
    for seed in range(20):
        pick = random.Random(seed)
        marking = start(max_staleness, num_ticks=12)
        running = []
        while not marking.finished:
            running += marking.ready()
            for channel in marking.graph.channels:
                done = marking.done_ticks
                assert done[channel.source] + channel.delay - done[channel.sink] <= channel.capacity
            firing = running.pop(pick.randrange(len(running)))  # any interleaving of completions
            if firing.executor == "generator":
                assert firing.inputs["weights"] == (max(0, firing.tick - max_staleness),)
            else:
                assert all(handles == (firing.tick,) for handles in firing.inputs.values())
            finish(marking, firing.executor, firing.tick)


def test_resume_asks_for_the_versions_that_lie_on_the_weights_edge() -> None:
    marking = start(2, num_ticks=8, first_tick=5)  # checkpoint after tick 4: versions 3, 4, 5
    (firing,) = marking.ready()
    assert (firing.executor, firing.tick, firing.inputs) == ("generator", 5, {"weights": (3,)})
