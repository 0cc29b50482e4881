"""Ranks that are forks of one process: as good as processes of their own, and nothing left of them however they end."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from forked_command import SERVER
from tools.chaos.processes import alive, wait_for_end

from llamarl.determinism import rank_environment
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime import fork_server as module
from llamarl.runtime.children import cause_of_death
from llamarl.runtime.fork_server import ForkedChild, ForkServer, fork_server, shared_modules, start_early

WAIT_S = 30.0


class Rank:
    """A fork with its control socket and what it prints."""

    def __init__(self, child: ForkedChild, control: socket.socket, printed: int) -> None:
        self.child, self.control, self.printed = child, control, printed

    def rank_pid(self) -> int:
        """The rank says hello with its number, which is not its guard's."""
        self.control.settimeout(WAIT_S)
        return int(self.control.recv(4096)[9:] or 0)

    async def cause(self) -> str:
        return cause_of_death(await asyncio.wait_for(self.child.code(), WAIT_S))


async def fork(server: ForkServer, label: str = "trainer") -> Rank:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    child = await asyncio.wait_for(server.fork(label, theirs.fileno(), write, write), WAIT_S)
    theirs.close()
    os.close(write)
    assert child is not None
    return Rank(child, ours, read)


@pytest.fixture
def run() -> Iterator[Callable[[Callable[[ForkServer], Coroutine[Any, Any, None]]], None]]:
    def run(test: Callable[[ForkServer], Coroutine[Any, Any, None]], modules: tuple[str, ...] = ("json",)) -> None:
        async def main() -> None:
            server = ForkServer(modules, rank_environment(1))
            try:
                await test(server)
            finally:
                server.kill()

        asyncio.run(asyncio.wait_for(main(), 2 * WAIT_S))

    yield run


def test_a_fork_is_shown_by_its_name_and_its_guard_is_its_parent(run: Any) -> None:
    async def test(server: ForkServer) -> None:
        rank = await fork(server, "generator 3")
        pid = rank.rank_pid()
        assert Path(f"/proc/{pid}/comm").read_text() == "generator 3\n"
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent == rank.child.pid != pid
        assert Path(f"/proc/{parent}/comm").read_text() == "llamarl-guard\n"
        rank.control.close()
        assert "its process" in await rank.cause(), "its guard kills it, or it sees the end first"
        assert not wait_for_end({pid, parent}, 10.0)

    run(test)


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "signal 9 (SIGKILL"), (signal.SIGSEGV, "signal 11 (SIGSEGV")]
)
def test_the_signal_that_ended_a_fork_is_told_within_a_second(run: Any, number: int, words: str) -> None:
    async def test(server: ForkServer) -> None:
        rank = await fork(server)
        pid = rank.rank_pid()
        os.kill(pid, number)
        began = time.monotonic()
        assert words in await rank.cause()
        assert time.monotonic() - began < 1.0
        assert not wait_for_end({pid, rank.child.pid}, 10.0)

    run(test)


def test_forks_do_not_hold_each_others_sockets(run: Any) -> None:
    async def test(server: ForkServer) -> None:
        first = await fork(server)
        second = await fork(server)
        pids = first.rank_pid(), second.rank_pid()
        os.kill(pids[0], signal.SIGKILL)
        await first.cause()
        first.control.settimeout(WAIT_S)
        assert first.control.recv(1) == b"", (
            "the end of the socket reaches the controller although the second rank lives"
        )
        assert alive(pids[1])
        second.control.close()
        await second.cause()

    run(test)


def test_a_server_that_is_killed_takes_its_forks_along_and_forks_no_more(run: Any) -> None:
    async def test(server: ForkServer) -> None:
        rank = await fork(server)
        pid = rank.rank_pid()
        server.kill()
        assert "the process that had forked it has ended" in await rank.cause()
        assert not wait_for_end({pid, rank.child.pid}, 10.0)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert await server.fork("late", theirs.fileno(), 1, 2) is None

    run(test)


def test_a_server_in_which_a_thread_runs_forks_nothing(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def test(server: ForkServer) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert await asyncio.wait_for(server.fork("rank", theirs.fileno(), 1, 2), WAIT_S) is None

    run(test, ("starts_a_thread",))


def test_a_server_to_which_the_system_gives_no_process_keeps_those_that_it_has_forked(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_process.py").write_text(
        "import os\nfork, server, left = os.fork, os.getpid(), [1]\n"
        "def limited():\n"
        "    if os.getpid() == server and not left:\n"
        "        raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "    left.clear()\n"
        "    return fork()\n"
        "os.fork = limited\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def test(server: ForkServer) -> None:
        rank = await fork(server)
        pid = rank.rank_pid()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert await asyncio.wait_for(server.fork("rank", theirs.fileno(), 1, 2), WAIT_S) is None
        assert not server._gone and alive(pid)

    run(test, ("one_process",))


def look_at_what_was_imported() -> None:
    import torch

    names = ("generator", "reward", "trainer", "evaluator", "critic", "judge")
    assert {f"llamarl.executors.{name}" for name in names} <= sys.modules.keys()
    assert not torch.cuda.is_initialized()


def test_importing_all_executors_starts_no_thread_and_no_gpu() -> None:
    child = SERVER.Process(target=look_at_what_was_imported)  # a fork of a process that has imported them
    child.start()
    child.join(60.0)
    assert child.exitcode == 0
    assert len(os.listdir(f"/proc/{forkserver._forkserver._forkserver_pid}/task")) == 1  # type: ignore[attr-defined]


def spec(name: str, **more: Any) -> ExecutorSpec:
    return ExecutorSpec(**{"name": name, "factory": f"llamarl.executors.{name}:Executor", "threads": 1, **more})


def test_a_server_is_worth_it_for_two_ranks_of_our_own_with_the_same_threads_and_no_gpu() -> None:
    trainer, generator, reward = (f"llamarl.executors.{name}" for name in ("trainer", "generator", "reward"))
    both = [spec("trainer"), spec("generator")]
    assert shared_modules(both, 1) == (generator, trainer)
    assert shared_modules([spec("trainer", num_ranks=2)], 1) == (trainer,)
    assert shared_modules([spec("trainer")], 1) == ()
    assert shared_modules([spec("trainer"), spec("generator", threads=2)], 1) == ()
    assert shared_modules([*both, spec("reward", threads=2)], 1) == (generator, trainer)
    assert shared_modules([*both, spec("reward", device="cuda:0")], 1) == (generator, trainer)
    assert shared_modules([*both, spec("reward", factory="my_judge.py:Judge")], 1) == (generator, trainer)
    assert reward not in shared_modules([*both, spec("reward", factory="mine:Reward")], 1)


def test_a_server_started_early_is_taken_if_its_environment_is_still_right(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Server:
        def __init__(self, modules: tuple[str, ...], environment: dict[str, str], **more: Any) -> None:
            self.environment, self.killed = dict(environment), False
            made.append(self)

        def kill(self) -> None:
            self.killed = True

    monkeypatch.setattr(module, "ForkServer", Server)
    monkeypatch.setattr(module, "_early", {})
    had = {"OMP_NUM_THREADS": "1", "PATH": "/bin"}
    start_early(("a",), had)
    assert fork_server(("a",), {**had, "TORCHINDUCTOR_CACHE_DIR": "/tmp/x"}) is made[0]
    assert fork_server(("a",), had) is made[1], "a second job of this process gets one of its own"
    start_early(("a",), had)
    assert fork_server(("a",), {**had, "OMP_NUM_THREADS": "2"}) is made[3]
    assert made[2].killed and made[3].environment["OMP_NUM_THREADS"] == "2"
    assert fork_server((), had) is None
    start_early(("a",), had)
    module.end_unused_servers()  # the run was refused
    assert made[4].killed and not module._early
