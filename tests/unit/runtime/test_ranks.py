"""Ranks that are not wanted any more before they have begun; what many are told."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from llamarl.runtime import local
from llamarl.runtime.children import is_stopped
from llamarl.runtime.output import OutputReader
from llamarl.runtime.ranks import Ranks
from llamarl.runtime.worker import WorkerPlan


class Link:
    """A process that ends when it is told to."""

    pid, host = 1, ""

    def __init__(self) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.told: list[bytes] = []

    async def command(self, blob: bytes) -> bytes:
        self.told.append(blob)
        return await asyncio.Future()

    def kill(self, *, at_once: bool = False) -> None:
        if not self.ended.done():
            self.ended.set_result("signal 9")


class Launcher:
    """One that starts processes when it is let."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.begun, self.let = threading.Event(), threading.Event()
        self.closed = False

    async def start(self, plans: Sequence[WorkerPlan], labels: Sequence[str], output: OutputReader) -> Any:
        self.begun.set()
        await asyncio.to_thread(self.let.wait, 30)
        self.links += [Link() for _ in plans]
        return self.links, ""

    async def stop(self) -> None:
        await asyncio.gather(*(link.ended for link in self.links))

    def close(self) -> None:
        self.closed = True


class Guard:
    """A process that has begun, and ends by the first signal."""

    pid = 1

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._ended = asyncio.Event()

    async def code(self) -> int:
        await self._ended.wait()
        return -self.signals[0]

    def signal(self, number: int) -> None:
        self.signals.append(number)
        self._ended.set()


def test_where_the_system_gives_no_further_process_those_that_have_begun_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guards: list[Guard] = []

    async def start_rank(*_: Any, **__: Any) -> Any:
        if guards:
            raise OSError(errno.EAGAIN, "no more processes")
        guards.append(Guard())
        return socket.socketpair()[0], guards[0]

    async def start() -> None:
        launcher: Any = local.LocalLauncher()
        plan = SimpleNamespace(spec=SimpleNamespace(name="generator", threads=1))
        output = SimpleNamespace(pipe=lambda *_: os.open(os.devnull, os.O_WRONLY))
        with pytest.raises(OSError, match="no more processes"):
            await launcher.start([plan, plan], ["generator 0", "generator 1"], output)
        await asyncio.wait_for(launcher.stop(), 5.0)
        launcher.close()

    monkeypatch.setattr(local, "start_rank", start_rank)
    monkeypatch.setattr(local, "shares_imports", lambda spec: False)
    asyncio.run(start())
    assert guards[0].signals == [signal.SIGKILL]


@pytest.mark.parametrize("prepares", [False, True])
def test_who_is_stopped_before_its_new_process_has_begun_never_does_anything(prepares: bool) -> None:
    launcher = Launcher()
    ranks = Ranks({"generator": ()}, {"generator": launcher})
    launcher.let.set()
    ranks.bring_up()
    assert launcher.begun.wait(30)
    launcher.begun.clear()
    launcher.let.clear()
    plans: Any = (SimpleNamespace(rank=0),)
    asked, answer = threading.Event(), threading.Event()

    def prepared() -> Any:
        asked.set()
        answer.wait(30)
        return plans

    ranks.replace("generator", plans, 1, prepared=prepared if prepares else None)
    assert (asked if prepares else launcher.begun).wait(30)
    ranks.stop("generator")
    answer.set()
    launcher.let.set()
    wait_until(lambda: prepares or launcher.links, 30.0)
    ranks.end(5.0, orderly=True)
    assert len(launcher.links) == (0 if prepares else 1), "it is not even started where that can still be spared"
    assert all(link.ended.done() and not link.told for link in launcher.links)
    assert launcher.closed and ranks.events.empty()


class _Argument:
    """Counts how often it is pickled: with a handle a source rank it takes milliseconds each time."""

    times = 0

    def __reduce__(self) -> tuple[Any, ...]:
        _Argument.times += 1
        return _Argument, ()


def test_an_order_to_many_ranks_is_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "_submit", lambda ranks, coroutine: coroutine.close())
    plans: Any = {"generator": tuple(SimpleNamespace(rank=rank) for rank in range(5))}
    assert Ranks(plans, {}).send("generator", "tick 0", "run", _Argument()) > 0
    assert _Argument.times == 1


# Guards.


@pytest.mark.parametrize(("stopped", "word"), [(True, "STOP"), (False, "CONT")])
def test_a_guard_whose_rank_was_stopped_before_it_said_who_it_is_counts_as_stopped(stopped: bool, word: str) -> None:
    program = f"sleep 60 & kill -{word} $!; echo done; wait"
    with subprocess.Popen(["bash", "-c", program], stdout=subprocess.PIPE, process_group=0) as guard:
        assert guard.stdout is not None and guard.stdout.readline() == b"done\n"
        wait_until(lambda: is_stopped(guard.pid) is stopped, 5.0)
        subprocess.run(["kill", "-KILL", "--", f"-{guard.pid}"], check=True)
    assert not is_stopped(guard.pid)  # nobody is not stopped
