"""The launcher of a cluster, without a cluster: what becomes of ranks whose peer does not start."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.hosts.hosted_rank import Say, Word
from llamarl.runtime.hosts.launcher import HostLauncher
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
