"""Deadlines of partial rollouts: hand-worked ticks, and no deadline missed under any order of completion."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from llamarl.executors.partial_rollouts import num_forced, select_deliveries


def test_without_segments_every_active_group_is_forced() -> None:
    assert num_forced([3, 3], tick=3, max_segments=1, prompts_per_step=2) == 2


def test_a_group_is_forced_only_when_its_last_tick_has_come() -> None:
    assert num_forced([4, 5, 5], tick=5, max_segments=3, prompts_per_step=2) == 0
    assert num_forced([4, 5, 5], tick=6, max_segments=3, prompts_per_step=2) == 1


def test_a_crowd_of_equal_deadlines_is_forced_ahead_of_time() -> None:
    """Four groups due at tick 1, two leave a tick: at tick 0 two of them must already go."""
    assert num_forced([0, 0, 0, 0], tick=0, max_segments=2, prompts_per_step=2) == 2
    assert num_forced([0, 0, 0], tick=0, max_segments=2, prompts_per_step=2) == 1


def test_decoding_goes_on_until_the_forced_group_is_complete() -> None:
    admitted = [0, 1, 1]
    assert select_deliveries(admitted, [2, 1], tick=1, max_segments=2, prompts_per_step=2) is None
    assert select_deliveries(admitted, [2, 1, 0], tick=1, max_segments=2, prompts_per_step=2) == [0, 2]


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.floats(0, 1),
    st.integers(0, 2**32),
)
def test_no_deadline_is_ever_missed(prompts_per_step: int, max_segments: int, fill: float, seed: int) -> None:
    pick = random.Random(seed)
    active = prompts_per_step + int(fill * (max_segments - 1) * prompts_per_step)
    groups: list[int] = []
    complete: list[int] = []
    for tick in range(12):
        groups += [tick] * (active - len(groups))
        waiting = [i for i in range(len(groups)) if i not in complete]
        pick.shuffle(waiting)
        while True:
            chosen = select_deliveries(
                groups, complete, tick=tick, max_segments=max_segments, prompts_per_step=prompts_per_step
            )
            if chosen is not None:
                break
            complete.append(waiting.pop())
        assert len(chosen) == prompts_per_step
        assert all(tick - groups[i] <= max_segments - 1 for i in chosen)
        keep = [i for i in range(len(groups)) if i not in chosen]
        complete = [keep.index(i) for i in complete if i not in chosen]
        groups = [groups[i] for i in keep]
