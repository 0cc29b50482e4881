"""The shell around one rank: order of calls, checks, failures as values, combined reports."""

import errno
import json
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.errors import CheckpointError, ConfigError, DataError, DeadlineExceeded, TrainingDiverged
from llamarl.executors.base import ExecutorContext, ExecutorSpec, StepResult
from llamarl.models import device_memory
from llamarl.runtime.base import JobStart, News, Order
from llamarl.runtime.rank_plans import combine_reports, combine_setups, executor_failed, plan_workers, with_states
from llamarl.runtime.tick_record import State
from llamarl.runtime.worker import (
    RankFailure,
    RankReport,
    RankSetup,
    Worker,
    WorkerPlan,
    capture,
    rank_device,
    stack_of,
)
from llamarl.transports.segments import SegmentHandle

CALLS: list[Any] = []


class Executor:
    def __init__(self, config: Any, context: ExecutorContext) -> None:
        CALLS.append(("made", config, context.rank, context.device, context.seed))
        self.outputs: Mapping[str, Any] = {"out": "payload", "late": 1}

    def setup(self) -> None:
        CALLS.append("setup")

    def load(self, folder: Path, tick: int) -> None:
        CALLS.append(("load", folder, tick))

    def initial_token(self, channel: str, source_tick: int) -> str:
        return f"{channel}@{source_tick}"

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        CALLS.append(("step", tick, dict(inputs)))
        return StepResult(outputs=self.outputs, metrics={"count": 3}, spans=(("work", 1.0, 2.0),))

    def save(self, folder: Path, tick: int) -> None:
        assert list(folder.iterdir()) == []
        CALLS.append(("save", folder, tick))

    def close(self) -> None:
        CALLS.append("close executor")
        raise RuntimeError("cannot close")


class End:
    def __init__(self, name: str) -> None:
        self.name = name

    def send(self, tick: int, payload: Any) -> str:
        return f"{self.name}:{tick}:{payload}"

    def receive(self, handles: tuple[Any, ...], deadline_s: float) -> Any:
        return handles, deadline_s

    def close(self) -> None:
        CALLS.append(f"close {self.name}")


@pytest.fixture(autouse=True)
def a_shell_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.runtime.worker.pin", lambda threads: None)
    monkeypatch.setattr("llamarl.runtime.worker.PULL_DEADLINE_S", 9.0)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    CALLS.clear()
    module = ModuleType("fake_channels")
    module.make_sender = lambda spec, *, rank, num_source_ranks, num_sink_ranks: End(spec.name)  # type: ignore[attr-defined]
    module.make_receiver = module.make_sender  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_channels", module)
    return Worker(
        WorkerPlan(
            spec=ExecutorSpec(name="me", factory=f"{__name__}:Executor", config="config", num_ranks=2, device="cpu"),
            rank=1,
            channels=(
                ChannelSpec(name="in", kind=ChannelKind.GATHER, source="other", sink="me"),
                ChannelSpec(name="out", kind=ChannelKind.GATHER, source="me", sink="other"),
                ChannelSpec(name="late", kind=ChannelKind.WEIGHTS, source="me", sink="other", delay=2, capacity=2),
            ),
            num_ranks={"me": 2, "other": 1},
            run_dir=None,
            seed=7,
            first_tick=5,
            load_from=Path("checkpoint"),
            channel_factory="fake_channels",
        )
    )


def test_setup_makes_restores_and_publishes_the_tokens_before_the_first_tick(worker: Worker) -> None:
    setup = worker.setup()
    assert CALLS == [("made", "config", 1, "cpu", 7), "setup", ("load", Path("checkpoint/me/rank_1"), 4)]
    assert setup.initial_tokens == {"late": {3: "late:3:late@3", 4: "late:4:late@4"}}


@pytest.mark.parametrize(("device", "given"), [("cpu", []), ("cuda:1", ["cpu"])])
def test_a_rank_on_a_gpu_keeps_no_host_memory_that_loading_has_freed(
    device: str, given: list[str], worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(device_memory, "give_back_freed", lambda device: found.append(str(device)))
    monkeypatch.setattr("llamarl.runtime.worker._take_device", lambda device: None)
    worker._plan = replace(worker._plan, spec=replace(worker._plan.spec, device=device))
    worker.setup()
    assert found == given and CALLS[-1][0] == "load", "after the state was loaded"


def test_a_factory_that_makes_no_executor_is_told_in_one_sentence(worker: Worker) -> None:
    spec = replace(worker._plan.spec, factory="operator:is_")
    with pytest.raises(ConfigError, match="operator:is_ made a bool, which lacks setup, step, close"):
        Worker(replace(worker._plan, spec=spec)).setup()


def test_a_state_of_which_the_executor_can_make_nothing_is_told_in_one_sentence(worker: Worker) -> None:
    worker.setup()
    executor: Any = worker._executor
    executor.journal = lambda tick: b""

    def restore(state: bytes, tick: int) -> None:
        raise ValueError(f"the token {int(state)}")

    executor.restore = restore
    with pytest.raises(CheckpointError) as raised:
        worker._restore(executor, [b"-7"], 4)
    told = "'me' cannot go on from its state after tick 4 (ValueError: the token -7): if RUN/journal holds it, remove"
    assert str(raised.value).startswith(told) and capture("me", 0, "setup", raised.value).explained
    executor.restore = lambda state, tick: json.loads(state)
    with pytest.raises(CheckpointError, match="after tick 4 .RecursionError"):
        worker._restore(executor, [b"[" * 200_000], 4)


def test_a_tick_pulls_steps_publishes_and_then_saves(worker: Worker, tmp_path: Path) -> None:
    worker.setup()
    CALLS.clear()
    report = worker.run(Order(executor="me", tick=5, inputs={"in": ("h",)}, save_to=tmp_path))
    folder = tmp_path / "me" / "rank_1"
    assert CALLS == [("step", 5, {"in": (("h",), 9.0)}), ("save", folder, 5)]
    assert report.outputs == {"out": "out:5:payload", "late": "late:5:1"}
    assert report.metrics == {"count": 3.0}
    assert [label for label, _, _ in report.spans] == [
        "receive in",
        "work",
        "send out",
        "weight_sync: send late",
        "save",
    ]


def test_a_save_in_the_background_is_reported_until_it_is_written(worker: Worker, tmp_path: Path) -> None:
    worker.setup()
    writing: list[Future[None]] = []
    worker._executor.save = lambda folder, tick: writing.append(Future()) or writing[-1]  # type: ignore[union-attr,method-assign]

    def run(tick: int, save: bool = False, flush_saves: bool = False) -> RankReport:
        folder = tmp_path / str(tick) if save else None
        return worker.run(
            Order(executor="me", tick=tick, inputs={"in": ("h",)}, save_to=folder, flush_saves=flush_saves)
        )

    report = run(5, save=True)
    assert report.saving == (5,) and report.metrics["time/me_save_s"] >= 0
    assert run(6).saving == (5,)
    writing[0].set_result(None)
    assert run(7).saving == ()
    assert run(8, save=True).saving == (8,)
    threading.Timer(0.05, writing[1].set_result, [None]).start()
    assert run(9, save=True).saving == (9,)  # waited for the one before: only one copy of the state at a time
    writing[2].set_exception(OSError(errno.ENOSPC, "No space left on device"))
    report = run(10, flush_saves=True)
    assert "No space left on device" in report.unsaved[9] and report.saving == () and 9 not in report.saved


def test_of_ranks_that_could_not_write_the_first_is_named() -> None:
    def rank(number: int, **unsaved: str) -> RankReport:
        told = {int(tick[1:]): why for tick, why in unsaved.items()}
        return RankReport(
            rank=number, tick=5, outputs={}, metrics={}, spans=(), started_s=0, finished_s=1, unsaved=told
        )

    whole = combine_reports("me", [rank(2, t4="full"), rank(1, t4="gone"), rank(0, t5="slow")], controller_bytes=0)
    assert whole.unsaved == {4: "me rank 1: gone", 5: "me rank 0: slow"}


def test_settling_waits_no_longer_than_its_limit(worker: Worker, tmp_path: Path) -> None:
    worker = Worker(replace(worker._plan, collective_timeout_s=0.05))
    worker.setup()
    worker._executor.save = lambda folder, tick: Future()  # type: ignore[union-attr,method-assign]
    with pytest.raises(DeadlineExceeded, match="'me', rank 1: the state after tick 5 is not yet written"):
        worker.run(Order(executor="me", tick=5, inputs={"in": ("h",)}, save_to=tmp_path, flush_saves=True))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1], "Executor.step of executor 'me' returned list, expected StepResult"),
        (
            StepResult(outputs={"out": 1, "late": 2}, metrics={"best": "high"}),
            "the metric best = 'high', expected a number",
        ),
    ],
)
def test_a_step_that_answers_wrongly_is_told_in_a_sentence(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, answer: Any, said: str
) -> None:
    worker.setup()
    monkeypatch.setattr(worker._executor, "step", lambda tick, inputs: answer)
    with pytest.raises(ConfigError, match=said):
        worker.run(Order(executor="me", tick=5, inputs={"in": ("h",)}))


def test_an_output_for_the_wrong_channels_is_refused(worker: Worker) -> None:
    worker.setup()
    worker._executor.outputs = {"out": 1, "elsewhere": 2}  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match=r"outputs for \['elsewhere', 'out'\] at tick 5, expected .*\['late', 'out'\]"
    ):
        worker.run(Order(executor="me", tick=5, inputs={"in": ("h",)}))


def test_close_closes_all_ends_though_one_fails_and_only_once(worker: Worker) -> None:
    worker.setup()
    CALLS.clear()
    (trouble,) = worker.close()
    assert CALLS == ["close in", "close executor", "close out", "close late"]
    assert "'me', rank 1" in trouble and "RuntimeError: cannot close" in trouble
    assert worker.close() == ()


def test_a_failure_shows_the_executors_frames_and_not_the_shells(worker: Worker) -> None:
    worker.setup()
    worker._executor.outputs = None  # type: ignore[union-attr]

    def fail(tick: int, inputs: object) -> None:
        raise ValueError("inside")

    worker._executor.step = fail  # type: ignore[union-attr,method-assign,assignment]
    try:
        worker.run(Order(executor="me", tick=5))
    except ValueError as error:
        message = capture("me", 1, "tick 5", error).message()
    assert message.startswith("executor 'me', rank 1 (pid ") and "tick 5: ValueError: inside\n" in message
    assert "in fail" in message and "worker.py" not in message


def failure(executor: str, rank: int, at_s: float, error: Exception) -> RankFailure:
    found = capture(executor, rank, "tick 2", error)
    return RankFailure(**{**vars(found), "at_s": at_s, "pid": 1})


def test_of_failures_that_come_together_the_earliest_is_told_whole() -> None:
    error = executor_failed(
        [failure("a", 0, 2.0, ValueError("consequence")), failure("b", 1, 1.0, TrainingDiverged("cause"))]
    )
    first, *_, last = str(error).splitlines()
    assert first == "executor 'b', rank 1 (pid 1), tick 2: llamarl.errors.TrainingDiverged: cause"
    assert last == "also: 'a' rank 0, tick 2: ValueError: consequence"
    assert error.exit_code == TrainingDiverged.exit_code


def test_ranks_that_say_the_same_are_told_in_a_line() -> None:
    first, *others = (failure("a", rank, float(rank), ValueError("x" if rank else "cause")) for rank in range(512))
    said = str(executor_failed([first, failure("b", 7, 9.5, ValueError("y")), *others])).splitlines()
    assert said[-2:] == [
        "also: 'a' rank 1, 2, 3, 4 and 507 more, tick 2: ValueError: x",
        "also: 'b' rank 7, tick 2: ValueError: y",
    ]


def test_a_users_mistake_needs_no_traceback() -> None:
    assert "\n" not in failure("a", 0, 0.0, DataError("line 3")).message()
    assert "\n" in failure("a", 0, 0.0, RuntimeError("bug")).message()


def rank_report(rank: int, finished_s: float) -> RankReport:
    return RankReport(
        rank=rank,
        tick=4,
        outputs={"out": f"handle {rank}"},
        metrics={"rank": rank},
        spans=(),
        started_s=float(rank),
        finished_s=finished_s,
    )


def test_ranks_are_combined_in_rank_order_whatever_the_order_of_arrival() -> None:
    report = combine_reports("me", [rank_report(1, 9.0), rank_report(0, 8.0)], controller_bytes=5)
    assert report.outputs == {"out": ("handle 0", "handle 1")}
    assert (report.metrics, report.started_s, report.finished_s) == ({"rank": 0.5}, 0.0, 9.0)  # mean of 0 and 1
    setups = [RankSetup(rank=1, initial_tokens={"w": {-1: "b"}}), RankSetup(rank=0, initial_tokens={"w": {-1: "a"}})]
    assert combine_setups("me", setups).initial_tokens == {"w": {-1: ("a", "b")}}


def test_metrics_of_shares_are_reduced_as_if_each_were_a_rank_whoever_had_them() -> None:
    shares = [{"response/length_mean": length, "samples/delivered": n} for length, n in ((0.1, 3), (0.2, 1), (0.7, 2))]

    def reduced(*ranks: list[dict[str, float]]) -> Mapping[str, float]:
        reports = [
            replace(rank_report(rank, 1.0), metrics={"time/x_s": float(rank)}, share_metrics=tuple(of))
            for rank, of in enumerate(ranks)
        ]
        return combine_reports("me", reports, controller_bytes=0).metrics

    together = reduced(shares)
    assert together["samples/delivered"] == 6 and together["response/length_mean"] == pytest.approx(1.9 / 6)
    assert reduced(shares[:1], shares[1:]) == {**together, "time/x_s": 1.0}
    assert reduced(*([share] for share in shares)) == {**together, "time/x_s": 2.0}


def plan(executors: list[ExecutorSpec], channels: list[ChannelSpec]) -> dict[str, tuple[WorkerPlan, ...]]:
    job = JobStart(executors=executors, channels=channels, deadline_s=1.0)
    return plan_workers(job, collective_timeout_s=1.0, channel_factory="fake_channels")


def test_a_rank_is_told_only_of_its_own_channels_and_their_ends() -> None:
    executors = [ExecutorSpec(name=name, factory="m:f", num_ranks=n) for name, n in (("a", 1), ("b", 2), ("c", 3))]
    channels = [
        ChannelSpec(name="ab", kind=ChannelKind.GATHER, source="a", sink="b"),
        ChannelSpec(name="bc", kind=ChannelKind.GATHER, source="b", sink="c"),
    ]
    plans = plan(executors, channels)
    assert [p.rank for p in plans["c"]] == [0, 1, 2]
    assert [c.name for c in plans["a"][0].channels] == ["ab"] and plans["a"][0].num_ranks == {"a": 1, "b": 2}
    assert [c.name for c in plans["b"][0].channels] == ["ab", "bc"]


def test_ranks_get_their_own_states_and_those_of_all_where_they_were_another_number() -> None:
    plans = plan([ExecutorSpec(name="a", factory="m:f", num_ranks=2)], [])["a"]
    states = [State(SegmentHandle(0, n, 64, b""), 1, 0) for n in range(3)]
    assert [(p.first_tick, p.restore) for p in with_states(plans, states[:2], first_tick=4)] == [
        (4, (states[0],)),
        (4, (states[1],)),
    ]
    assert [p.restore for p in with_states(plans, states, first_tick=4)] == [tuple(states)] * 2
    assert [p.restore for p in with_states(plans, states[:1], first_tick=4)] == [(states[0],)] * 2


@pytest.mark.parametrize(
    ("counts", "message"), [({"num_ranks": 0}, "num_ranks >= 1"), ({"threads": 0}, "threads >= 1, got 1 and 0")]
)
def test_a_job_without_ranks_or_threads_is_refused(counts: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan([ExecutorSpec(name="a", factory="m:f", **counts)], [])


def test_a_rank_takes_its_own_device_of_the_list() -> None:
    spec = ExecutorSpec(name="a", factory="m:f", num_ranks=2, device="cuda:2,cuda:5")
    assert [rank_device(spec, rank) for rank in (0, 1)] == ["cuda:2", "cuda:5"]


def test_the_stack_of_a_thread_names_the_line_at_which_it_waits() -> None:
    begun, go = threading.Event(), threading.Event()

    def wait_here() -> None:
        begun.set()
        go.wait(10.0)

    thread = threading.Thread(target=wait_here, name="waiting-thread")
    thread.start()
    begun.wait(10.0)
    stack = stack_of("waiting-thread")
    go.set()
    thread.join()
    assert "in wait_here\n    go.wait(10.0)" in stack
    assert stack_of("waiting-thread") == "no call"


def test_a_latest_channel_gives_the_executor_a_feed_that_hears_news_from_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("fake_channels")
    module.make_sender = lambda spec, **_: End(spec.name)  # type: ignore[attr-defined]
    module.make_receiver = module.make_sender  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_channels", module)
    weights = ChannelSpec(
        name="weights", kind=ChannelKind.WEIGHTS, source="other", sink="me", delay=2, capacity=2, latest=True
    )
    executors = [ExecutorSpec(name="me", factory=f"{__name__}:Listener"), ExecutorSpec(name="other", factory="x:y")]
    (made,) = plan(executors, [weights])["me"]
    worker = Worker(made)
    worker.tell(News(executor="me", channel="weights", source_tick=0, handles=("too early",)))
    worker.setup()
    order = Order(executor="me", tick=5, inputs={"weights": ("h3",)}, later={"weights": {4: ("h4",)}})
    CALLS.clear()

    def news() -> None:
        worker.tell(News(executor="me", channel="weights", source_tick=5, handles=("h5",)))

    Listener.while_working = lambda: _in_thread(news)
    report = worker.run(order)
    assert CALLS == [4, 5, (("h3",), 9.0), (("h5",), 9.0)]
    assert report.events == ({"took": 5},)
    Listener.while_working = lambda: None
    CALLS.clear()
    worker.run(Order(executor="me", tick=6, inputs={"weights": ("h4",)}))
    assert CALLS == [5, 5, (("h4",), 9.0), (("h5",), 9.0)]  # what was told in tick 5 is still known
    with pytest.raises(KeyError):
        worker._feeds["weights"].take(3)  # it has left the edge


def _in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


class Listener:
    """Looks at its feed, lets something happen, looks again, takes the oldest and the newest token."""

    while_working: Callable[[], None] = lambda: None

    def __init__(self, config: Any, context: ExecutorContext) -> None: ...

    def setup(self) -> None: ...

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        feed = inputs["weights"]
        CALLS.append(feed.newest())
        type(self).while_working()
        CALLS.append(feed.newest())
        CALLS.append(feed.take(tick - 2))
        CALLS.append(feed.take(feed.newest()))
        return StepResult(events=({"took": feed.newest()},))

    def close(self) -> None: ...
