"""Channels whose sink may take later tokens: what an order carries, who is told, what a replay waits for."""

from collections.abc import Mapping, Sequence

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import JobStart, News, Order, Report, SetupReport


def loop(max_staleness: int) -> Graph:
    room = max_staleness + 1
    return Graph(
        tuple(ExecutorSpec(name=n, factory="tests:none") for n in ("generator", "trainer")),
        (
            ChannelSpec(name="batch", kind=ChannelKind.GATHER, source="generator", sink="trainer", capacity=room),
            ChannelSpec(
                name="weights",
                kind=ChannelKind.WEIGHTS,
                source="trainer",
                sink="generator",
                delay=room,
                capacity=room,
                latest=True,
            ),
        ),
    )


INITIAL = {"weights": {-2: ("v0",), -1: ("v0",)}}


def advance(marking: Marking, executor: str) -> None:
    tick = marking.busy[executor].tick
    outputs = {"generator": {"batch": (tick,)}, "trainer": {"weights": (f"v{tick + 1}",)}}
    marking.complete(executor, tick, outputs[executor])


def test_an_order_carries_the_token_that_is_due_and_the_later_ones_on_the_edge() -> None:
    marking = Marking(loop(1), first_tick=0, num_ticks=9, initial_tokens=INITIAL)
    (first,) = marking.ready()
    assert (first.inputs, first.later) == ({"weights": ("v0",)}, {"weights": {-1: ("v0",)}})
    advance(marking, "generator")
    marking.ready()
    advance(marking, "trainer")  # version 1, while the generator is still at tick 1
    advance(marking, "generator")
    third = next(f for f in marking.ready() if f.executor == "generator")
    assert (third.tick, third.inputs, third.later) == (2, {"weights": ("v1",)}, {"weights": {}})
    advance(marking, "trainer")  # version 2, during tick 2
    advance(marking, "generator")
    fourth = next(f for f in marking.ready() if f.executor == "generator")
    assert (fourth.tick, fourth.inputs) == (3, {"weights": ("v2",)})


def test_a_replay_fires_a_tick_only_when_the_newest_version_that_it_took_is_there() -> None:
    newest_taken = {0: 0, 1: 1}
    marking = Marking(
        loop(1),
        first_tick=0,
        num_ticks=2,
        initial_tokens=INITIAL,
        needs=lambda channel, tick: max(tick - channel.delay, newest_taken[tick] - 1),
    )
    assert [f.executor for f in marking.ready()] == ["generator"]
    advance(marking, "generator")
    assert [f.executor for f in marking.ready()] == ["trainer"]  # the live run had fired the generator beside it
    assert "generator: at tick 1, waits for token 0 of channel 'weights'" in marking.describe()
    advance(marking, "trainer")
    (firing,) = marking.ready()
    assert (firing.executor, firing.later) == ("generator", {"weights": {0: ("v1",)}})


class Clocked:
    """A runtime in which ticks take ``durations`` and what is told is written down."""

    def __init__(self, durations: Mapping[str, float]) -> None:
        self.durations, self.clock = durations, 0.0
        self.out: list[tuple[float, Order]] = []
        self.told: list[tuple[float, News]] = []

    def start(self, job: JobStart) -> Mapping[str, SetupReport]:
        return {
            e.name: SetupReport(executor=e.name, initial_tokens=INITIAL if e.name == "trainer" else {})
            for e in job.executors
        }

    def fire(self, order: Order) -> None:
        self.out.append((self.clock + self.durations[order.executor], order))

    def tell(self, news: News) -> None:
        self.told.append((self.clock, news))

    def counted(self) -> Sequence[Report]:
        return ()

    def wait(self, limit_s: float) -> Report:
        self.out.sort(key=lambda item: item[0])
        self.clock, order = self.out.pop(0)
        outputs = {"generator": {"batch": (order.tick,)}, "trainer": {"weights": (f"v{order.tick + 1}",)}}
        return Report(executor=order.executor, tick=order.tick, outputs=outputs[order.executor])

    def now(self) -> float:
        return self.clock

    def close(self) -> None: ...


def test_a_sink_at_work_hears_of_each_new_token_at_once() -> None:
    runtime = Clocked({"generator": 10.0, "trainer": 3.0})
    run_graph(Marking(loop(1), num_ticks=3), runtime, seed=0)
    # ticks of the generator end at 10, 20, 30; of the trainer at 13, 23, 33, the last one after the generator's last tick
    assert [(at, news.executor, news.source_tick, news.handles) for at, news in runtime.told] == [
        (13.0, "generator", 0, ("v1",)),
        (23.0, "generator", 1, ("v2",)),
    ]


def test_a_sink_that_is_idle_is_told_by_its_next_order() -> None:
    runtime = Clocked({"generator": 1.0, "trainer": 10.0})
    run_graph(Marking(loop(1), num_ticks=5), runtime, seed=0)
    assert runtime.told == []
