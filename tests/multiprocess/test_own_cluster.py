"""A kind of cluster of one's own: what ``runtime/hosts/cluster.py`` asks of it is enough for a job, and for one that loses a node."""

import asyncio
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import counting_executors
import pytest
from death_job import NUM_TICKS, by_hand, graph

from llamarl.config import load_config
from llamarl.controller.controller import run_graph
from llamarl.controller.job_hosts import open_hosts
from llamarl.controller.marking import Marking
from llamarl.controller.recovery import Recovery
from llamarl.controller.saving import Saving
from llamarl.controller.surviving import SurvivingRuntime
from llamarl.errors import ConfigError, DataError
from llamarl.runtime.base import Report
from llamarl.runtime.hosts.agent import HostAgent
from llamarl.runtime.hosts.cluster import Agent, Cluster, end_ranks, find_cluster
from llamarl.runtime.hosts.node import Node, facts_of_this_node
from llamarl.runtime.tick_log import TickLog
from llamarl.settings.job import DeadlineConfig

T = TypeVar("T")
LIMIT_S = 10.0


class Threads(Cluster):
    """Nodes that are threads of this process; the address lists their names."""

    def __init__(self, names: Sequence[str], ports: tuple[int, int]) -> None:
        own: dict[str, Any] = {"address": "127.0.0.1", "ports": ports, **facts_of_this_node("127.0.0.1")}
        self.nodes = [Node(name=name, cores=4, cuda_devices=0, **own) for name in names]
        self.left_out, self.here, self.told_s = {}, 0, 0.1
        self.taken: list[Mapping[int, tuple[int, int]]] = []
        self.agents: dict[int, _Thread] = {}
        self.gone: set[int] = set()

    @staticmethod
    def connect(address: str, ports: tuple[int, int]) -> "Threads":
        if not address:
            raise ConfigError("which threads?")
        return Threads(address.split(","), ports)

    def lines(self) -> list[str]:
        return ["threads"]

    def call(self, number: int, within_s: float, work: Callable[..., T], *arguments: Any) -> T:
        return work(*arguments)

    def take(self, shares: Mapping[int, tuple[int, int]], within_s: float) -> str:
        self.taken.append(dict(shares))
        return ""

    def gpus(self, number: int) -> Sequence[str]:
        return ()

    def agent(self, number: int) -> Agent:
        if number in self.gone:
            raise ConnectionError("pulled")
        if number not in self.agents:
            self.agents[number] = _Thread(self.nodes[number])
        return self.agents[number].ask

    async def lose(self, number: int) -> bool:
        if number not in self.gone and (agent := self.agents.pop(number, None)) is not None:
            agent.end()
        return number in self.gone

    def pull(self, number: int) -> None:
        """Lose a node."""
        self.gone.add(number)
        self.agents[number].end()

    def close(self) -> None:
        end_ranks([agent.ask for agent in self.agents.values()], LIMIT_S)
        for agent in self.agents.values():
            agent.end()


class _Thread:
    def __init__(self, node: Node) -> None:
        self._agent, self._loop = HostAgent(node), asyncio.new_event_loop()
        self._asked: list[Future[Any]] = []
        self._over = False
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        if self._over:
            answer.set_exception(ConnectionError("pulled"))
        else:
            self._asked.append(answer)
            asked = asyncio.run_coroutine_threadsafe(getattr(self._agent, method)(*arguments), self._loop)
            asked.add_done_callback(functools.partial(self._take, answer))
        return answer

    def _take(self, answer: Future[Any], found: Future[Any]) -> None:
        if not self._over:
            answer.set_result(found.result())

    def end(self) -> None:
        """As if its process were gone: nothing is answered any more, ranks end."""
        if self._over:
            return
        asyncio.run_coroutine_threadsafe(self._agent.end(), self._loop).result(LIMIT_S)
        self._over = True
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(ConnectionError("pulled"))
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)


class Pull:
    """Has a node's cable pulled at a tick, and keeps the sink's totals."""

    def __init__(self, cluster: Threads, node: int) -> None:
        self.cluster, self.node, self.totals = cluster, node, dict[int, int]()

    def on_report(self, report: Report) -> None:
        if report.executor == "sink":
            self.totals[report.tick] = int(report.metrics["sink/total"])
            if report.tick == NUM_TICKS // 2:
                self.cluster.pull(self.node)


class Rude(Threads):
    """Breaks its word: an end is another error, and of the node it says nothing."""

    @staticmethod
    def connect(address: str, ports: tuple[int, int]) -> Threads:
        return Rude(address.split(","), ports)

    def agent(self, number: int) -> Agent:
        ask = super().agent(number)

        def rude(method: str, *arguments: Any) -> Future[Any]:
            answer: Future[Any] = Future()
            answer.set_running_or_notify_cancel()

            def take(found: Future[Any]) -> None:
                if found.exception() is None:
                    answer.set_result(found.result())
                else:
                    answer.set_exception(OSError("a pipe of mine"))

            ask(method, *arguments).add_done_callback(take)
            return answer

        return rude

    async def lose(self, number: int) -> bool:
        raise RuntimeError("a bug of mine")


class Deaf(Threads):
    """A node that is lost goes on telling news, and refuses orders by an error of its own."""

    @staticmethod
    def connect(address: str, ports: tuple[int, int]) -> Threads:
        return Deaf(address.split(","), ports)

    def pull(self, number: int) -> None:
        self.gone.add(number)

    def agent(self, number: int) -> Agent:
        ask = super().agent(number)

        def deaf(method: str, *arguments: Any) -> Future[Any]:
            if method != "obey" or number not in self.gone:
                return ask(method, *arguments)
            refused: Future[Any] = Future()
            refused.set_exception(OSError("no orders any more"))
            return refused

        return deaf

    async def lose(self, number: int) -> bool:
        self.agents.pop(number).end()
        return True


@pytest.mark.parametrize("kind", ["Threads", "Rude", "Deaf"])
def test_a_job_on_a_cluster_that_a_recipe_names_by_import_path_goes_on_without_a_node(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamarl.runtime.hosts.launcher.shares_imports", lambda spec: True)
    monkeypatch.syspath_prepend(Path(counting_executors.__file__).parent)
    job = graph()
    executors = [dataclasses.replace(e, factory=f"counting_executors:{e.name.title()}") for e in job.executors]
    job = dataclasses.replace(job, executors=tuple(executors))
    hosts = open_hosts(load_config(None, {"hosts.cluster": f"{__name__}:{kind}://a,b,c"}))
    cluster: Any = hosts.cluster
    try:
        hosts.config.hosts.on.update(source=("a",), sink=("here",), doubler=("b",))  # names of no standard job
        hosts.place(job.executors, None)
        assert hosts.where == {"source": (0,), "doubler": (1, 1), "sink": (0,)}
        assert not hosts.take(hosts.where, LIMIT_S)
        runtime = hosts.runtime(log=TickLog())
        watching = Pull(cluster, 1)
        marking, saving = Marking(job, num_ticks=NUM_TICKS), Saving(job)
        surviving = SurvivingRuntime(runtime, marking, Recovery(max_restarts=8, window_s=60.0), saving)
        deadlines = DeadlineConfig(setup_s=60.0, step_s=30.0)
        try:
            run_graph(marking, surviving, seed=0, observers=[watching], saving=saving, deadlines=deadlines)
        finally:
            runtime.close()
        assert [watching.totals[tick] for tick in range(NUM_TICKS)] == by_hand(NUM_TICKS)
        assert hosts.where["doubler"] == (2, 2) and [list(shares) for shares in cluster.taken] == [[0, 1], [2]]
    finally:
        hosts.close()


def test_nodes_of_one_name_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="2 nodes are called a, and a job tells nodes by their names: give each its own"
    ):
        open_hosts(load_config(None, {"hosts.cluster": f"{__name__}:Threads://b,a,a"}))


def test_a_resume_takes_no_range_of_places_for_a_node_that_is_gone() -> None:
    begun = load_config(None, {"hosts.cluster": f"{__name__}:Threads://a,b,c", "hosts.on.generator": ["1-2"]})
    hosts = open_hosts(begun, begun)
    try:
        assert not hosts.absent
    finally:
        hosts.close()


def test_a_kind_that_there_is_not_is_told_by_its_key() -> None:
    with pytest.raises(ConfigError, match="hosts.cluster: the kind 'rai' is unknown; did you mean 'ray'"):
        load_config(None, {"hosts.cluster": "rai://10.0.0.1:6379"})


class Half(Cluster):
    """One that forgets most of what it owes, and may: ``check_access``."""

    take = Threads.take


def half() -> None:
    """No class at all."""


def test_a_class_that_owes_something_is_told_what_before_it_is_asked_for_anything() -> None:
    with pytest.raises(
        DataError,
        match=r"hosts.cluster .*:Half' is no cluster, as it lacks connect, lines, call, gpus, agent, lose, close",
    ):
        find_cluster(f"{__name__}:Half")
    with pytest.raises(DataError, match="it lacks connect, .* check_access:"):
        find_cluster(f"{__name__}:half")
    assert find_cluster(f"{__name__}:Threads://a,b") == (Threads, "a,b")
