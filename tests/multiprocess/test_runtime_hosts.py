"""A job whose executors lie on several Monarch hosts, each a process here: the path that a cluster takes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from runtime_fakes import HERE, Config, job

from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.errors import ConfigError
from llamarl.runtime.base import Report
from llamarl.runtime.make_runtime import make_runtime


@pytest.fixture
def hosts() -> Iterator[dict[str, Any]]:
    monarch = pytest.importorskip("monarch.job")

    monarch_job = monarch.ProcessJob({"generators": 2, "rewards": 1})
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
    for name, kind, placed in (("several", "monarch", hosts), ("one", "local", {})):
        runtime = make_runtime(kind, channel_factory=str(HERE), hosts=placed)
        executors, channels = job(num_ranks=2, doubler=Config("print", trouble_rank=1))
        recorder = Totals()
        try:
            run_graph(Graph(tuple(executors), tuple(channels)), runtime, num_ticks=3, seed=0, observers=[recorder])
        finally:
            runtime.close()
        totals[name] = recorder.found
    assert totals["several"] == totals["one"] and len(totals["one"]) == 3
    assert capfd.readouterr().out.count("[doubler 1] a line on stdout\n") == 2


@pytest.mark.parametrize("name", ["inline", "local"])
def test_a_runtime_of_one_machine_refuses_hosts(name: str) -> None:
    with pytest.raises(ConfigError, match=r"\['trainer'\] need runtime 'monarch'"):
        make_runtime(name, hosts={"trainer": object()})


def test_monarch_without_hosts_is_refused_with_the_runtime_to_take() -> None:
    with pytest.raises(ConfigError, match="on one machine take 'local'"):
        make_runtime("monarch")


def test_a_failure_that_monarch_tells_late_hits_only_the_job_it_is_about() -> None:
    pytest.importorskip("monarch.actor")
    from llamarl.runtime.monarch_hosts import MonarchLauncher, MonarchLink

    async def tell() -> list[list[bool]]:
        launchers = [MonarchLauncher({"doubler": None, "source": None}) for _ in range(2)]  # type: ignore[dict-item]
        for launcher in launchers:
            launcher._loop = asyncio.get_running_loop()
            launcher._links = {name: [MonarchLink(None, None) for _ in range(2)] for name in ("doubler", "source")}
        for launcher in launchers:
            launcher.on_fault(launchers[0].mesh_name("doubler") + "-xYz", "MeshFailure(crashed_ranks=[1], ...)")
        await asyncio.sleep(0.01)
        for launcher in launchers:
            launcher.close()
        return [[link.ended.done() for ranks in one._links.values() for link in ranks] for one in launchers]

    assert asyncio.run(tell()) == [[False, True, False, False], [False] * 4]
