"""What the rule decides on given deaths, and when it gives up."""

from __future__ import annotations

import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.controller.recovery import Recovery, Redo
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import Death

BOTH = ("source", "sink")


def begun() -> Marking:
    graph = Graph(
        tuple(ExecutorSpec(name=name, factory="tests:none") for name in BOTH),
        (ChannelSpec(name="numbers", kind=ChannelKind.GATHER, source="source", sink="sink", capacity=2),),
    )
    marking = Marking(graph, first_tick=0, num_ticks=5, initial_tokens={})
    marking.ready()
    marking.complete("source", 0, {"numbers": ("token 0",)})
    marking.ready()
    return marking  # source at tick 1, sink at tick 0 with token 0


def death(executor: str, doing: str = "tick", cause: str = "signal 9", incarnation: int = 0) -> Death:
    return Death(executor=executor, incarnation=incarnation, doing=doing, cause=cause)


def rule(max_restarts: int = 3) -> Recovery:
    return Recovery(max_restarts=max_restarts, window_s=60.0)


def test_each_of_the_dead_gets_its_order_again_with_the_tokens_that_lie_on_its_edges() -> None:
    decided = rule().decide(begun(), [death("sink"), death("source"), death("sink")], replaceable=BOTH, now_s=0.0)
    assert not isinstance(decided, str)
    assert [(redo.executor, redo.incarnation, redo.first_tick) for redo in decided] == [
        ("source", 1, 1),
        ("sink", 1, 0),
    ]
    assert [redo.firing.inputs if redo.firing else None for redo in decided] == [{}, {"numbers": ("token 0",)}]


def test_who_waits_for_its_next_order_is_brought_up_without_one() -> None:
    marking = begun()
    marking.complete("sink", 0, {})
    decided = rule().decide(marking, [death("sink")], replaceable=BOTH, now_s=0.0)
    assert not isinstance(decided, str)
    (redo,) = decided
    assert isinstance(redo, Redo) and (redo.first_tick, redo.firing) == (1, None)


def test_the_second_news_of_one_death_changes_nothing_and_a_late_report_does_not_count() -> None:
    recovery, marking = rule(), begun()
    assert recovery.counts("sink", 0, held=True) and not recovery.counts("sink", 0, held=False)
    recovery.decide(marking, [death("sink")], replaceable=BOTH, now_s=0.0)
    assert recovery.decide(marking, [death("sink")], replaceable=BOTH, now_s=0.1) == ()
    assert recovery.num_restarts == {"sink": 1}
    assert recovery.counts("sink", 1, held=True) and not recovery.counts("sink", 0, held=True)


def test_the_same_death_at_the_same_tick_twice_ends_the_run_with_its_history() -> None:
    recovery, marking = rule(), begun()
    recovery.decide(marking, [death("sink")], replaceable=BOTH, now_s=0.0)
    why = recovery.decide(marking, [death("sink", incarnation=1)], replaceable=BOTH, now_s=7.0)
    assert isinstance(why, str) and why.startswith("the same death at the same tick for the second time")
    assert why.splitlines()[1:] == [
        "  7 s ago: 'sink' rank 0, tick (next tick 0): signal 9",
        "  0 s ago: 'sink' rank 0, tick (next tick 0): signal 9",
    ]


def test_another_death_at_that_tick_or_the_same_at_the_next_does_not() -> None:
    recovery, marking = rule(), begun()
    recovery.decide(marking, [death("sink")], replaceable=BOTH, now_s=0.0)
    in_setup = recovery.decide(marking, [death("sink", "setup", incarnation=1)], replaceable=BOTH, now_s=1.0)
    marking.complete("sink", 0, {})
    later = recovery.decide(marking, [death("sink", incarnation=2)], replaceable=BOTH, now_s=2.0)
    assert [len(decided) for decided in (in_setup, later) if not isinstance(decided, str)] == [1, 1]


def test_restarts_are_counted_within_the_window_only() -> None:
    recovery, marking = rule(max_restarts=2), begun()
    for number, now_s in enumerate((0.0, 50.0, 61.0)):  # the first is out of the window by the third
        cause = f"signal {number}"
        decided = recovery.decide(
            marking, [death("sink", cause=cause, incarnation=number)], replaceable=BOTH, now_s=now_s
        )
        assert not isinstance(decided, str)
    why = recovery.decide(marking, [death("sink", cause="signal 15", incarnation=3)], replaceable=BOTH, now_s=62.0)
    assert (
        isinstance(why, str) and "more than recovery.max_restarts = 2 restarts within recovery.window_s = 60 s" in why
    )


@pytest.mark.parametrize("together", [["source"], ["sink", "source"]])
def test_one_that_cannot_be_brought_up_again_ends_the_run_and_nothing_is_remembered(together: list[str]) -> None:
    recovery = rule()
    why = recovery.decide(begun(), [death(name) for name in together], replaceable=["sink"], now_s=0.0)
    assert why == "'source' is not brought up again: what it held is not held elsewhere"
    assert recovery.num_restarts == {} and recovery.incarnation("sink") == 0
