"""Every interleaving of a small job in which processes die at any point, against the rule that the controller follows.

The job: generator ─▶ reward ─▶ trainer ─▶ (delay s + 1) generator. What is real here: ``Marking``, ``Recovery``. What is modelled:

    process     setup ─▶ idle ─▶ at work ─▶ has written its tokens ─▶ has reported ─▶ idle ...   ; it may die in each of them
    its words   reports and the news of its death, heard in any order at all
    tokens      slots in its memory that are written again in turn (capacity + 1 of them); a slot is held while a token that
                counted lies in it, and is then the slot itself, not a copy; what is not held goes with its process
    state       a number that says everything that it has ever read

A token, and a state, is a hash of all that went into it, so equal numbers mean equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Firing, Marking
from llamarl.controller.recovery import Recovery, Redo
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import Death

NAMES = ("generator", "reward", "trainer")
SETUP, IDLE, WORKS, WRITTEN, DEAD = "setup", "idle", "works", "written", "dead"


def job(max_staleness: int, *, latest: bool = False) -> Graph:
    room = max_staleness + 1
    return Graph(
        tuple(ExecutorSpec(name=n, factory="tests:none") for n in NAMES),
        (
            ChannelSpec(name="completions", kind=ChannelKind.GATHER, source="generator", sink="reward", capacity=room),
            ChannelSpec(name="scored", kind=ChannelKind.SCATTER, source="reward", sink="trainer", capacity=room),
            ChannelSpec(
                name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator",
                delay=room, capacity=room, latest=latest,
            ),
        ),
    )  # fmt: skip


class World:
    """One state of the job. Small values, copied for each step that may follow."""

    def __init__(self, graph: Graph, num_ticks: int, num_deaths: int) -> None:
        self.graph = graph
        first = {t: (("start", 0, "weights", t), t) for t in range(-graph.channels[2].delay, 0)}
        self.slots: dict[tuple[str, int, str, int], tuple[int, int]] = {
            slot: (tick, hash(("weights", tick))) for slot, tick in first.values()
        }
        """(executor, incarnation, channel, slot) -> tick and value of the token in it."""
        self.marking = Marking(
            graph, first_tick=0, num_ticks=num_ticks, initial_tokens={"weights": {t: (h,) for t, h in first.items()}}
        )
        self.recovery = Recovery(max_restarts=num_deaths, window_s=1.0)
        self.phase = dict.fromkeys(NAMES, IDLE)
        self.state = {name: hash(name) for name in NAMES}
        self.sent = dict.fromkeys(NAMES, 0)
        self.order: dict[str, Firing | None] = dict.fromkeys(NAMES)
        self.words: dict[str, tuple[tuple[object, ...], ...]] = {name: () for name in NAMES}
        self.held = dict(self.state)
        """The state after the last tick that counted."""
        self.counted: dict[tuple[str, int], tuple[int, ...]] = {}
        self.deaths_left = num_deaths
        self.fire()

    def branch(self) -> World:
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(other, name, dict(value))
        other.marking = copy(self.marking)
        other.marking.done_ticks = dict(self.marking.done_ticks)
        other.marking._busy = dict(self.marking._busy)
        other.marking._tokens = {name: dict(tokens) for name, tokens in self.marking._tokens.items()}
        other.recovery = copy(self.recovery)
        other.recovery._incarnations = dict(self.recovery._incarnations)
        other.recovery._attempts = list(self.recovery._attempts)
        return other

    def key(self) -> tuple[object, ...]:
        return (
            tuple(self.phase.values()), tuple(self.state.values()), tuple(self.words.values()), self.deaths_left,
            tuple(self.recovery.incarnation(name) for name in NAMES), tuple(self.marking.done_ticks.values()),
            tuple(sorted((n, f.tick, str(f.inputs), str(f.later)) for n, f in self.marking.busy.items())),
            tuple(self.sent.values()), tuple(self.held.values()), frozenset(self.slots.items()),
        )  # fmt: skip

    # -- what may happen next --

    def successors(self) -> Iterator[World]:
        for name in NAMES:
            if self.phase[name] in (SETUP, WORKS, WRITTEN):
                yield self._after(name, "advance")
            for number in range(len(self.words[name])):
                other = self.branch()
                other.hear(name, number)
                yield other
            if self.deaths_left and self.phase[name] != DEAD:
                yield self._after(name, "die")
        notices = {name: i for name in NAMES for i, word in enumerate(self.words[name]) if word[0] == "died"}
        if len(notices) > 1:
            other = self.branch()
            other.hear_deaths([(name, other.take_word(name, number)) for name, number in notices.items()])
            yield other

    def _after(self, name: str, what: str) -> World:
        other = self.branch()
        getattr(other, what)(name)
        return other

    def advance(self, name: str) -> None:
        if self.phase[name] == SETUP:
            self.phase[name] = WORKS if self.order[name] else IDLE
        elif self.phase[name] == WORKS:
            self.write(name)
        else:
            outputs = {
                channel.name: ((self._slot(name, channel), self._tick(name)),) for channel in self.graph.outputs[name]
            }
            said = ("report", self._incarnation_of(name), self._tick(name), tuple(outputs.items()), self.state[name])
            self.words[name] += (said,)
            self.order[name], self.phase[name] = None, IDLE

    def write(self, name: str) -> None:
        firing = self.order[name]
        assert firing is not None
        read = tuple(self.read(handle) for handles in firing.inputs.values() for handle in handles)
        self.state[name] = hash((name, firing.tick, self.state[name], read))
        self.sent[name] += 1
        for channel in self.graph.outputs[name]:
            value = hash((channel.name, firing.tick, self.state[name]))
            self.slots[self._slot(name, channel)] = (firing.tick, value)
        self.phase[name] = WRITTEN

    def read(self, handle: tuple[tuple[str, int, str, int], int]) -> int:
        slot, tick = handle
        assert slot in self.slots, f"the token of tick {tick} went with its process"
        found, value = self.slots[slot]
        assert found == tick, f"the token of tick {tick} was overwritten by that of tick {found}"
        return value

    def die(self, name: str) -> None:
        doing = {SETUP: "setup", IDLE: "between two ticks"}.get(self.phase[name], "a tick")
        cause = f"the kill of which {self.deaths_left - 1} follow"  # two of the same cause would end the run
        self.words[name] += (("died", self._incarnation_of(name), doing, cause),)
        on_edges = {
            slot for tokens in self.marking._tokens.values() for handles in tokens.values() for slot, _ in handles
        }
        mine = (name, self._incarnation_of(name))
        self.slots = {slot: token for slot, token in self.slots.items() if slot[:2] != mine or slot in on_edges}
        self.phase[name], self.order[name] = DEAD, None
        self.deaths_left -= 1

    def take_word(self, name: str, number: int) -> tuple[object, ...]:
        words = self.words[name]
        self.words[name] = (*words[:number], *words[number + 1 :])
        return words[number]

    def hear(self, name: str, number: int) -> None:
        word = self.take_word(name, number)
        if word[0] == "died":
            self.hear_deaths([(name, word)])
            return
        _, incarnation, tick, outputs, state = word
        assert isinstance(incarnation, int) and isinstance(tick, int) and isinstance(outputs, tuple)
        lives = self.phase[name] != DEAD  # for one of an earlier incarnation the rule must know by itself
        if not self.recovery.counts(name, incarnation, held=lives):
            return
        assert (name, tick) not in self.counted, "a tick counted twice"
        assert isinstance(state, int)
        self.counted[name, tick] = (state, *(self.read(handle) for _, handles in outputs for handle in handles))
        self.held[name] = state
        self.marking.complete(name, tick, dict(outputs))
        self.fire()

    def hear_deaths(self, notices: list[tuple[str, tuple[object, ...]]]) -> None:
        deaths = []
        for name, (_, incarnation, doing, cause) in notices:
            assert isinstance(incarnation, int) and isinstance(doing, str) and isinstance(cause, str)
            deaths.append(Death(executor=name, incarnation=incarnation, doing=doing, cause=cause))
        decided = self.recovery.decide(self.marking, deaths, replaceable=NAMES, now_s=0.0)
        assert not isinstance(decided, str), decided
        assert [redo.executor for redo in decided] == [name for name, _ in notices]
        for redo in decided:
            self.bring_up(redo)

    def bring_up(self, redo: Redo) -> None:
        name = redo.executor
        assert redo.first_tick == self.marking.done_ticks[name]
        assert redo.firing is None or redo.firing.tick == redo.first_tick
        self.phase[name], self.state[name], self.order[name] = SETUP, self.held[name], redo.firing
        self.sent[name] = 0

    def fire(self) -> None:
        """As the controller's loop does after each thing that it hears."""
        for firing in self.marking.ready():
            name = firing.executor
            self.order[name] = firing
            if self.phase[name] == IDLE:
                self.phase[name] = WORKS
            elif self.phase[name] == DEAD:  # the order reaches nobody; the news of the death is on its way
                self.order[name] = None

    def _slot(self, name: str, channel: ChannelSpec) -> tuple[str, int, str, int]:
        return name, self._incarnation_of(name), channel.name, self.sent[name] % (channel.capacity + 1)

    def _incarnation_of(self, name: str) -> int:
        return self.recovery.incarnation(name)

    def _tick(self, name: str) -> int:
        firing = self.order[name]
        assert firing is not None
        return firing.tick


def explore(first: World) -> tuple[int, list[World]]:
    """Number of states that can be reached, and those from which nothing follows."""
    seen = {first.key()}
    todo, ends = [first], []
    while todo:
        world = todo.pop()
        followers = list(world.successors())
        if not any(world.words.values()) and all(phase == IDLE for phase in world.phase.values()):
            ends.append(world)
        else:
            assert followers, f"deadlock: {world.phase}\n{world.marking.describe()}"
        for follower in followers:
            if (key := follower.key()) not in seen:
                seen.add(key)
                todo.append(follower)
    return len(seen), ends


@pytest.mark.parametrize(
    ("max_staleness", "num_ticks", "num_deaths", "at_least"),
    [(0, 2, 2, 500), (1, 3, 1, 1_000), (1, 2, 2, 2_000)],
)
def test_whoever_dies_and_whenever_the_job_ends_with_the_tokens_of_the_undisturbed_one(
    max_staleness: int, num_ticks: int, num_deaths: int, at_least: int
) -> None:
    _, (undisturbed, *same) = explore(World(job(max_staleness), num_ticks, num_deaths=0))
    assert all(end.counted == undisturbed.counted for end in same)
    num_states, ends = explore(World(job(max_staleness), num_ticks, num_deaths))
    assert num_states >= at_least
    assert {end.deaths_left for end in ends} == set(range(num_deaths + 1))  # none, some, all of them have happened
    for end in ends:
        assert end.marking.finished, end.marking.describe()
        assert end.counted == undisturbed.counted
        assert end.marking.done_ticks == undisturbed.marking.done_ticks
