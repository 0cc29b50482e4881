"""A job whose executors lie on several Monarch hosts, each a process here: the path that a cluster takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from runtime_fakes import HERE, Config, job

from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.errors import ConfigError
from llamarl.runtime.base import Report
from llamarl.runtime.factory import make_runtime


@pytest.fixture
def hosts() -> Iterator[dict[str, Any]]:
    from monarch.job import ProcessJob

    monarch_job = ProcessJob({"generators": 2, "rewards": 1})
    try:
        state = monarch_job.state(cached_path=None)
        yield {"doubler": state.generators, "source": state.rewards}
    finally:
        monarch_job.kill()


class Totals:
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_report(self, report: Report) -> None:
        if report.executor == "sink":
            self.found.append(report.metrics["sink/total"])


def test_ranks_are_spread_over_hosts_and_give_what_one_host_gives(
    hosts: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    totals = {}
    for name, placed in (("several", hosts), ("one", {})):
        runtime = make_runtime("monarch", channel_factory=str(HERE), hosts=placed)
        executors, channels = job(num_ranks=2, doubler=Config("print", trouble_rank=1))
        recorder = Totals()
        try:
            run_graph(Graph(tuple(executors), tuple(channels)), runtime, num_ticks=3, seed=0, observers=[recorder])
        finally:
            runtime.close()
        totals[name] = recorder.found
    assert totals["several"] == totals["one"] and len(totals["one"]) == 3
    assert capfd.readouterr().out.count("[doubler 1] a line on stdout\n") == 2


def test_inline_refuses_hosts() -> None:
    with pytest.raises(ConfigError, match=r"\['trainer'\] need runtime 'monarch'"):
        make_runtime("inline", hosts={"trainer": object()})
