"""What the rule decides on given deaths, and when it gives up."""

import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.controller.recovery import Recovery, Redo
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import Death

NAMES = ("source", "sink")


def begun() -> Marking:
    graph = Graph(
        tuple(ExecutorSpec(name=name, factory="tests:none") for name in NAMES),
        (ChannelSpec(name="numbers", kind=ChannelKind.GATHER, source="source", sink="sink", capacity=2),),
    )
    marking = Marking(graph, first_tick=0, num_ticks=5, initial_tokens={})
    marking.ready()
    marking.complete("source", 0, {"numbers": ("token 0",)})
    marking.ready()
    return marking  # source at tick 1, sink at tick 0 with token 0


def death(
    executor: str, doing: str = "tick", cause: str = "signal 11", incarnation: int = 0, from_outside: bool = False
) -> Death:
    return Death(executor=executor, incarnation=incarnation, doing=doing, cause=cause, from_outside=from_outside)


def decide(
    recovery: Recovery,
    marking: Marking,
    deaths: list[Death],
    *,
    now_s: float,
    replaceable: dict[str, int] | None = None,
) -> tuple[Redo, ...] | str:
    """Where the state after each tick is held, unless ``replaceable`` says otherwise."""
    return recovery.decide(marking, deaths, replaceable=replaceable or marking.done_ticks, now_s=now_s)


def rule(max_restarts: int = 3) -> Recovery:
    return Recovery(max_restarts=max_restarts, window_s=60.0)


def test_each_of_the_dead_gets_its_order_again_with_the_tokens_that_lie_on_its_edges() -> None:
    decided = decide(rule(), begun(), [death("sink"), death("source"), death("sink")], now_s=0.0)
    assert not isinstance(decided, str)
    assert [(redo.executor, redo.incarnation, redo.first_tick) for redo in decided] == [
        ("source", 1, 1),
        ("sink", 1, 0),
    ]
    assert [redo.firing.inputs if redo.firing else None for redo in decided] == [{}, {"numbers": ("token 0",)}]


def test_who_waits_for_its_next_order_is_brought_up_without_one() -> None:
    marking = begun()
    marking.complete("sink", 0, {})
    decided = decide(rule(), marking, [death("sink")], now_s=0.0)
    assert not isinstance(decided, str)
    (redo,) = decided
    assert isinstance(redo, Redo) and (redo.first_tick, redo.firing) == (1, None)


def test_the_second_news_of_one_death_changes_nothing_and_a_late_report_does_not_count() -> None:
    recovery, marking = rule(), begun()
    assert recovery.incarnation("sink") == 0
    decide(recovery, marking, [death("sink")], now_s=0.0)
    assert decide(recovery, marking, [death("sink")], now_s=0.1) == ()
    assert recovery.num_restarts == {"sink": 1}
    assert recovery.incarnation("sink") == 1  # a report of 0 is late


def test_the_same_death_at_the_same_tick_twice_ends_the_run_with_its_history() -> None:
    recovery, marking = rule(), begun()
    decide(recovery, marking, [death("sink")], now_s=0.0)
    why = decide(recovery, marking, [death("sink", incarnation=1)], now_s=7.0)
    assert isinstance(why, str) and why.startswith("the same death at the same tick for the second time")
    assert why.splitlines()[1:] == [
        "  7 s ago: 'sink' rank 0, tick (next tick 0): signal 11",
        "  0 s ago: 'sink' rank 0, tick (next tick 0): signal 11",
    ]


def test_a_kill_from_outside_may_meet_the_same_tick_twice_and_ends_the_run_at_the_third() -> None:
    recovery, marking = rule(max_restarts=8), begun()
    for number in range(2):
        killed = death("sink", cause="signal 9", incarnation=number, from_outside=True)
        assert not isinstance(decide(recovery, marking, [killed], now_s=0.0), str)
    killed = death("sink", cause="signal 9", incarnation=2, from_outside=True)
    why = decide(recovery, marking, [killed], now_s=0.0)
    assert isinstance(why, str) and why.startswith("the same death at the same tick for the third time")


def test_one_whose_state_is_in_a_checkpoint_begins_there_and_says_what_is_repeated() -> None:
    marking = begun()
    for tick in (1, 2):
        marking.complete("source", tick, {"numbers": (f"token {tick}",)})
        marking.complete("sink", tick - 1, {})
        marking.ready()
    decided = decide(rule(), marking, [death("sink")], now_s=0.0, replaceable={"sink": 1})
    assert not isinstance(decided, str)
    (redo,) = decided
    assert (redo.first_tick, redo.next_tick, redo.firing and redo.firing.tick) == (1, 2, 2)
    assert redo.describe() == (
        "'sink' rank 0 died (tick): signal 11; brought up again (restart 1), ticks 1 to 2 done again"
    )


def test_one_that_has_done_all_its_ticks_is_left_dead_unless_somebody_waits_for_what_was_not_whole() -> None:
    marking = begun()
    marking.num_ticks = 1  # the source has done that one
    assert decide(rule(), marking, [death("source")], now_s=0.0) == ()
    marking.num_ticks = 2
    marking.complete("source", 1, {"numbers": ("token 1",)})
    assert decide(rule(), marking, [death("source")], now_s=0.0) == ()
    marking.withdraw("numbers", 1)
    decided = decide(rule(), marking, [death("source")], now_s=0.0, replaceable={"source": 0})
    assert [redo.next_tick for redo in decided if isinstance(redo, Redo)] == [2]


def test_who_was_reading_what_went_with_another_is_brought_up_again_without_an_attempt_of_its_own() -> None:
    recovery, marking = rule(max_restarts=1), begun()
    decide(recovery, marking, [death("source")], now_s=0.0)
    assert marking.withdraw("numbers", 0) == "sink" and "sink" not in marking.busy
    redo = recovery.follow(marking, "sink", death("source"), replaceable={"sink": 0})
    assert isinstance(redo, Redo) and (redo.incarnation, redo.firing) == (1, None)
    assert "what it was reading went with 'source'" in redo.describe()
    assert recovery.follow(marking, "sink", death("source"), replaceable={}) == (
        "'sink' was reading what went with 'source', and what it held is not held elsewhere"
    )


def test_another_death_at_that_tick_or_the_same_at_the_next_does_not() -> None:
    recovery, marking = rule(), begun()
    decide(recovery, marking, [death("sink")], now_s=0.0)
    in_setup = decide(recovery, marking, [death("sink", "setup", incarnation=1)], now_s=1.0)
    marking.complete("sink", 0, {})
    later = decide(recovery, marking, [death("sink", incarnation=2)], now_s=2.0)
    assert [len(decided) for decided in (in_setup, later) if not isinstance(decided, str)] == [1, 1]


def test_restarts_are_counted_within_the_window_only() -> None:
    recovery, marking = rule(max_restarts=2), begun()
    for number, now_s in enumerate((0.0, 50.0, 61.0)):  # the first is out of the window by the third
        cause = f"signal {number}"
        decided = decide(recovery, marking, [death("sink", cause=cause, incarnation=number)], now_s=now_s)
        assert not isinstance(decided, str)
    why = decide(recovery, marking, [death("sink", cause="signal 15", incarnation=3)], now_s=62.0)
    assert isinstance(why, str) and "more than recovery.max_restarts = 2 restarts within 60 s" in why


@pytest.mark.parametrize("together", [["source"], ["sink", "source"]])
def test_one_that_cannot_be_brought_up_again_ends_the_run_and_nothing_is_remembered(together: list[str]) -> None:
    recovery = rule()
    why = decide(recovery, begun(), [death(name) for name in together], replaceable={"sink": 0}, now_s=0.0)
    assert why == "'source' is not brought up again: its host is gone, or what it held is not held elsewhere"
    assert recovery.num_restarts == {} and recovery.incarnation("sink") == 0
