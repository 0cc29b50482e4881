"""What ``llamarl worker`` does with ranks of a controller that is gone, in whatever state they are."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from llamarl.runtime.hosts import daemon
from llamarl.runtime.hosts.hosted_rank import HostedRank
from llamarl.runtime.hosts.wire import Word, message

ORDER = {"label": "generator", "modules": [], "environment": {}, "folders": [], "apart": False}


class SlowRank:
    """Its process is there when somebody lets it be."""

    pid = 7

    def __init__(self) -> None:
        self.killed: list[bool] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wait_for_nobody(self) -> None: ...

    def kill(self, *, at_once: bool) -> None:
        self.killed.append(at_once)
        if not self.over.done():
            self.over.set_result(None)


async def play(monkeypatch: pytest.MonkeyPatch, late_s: float) -> list[bool]:
    """A controller that orders a rank and is gone; how the rank was killed, once it was there."""
    begun, made = asyncio.Event(), SlowRank()

    async def start(*_: Any) -> SlowRank:
        begun.set()
        await asyncio.sleep(late_s)
        return made

    monkeypatch.setattr(HostedRank, "start", start)
    monkeypatch.setattr(daemon, "_KILL_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        ours, _ = listener.accept()
    say: Callable[[str], None] = lambda _: None  # noqa: E731
    job = daemon.Job(reader, writer, ports=(0, 0), space="", tls_files=None, say=say, promised=set())
    job._obey(Word.START, 1, message(Word.START, 1, ORDER)[13:])
    await begun.wait()
    await job.end()
    ours.close()
    await asyncio.wait_for(made.over, 5.0)
    return made.killed


def test_a_rank_that_is_being_started_while_its_controller_goes_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(play(monkeypatch, 0.0)) != []


def test_so_is_one_that_takes_longer_to_start_than_the_end_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(play(monkeypatch, 0.3)) == [True]
