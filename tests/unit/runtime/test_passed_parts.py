"""Parts of ticks between the ranks that make them and those that work ahead on them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.errors import ChannelError, SourceGone
from llamarl.executors.base import ExecutorContext, ExecutorSpec, StepResult
from llamarl.runtime.base import Order
from llamarl.runtime.passed_parts import PartMade, PartOrder, PartsHeard, parts_channel
from llamarl.runtime.ranks import Rank, Ranks
from llamarl.runtime.worker import Worker, WorkerPlan
from llamarl.tick_parts import AHEAD


def made(rank: int, tick: int = 3, part: int = 0) -> PartMade:
    return PartMade(executor="sink", channel="data", tick=tick, part=part, handle=f"{tick}/{part}/{rank}")


def order(tick: int = 3, part: int = 0, ranks: Sequence[int] = (0, 1)) -> PartOrder:
    return PartOrder(channel="data", tick=tick, part=part, handles=tuple(f"{tick}/{part}/{rank}" for rank in ranks))


def test_a_part_is_passed_on_when_all_ranks_have_told_of_it_in_their_order() -> None:
    heard = PartsHeard(lambda executor: 2)
    assert heard.hear("source", 1, 0, made(1)) is None
    assert heard.hear("source", 1, 0, made(1, part=1)) is None
    assert heard.hear("source", 0, 0, made(0)) == order()
    assert heard.hear("source", 0, 0, made(0, part=1)) == order(part=1)


def test_shares_of_two_incarnations_make_no_part() -> None:
    heard = PartsHeard(lambda executor: 2)
    assert heard.hear("source", 0, 0, made(0)) is None
    assert heard.hear("source", 1, 1, made(1)) is None
    assert heard.hear("source", 0, 1, made(0)) == order()


def test_what_never_became_a_part_is_forgotten_with_its_tick() -> None:
    heard = PartsHeard(lambda executor: 2)
    heard.hear("source", 0, 0, made(0, tick=3))
    heard.hear("source", 0, 0, made(0, tick=4))
    assert heard.hear("source", 1, 0, made(1, tick=3)) is None


def test_the_slots_of_parts_hold_those_of_every_tick_on_the_edge_and_of_the_one_being_made() -> None:
    channel = ChannelSpec(name="data", kind=ChannelKind.GATHER, source="a", sink="b", capacity=2, parts=4, kept=True)
    of_parts = parts_channel(channel, 4)
    assert of_parts.capacity + 1 == 3 * 4
    assert not of_parts.kept


class Executor:
    """Takes even parts; sends the parts of its own tick on."""

    def __init__(self, config: Any, context: ExecutorContext) -> None:
        self.context = context
        self.took: list[Any] = []

    def setup(self) -> None:
        pass

    def take_part(self, tick: int, part: int, items: Sequence[Any]) -> bool:
        self.took.append((tick, part, items))
        self.context.send_part(tick, part, [*items, "worked on"])
        return part % 2 == 0

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        return StepResult(outputs={"out": inputs["in"]}, metrics={}, spans=(("work", 1.0, 2.0),))

    def close(self) -> None:
        pass


class End:
    """Its handles are the payloads; an exception among them is raised."""

    def __init__(self, spec: ChannelSpec, **ranks: int) -> None:
        self.spec = spec

    def send(self, tick: int, payload: Any) -> Any:
        return (self.spec.capacity, tick, payload)

    def receive(self, handles: tuple[Any, ...], deadline_s: float) -> Any:
        if isinstance(handles[0], Exception):
            raise handles[0]
        return list(handles)

    def close(self) -> None:
        pass


def worker_of(monkeypatch: pytest.MonkeyPatch, told: list[PartMade], *, passes_parts: bool = True) -> Worker:
    ends = ModuleType("fake_ends")
    ends.make_sender = ends.make_receiver = End  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_ends", ends)
    worker = Worker(
        WorkerPlan(
            spec=ExecutorSpec(name="me", factory=f"{__name__}:Executor"),
            rank=0,
            channels=(
                ChannelSpec(name="in", kind=ChannelKind.GATHER, source="before", sink="me", parts=3),
                ChannelSpec(name="out", kind=ChannelKind.GATHER, source="me", sink="after", parts=3),
            ),
            num_ranks={"me": 1, "before": 1, "after": 1},
            run_dir=None,
            seed=0,
            first_tick=0,
            load_from=None,
            pull_deadline_s=1.0,
            channel_factory="fake_ends",
            deterministic=False,
            passes_parts=passes_parts,
        ),
        told.append,
    )
    worker.setup()
    return worker


def part_order(part: int, payload: Any, tick: int = 0) -> PartOrder:
    return PartOrder(channel="in", tick=tick, part=part, handles=(payload,))


def test_a_part_is_read_worked_on_sent_on_and_counted_in_the_spans_of_its_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[PartMade] = []
    worker = worker_of(monkeypatch, told)
    for part in range(3):
        worker.take_part(part_order(part, f"items {part}"))
    worker.take_part(part_order(0, "of a later tick", tick=1))
    assert told[0] == PartMade(executor="after", channel="out", tick=0, part=0, handle=(5, 0, ["items 0", "worked on"]))
    assert [(one.tick, one.part) for one in told] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    counted = [
        [label for label, _, _ in worker.run(Order(executor="me", tick=tick, inputs={"in": ("h",)})).spans]
        for tick in range(3)
    ]
    rest = ["receive in", "work", "send out"]
    assert counted == [[AHEAD, AHEAD, *rest], [AHEAD, *rest], rest]


@pytest.mark.parametrize("trouble", [ChannelError("it was overwritten"), SourceGone("its process has ended")])
def test_a_part_that_cannot_be_read_any_more_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    worker = worker_of(monkeypatch, [])
    worker.take_part(part_order(0, trouble))
    assert worker._executor.took == []  # type: ignore[union-attr]


def test_where_parts_are_not_passed_on_none_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[PartMade] = []
    worker = worker_of(monkeypatch, told, passes_parts=False)
    worker._executor.context.send_part(0, 0, ["items"])  # type: ignore[union-attr]
    worker.take_part(part_order(0, "items"))
    assert (told, worker._executor.took) == ([], [])  # type: ignore[union-attr]


def test_the_controller_orders_the_sink_at_once_and_leaves_out_what_an_earlier_incarnation_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks({}, {})
    source, second, sink = Rank("source", 0), Rank("source", 0, 1), Rank("sink", 0)
    ranks.of = {"source": [source], "sink": [sink]}
    ordered: list[tuple[Rank, str, Any]] = []

    def command(rank: Rank, doing: str, blob: bytes) -> None:
        *_, method, argument = cloudpickle.loads(blob)
        ordered.append((rank, f"{method}, {doing}", cloudpickle.loads(argument)))

    monkeypatch.setattr(ranks, "_command", command)
    monkeypatch.setattr(ranks, "_spawn", lambda done: None)
    ranks._pass_on(second, cloudpickle.dumps(made(0)))
    assert ordered == []
    ranks._pass_on(source, cloudpickle.dumps(made(0)))
    assert ordered == [(sink, "take_part, tick 3", order(ranks=[0]))]
    ranks._loop.close()
