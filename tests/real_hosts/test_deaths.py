"""How soon a death is told, on hosts that can be cut off (``make test-hosts``): from the event to the error that names it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hosted_jobs import wait_for_none_left
from namespace_hosts import KEY, NamespaceHost, namespace_hosts, why_not
from runtime_fakes import HERE, Config, job

from llamarl.controller.config import DeadlineConfig
from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.errors import ExecutorFailed
from llamarl.runtime.base import Report
from llamarl.runtime.config import Worker
from llamarl.runtime.hosts.connection import WorkerKey
from llamarl.runtime.hosts.launcher import HostLauncher
from llamarl.runtime.processes import ProcessRuntime

_WHY_NOT = why_not()
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(_WHY_NOT), reason=f"hosts of namespaces: {_WHY_NOT}")]
SILENCE_S = DeadlineConfig().host_silence_s
WHERE = {"source": (0,), "doubler": (0, 1), "sink": (2,)}


@pytest.fixture
def hosts() -> Iterator[list[NamespaceHost]]:
    with namespace_hosts(3) as made:
        yield made


class AtTick:
    """Does something once, at the end of a tick, and notes when."""

    def __init__(self, tick: int, deed: Callable[[], object]) -> None:
        self._tick, self._deed = tick, deed
        self.done_s = 0.0

    def on_report(self, report: Report) -> None:
        if report.executor == "sink" and report.tick == self._tick:
            self._deed()
            self.done_s = time.monotonic()


def seconds_until_told(hosts: list[NamespaceHost], deed: Callable[[], object], **configs: Config) -> tuple[float, str]:
    workers = [Worker(name, host.address, host.port) for name, host in zip("abc", hosts, strict=True)]
    launcher = HostLauncher(workers, WHERE, WorkerKey(KEY, silence_s=SILENCE_S))
    runtime = ProcessRuntime(channel_factory=str(HERE), launchers=dict.fromkeys(WHERE, launcher))
    executors, channels = job(num_ranks=2, **configs)
    observer = AtTick(1, deed)
    try:
        with pytest.raises(ExecutorFailed) as caught:
            run_graph(
                Graph(tuple(executors), tuple(channels)), runtime, num_ticks=1_000_000, seed=0, observers=[observer]
            )
        told_s = time.monotonic() - observer.done_s
    finally:
        runtime.close()
    print(f"told after {told_s:.2f} s: {str(caught.value).splitlines()[0]}")
    return told_s, str(caught.value)


def test_a_killed_rank_is_told_within_a_second(hosts: list[NamespaceHost]) -> None:
    told_s, message = seconds_until_told(hosts, lambda: os.kill(max(hosts[1].ranks()), signal.SIGKILL))
    told = r"executor 'doubler', rank 1 on host b \(pid \d+\), (?:tick \d+|between two ticks): its process was killed by signal 9"
    assert re.search(told, message.splitlines()[0]), message
    assert told_s < 1.0
    wait_for_none_left(hosts)


def test_a_host_that_is_cut_off_is_told_within_ten_seconds_by_the_default_limit(hosts: list[NamespaceHost]) -> None:
    told_s, message = seconds_until_told(hosts, hosts[1].cut_off)
    told = rf"executor 'doubler', rank 1 on host b \(pid \d+\), (?:tick \d+|between two ticks): host b does not answer: no sign of it for {SILENCE_S:g} s"
    assert re.search(told, message.splitlines()[0]), message
    assert SILENCE_S - 2.0 < told_s < 10.0
    wait_for_none_left(hosts)


def test_a_host_whose_ranks_are_stopped_is_not_taken_for_dead(hosts: list[NamespaceHost]) -> None:
    continued = []

    def stop_for_longer_than_the_limit() -> None:
        ranks = hosts[1].ranks()
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(SILENCE_S + 3.0)
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)
        continued.append(time.monotonic())
        threading.Timer(1.0, os.kill, (max(ranks), signal.SIGKILL)).start()

    _, message = seconds_until_told(hosts, stop_for_longer_than_the_limit)
    assert continued and "was killed by signal 9" in message, "it went on, until it was killed"
