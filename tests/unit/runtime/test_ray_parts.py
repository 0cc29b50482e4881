"""Small parts of the runtime on a cluster: whose clock is ahead, where ranks meet, what a node says of itself."""

import asyncio
import importlib.metadata
import importlib.util
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.determinism import platform_facts
from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.children import PlainChild
from llamarl.runtime.hosts import ray
from llamarl.runtime.hosts.agent import HostAgent, _meeting_port
from llamarl.runtime.hosts.hosted_rank import HostedRank
from llamarl.runtime.hosts.launcher import imported_on, seconds_ahead
from llamarl.runtime.hosts.node import interface_of
from llamarl.runtime.hosts.ray import RayCluster, _free, health_of, one_line, this_node
from llamarl.runtime.ranks import on_our_clock
from llamarl.runtime.worker import RankFailure, RankReport
from llamarl.settings.job import parse_ports
from llamarl.transports.network import this_space


def test_what_ray_raises_is_told_by_its_cause_in_a_line() -> None:
    far = (
        "The remote function failed to import on the worker. sys.path: " + "x" * 400 + "\nTraceback (most recent call "
        "last):\n  File \"serialization.py\", line 1\nModuleNotFoundError: No module named 'llamarl.runtime'"
    )
    assert one_line(RuntimeError(far)) == "Ray: ModuleNotFoundError: No module named 'llamarl.runtime'"
    assert one_line(RuntimeError("a\nb")) == "Ray: a"
    versions = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.61.0\n    Python: 3.11.9\nThis process on node b"
    )
    assert one_line(RuntimeError(versions)) == (
        "Ray: Version mismatch: The cluster was started with: Ray: 2.61.0 Python: 3.11.9 This process on node b"
    )
    assert one_line(RuntimeError("Traceback (most recent call last):\n  File x\nKeyError: 3")) == "Ray: KeyError: 3"
    assert one_line(RuntimeError()) == "Ray: RuntimeError"


def test_who_names_a_cluster_from_a_machine_that_is_no_node_of_it_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: object, **__: object) -> None:  # of Ray 2.60, after a minute
        raise RuntimeError("No node info found matching attributes: '' when trying to resolve node to connect to.")

    monkeypatch.setattr(RayCluster, "check_access", lambda address: None)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayError=KeyError))
    with pytest.raises(ConfigError, match="--cluster h:1: this machine is no node of it: start the job on one that is"):
        RayCluster.connect("h:1", (0, 0))


def test_an_old_ray_is_told_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.59.3")
    with pytest.raises(ConfigError, match="needs Ray 2.60, and here is 2.59.3: pip install"):
        RayCluster.check_access("10.0.0.1:1")


@pytest.mark.parametrize(
    ("program", "status", "told"),
    [
        ("echo; exec sleep 60", 1, "--cluster auto, by RAY_ADDRESS http://a:8265: nothing answers there"),
        ("echo; echo 'Could not find any running Ray instance' >&2; exit 1", 1, "no Ray cluster runs on this machine"),
        ("echo; echo 'InvalidToken: authentication token' >&2; exit 1", 2, "is missing or not that cluster's"),
    ],
)
def test_a_head_that_is_not_up_yet_is_no_refusal_for_good(
    program: str, status: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(ray, "_ASK_S", 0.3)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.60.0")
    monkeypatch.setenv("RAY_ADDRESS", "http://a:8265")  # as for ray job submit
    with pytest.raises(ConfigError) as refused:
        RayCluster.check_access("auto")
    assert told in str(refused.value) and refused.value.exit_code == status


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("sleep 0.6; echo; echo status", ""),
        ("echo; sleep 60", "nothing answers there within 0.3 s"),
        ("sleep 60", "Ray itself cannot be read within 3 s"),
        ("echo 'No module' >&2; exit 1", "No module"),
        ("echo; echo 'InvalidToken: authentication token' >&2; exit 1", "is missing or not that cluster's"),
    ],
)
def test_a_slow_disk_from_which_ray_is_read_is_not_taken_for_a_head_that_does_not_answer(
    program: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n".replace("sleep 60", "exec sleep 60"))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(ray, "_ASK_S", 0.3)
    monkeypatch.setattr(ray, "_IMPORT_S", 3.0)
    found = ray.why_refused("10.0.0.1:6379")
    assert told in found and bool(told) == bool(found)


def test_nodes_have_as_long_to_read_their_programs_as_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, Any] = {"name": "a", "cores": 4, "cuda_devices": 0, "facts": platform_facts(), "space": "s"}
    facts |= {"address": "10.0.0.1", "interface": "eth0", "node_id": "a", "is_head": True, "token": True}
    here = ray.RayNode(**facts, health=ray._HEALTH)

    def get(answer: object, timeout: float) -> ray.RayNode:
        if timeout < 90.0:  # two minutes less what the test takes
            raise LookupError("not read yet")
        return here

    context = SimpleNamespace(get_node_id=lambda: "a")
    told = [{**node("a", is_head=True), "Alive": True}]
    fake = SimpleNamespace(get=get, nodes=lambda: told, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayError=LookupError))
    monkeypatch.setattr(ray, "_submit", lambda *_: None)
    assert ray._with_nodes((0, 0)).nodes == (here,)


def test_what_of_a_cluster_is_free_is_told_in_cores_and_gpus() -> None:
    assert _free({"CPU": 12.0, "GPU": 1.0}, {"CPU": 1.0}) == "free now: 1 core of 12 cores and 1 GPU"


def test_the_head_has_the_first_place_whatever_its_address() -> None:
    names = ("10.0.0.10", "10.0.0.9", "10.0.0.30")
    told = [ray._as_ray_tells(node(name, is_head=name == "10.0.0.30")) for name in names]
    assert [one["name"] for one in sorted(told, key=ray._head_first)] == ["10.0.0.30", "10.0.0.9", "10.0.0.10"]


def node(name: str, *, is_head: bool) -> dict[str, Any]:
    """As ``ray.nodes`` tells of one."""
    resources = {"CPU": 4.0, **({"node:__internal_head__": 1.0} if is_head else {})}
    return {"NodeName": name, "NodeManagerAddress": name, "NodeID": name, "Resources": resources}


def test_ports_are_one_or_a_range() -> None:
    assert (parse_ports("7"), parse_ports("7-9")) == ((7, 7), (7, 9))
    for wrong in ("9-7", "0", "70000", "a", "7-", "-7"):
        with pytest.raises(ValueError, match="port"):
            parse_ports(wrong)


def test_the_quickest_of_several_pings_is_believed() -> None:
    slow, quick = (10.0, 1012.9, 13.0), (20.0, 1020.5, 20.5)
    assert seconds_ahead([slow, quick]) == 1000.25


def test_places_where_ranks_meet_do_not_coincide_nor_with_where_segments_are_offered_first() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        last = taken.getsockname()[1]
        ports = last - 3, last
        assert [_meeting_port("127.0.0.1", ports, promised) for promised in ([], [last - 1], [last - 1, last - 2])] == [
            last - 1,
            last - 2,
            last - 3,
        ]
        with pytest.raises(OSError, match="in use"):
            _meeting_port("127.0.0.1", ports, range(last - 3, last))
        with pytest.raises(OSError, match="to meet on all"):
            _meeting_port("127.0.0.1", ports, range(last - 3, last + 1))
    assert _meeting_port("127.0.0.1", (0, 0), []) > 0


def test_an_executor_that_is_brought_up_again_and_again_uses_up_no_range_of_ports() -> None:
    async def meet(last: int) -> list[tuple[str, str]]:
        node: Any = SimpleNamespace(address="127.0.0.1", ports=(last - 1, last))
        agent = HostAgent(node)
        return [await agent.meeting_place(name, True) for name in ("generator", "trainer", "trainer", "critic")]

    with socket.create_server(("127.0.0.1", 0)) as taken:
        last = taken.getsockname()[1] - 1
        *met, (_, refused) = asyncio.run(meet(last))
    assert met == [(f"tcp://127.0.0.1:{port}", "") for port in (last, last - 1, last - 1)]
    assert refused.startswith(f"no port of {last - 1}-{last} is free"), "the others' meeting places stay theirs"


def test_a_job_ends_at_once_though_nobody_takes_what_its_rank_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(
        _server: None, _label: str, _environment: object, stdout: int, stderr: int
    ) -> tuple[socket.socket, PlainChild]:
        ours, theirs = socket.socketpair()
        with theirs:
            return ours, PlainChild(subprocess.Popen(["yes"], stdin=theirs.fileno(), stdout=stdout, stderr=stderr))

    monkeypatch.setattr("llamarl.runtime.hosts.hosted_rank.start_rank", start)

    async def job() -> float:
        said = asyncio.Event()
        spoken = 0

        def send(_word: object, _number: int, data: bytes) -> None:
            nonlocal spoken
            spoken += len(data) if isinstance(data, bytes) else 0
            if spoken > 1 << 18:
                said.set()

        rank = await HostedRank.start(1, "talker", {}, None, send)
        await asyncio.wait_for(said.wait(), 10.0)
        began_s = time.monotonic()
        rank.kill(at_once=True)
        rank.wait_for_nobody()
        await asyncio.wait_for(rank.over, 10.0)
        return time.monotonic() - began_s

    assert asyncio.run(job()) < 3.0


def test_times_of_a_host_are_read_on_the_controllers_clock() -> None:
    class Ahead:
        host = "b"

        def here_s(self, there_s: float) -> float:
            return there_s - 1000.0

    report = RankReport(
        rank=0,
        tick=3,
        outputs={},
        metrics={"x": 1001.0},
        spans=(("s", 1001.0, 1002.0),),
        started_s=1001.0,
        finished_s=1003.0,
    )
    found = on_our_clock(report, Ahead())  # type: ignore[arg-type]
    assert (found.started_s, found.finished_s, found.spans) == (1.0, 3.0, (("s", 1.0, 2.0),))
    assert found.metrics == {"x": 1001.0}, "what an executor measures itself is a duration"
    failure = RankFailure(executor="e", rank=0, doing="tick 3", cause="c", traceback="t", pid=7, at_s=1004.0)
    told = on_our_clock(failure, Ahead())  # type: ignore[arg-type]
    assert told.at_s == 4.0 and told.message().startswith("executor 'e', rank 0 on host b (pid 7), tick 3: c")


def test_a_fork_server_imports_what_all_its_hosts_ranks_of_that_many_threads_need() -> None:
    generator = ExecutorSpec(name="generator", factory="llamarl.executors.generator:make")
    reward = ExecutorSpec(name="reward", factory="llamarl.executors.reward:make")
    trainer = ExecutorSpec(name="trainer", factory="llamarl.executors.trainer:make", threads=2)
    mine = ExecutorSpec(name="mine", factory="my_code:make")
    specs, where = (
        (generator, reward, trainer, mine),
        {"generator": (0, 1), "reward": (1,), "trainer": (1,), "mine": (1,)},
    )
    assert imported_on(0, generator, specs, where) == ["llamarl.executors.generator"]
    assert imported_on(1, generator, specs, where) == ["llamarl.executors.generator", "llamarl.executors.reward"]
    assert imported_on(1, trainer, specs, where) == ["llamarl.executors.trainer"]
    assert imported_on(1, mine, specs, where) == []
    assert imported_on(2, reward, specs, where) == [
        "llamarl.executors.reward"
    ]  # before `where` knows that it comes here


def test_a_node_says_what_ray_was_told_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    told = {"name": "n", "address": "127.0.0.1", "cores": 4, "cuda_devices": 2, "node_id": "f", "is_head": True}
    taken = this_node({**told, "ports": (7, 9)})
    assert (taken.cores, taken.cuda_devices, taken.ports, taken.tls, taken.token) == (4, 2, (7, 9), None, False)
    assert (taken.space, taken.interface) == (this_space(), interface_of("127.0.0.1"))
    assert health_of(taken.health) == (15.0, 65.0), "Ray's defaults: five questions, 3 s apart, 10 s each"
    for name, value in {"period_ms": "800", "timeout_ms": "2000", "failure_threshold": "3"}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", value)
    for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT"):
        monkeypatch.setenv(f"RAY_TLS_{name}", f"/tls/{name}")
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    taken = this_node(told)
    assert health_of(taken.health) == (2.4, 8.4) and taken.token
    assert taken.tls is not None and str(taken.tls.private_key) == "/tls/SERVER_KEY"


def test_gpus_of_which_the_cluster_does_not_tell_are_given_back_and_named_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class RayError(Exception):
        pass

    group, removed = SimpleNamespace(wait=lambda within_s: True), list[object]()
    groups = SimpleNamespace(placement_group=lambda *_, **__: group, remove_placement_group=removed.append)
    stubs = {
        "exceptions": SimpleNamespace(RayError=RayError),
        "util": SimpleNamespace(),
        "util.placement_group": groups,
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, f"ray.{name}", stub)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(**stubs))

    def silent(*_: object) -> list[str]:
        raise RayError("Get timed out: some object(s) not ready.")

    monkeypatch.setattr(ray, "_gpu_ids", silent)
    health = {"period_ms": 1, "timeout_ms": 1, "failure_threshold": 1}
    node: Any = SimpleNamespace(name="a", node_id="x", is_head=True, health=health)
    cluster = RayCluster([node], 0, {})
    why_not = cluster.take({0: (1, 1)}, 5.0)
    assert why_not == (
        "the cluster gave GPUs and does not say which within 60 s: Ray: Get timed out: some object(s) not ready."
    )
    assert removed == [group] and not cluster._groups and not cluster._bundles and cluster.gpus(0) == ()


def test_gpus_keep_their_order_though_ray_tells_them_in_another_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def get(_: object, timeout: float) -> list[str]:
        waited.append(timeout)
        return ["10", "2", "0"]

    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: None))
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, place: None)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, remote=lambda work: task))
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    assert ray._gpu_ids(None, 0, 3) == ["0", "2", "10"]
    assert waited == [60.0], "the process that is asked may have to be started: not the 5 s that a free share may take"


@pytest.mark.parametrize(("declared_dead", "gone"), [(False, False), (True, True)])
def test_a_node_that_lives_is_not_given_up_for_being_slow_to_start_the_process_that_shows_it(
    declared_dead: bool, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, sign = Future[None](), Future[None]()
    killed.set_exception(OSError("the worker was killed: the node was low on memory"))
    sign.set_running_or_notify_cancel()
    threading.Timer(0.6, sign.set_result, (None,)).start()
    asked = iter((killed, sign))
    monkeypatch.setattr(ray, "_submit", lambda node_id, work: SimpleNamespace(future=lambda: next(asked)))
    monkeypatch.setattr(ray, "_is_alive", lambda node_id: not declared_dead)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    health = {"period_ms": 10, "timeout_ms": 10, "failure_threshold": 1}
    head: Any = SimpleNamespace(name="a", node_id="x", is_head=True, health=health)
    cluster = RayCluster([head], 0, {})
    began_s = time.monotonic()
    assert asyncio.run(cluster.lose(0)) is gone
    assert (time.monotonic() - began_s < 0.5) is declared_dead


@pytest.mark.parametrize(
    ("own", "kind", "told"),
    [(True, RuntimeError, "the agent's 'start' raised Ray: KeyError: 3"), (False, ConnectionError, "Ray: ")],
)
def test_what_a_method_of_an_agent_raises_is_not_taken_for_the_agents_end(
    own: bool, kind: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RayTaskError(Exception):
        pass

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayTaskError=RayTaskError))
    found: Future[Any] = Future()
    found.set_exception(RayTaskError("ray::HostAgent.start()\nKeyError: 3") if own else OSError("The actor died."))
    actor = SimpleNamespace(start=SimpleNamespace(remote=lambda *_: SimpleNamespace(future=lambda: found)))
    with pytest.raises(kind, match=told):
        ray._ask(actor, "start", 1).result(1.0)
