"""The loop against a runtime made of plain values: order, checkpoints, deadlines, stopping together."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.checkpoint.snapshot import FileRecord
from llamarl.config import load_config
from llamarl.controller import run
from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.controller.run import start_run
from llamarl.controller.saving import Saving
from llamarl.errors import DeadlineExceeded, RunStopped
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import JobStart, Order, Report, SetupReport
from llamarl.settings.job import DeadlineConfig


class FakeRuntime:
    """Runs orders on a virtual clock; an executor's tick takes ``durations[name]`` seconds."""

    def __init__(self, durations: Mapping[str, float], stop_at: Callable[[Order], str] = lambda order: "") -> None:
        self.durations, self.stop_at = durations, stop_at
        self.clock = 0.0
        self.out: list[tuple[float, Order]] = []
        self.log: list[tuple[str, int, float]] = []
        self.saved: list[tuple[str, int]] = []
        self.unsaved: dict[tuple[str, int], dict[int, str]] = {}
        """Executor and tick of a report -> saved ticks that it says it could not write."""
        self.write_for = 0
        """Ticks that the trainer's state takes to be written, beside the ticks that follow."""

    def start(self, job: JobStart) -> Mapping[str, SetupReport]:
        self.channels = job.channels
        return {
            e.name: SetupReport(
                executor=e.name,
                initial_tokens={
                    c.name: {t: (t,) for t in range(job.first_tick - c.delay, job.first_tick)}
                    for c in job.channels
                    if c.source == e.name
                },
            )
            for e in job.executors
        }

    def fire(self, order: Order) -> None:
        self.out.append((self.clock + self.durations[order.executor], order))

    def counted(self) -> Sequence[Report]:
        return ()

    def wait(self, limit_s: float) -> Report:
        self.out.sort(key=lambda item: item[0])
        end, order = self.out[0]
        late_s, late = min((one_s - self.durations[one.executor] + limit_s, one.executor) for one_s, one in self.out)
        if end > late_s:
            self.clock = late_s
            raise DeadlineExceeded(f"no report of {late!r}")
        self.out.pop(0)
        self.clock = end
        self.log.append((order.executor, order.tick, end))
        if order.save_to is not None:
            self.saved.append((order.executor, order.tick))
        outputs = {c.name: (order.tick,) for c in self.channels if c.source == order.executor}
        saving = tuple(
            tick
            for name, tick in self.saved
            if order.executor == name == "trainer" and order.tick < tick + self.write_for and not order.flush_saves
        )
        return Report(
            executor=order.executor,
            tick=order.tick,
            outputs=outputs,
            stop=self.stop_at(order),
            saving=saving,
            unsaved=self.unsaved.pop((order.executor, order.tick), {}),
        )

    def now(self) -> float:
        return self.clock

    def close(self) -> None: ...


class FakeCheckpoints:
    def __init__(self, every: int) -> None:
        self.every, self.required, self.finished_ticks = every, set[int](), list[int]()
        self.given_up: dict[int, str] = {}

    def due(self, tick: int) -> bool:
        return (tick + 1) % self.every == 0 or tick in self.required

    def overdue(self) -> bool:
        return False

    def folder_for(self, tick: int) -> Path | None:
        return Path("checkpoint") if self.due(tick) else None

    def require(self, tick: int) -> None:
        self.required.add(tick)

    def on_saved(self, tick: int, written: Mapping[str, Sequence[FileRecord]]) -> None:
        self.finished_ticks.append(tick)

    def on_unsaved(self, tick: int, why: str) -> None:
        self.given_up[tick] = why

    def finished(self, *, wait: bool = False) -> tuple[int, Path] | None:
        return None


def job(max_staleness: int, middle: str = "reward") -> Graph:
    room = max_staleness + 1
    return Graph(
        tuple(ExecutorSpec(name=n, factory="tests:none") for n in ("generator", middle, "trainer")),
        (
            ChannelSpec(name="completions", kind=ChannelKind.GATHER, source="generator", sink=middle, capacity=room),
            ChannelSpec(name="scored", kind=ChannelKind.SCATTER, source=middle, sink="trainer", capacity=room),
            ChannelSpec(
                name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator", delay=room, capacity=room
            ),
        ),
    )


def test_a_checkpoint_is_finished_when_the_last_executor_has_saved_its_tick() -> None:
    runtime = FakeRuntime({"generator": 1.0, "reward": 1.0, "trainer": 3.0})
    checkpoints = FakeCheckpoints(every=2)
    run_graph(Marking(job(2), num_ticks=6), runtime, seed=0, saving=Saving(job(2), checkpoints))
    assert checkpoints.finished_ticks == [1, 3, 5]
    assert sorted(runtime.saved) == sorted((n, t) for n in ("generator", "reward", "trainer") for t in (1, 3, 5))


def test_a_checkpoint_is_not_finished_while_a_state_is_being_written() -> None:
    runtime = FakeRuntime({"generator": 1.0, "reward": 1.0, "trainer": 3.0})
    runtime.write_for = 2
    checkpoints = FakeCheckpoints(every=3)
    finished_at = {}
    checkpoints.on_saved = lambda tick, written: finished_at.update({tick: runtime.log[-1][:2]})  # type: ignore[method-assign]
    run_graph(Marking(job(1), num_ticks=9), runtime, seed=0, saving=Saving(job(1), checkpoints))
    assert finished_at == {2: ("trainer", 4), 5: ("trainer", 7), 8: ("trainer", 8)}  # the last tick waits for its own


def test_a_state_that_nobody_could_write_gives_its_checkpoint_up_when_all_have_passed_and_the_next_is_taken() -> None:
    runtime = FakeRuntime({"generator": 1.0, "reward": 1.0, "trainer": 3.0})
    runtime.unsaved = {("generator", 1): {1: "full"}, ("trainer", 4): {3: "slow"}}
    runtime.write_for = 1
    checkpoints = FakeCheckpoints(every=2)
    given_up_at = {}
    checkpoints.on_unsaved = lambda tick, why: given_up_at.update({tick: (why, *runtime.log[-1][:2])})  # type: ignore[method-assign]
    run_graph(Marking(job(2), num_ticks=8), runtime, seed=0, saving=Saving(job(2), checkpoints))
    assert checkpoints.finished_ticks == [5, 7]
    assert given_up_at == {1: ("full", "trainer", 2), 3: ("slow", "trainer", 4)}


def test_a_state_that_is_still_to_be_written_gives_its_checkpoint_up_where_its_processes_are_replaced_first() -> None:
    """States are written in the background; that of a trainer, which repeats the tick, is written anew."""
    graph = job(1)
    for first_tick, why in ((4, "generator ended before its state was written"), (3, "")):
        checkpoints = FakeCheckpoints(every=4)
        saving = Saving(graph, checkpoints)
        for name in ("generator", "reward", "trainer"):
            saving.note(Report(executor=name, tick=3, saving=(3,) if name == "generator" else ()))
        saving.redo("generator", first_tick)
        assert checkpoints.finished_ticks == [] and checkpoints.given_up == {}
        saving.note(Report(executor="generator", tick=first_tick))
        assert checkpoints.given_up == ({3: why} if why else {})
        assert checkpoints.finished_ticks == ([] if why else [3])


def test_a_tick_beyond_its_deadline_is_named_with_who_waits_for_whom() -> None:
    runtime = FakeRuntime({"generator": 1.0, "reward": 100.0, "trainer": 1.0})
    with pytest.raises(DeadlineExceeded) as caught:
        run_graph(Marking(job(0), num_ticks=2), runtime, seed=0, deadlines=DeadlineConfig(step_s=30))
    message = str(caught.value)
    assert "no report of 'reward'" in message and "deadlines.step_s = 30" in message
    assert "trainer: at tick 0, waits for token 0 of channel 'scored' from 'reward'" in message
    assert runtime.clock == pytest.approx(31.0)  # the limit runs from the order, not from the last report


def test_a_stop_is_joined_by_everyone_at_one_tick_whose_state_is_saved() -> None:
    runtime = FakeRuntime(
        {"generator": 1.0, "reward": 1.0, "trainer": 5.0},
        stop_at=lambda order: "loss is NaN" if order.executor == "trainer" and order.tick >= 3 else "",
    )
    checkpoints = FakeCheckpoints(every=1000)
    with pytest.raises(RunStopped, match="loss is NaN"):
        run_graph(Marking(job(2), num_ticks=50), runtime, seed=0, saving=Saving(job(2), checkpoints))
    (last,) = checkpoints.finished_ticks
    assert {
        name: max(t for n, t, _ in runtime.log if n == name) for name in ("generator", "reward", "trainer")
    } == dict.fromkeys(("generator", "reward", "trainer"), last)
    assert last >= 3 + 3  # every version on the weights edge was made after the request


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_checkpoint_by_the_clock_is_one_tick_of_everyone_and_is_told_before_its_oldest_version_is_made(
    max_staleness: int,
) -> None:
    runtime = FakeRuntime({"generator": 1.0, "reward": 2.0, "trainer": 5.0})
    told: dict[int, int] = {}  # saved tick -> first trainer tick that knew
    fire = runtime.fire

    def watch(order: Order) -> None:
        if order.executor == "trainer":
            for tick in order.saves:
                told.setdefault(tick, order.tick)
        fire(order)

    runtime.fire = watch  # type: ignore[method-assign]
    checkpoints = FakeCheckpoints(every=1000)
    due_s = iter([18.0, 61.0, 1e9])
    next_s = [next(due_s)]

    def overdue() -> bool:
        if runtime.clock < next_s[0]:
            return False
        next_s[0] = next(due_s)
        return True

    checkpoints.overdue = overdue  # type: ignore[method-assign]
    run_graph(
        Marking(job(max_staleness), num_ticks=30), runtime, seed=0, saving=Saving(job(max_staleness), checkpoints)
    )
    assert len(checkpoints.finished_ticks) == 2 and checkpoints.finished_ticks[0] < checkpoints.finished_ticks[1] < 29
    for tick in checkpoints.finished_ticks:
        assert {name for name, saved in runtime.saved if saved == tick} == {"generator", "reward", "trainer"}
        # the state after tick c holds versions c + 1 - s .. c + 1; tick t is told before version t changes
        assert told[tick] <= max(0, tick + 1 - max_staleness)


@pytest.mark.parametrize("asked_at", [48, 49])
def test_a_stop_near_the_end_runs_no_tick_beyond_it(asked_at: int) -> None:
    runtime = FakeRuntime(
        {"generator": 1.0, "reward": 1.0, "trainer": 5.0},
        stop_at=lambda order: "loss is NaN" if order.executor == "trainer" and order.tick >= asked_at else "",
    )
    with pytest.raises(RunStopped, match="stopped there"):
        run_graph(Marking(job(2), num_ticks=50), runtime, seed=0, saving=Saving(job(2), FakeCheckpoints(every=25)))
    assert {max(t for n, t, _ in runtime.log if n == name) for name in ("generator", "reward", "trainer")} == {49}


# Limits of collectives.


RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "tiny.toml"


@pytest.mark.parametrize(("setup_s", "step_s"), [(600.0, 1800.0), (600.0, 2.0), (1.0, 2.0)])
def test_a_collective_outlasts_every_limit_of_the_controller(setup_s: float, step_s: float) -> None:
    deadlines = DeadlineConfig(setup_s=setup_s, step_s=step_s)
    assert min(deadlines.collective_s - setup_s, deadlines.collective_s - step_s) == 30.0


def test_a_run_gives_its_ranks_the_limit_that_its_deadlines_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made(Exception):
        """The runtime would be made."""

    def make(**how: Any) -> None:
        raise Made(how["collective_timeout_s"])

    monkeypatch.setattr(run, "ProcessRuntime", make)
    words = ["--run.dir", str(tmp_path / "run"), "--deadlines.step_s", "5000"]
    with pytest.raises(Made) as made:
        start_run(load_config(RECIPE, [*words, "--run.cores", "2"]))
    assert made.value.args == (5030.0,)
