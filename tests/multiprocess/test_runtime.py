"""Both runtimes on a tiny job: equal results; every way to fail ends in time, tells its cause once, leaves nobody behind."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import runtime_program
from forked_command import Started
from runtime_fakes import DELAY, HERE, Config, job
from tools.chaos.processes import descendants, wait_for_end

from llamarl.checkpoint.snapshot import FileRecord
from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.controller.recovery import Recovery
from llamarl.controller.saving import Saving
from llamarl.controller.surviving import SurvivingRuntime
from llamarl.errors import ConfigError, DeadlineExceeded, ExecutorFailed
from llamarl.runtime.base import JobStart, Order, Report, Runtime
from llamarl.runtime.inline import InlineRuntime
from llamarl.runtime.processes import ProcessRuntime
from llamarl.runtime.tick_log import TickLog
from llamarl.settings.job import DeadlineConfig

NUM_TICKS = 5
LIMIT_S = 60.0
"""After which a test gives a program up; far below the deadlines of its job, so that whatever ends in it ended by its cause. How
long ends may take, ``tests/unit/runtime/test_runtime_parts.py`` counts."""


def by_hand(num_ticks: int, num_ranks: int = 1) -> dict[int, int]:
    """Sink's total after each tick, from the recurrence that the three fakes define."""
    total, back = 0, {tick: 100 + tick for tick in range(-DELAY, 0)}
    totals = {}
    for tick in range(num_ticks):
        number = 10 * tick + back[tick - DELAY]
        total += sum(2 * number + rank for rank in range(num_ranks))
        totals[tick] = back[tick] = total
    return totals


class Recorder:
    def __init__(self) -> None:
        self.reports: list[Report] = []

    def on_report(self, report: Report) -> None:
        self.reports.append(report)

    def metric(self, name: str) -> dict[int, float]:
        return {report.tick: report.metrics[name] for report in self.reports if name in report.metrics}


@pytest.fixture
def ranks_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of our own executors are: what they need is imported once. Those of the programs below are no forks."""
    monkeypatch.setattr("llamarl.runtime.local.shares_imports", lambda spec: True)
    monkeypatch.setattr("llamarl.runtime.local.shared_modules", lambda specs, threads: ("llamarl.runtime.commands",))


@pytest.fixture(params=[InlineRuntime, ProcessRuntime], ids=["inline", "local"])
def runtime(request: pytest.FixtureRequest, ranks_are_forks: None) -> Iterator[Runtime]:
    made = request.param(channel_factory=str(HERE))
    yield made
    made.close()


@pytest.fixture
def local(ranks_are_forks: None) -> Iterator[Runtime]:
    made = ProcessRuntime(channel_factory=str(HERE))
    yield made
    made.close()


def run(runtime: Any, spec: Any, **options: Any) -> Recorder:
    executors, channels = spec
    recorder = Recorder()
    graph = Graph(tuple(executors), tuple(channels))
    options = {"seed": 0} | options
    marking = Marking(graph, first_tick=options.pop("first_tick", 0), num_ticks=options.pop("num_ticks", NUM_TICKS))
    saving = Saving(graph, options.pop("checkpoints", None))
    if max_restarts := options.pop("max_restarts", 0):
        recovery = Recovery(max_restarts=max_restarts, window_s=60.0)
        runtime = SurvivingRuntime(runtime, marking, recovery, saving, tell=options.pop("tell", lambda redo: None))
    run_graph(marking, runtime, observers=[recorder], saving=saving, **options)
    return recorder


def test_both_runtimes_give_the_totals_worked_by_hand(runtime: Runtime, tmp_path: Path) -> None:
    recorder = run(runtime, job(), run_dir=tmp_path)
    runtime.close()
    assert recorder.metric("sink/total") == by_hand(NUM_TICKS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed-doubler-0", "closed-sink-0", "closed-source-0"]


def test_a_saved_job_goes_on_as_if_never_stopped(runtime: Runtime, tmp_path: Path) -> None:
    class EveryTick:
        def due(self, tick: int) -> bool:
            return True

        def overdue(self) -> bool:
            return False

        def folder_for(self, tick: int) -> Path | None:
            return tmp_path / str(tick)

        def on_unsaved(self, tick: int, why: str) -> None:
            raise AssertionError(why)

        def on_saved(self, tick: int, written: Mapping[str, Sequence[FileRecord]]) -> None:
            assert sorted(path.name for path in (tmp_path / str(tick)).iterdir()) == ["doubler", "sink", "source"]
            files = {name: [record.path for record in records] for name, records in written.items()}
            assert files == {f"{name} rank 0": [f"{name}/rank_0/state"] for name in ("doubler", "sink", "source")}

    run(runtime, job(), num_ticks=3, checkpoints=EveryTick())
    assert (tmp_path / "2" / "sink" / "rank_0" / "state").read_text() == f"2 {by_hand(3)[2]}"
    again = InlineRuntime(channel_factory=str(HERE))
    # The fake's initial tokens do not know earlier totals, so only what the sink carries over is compared.
    recorder = run(again, job(), first_tick=3, num_ticks=4, load_from=tmp_path / "2")
    assert recorder.metric("sink/total") == {3: by_hand(3)[2] + 2 * (30 + 100 + 1)}


def test_ranks_report_together_handles_keep_rank_order_and_output_arrives_with_its_name(
    local: Runtime, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = run(local, job(num_ranks=3, doubler=Config("print", trouble_rank=1)))
    local.close()
    assert recorder.metric("sink/total") == by_hand(NUM_TICKS, num_ranks=3)
    assert set(recorder.metric("doubler/rank").values()) == {(0.0 + 1.0 + 2.0) / 3}, "the mean of all ranks"
    assert set(recorder.metric("doubler/threads").values()) == {1.0}
    out, err = capfd.readouterr()
    assert "[doubler 1] a line on stdout\n" in out and "[doubler 1] no newline at the end\n" in out
    assert "[doubler 1] a line on stderr\n" in err


def test_bytes_through_the_controller_do_not_grow_with_the_payload(local: Runtime) -> None:
    recorder = run(local, job(source=Config(blob_bytes=5_000_000)), num_ticks=3)
    per_tick = [sum(r.controller_bytes for r in recorder.reports if r.tick == tick) for tick in range(3)]
    assert all(0 < size < 4000 for size in per_tick), per_tick


@pytest.mark.parametrize("trouble_tick", [-1, 2])
def test_an_exception_ends_the_job_and_tells_where_it_came_from(runtime: Runtime, trouble_tick: int) -> None:
    with pytest.raises(ExecutorFailed) as caught:
        run(runtime, job(doubler=Config("raise", trouble_tick)))
    message = str(caught.value)
    assert "'doubler', rank 0" in message and "ValueError: the answer is 42" in message
    assert ("setup" if trouble_tick < 0 else "tick 2") in message
    assert "runtime_fakes.py" in message and 'raise ValueError("the answer is 42")' in message


def test_a_data_error_keeps_its_exit_code_and_needs_no_traceback(runtime: Runtime) -> None:
    with pytest.raises(ExecutorFailed) as caught:
        run(runtime, job(source=Config("bad data", -1)))
    assert caught.value.exit_code == 2
    assert "prompts.jsonl, line 3: not JSON" in str(caught.value) and "Traceback" not in str(caught.value)


def test_sys_exit_in_an_executor_is_a_failure_of_it(local: Runtime) -> None:
    with pytest.raises(ExecutorFailed, match="'doubler', rank 0 .*tick 2: SystemExit: 7"):
        run(local, job(doubler=Config("exit")))


@pytest.fixture
def restarting(ranks_are_forks: None) -> Iterator[ProcessRuntime]:
    made = ProcessRuntime(channel_factory=str(HERE), log=TickLog())
    yield made
    made.close()


def test_who_dies_while_the_job_is_set_up_begins_once_more(restarting: ProcessRuntime, tmp_path: Path) -> None:
    told: list[str] = []
    spec = job(num_ranks=2, source=Config("kill once", -1), doubler=Config("kill once", -1, trouble_rank=1))
    recorder = run(restarting, spec, run_dir=tmp_path, max_restarts=2, tell=lambda redo: told.append(redo.describe()))
    assert recorder.metric("sink/total") == by_hand(NUM_TICKS, num_ranks=2)
    cause = r"died \(setup\): its process was killed by signal 9 \(SIGKILL.*; brought up again \(restart 1\)"
    assert len(told) == 2
    assert all(
        any(re.match(f"{who} {cause}", line) for line in told) for who in ("'source' rank 0", "'doubler' rank 1")
    )


def test_who_is_stopped_while_the_job_is_set_up_begins_once_more(restarting: ProcessRuntime, tmp_path: Path) -> None:
    spec = job(doubler=Config("stop once", -1))
    recorder = run(restarting, spec, run_dir=tmp_path, max_restarts=1, deadlines=DeadlineConfig(setup_s=5.0))
    assert recorder.metric("sink/total") == by_hand(NUM_TICKS)


def test_a_set_up_that_dies_each_time_ends_the_job_with_its_history(restarting: ProcessRuntime, tmp_path: Path) -> None:
    with pytest.raises(ExecutorFailed, match="the same death at the same tick for the third time") as caught:
        run(restarting, job(doubler=Config("kill", -1)), run_dir=tmp_path, max_restarts=8)
    assert str(caught.value).count("'doubler' rank 0, setup (next tick 0)") == 3


def test_who_dies_between_standing_ready_and_the_others_set_up_begins_once_more(
    restarting: ProcessRuntime, tmp_path: Path
) -> None:
    executors, channels = job(source=Config(step_s=1.5))
    dead: list[str] = []

    def kill_the_sink() -> None:
        ranks = restarting._ranks.of["sink"]  # type: ignore[attr-defined]
        while not ranks[0].pid or ranks[0].doing != "between two ticks":
            time.sleep(0.01)
        os.kill(ranks[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_the_sink)
    started = restarting.start

    def start(*args: Any, **options: Any) -> Any:
        threading.Timer(0.2, killer.start).start()
        return started(*args, **options)

    restarting.start = start  # type: ignore[method-assign]
    job_here = (executors, channels)
    run(
        restarting,
        job_here,
        run_dir=tmp_path,
        num_ticks=2,
        max_restarts=1,
        tell=lambda redo: dead.append(redo.death.doing),
    )
    killer.join(10.0)
    assert dead == ["between two ticks"]


def test_the_death_of_an_idle_executor_is_noticed_while_waiting_for_another(local: Runtime) -> None:
    executors, channels = job(source=Config("hang", 0))
    ready = local.start(JobStart(executors=executors, channels=channels, deadline_s=60.0))
    assert set(ready["sink"].initial_tokens["back"]) == {-2, -1}
    local.fire(Order(executor="source", tick=0, inputs={"back": ready["sink"].initial_tokens["back"][-2]}))
    (idle,) = [rank for rank in local._ranks.of["sink"]]  # type: ignore[attr-defined]
    os.kill(idle.pid, signal.SIGKILL)
    with pytest.raises(ExecutorFailed, match="'sink', rank 0 .*between two ticks"):
        local.wait(60.0)


def test_a_hang_ends_at_the_deadline_and_the_message_names_who_did_not_report(local: Runtime) -> None:
    executors, channels = job(num_ranks=2, doubler=Config("hang", 0, trouble_rank=1))
    ready = local.start(JobStart(executors=executors, channels=channels, deadline_s=60.0))
    local.fire(Order(executor="source", tick=0, inputs={"back": ready["sink"].initial_tokens["back"][-2]}))
    numbers = local.wait(60.0).outputs["numbers"]
    local.fire(Order(executor="doubler", tick=0, inputs={"numbers": numbers}))
    with pytest.raises(
        DeadlineExceeded, match=r"limit 2 s; orders out:\n'doubler', tick 0, .* rank 1 \(pid \d+\)"
    ) as caught:
        local.wait(2.0)
    assert "rank 0" not in str(caught.value)
    assert str(caught.value).endswith("time.sleep(1000)"), "the last line is the one at which the executor hangs"


def test_a_setup_that_hangs_ends_at_the_deadline_and_is_named(local: Runtime) -> None:
    with pytest.raises(
        DeadlineExceeded, match=r"limit 3 s:(.*\n)*'doubler', setup, out for \d+\.\d s: no report from rank 0"
    ):
        executors, channels = job(doubler=Config("hang", -1))
        local.start(JobStart(executors=executors, channels=channels, deadline_s=3.0))


def test_inline_tells_a_missed_deadline_after_the_step() -> None:
    runtime = InlineRuntime(channel_factory=str(HERE))
    executors, channels = job()
    ready = runtime.start(JobStart(executors=executors, channels=channels, deadline_s=60.0))
    runtime.fire(Order(executor="source", tick=0, inputs={"back": ready["sink"].initial_tokens["back"][-2]}))
    with pytest.raises(DeadlineExceeded, match="'source' to finish tick 0"):
        runtime.wait(0.0)


def test_inline_refuses_several_ranks() -> None:
    with pytest.raises(ConfigError, match="'doubler' asks for 2"):
        run(InlineRuntime(channel_factory=str(HERE)), job(num_ranks=2))


# -- a controller that is a program of its own ----------------------------------------------------------------------


class Program:
    def __init__(self, tmp_path: Path, num_ticks: int, step_s: float = 600.0, **configs: dict[str, Any]) -> None:
        arguments = json.dumps({"configs": configs, "num_ticks": num_ticks, "step_s": step_s, "run_dir": str(tmp_path)})
        self.process = Started([arguments], program=runtime_program.in_a_session_of_its_own)

    def wait_for(self, line: str) -> None:
        until = time.monotonic() + LIMIT_S
        while not re.search(f"^{line}\n", self.process.out, re.M):
            assert self.process.poll() is None and time.monotonic() < until, (
                f"{line!r} never came; stderr: {self.process.err}"
            )
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        return self.process.wait(LIMIT_S), self.process.err


@pytest.mark.parametrize("tick", [-1, 0], ids=["still coming up", "at work"])
def test_ctrl_c_ends_every_process_and_is_told_in_a_line(tmp_path: Path, tick: int) -> None:
    hang = {"trouble": "hang"} | ({"trouble_tick": -1} if tick < 0 else {})
    program = Program(tmp_path, num_ticks=1000, doubler=hang, source={"trouble": "child", "trouble_tick": tick})
    if tick >= 0:
        program.wait_for("report source 2")
    child, until = tmp_path / "child.pid", time.monotonic() + LIMIT_S
    pids: list[int] = []
    while not (child.exists() and child.read_text() and len(pids) == 3 * 2 + 1) and time.monotonic() < until:
        time.sleep(0.02)
        pids = descendants(program.process.pid)
    assert len(pids) == 3 * 2 + 1 and int(child.read_text()) in pids
    os.killpg(program.process.pid, signal.SIGINT)  # as a terminal does: to everybody
    code, err = program.end()
    assert (code, err.strip()) == (130, "ended: stopped by the user")
    assert not wait_for_end(set(pids), LIMIT_S)


@pytest.mark.long
def test_a_job_that_was_suspended_for_longer_than_its_deadline_goes_on(tmp_path: Path) -> None:
    program = Program(tmp_path, num_ticks=400, step_s=4.0, source={"step_s": 0.02})
    program.wait_for("report sink 200")
    pids = [program.process.pid, *descendants(program.process.pid)]
    assert len(pids) == 1 + 3 * 2, "three guards and their ranks"
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(9.0)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        out, err = program.process.communicate(timeout=60)
    finally:
        program.process.kill()
    assert (program.process.returncode, err) == (0, "")
    assert out.splitlines()[-1] == "report sink 399"


def test_a_failing_program_tells_its_cause_once(tmp_path: Path) -> None:
    program = Program(tmp_path, num_ticks=1000, doubler={"trouble": "kill"})
    program.wait_for("report source 1")
    pids = descendants(program.process.pid)
    returned, err = program.end()
    assert returned == 1
    lines = [line for line in err.splitlines() if "its process" in line]
    assert lines and lines[0].startswith("ended: executor 'doubler'") and len(lines) <= 2, err
    assert err.count("ended:") == 1 and not any(
        noise in err for noise in ("Unhandled", "Task was", "Exception ignored")
    ), err
    assert not wait_for_end(set(pids), LIMIT_S)


def test_a_notebook_whose_thread_runs_an_event_loop_can_be_the_controller(local: Runtime) -> None:
    async def cell() -> Recorder:
        return run(local, job(), num_ticks=1)

    assert asyncio.run(cell()).metric("sink/total") == by_hand(1)


def test_a_rank_tells_how_far_it_is_while_it_works(local: Runtime, tmp_path: Path) -> None:
    heard: list[Mapping[str, str]] = []
    over = threading.Event()

    def listen() -> None:
        while not over.wait(0.05):
            heard.append(local.progress())  # type: ignore[attr-defined]

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        run(local, job(source=Config(step_s=0.6)), num_ticks=2, run_dir=tmp_path)
    finally:
        over.set()
        thread.join()
    told = {(name, words) for one in heard for name, words in one.items()}
    assert ("source", "starting") in told and ("source", "sleeping 1 of 2 halves") in told
    local.close()
