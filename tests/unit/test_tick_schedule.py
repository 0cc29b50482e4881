"""Who leaves at the end of a tick: hand-worked ticks, a slow copy of the rule, no deadline missed in any order."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.executors.generator_shard import GeneratorShard
from llamarl.tick_schedule import NEVER, deliveries, select_due
from llamarl.tick_shares import Dealing


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 9),
    st.integers(1, 4),
    st.floats(0, 1),
    st.integers(0, 2**32),
)
def test_no_deadline_is_missed_where_shares_make_counts_differ_from_tick_to_tick(
    shares: list[int], more: int, max_segments: int, fill: float, seed: int
) -> None:
    """Every replica of a dealing, as ``executors/generator_shard.py`` has it: groups complete in any order."""
    pick = random.Random(seed)
    dealing = Dealing(shares, -(-sum(shares) // min(shares)) + more)
    for replica in range(dealing.num_replicas):
        groups: list[int] = []
        complete: list[int] = []
        shard = GeneratorShard(
            replica, dealing, first_prompt=0, oversubscription=1 + fill * (max_segments - 1), max_segments=max_segments,
            new_group=lambda index, tick: pytest.fail("nothing is sampled here"),
        )  # fmt: skip
        for tick in range(12):
            leaving = dealing.counts(tick)[replica]
            later = dealing.ahead(replica, tick + 1, max_segments)
            groups += [tick] * (shard.num_active(tick) - len(groups))
            waiting = [i for i in range(len(groups)) if i not in complete]
            pick.shuffle(waiting)
            due = [at + max_segments - 1 for at in groups]
            while (chosen := select_due(due, complete, tick=tick, prompts_per_step=leaving, later=later)) is None:
                complete.append(waiting.pop())
            assert len(chosen) == leaving
            assert all(tick - groups[i] <= max_segments - 1 for i in chosen)
            keep = [i for i in range(len(groups)) if i not in chosen]
            complete = [keep.index(i) for i in complete if i not in chosen]
            groups = [groups[i] for i in keep]


def slow_select(deadlines: list[int], order: list[int], tick: int, prompts_per_step: int) -> list[int] | None:
    """By lists and sets, one group after the other."""
    urgent = sorted(range(len(deadlines)), key=lambda i: (deadlines[i], i))
    forced = 0
    for horizon in range(max(deadlines) - tick + 1):
        forced = max(forced, sum(d <= tick + horizon for d in deadlines) - horizon * prompts_per_step)
    must = urgent[:forced]
    if len(order) < prompts_per_step or not set(must) <= set(order):
        return None
    return sorted([*must, *[i for i in order if i not in must][: prompts_per_step - forced]])


@pytest.mark.parametrize("seed", range(6))
def test_the_schedule_of_many_replicas_is_that_of_each_asked_whenever_a_group_is_complete(seed: int) -> None:
    """Moments known beforehand, all replicas at once, against one replica asked moment by moment."""
    rng = np.random.default_rng(seed)
    replicas, active, deliver, tick = 40, int(rng.integers(3, 9)), 3, 5
    born = tick - rng.integers(0, 3, (replicas, active))
    born[:, : max(0, active - 6)] = tick  # feasible: no more than two ticks' worth may be old
    due = np.sort(born + 3, axis=1)
    done = np.where(rng.random((replicas, active)) < 0.1, -1, rng.integers(0, 12, (replicas, active)))
    moment, leaves = deliveries(due, done, tick=tick, prompts_per_step=deliver)
    for replica in range(replicas):
        ranked = np.argsort(done[replica], kind="stable").tolist()
        for now in range(-1, 13):
            order = [i for i in ranked if done[replica, i] <= now]
            chosen = slow_select(due[replica].tolist(), order, tick, deliver)
            assert chosen == select_due(due[replica], order, tick=tick, prompts_per_step=deliver)
            assert (chosen is None) == (now < moment[replica])
            assert chosen is None or chosen == np.flatnonzero(leaves[replica]).tolist()


def test_a_group_of_which_no_moment_is_known_ends_no_tick() -> None:
    # Both are due at tick 4: the second must leave too, and nobody knows when it is complete.
    moment, _ = deliveries([4, 4], [3, NEVER], tick=4, prompts_per_step=2)
    assert moment == NEVER
