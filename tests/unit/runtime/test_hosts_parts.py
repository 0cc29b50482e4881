"""Small parts of the runtime over hosts: how workers are written, whose clock is ahead, which key a file holds."""

from __future__ import annotations

import asyncio
import errno
import socket
import stat
import subprocess
import time
from pathlib import Path

import pytest

from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.config import Worker, parse_ports, parse_worker, parse_workers
from llamarl.runtime.hosts.addresses import own_address
from llamarl.runtime.hosts.clock import Ping, best_offset
from llamarl.runtime.hosts.connection import WorkerKey, ask
from llamarl.runtime.hosts.daemon import _meeting_port
from llamarl.runtime.hosts.hosted_rank import HostedRank
from llamarl.runtime.hosts.inventory import Inventory, interface_of, take_inventory
from llamarl.runtime.hosts.keys import parse_key, take_key
from llamarl.runtime.hosts.launcher import imported_on
from llamarl.runtime.hosts.wire import Word, message, read_message, unpack
from llamarl.runtime.ranks import on_our_clock
from llamarl.runtime.worker import RankFailure, RankReport
from llamarl.transports.network import TlsFiles, this_space


@pytest.mark.parametrize(
    ("text", "address", "port"),
    [
        ("a", "a", 22222),
        ("node-3.cluster:7", "node-3.cluster", 7),
        ("10.0.0.2", "10.0.0.2", 22222),
        ("10.0.0.2:80", "10.0.0.2", 80),
        ("[fd00::2]:80", "fd00::2", 80),
        ("fd00::2", "fd00::2", 22222),
    ],
)
def test_a_worker_is_a_name_or_an_address_with_or_without_a_port(text: str, address: str, port: int) -> None:
    assert parse_worker(text) == Worker(text, address, port)


@pytest.mark.parametrize("text", ["", "-oProxyCommand=rm", "a b", "a:0", "a:99999", "[fd00::2", "a;b", "a:b"])
def test_what_is_no_worker_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a host such as"):
        parse_worker(text)


def test_a_host_named_twice_is_refused() -> None:
    assert [worker.port for worker in parse_workers(["a:1", "a:2"])] == [1, 2]
    with pytest.raises(ValueError, match="'a:22222' is named twice|'a' is named twice"):
        parse_workers(["a", "a:22222"])


def test_ports_are_one_or_a_range() -> None:
    assert (parse_ports("7"), parse_ports("7-9")) == ((7, 7), (7, 9))
    for wrong in ("9-7", "0", "70000", "a", "7-", "-7"):
        with pytest.raises(ValueError, match="port"):
            parse_ports(wrong)


def test_a_worker_that_ssh_started_listens_where_ssh_came_in() -> None:
    assert own_address({"SSH_CONNECTION": "10.0.0.9 40000 10.0.0.2 22"})[0] == "10.0.0.2"


def test_the_quickest_of_several_pings_is_believed() -> None:
    slow = Ping(sent_s=10.0, there_s=1012.9, received_s=13.0)
    quick = Ping(sent_s=20.0, there_s=1020.5, received_s=20.5)
    offset = best_offset([slow, quick])
    assert (offset.ahead_s, offset.within_s) == (1000.25, 0.25)
    assert offset.here_s(1020.5) == 20.25


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "settings" / "worker.key"
    key, made = take_key(path)
    assert made and take_key(path) == (key, False) and len(key) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        take_key(path)


def test_workers_that_begin_at_once_in_one_home_take_the_same_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = take_key(tmp_path / "worker.key")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", lambda _: False)  # as seen before the other had written its own
        assert take_key(tmp_path / "worker.key") == (first, False)
    assert [path.name for path in tmp_path.iterdir()] == ["worker.key"]


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


def test_a_wrong_key_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_key("secret")
    assert "secret" not in str(caught.value) and "64 hexadecimal digits" in str(caught.value)


def test_an_inventory_survives_the_way_through_json() -> None:
    files = TlsFiles(certificate=Path("/c"), private_key=Path("/k"), authority=Path("/a"))
    for tls in (None, files):
        taken = take_inventory("127.0.0.1", ports=(7, 9), space="b", tls=tls)
        travelled = unpack(message(Word.HELLO, content=taken.to_plain())[13:])
        assert Inventory.from_plain(travelled) == taken
    assert (taken.space, taken.interface) == ("b", interface_of("127.0.0.1"))
    assert take_inventory("127.0.0.1").space == this_space()


def test_a_message_too_long_or_of_no_kind_is_refused() -> None:
    async def read(data: bytes) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        await read_message(reader)

    huge = message(Word.PING)[:5] + (1 << 40).to_bytes(8, "big")
    with pytest.raises(ValueError, match="a message of 1099511627776 bytes"):
        asyncio.run(read(huge))
    with pytest.raises(ValueError, match="99 is not a valid Word"):
        asyncio.run(read(bytes([99]) + message(Word.PING)[1:]))


def test_a_job_ends_at_once_though_nobody_takes_what_its_rank_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_label: str, _environment: object, stdout: int, stderr: int) -> tuple[socket.socket, object]:
        ours, theirs = socket.socketpair()
        with theirs:
            return ours, subprocess.Popen(["yes"], stdin=theirs.fileno(), stdout=stdout, stderr=stderr)

    monkeypatch.setattr("llamarl.runtime.hosts.hosted_rank.start_rank", start)

    async def job() -> float:
        said = asyncio.Event()
        spoken = 0

        def send(data: bytes) -> None:
            nonlocal spoken
            spoken += len(data)
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


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('10.0.0.2', 22222)"), "Connection refused"),
        (asyncio.IncompleteReadError(b"", 13), "it hung up"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "Network is unreachable"),
    ],
)
def test_why_no_worker_answers_is_said_in_the_systems_words(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_address: str, _port: int) -> socket.socket:
        raise error

    monkeypatch.setattr("llamarl.runtime.hosts.connection._connect", refuse)
    with pytest.raises(ConfigError, match=rf"host b: no worker at \[fd00::2\]:7: {words}$"):
        ask([Worker("b", "fd00::2", 7)], WorkerKey(b"k" * 32))


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
