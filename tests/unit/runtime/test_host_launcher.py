"""The launcher of a cluster, without a cluster: what becomes of ranks whose peer does not start; and on a node what they are told of it."""

import asyncio
import resource
import subprocess
import sys
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.determinism import LOOPBACK
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.hosts.agent import HostAgent
from llamarl.runtime.hosts.hosted_rank import Say, Word
from llamarl.runtime.hosts.launcher import HostLauncher
from llamarl.runtime.hosts.node import Node
from llamarl.runtime.output import OutputReader


class Agent:
    """Starts its second rank, slowly, and no other; an order to end one that does not run is lost, as with the real one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.running: set[int] = set()

    def __call__(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Coroutine[Any, Any, Any] = getattr(self, method)(*arguments)
        return asyncio.run_coroutine_threadsafe(answer, self._loop)

    async def now_s(self) -> float:
        return 0.0

    async def receive(self) -> list[Say]:
        await asyncio.sleep(60.0)
        return []

    async def meeting_place(self, name: str, apart: bool) -> tuple[str, str]:
        return "file:///nowhere", ""

    async def obey(self, orders: list[Say]) -> None:
        self.running -= {number for word, number, _ in orders if word is Word.KILL}

    async def start(self, number: int, order: dict[str, Any]) -> int | str:
        if number != 2:
            return "no more processes"
        await asyncio.sleep(0.1)
        self.running.add(number)
        return 77


async def start_two() -> None:
    agent: Any = Agent()
    cluster: Any = SimpleNamespace(
        nodes=[SimpleNamespace(name="a")], agent=lambda number: agent, gpus=lambda number: ()
    )
    spec = ExecutorSpec(name="trainer", factory="module:function", num_ranks=2)
    plans: Any = [SimpleNamespace(spec=spec)] * 2
    output = OutputReader()
    launcher = HostLauncher(cluster, {"trainer": (0, 0)}, lambda host: None, [spec])
    with pytest.raises(OSError, match="node a starts no process: no more processes"):
        await launcher.start(plans, ["trainer 0", "trainer 1"], output)
    await asyncio.sleep(0.3)
    assert not agent.running
    (first, second) = next(iter(launcher._nodes.values())).links.values()
    assert first.ended.done() and not second.ended.done()  # of the second the agent would tell
    second.finish("killed", streams=True)
    await asyncio.wait_for(launcher.stop(), 1.0)
    await asyncio.to_thread(output.close, 5.0)
    assert not output._thread.is_alive()


def test_a_rank_whose_peer_does_not_start_is_ended_though_it_starts_later() -> None:
    asyncio.run(start_two())


def test_groups_of_several_nodes_listen_on_the_nodes_interface_and_on_none_whose_name_begins_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in LOOPBACK:
        monkeypatch.delenv(name, raising=False)
    node = Node(name="a", cores=1, cuda_devices=0, address="10.0.0.1", space="", interface="eth1")
    agent = HostAgent(node)

    def listens(apart: bool) -> list[str]:
        order = {"apart": apart, "folders": [], "threads": 1, "gpus": ["3", "5"]}
        made = agent._environment(order)
        assert made["CUDA_VISIBLE_DEVICES"] == "3,5"
        return [made["GLOO_SOCKET_IFNAME"], made["NCCL_SOCKET_IFNAME"]]

    assert listens(apart=False) == ["lo", "lo"]
    assert listens(apart=True) == ["eth1", "=eth1"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    assert listens(apart=True) == ["eth1", "ib"], "the user's"


def test_sums_in_the_switch_of_gpus_are_as_the_node_says_whatever_the_controllers_shell_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller's order names threads, and no variable of its own."""
    agent = HostAgent(Node(name="a", cores=1, cuda_devices=0, address="10.0.0.1", space="", interface="eth1"))
    order = {"apart": True, "folders": [], "threads": 3, "gpus": []}
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    made = agent._environment(order)
    assert (made["NCCL_NVLS_ENABLE"], made["OMP_NUM_THREADS"]) == ("0", "3")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert agent._environment(order)["NCCL_NVLS_ENABLE"] == "1"


def test_a_users_file_with_the_name_of_a_module_of_pythons_does_not_hide_it_on_a_node(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong one')\n")
    agent = HostAgent(Node(name="a", cores=1, cuda_devices=0, address="10.0.0.1", space="", interface="eth1"))
    path = agent._environment({"apart": False, "folders": [str(tmp_path)], "threads": 1, "gpus": []})["PYTHONPATH"]
    code = f"import queue, sys; print(queue.__file__ != {str(tmp_path / 'queue.py')!r}, {str(tmp_path)!r} in sys.path)"
    done = subprocess.run([sys.executable, "-P", "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_ranks_on_a_node_may_have_as_many_open_files_as_the_system_gives() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))  # a shell's, whose Ray was started in it
    try:
        HostAgent(Node(name="a", cores=1, cuda_devices=0, address="10.0.0.1", space="", interface="eth1"))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
