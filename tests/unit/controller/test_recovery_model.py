"""Every interleaving of a small job in which processes die at any point, against the code that the controller follows.

The job: generator ─▶ reward or critic ─▶ trainer ─▶ (delay s + 1) generator. What is real here: ``Marking``, ``Recovery``,
``SurvivingRuntime``, ``Saving``. What is modelled:

    process     setup ─▶ idle ─▶ at work ─▶ has written its tokens ─▶ has reported ─▶ idle ...   ; it may die in each of them
    its words   reports and the news of its death, heard in any order at all
    tokens      data: memory of its own each; a version of the weights: one of ``capacity`` slots, written again in turn, and still
                being copied when its tick is reported. What is held stays; what is not held goes with its process. Of a trainer
                on another host no version is held: its slots go with it, and a checkpoint has the versions on its edge
    state       a number that says everything that it has ever read; held after each tick (generator, reward), or in checkpoints
                alone (critic, trainer), in which case what it has read since the last one is held

A token, and a state, is a hash of all that went into it, so equal numbers mean equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

import pytest
from test_controller import job

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.controller.recovery import Recovery
from llamarl.controller.saving import Saving
from llamarl.controller.surviving import SurvivingRuntime
from llamarl.errors import ExecutorFailed
from llamarl.runtime.base import Death, Order, Report

SETUP, IDLE, WORKS, WRITTEN, DEAD = "setup", "idle", "works", "written", "dead"
JOURNALED = {"generator", "reward"}
Slot = tuple[str, int, str, int]
Handle = tuple[Slot, int]
"""Where a token lies, and of which tick it is."""


class World:
    """One state of the job, and the runtime of the code that is checked. Small values, copied for each step that may follow."""

    def __init__(
        self, graph: Graph, num_ticks: int, num_deaths: int, saved: frozenset[int], far: frozenset[str] = frozenset()
    ) -> None:
        self.graph, self.due, self.far = graph, saved, far
        self.names = [spec.name for spec in graph.executors]
        (weights,) = (channel for channel in graph.channels if channel.delay)
        first = {t: (("trainer", 0, "weights", t % weights.capacity), t) for t in range(-weights.delay, 0)}
        self.slots: dict[Slot, tuple[int, int, bool]] = {
            slot: (tick, hash(("weights", tick)), True) for slot, tick in first.values()
        }
        """Slot -> tick and value of the token in it, and whether it is whole."""
        self.marking = Marking(
            graph, first_tick=0, num_ticks=num_ticks, initial_tokens={"weights": {t: (h,) for t, h in first.items()}}
        )
        self.recovery = Recovery(max_restarts=num_deaths, window_s=1e9)
        self.saving = Saving(graph)
        self.surviving = self._surviving()
        self.phase = dict.fromkeys(self.names, IDLE)
        self.state = {name: hash(name) for name in self.names}
        self.begins = dict.fromkeys(self.names, 0)
        """The first tick of its present incarnation."""
        self.sent = {name: weights.delay * (name == "trainer") for name in self.names}
        self.order: dict[str, Order | None] = dict.fromkeys(self.names)
        self.words: dict[str, tuple[tuple[Any, ...], ...]] = {name: () for name in self.names}
        self.states = {(name, -1): self.state[name] for name in self.names}
        """(executor, tick) -> its state after that tick, as far as it is held or in a finished checkpoint."""
        self.saves: dict[tuple[int, str], int] = {}
        """(tick, executor) -> its state, in a checkpoint that is not finished."""
        self.last_saved = -1
        self.past: dict[tuple[str, int], Mapping[str, tuple[Handle, ...]]] = {}
        self.counted: dict[tuple[str, int], tuple[int, ...]] = {}
        self.met = frozenset[str]()
        """What has happened on the way here, of what does not happen in every run."""
        self.deaths_left = num_deaths
        self.give()

    def _surviving(self) -> SurvivingRuntime:
        return SurvivingRuntime(self, self.marking, self.recovery, self.saving)  # type: ignore[arg-type]

    def branch(self) -> World:
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(other, name, dict(value))
        other.marking = copy(self.marking)
        other.marking.done_ticks = dict(self.marking.done_ticks)
        other.marking._busy = dict(self.marking._busy)
        other.marking._withdrawn = set(self.marking._withdrawn)
        other.marking._tokens = {name: dict(tokens) for name, tokens in self.marking._tokens.items()}
        other.recovery = copy(self.recovery)
        other.recovery._incarnations = dict(self.recovery._incarnations)
        other.recovery._restarts = dict(self.recovery._restarts)
        other.recovery._attempts = list(self.recovery._attempts)
        other.surviving = other._surviving()
        for own in ("_repeat", "_begins", "_since_s"):
            setattr(other.surviving, own, dict(getattr(self.surviving, own)))
        return other

    def key(self) -> tuple[object, ...]:
        return (
            frozenset(self.phase.items()), frozenset(self.state.items()), frozenset(self.words.items()), self.deaths_left,
            tuple(self.recovery.incarnation(name) for name in self.names), tuple(self.marking.done_ticks.values()),
            tuple(sorted((n, f.tick, str(f.inputs)) for n, f in self.marking.busy.items())),
            frozenset(self.sent.items()), frozenset(self.slots.items()), frozenset(self.marking._withdrawn),
            frozenset((name, str(order)) for name, order in self.order.items()), tuple(sorted(self.surviving._repeat.items())),
            frozenset(self.states.items()), frozenset(self.saves.items()), frozenset(self.begins.items()),
        )  # fmt: skip

    # -- what may happen next --

    def successors(self) -> Iterator[World]:
        for name in list(self.phase):
            if self.may_advance(name):
                yield self._after("advance", name)
            for number in range(len(self.words[name])):
                yield self._after("hear", name, number)
            if self.deaths_left and self.phase[name] != DEAD:
                yield self._after("die", name)
        for slot, (_, _, whole) in self.slots.items():
            if not whole and self._lives(slot):
                yield self._after("copied", slot)
        notices = {name: i for name in self.words for i, word in enumerate(self.words[name]) if word[0] == "died"}
        if len(notices) > 1:
            other = self.branch()
            other.hear_deaths([other.take_word(name, number) for name, number in notices.items()])
            yield other

    def _after(self, what: str, *arguments: Any) -> World:
        other = self.branch()
        getattr(other, what)(*arguments)
        return other

    def may_advance(self, name: str) -> bool:
        order = self.order[name]
        if self.phase[name] == WORKS:  # a reader follows a version that is being copied, to its end
            return all(self.is_whole(handle) for handles in order.inputs.values() for handle in handles)
        if self.phase[name] == WRITTEN:  # a state is written when the versions up to it are whole
            return (
                order.tick not in self.due
                or order.tick < self.begins[name]
                or all(self.slots[s][2] for s in self.slots if s[:2] == self._me(name))
            )
        return self.phase[name] == SETUP

    def is_whole(self, handle: Handle) -> bool:
        """Whether it can be read. One that has gone never will: its reader waits until it is ended."""
        slot, tick = handle
        assert slot in self.slots or slot[0] in self.far, f"the token of tick {tick} went with its process"
        return slot in self.slots and self.slots[slot][2]

    def advance(self, name: str) -> None:
        if self.phase[name] == SETUP:
            self.phase[name] = WORKS if self.order[name] else IDLE
        elif self.phase[name] == WORKS:
            self.write(name)
        else:
            order = self.order[name]
            executor = order.executor
            outputs = {c.name: ((self._slot(name, c), order.tick),) for c in self.graph.outputs[executor]}
            said = ("report", executor, self._me(name)[1], order.tick, tuple(outputs.items()), self.state[name])
            self.words[name] += (said,)
            self.order[name], self.phase[name] = None, IDLE

    def write(self, name: str) -> None:
        order = self.order[name]
        if order.tick < self.begins[name]:
            self.rewrite_product(name, order.tick)
            return
        read = tuple(self.read(handle) for handles in order.inputs.values() for handle in handles)
        self.state[name] = hash((order.executor, order.tick, self.state[name], read))
        for slot in [s for s, (_, _, whole) in self.slots.items() if not whole and s[:2] == self._me(name)]:
            self.copied(slot)  # the one before is waited for
        self.sent[name] += 1
        for channel in self.graph.outputs[order.executor]:
            value = hash((channel.name, order.tick, self.state[name]))
            self.slots[self._slot(name, channel)] = (order.tick, value, channel.kind is not ChannelKind.WEIGHTS)
        self.phase[name] = WRITTEN

    def rewrite_product(self, name: str, tick: int) -> None:
        """A token that lay on an edge where this incarnation begins, from the checkpoint or as the run began."""
        self.sent[name] += 1
        for number, channel in enumerate(self.graph.outputs[name], 1):
            value = self.counted[name, tick][number] if tick >= 0 else hash((channel.name, tick))
            self.slots[self._slot(name, channel)] = (tick, value, True)
        self.phase[name] = WRITTEN
        self.met |= {"a version of before its first tick is made again"}

    def read(self, handle: Handle) -> int:
        slot, tick = handle
        assert slot in self.slots, f"the token of tick {tick} went with its process"
        found, value, whole = self.slots[slot]
        assert found == tick, f"the token of tick {tick} was overwritten by that of tick {found}"
        assert whole, f"the token of tick {tick} is not whole"
        return value

    def copied(self, slot: Slot) -> None:
        tick, value, _ = self.slots[slot]
        self.slots[slot] = tick, value, True

    def die(self, name: str) -> None:
        doing = {SETUP: "setup", IDLE: "between two ticks"}.get(self.phase[name], "a tick")
        cause = f"the kill of which {self.deaths_left - 1} follow"  # two of the same cause would end the run
        self.words[name] += (("died", *self._me(name), doing, cause),)
        self._end(name)
        self.deaths_left -= 1

    def _end(self, name: str, incarnation: int | None = None) -> None:
        me = self._me(name) if incarnation is None else (name, incarnation)
        held = {h for tokens in self.marking._tokens.values() for handles in tokens.values() for h in handles}
        held |= {h for inputs in self.past.values() for handles in inputs.values() for h in handles}
        slots = {slot for slot, _ in held if slot[0] not in self.far}
        self.slots = {slot: token for slot, token in self.slots.items() if slot[:2] != me or slot in slots}
        self.phase[name], self.order[name] = DEAD, None

    def take_word(self, name: str, number: int) -> tuple[Any, ...]:
        words = self.words[name]
        self.words[name] = (*words[:number], *words[number + 1 :])
        return words[number]

    # -- the controller's loop --

    def give(self) -> None:
        for firing in self.marking.ready():
            self.surviving.fire(self.saving.order(firing, self.marking.num_ticks))

    def hear(self, name: str, number: int) -> None:
        word = self.take_word(name, number)
        if word[0] == "died":
            self.hear_deaths([word])
            return
        _, name, incarnation, tick, outputs, state = word
        lives = self.phase[name] != DEAD  # for one of an earlier incarnation the rule must know by itself
        if not lives or incarnation != self.recovery.incarnation(name):
            return
        again = tick < self.marking.done_ticks[name]
        lost = {channel for channel, at in self.marking.withdrawn(name) if at == tick}
        told = {channel: handles for channel, handles in outputs if not again or channel in lost}
        self.surviving.take(Report(executor=name, tick=tick, outputs=told))
        if again:
            if tick >= self.begins[name]:
                self.met |= {"a tick that has counted is repeated"}
            if lost:
                self.met |= {"a version is made again"}
        else:
            assert (name, tick) not in self.counted, "a tick counted twice"
            values = (self.slots[slot][1] for _, handles in outputs for slot, _ in handles)
            self.counted[name, tick] = (state, *values)
            firing = self.marking.busy[name]
            self.marking.complete(name, tick, dict(outputs))
            if name in JOURNALED:
                self.states = {at: s for at, s in self.states.items() if at[0] != name or at[1] <= self.last_saved}
                self.states[name, tick] = state
            else:
                self.past[name, tick] = firing.inputs
        at_start = tick < self.begins[name]
        if tick in self.due and not at_start:
            self.saves[tick, name] = state
            self.finish(tick)
        self.give()

    def finish(self, tick: int) -> None:
        if all((tick, name) in self.saves for name in self.names):
            for name in self.names:
                self.states[name, tick] = self.saves.pop((tick, name))
            self.last_saved = tick
            self.past = {at: inputs for at, inputs in self.past.items() if at[1] > tick}

    def hear_deaths(self, words: list[tuple[Any, ...]]) -> None:
        deaths = [Death(executor=n, incarnation=i, doing=doing, cause=cause) for _, n, i, doing, cause in words]
        redos = self.surviving.bring_back(ExecutorFailed("they died"), deaths)
        if len(redos) > len(deaths):
            self.met |= {"a reader of a version is brought up again"}
        for redo in redos:
            self.saves = {at: s for at, s in self.saves.items() if at[1] != redo.executor or at[0] < redo.first_tick}
        self.give()

    # -- what the runtime does for it --

    def now(self) -> float:
        return 0.0

    def fire(self, order: Order) -> None:
        name = order.executor
        if self.phase[name] != DEAD:  # else it reaches nobody; the news of the death is on its way
            self.order[name] = order
            self.phase[name] = WORKS if self.phase[name] == IDLE else self.phase[name]

    def replaceable(self) -> dict[str, int]:
        done = self.marking.done_ticks
        return {name: done[name] if name in JOURNALED else self.last_saved + 1 for name in self.names}

    def stop(self, name: str) -> frozenset[tuple[str, int]]:
        if self.phase[name] != DEAD:
            self._end(name)
        on_edges = {
            (channel, tick): slot
            for channel, tokens in self.marking._tokens.items()
            for tick, handles in tokens.items()
            for slot, _ in handles
        }
        mine = {at: slot for at, slot in on_edges.items() if slot[0] == name}
        torn = {at: slot for at, slot in mine.items() if slot not in self.slots or not self.slots[slot][2]}
        self.slots = {slot: token for slot, token in self.slots.items() if slot not in torn.values()}
        return frozenset(torn)

    def replace(self, name: str, *, incarnation: int, first_tick: int) -> None:
        assert self.phase[name] == DEAD, "two processes of one rank"
        self.phase[name], self.state[name], self.sent[name] = SETUP, self.states[name, first_tick - 1], 0
        self.begins[name] = first_tick

    def past_inputs(self, name: str, tick: int) -> Mapping[str, tuple[Handle, ...]]:
        return self.past[name, tick]

    def _me(self, name: str) -> tuple[str, int]:
        return name, self.recovery.incarnation(name)

    def _lives(self, slot: Slot) -> bool:
        return slot[:2] == self._me(slot[0]) and self.phase[slot[0]] != DEAD

    def _slot(self, name: str, channel: ChannelSpec) -> Slot:
        number = self.sent[name] - 1
        return *self._me(name), channel.name, number % channel.capacity if channel.delay else number


def explore(first: World) -> tuple[int, list[World], frozenset[str]]:
    """Number of states that can be reached, those at which the job is done, and what was met on all ways."""
    seen = {first.key()}
    todo, ends = [first], []
    met = first.met
    while todo:
        world = todo.pop()
        met |= world.met
        followers = list(world.successors())
        at_rest = all(phase in (IDLE, DEAD) for phase in world.phase.values())
        if not any(world.words.values()) and at_rest and world.marking.finished:
            ends.append(world)
        else:
            assert followers, f"deadlock: {world.phase}\n{world.marking.describe()}"
        for follower in followers:
            if (key := follower.key()) not in seen:
                seen.add(key)
                todo.append(follower)
    return len(seen), ends, met


BEFORE = "a version of before its first tick is made again"
REPEATED, REMADE = "a tick that has counted is repeated", "a version is made again"
FOLLOWED = "a reader of a version is brought up again"


@pytest.mark.parametrize(
    ("middle", "max_staleness", "num_ticks", "num_deaths", "saved", "far", "at_least", "met"),
    [
        ("reward", 0, 2, 2, (), "", 1_000, {REPEATED, REMADE, FOLLOWED}),
        ("reward", 1, 3, 1, (0,), "", 1_000, {REPEATED}),
        ("reward", 0, 2, 2, (), "trainer", 1_000, {REPEATED, REMADE, FOLLOWED, BEFORE}),
        ("reward", 1, 3, 1, (0,), "trainer", 1_000, {REPEATED, REMADE, FOLLOWED, BEFORE}),
        ("critic", 0, 2, 2, (0,), "trainer", 1_000, {REPEATED, REMADE, FOLLOWED, BEFORE}),
    ],
)
def test_whoever_dies_and_whenever_the_job_ends_with_the_tokens_of_the_undisturbed_one(
    middle: str,
    max_staleness: int,
    num_ticks: int,
    num_deaths: int,
    saved: tuple[int, ...],
    far: str,
    at_least: int,
    met: set[str],
) -> None:
    graph, due = job(max_staleness, middle), frozenset(saved)
    _, (undisturbed, *same), _ = explore(World(graph, num_ticks, 0, due))
    assert all(end.counted == undisturbed.counted for end in same)
    num_states, ends, found = explore(World(graph, num_ticks, num_deaths, due, far=frozenset({far} - {""})))
    assert num_states >= at_least
    assert {end.deaths_left for end in ends} == set(range(num_deaths + 1))  # none, some, all of them have happened
    assert found == met
    for end in ends:
        assert end.counted == undisturbed.counted
        assert end.marking.done_ticks == undisturbed.marking.done_ticks
        assert end.last_saved == max(saved, default=-1)
