"""A job whose ranks lie on several hosts, each a worker program here: same totals; deaths told with their host; nobody left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from loopback_hosts import LoopbackHost, loopback_hosts, worker_key, workers
from runtime_fakes import HERE, Config, job

from llamarl.controller.config import DeadlineConfig
from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.controller.recovery import Recovery, Redo
from llamarl.controller.replacing import Replacing
from llamarl.errors import ExecutorFailed
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import Report
from llamarl.runtime.hosts.launcher import HostLauncher
from llamarl.runtime.processes import ProcessRuntime

WHERE = {"source": (0,), "doubler": (0, 1), "sink": (1,)}


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[LoopbackHost]]:
    with loopback_hosts("ab") as made:
        yield made


def runtime_over(
    hosts: list[LoopbackHost],
    where: Mapping[str, tuple[int, ...]] = WHERE,
    silence_s: float = 30.0,
    *,
    restarts: bool = False,
) -> ProcessRuntime:
    launcher = HostLauncher(workers(hosts), where, worker_key(silence_s=silence_s))
    return ProcessRuntime(channel_factory=str(HERE), launchers=dict.fromkeys(where, launcher), restarts=restarts)


class Recorder:
    def __init__(self) -> None:
        self.reports: list[Report] = []

    def on_report(self, report: Report) -> None:
        self.reports.append(report)

    def totals(self) -> list[float]:
        return [report.metrics["sink/total"] for report in self.reports if report.executor == "sink"]


def run(runtime: ProcessRuntime, num_ticks: int = 4, **configs: Config) -> Recorder:
    executors, channels = job(num_ranks=2, **configs)
    recorder = Recorder()
    try:
        run_graph(Graph(tuple(executors), tuple(channels)), runtime, num_ticks=num_ticks, seed=0, observers=[recorder])
    finally:
        runtime.close()
    return recorder


def ranks_on(hosts: list[LoopbackHost]) -> list[int]:
    """Processes below the workers."""
    found = []
    for host in hosts:
        listed = subprocess.run(["pgrep", "-P", str(host.process.pid)], capture_output=True, text=True, check=False)
        found += [int(pid) for pid in listed.stdout.split()]
    return found


def none_left(hosts: list[LoopbackHost], within_s: float = 10.0) -> float:
    began = time.monotonic()
    while ranks_on(hosts):
        assert time.monotonic() - began < within_s, ranks_on(hosts)
        time.sleep(0.02)
    return time.monotonic() - began


def test_ranks_on_two_hosts_give_what_one_machine_gives(
    hosts: list[LoopbackHost], capfd: pytest.CaptureFixture[str]
) -> None:
    over = run(runtime_over(hosts), doubler=Config("print", trouble_rank=1))
    here = run(ProcessRuntime(channel_factory=str(HERE)), doubler=Config("print", trouble_rank=1))
    assert over.totals() == here.totals() and len(here.totals()) == 4
    printed = capfd.readouterr()
    assert printed.out.count("[doubler 1] a line on stdout\n") == 2
    assert printed.out.count("[doubler 1] no newline at the end\n") == 2
    assert printed.err.count("[doubler 1] a line on stderr\n") == 2
    none_left(hosts)


def test_a_host_says_which_places_it_does_not_reach(hosts: list[LoopbackHost]) -> None:
    launcher = HostLauncher(workers(hosts), WHERE, worker_key())
    runtime = ProcessRuntime(channel_factory=str(HERE), launchers=dict.fromkeys(WHERE, launcher))
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()
        closed.close()

        class Asks:
            def on_report(self, report: Report) -> None:
                if report.executor == "sink" and not said:
                    said.append(launcher.why_unreached([0, 1], [there.getsockname()]))
                    said.append(launcher.why_unreached([1], [gone, there.getsockname()]))

        executors, channels = job(num_ranks=2)
        try:
            run_graph(Graph(tuple(executors), tuple(channels)), runtime, num_ticks=2, seed=0, observers=[Asks()])
        finally:
            runtime.close()
    assert said == ["", f"host b does not reach others: 127.0.0.1:{gone[1]}: Connection refused"]


def test_executors_that_are_given_no_host_stay_here(hosts: list[LoopbackHost]) -> None:
    assert len(run(runtime_over(hosts, {"doubler": (0, 1)})).totals()) == 4
    none_left(hosts)


@pytest.mark.long  # beside make test-hosts, whose trainers span four hosts
def test_ranks_of_two_hosts_meet_in_one_process_group(hosts: list[LoopbackHost]) -> None:
    spec = ExecutorSpec(name="reducer", factory=f"{HERE}:Reducer", config=Config(), num_ranks=3, process_group="gloo")
    runtime, recorder = runtime_over(hosts, {"reducer": (0, 0, 1)}), Recorder()
    try:
        run_graph(Graph((spec,), ()), runtime, num_ticks=2, seed=0, observers=[recorder])
    finally:
        runtime.close()
    assert [report.metrics["sum"] for report in recorder.reports] == [6.0, 6.0]


def test_a_killed_rank_is_told_at_once_with_host_rank_pid_and_tick(
    hosts: list[LoopbackHost], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ExecutorFailed) as caught:
        run(runtime_over(hosts), doubler=Config("kill", trouble_rank=1))
    message = str(caught.value)
    assert "executor 'doubler', rank 1 on host b (pid " in message
    assert "), tick 2: its process was killed by signal 9 (SIGKILL" in message
    none_left(hosts)


def test_an_exception_elsewhere_is_told_with_its_host(hosts: list[LoopbackHost]) -> None:
    with pytest.raises(ExecutorFailed, match=r"rank 0 on host a \(pid \d+\), tick 2: ValueError: the answer is 42"):
        run(runtime_over(hosts), doubler=Config("raise"))


def test_a_stopped_rank_is_not_dead(hosts: list[LoopbackHost]) -> None:
    runtime = runtime_over(hosts, silence_s=2.0)
    executors, channels = job(num_ranks=2)

    class Stop(Recorder):
        def on_report(self, report: Report) -> None:
            super().on_report(report)
            if report.tick == 1 and report.executor == "sink":
                for pid in ranks_on(hosts):
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(4.0)
                for pid in ranks_on(hosts):
                    os.kill(pid, signal.SIGCONT)

    recorder = Stop()
    try:
        run_graph(Graph(tuple(executors), tuple(channels)), runtime, num_ticks=4, seed=0, observers=[recorder])
    finally:
        runtime.close()
    assert len(recorder.totals()) == 4


STOPS_ONCE = """
import os, pathlib, signal, sys
done = pathlib.Path(__file__).with_name("stopped")
if sys.orig_argv[-1] == "doubler 1" and not done.exists():
    done.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
"""
"""What Python runs before anything else: the process has said nothing yet."""


def test_a_rank_that_is_stopped_before_it_says_who_it_is_begins_once_more(
    hosts: list[LoopbackHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STOPS_ONCE)
    monkeypatch.syspath_prepend(str(tmp_path))  # which ranks elsewhere import from too
    told: list[Redo] = []
    runtime, recorder = runtime_over(hosts, restarts=True), Recorder()
    executors, channels = job(num_ranks=2)
    try:
        run_graph(
            Graph(tuple(executors), tuple(channels)),
            runtime,
            num_ticks=2,
            seed=0,
            observers=[recorder],
            deadlines=DeadlineConfig(setup_s=8.0),
            replacing=Replacing(Recovery(max_restarts=1, window_s=60.0), told.append),
        )
    finally:
        runtime.close()
    assert len(recorder.totals()) == 2
    (one,) = told
    assert (one.executor, one.death.rank, one.death.from_outside) == ("doubler", 1, True)
    assert one.death.cause == "it was stopped (SIGSTOP), and gave no answer within 8 s"
    assert not Path(f"/proc/{(tmp_path / 'stopped').read_text()}").exists(), "the stopped one was ended"
    none_left(hosts)


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "asked to end"])
def test_a_worker_that_ends_ends_the_job_and_is_named(killed: bool) -> None:
    with loopback_hosts("cd") as pair:

        class Kill(Recorder):
            def on_report(self, report: Report) -> None:
                if report.tick == 1 and report.executor == "sink":
                    left.extend(ranks_on(pair))
                    pair[1].kill() if killed else pair[1].process.terminate()

        left: list[int] = []
        executors, channels = job(num_ranks=2)
        runtime = runtime_over(pair)
        began = time.monotonic()
        try:
            with pytest.raises(ExecutorFailed, match="the worker on host d has ended, or its host") as caught:
                run_graph(Graph(tuple(executors), tuple(channels)), runtime, num_ticks=9, seed=0, observers=[Kill()])
        finally:
            runtime.close()
        assert "on host d (pid " in str(caught.value) and time.monotonic() - began < 20.0
        none_left(pair[:1])
        assert len(left) == 4
        until = time.monotonic() + 10.0
        while alive := [pid for pid in left if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < until, alive
            time.sleep(0.02)


def test_a_killed_controller_leaves_no_process_on_any_host(hosts: list[LoopbackHost], tmp_path: Path) -> None:
    program = f"""
import sys
sys.path[:0] = {[str(HERE.parent), str(HERE.parents[1])]!r}
from pathlib import Path
from loopback_hosts import worker_key
from runtime_fakes import HERE, Config, job
from llamarl.controller.config import DeadlineConfig
from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.controller.recovery import Recovery, Redo
from llamarl.controller.replacing import Replacing
from llamarl.runtime.config import Worker
from llamarl.runtime.hosts.launcher import HostLauncher
from llamarl.runtime.processes import ProcessRuntime
hosts = {[(one.worker.name, one.worker.port) for one in hosts]!r}
workers = [Worker(name, "127.0.0.1", port) for name, port in hosts]
launcher = HostLauncher(workers, {WHERE!r}, worker_key())
runtime = ProcessRuntime(channel_factory=str(HERE), launchers=dict.fromkeys({list(WHERE)!r}, launcher))
executors, channels = job(num_ranks=2, doubler=Config("hang", trouble_tick=2))
class Tell:
    def on_report(self, report):
        if report.tick == 1 and report.executor == "sink":
            Path({str(tmp_path / "up")!r}).touch()
run_graph(Graph(tuple(executors), tuple(channels)), runtime, num_ticks=4, seed=0, observers=[Tell()])
"""
    controller = subprocess.Popen([sys.executable, "-c", program])
    until = time.monotonic() + 60.0
    while not (tmp_path / "up").exists():
        assert time.monotonic() < until and controller.poll() is None
        time.sleep(0.02)
    assert len(ranks_on(hosts)) == 4
    controller.kill()
    controller.wait()
    assert none_left(hosts) < 10.0


def test_two_jobs_share_a_host_side_by_side(hosts: list[LoopbackHost]) -> None:
    first, second = runtime_over(hosts), runtime_over(hosts)
    executors, channels = job(num_ranks=2)

    class Other(Recorder):
        def on_report(self, report: Report) -> None:
            super().on_report(report)
            if report.tick == 1 and report.executor == "sink":
                self.inner: Any = run(second).totals()

    outer = Other()
    try:
        run_graph(Graph(tuple(executors), tuple(channels)), first, num_ticks=4, seed=0, observers=[outer])
    finally:
        first.close()
    assert outer.inner == outer.totals()
