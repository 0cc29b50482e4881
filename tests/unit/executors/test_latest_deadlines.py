"""``schedule.weights = "latest"``: which groups may be sampled under which version, so that no token gets too old."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.tick_schedule import NEVER, deadlines, num_startable, select_due, urgency_order


def test_a_token_sets_its_group_the_deadline_at_which_it_is_max_staleness_old() -> None:
    assert deadlines(5, NEVER, max_segments=4, max_staleness=2) == 8  # admitted at 5, four ticks: 5, 6, 7, 8
    assert deadlines(5, 4, max_segments=4, max_staleness=2) == 6
    assert deadlines(5, 6, max_segments=2, max_staleness=2) == 6  # its age is the tighter limit


def test_the_oldest_version_allowed_starts_only_what_can_leave_in_this_tick() -> None:
    assert num_startable(4, tick=5, max_staleness=1, prompts_per_step=3) == 3
    assert num_startable(5, tick=5, max_staleness=1, prompts_per_step=3) == 6
    with pytest.raises(AssertionError, match="too old"):
        num_startable(3, tick=5, max_staleness=1, prompts_per_step=3)


def test_equal_deadlines_are_urgent_in_order_of_admission() -> None:
    assert urgency_order([7, 6, 7, 6]).tolist() == [1, 3, 0, 2]


@dataclass(eq=False)
class Group:
    admitted: int
    left: int
    """Engine steps until it is complete."""
    versions: list[int] = field(default_factory=list)


@settings(deadline=None)  # a busy machine makes no test fail
@given(
    prompts_per_step=st.integers(1, 4),
    max_segments=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    fill=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_whenever_versions_arrive_no_delivered_token_is_older_than_max_staleness(
    prompts_per_step: int, max_segments: int, max_staleness: int, fill: float, seed: int
) -> None:
    pick = random.Random(seed)
    num_active = prompts_per_step + int(fill * (max_segments - 1) * prompts_per_step)
    active: list[Group] = []
    completed: list[Group] = []
    version = 0
    for tick in range(10):
        version = max(version, tick - max_staleness, pick.randint(0, tick))
        active += [Group(tick, pick.randint(1, 12)) for _ in range(num_active - len(active))]
        for _ in range(1000):
            due = deadlines(
                [g.admitted for g in active], [min(g.versions, default=NEVER) for g in active],
                max_segments=max_segments, max_staleness=max_staleness,
            )  # fmt: skip
            order = [active.index(g) for g in completed]
            chosen = select_due(due, order, tick=tick, prompts_per_step=prompts_per_step)
            if chosen is not None:
                break
            if pick.random() < 0.2:
                version = pick.randint(version, tick)  # the trainer can be no further: it needs this tick's batch
            startable = num_startable(
                version, tick=tick, max_staleness=max_staleness, prompts_per_step=prompts_per_step
            )
            for i in urgency_order(due)[:startable]:
                group = active[i]
                if group.left and pick.random() < 0.9:  # some wait in the engine's line
                    group.versions.append(version)
                    group.left -= 1
                    if not group.left:
                        completed.append(group)
        else:
            raise AssertionError(f"tick {tick} does not end")
        assert len(chosen) == prompts_per_step
        gone = [active[i] for i in chosen]
        for group in gone:
            assert not group.left
            assert tick - min(group.versions) <= max_staleness
            assert tick - group.admitted <= max_segments - 1
        active = [g for g in active if not any(g is other for other in gone)]
        completed = [g for g in completed if not any(g is other for other in gone)]
