"""Files go to and from a host whole or not at all, go on after a broken connection, and never lead out of their folder."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from file_server import FarHost, far_host

from llamarl.checkpoint.shared_folder import ask, judge
from llamarl.checkpoint.snapshot import FileRecord, checksum_bytes
from llamarl.errors import TransferError
from llamarl.files import client as client_module
from llamarl.files import partial as partial_module
from llamarl.files.below import Below
from llamarl.files.client import FileClient
from llamarl.files.frames import SocketFrames

BIG = os.urandom(3_500_000)  # four pieces, the last of them short


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_PAUSE_S", 0.001)


def record(path: str, data: bytes) -> FileRecord:
    return FileRecord(path=path, num_bytes=len(data), xxh3_128=checksum_bytes(data))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FarHost]:
    with far_host(tmp_path / "b") as found:
        yield found


@pytest.fixture
def here(tmp_path: Path) -> Below:
    (tmp_path / "here").mkdir()
    return Below(tmp_path / "here")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(BIG)
    return path


def test_a_file_comes_whole_with_its_checksum_and_lies_on_the_disk(
    host: FarHost, here: Below, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = host.client()
    run, folder = client.open_run("id")
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "tick_000000.jsonl").write_bytes(BIG)
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    expected = record("rollouts/tick_000000.jsonl", BIG)
    assert client.fetch(run, expected.path, here, expected) == expected
    assert (here.root / expected.path).read_bytes() == BIG
    assert any(".incoming" in path for path in synced) and str(here.root / "rollouts") in synced
    assert client.fetch(run, expected.path, here, None, name="again") == expected  # without knowing what to expect
    assert (here.root / "again").read_bytes() == BIG
    assert not list((here.root / ".incoming").iterdir())


def test_a_file_goes_to_the_host_and_an_empty_one_too(host: FarHost, source: Path, tmp_path: Path) -> None:
    client = host.client()
    run, folder = client.open_run("id")
    client.send(source, record("checkpoints/tick_000001/trainer/state/a", BIG), run=run)
    (tmp_path / "empty").touch()
    client.send(tmp_path / "empty", record("checkpoints/empty", b""), run=run)
    assert (folder / "checkpoints/tick_000001/trainer/state/a").read_bytes() == BIG
    assert (folder / "checkpoints/empty").read_bytes() == b""
    assert [(f.path, f.num_bytes) for f in client.list_files(run)] == [
        (".run_id", 3),
        ("checkpoints/empty", 0),
        ("checkpoints/tick_000001/trainer/state/a", len(BIG)),
    ]
    assert [f.path for f in client.list_files(run, skip=["checkpoints", ".run_id"])] == []
    client.remove(run, "checkpoints/tick_000001")
    client.remove(run, "checkpoints/tick_000001")  # it is gone: nothing happens
    assert [f.path for f in client.list_files(run, skip=[".run_id"])] == ["checkpoints/empty"]


class _Breaking:
    """A dialler whose first connections end after so many bytes in either direction."""

    def __init__(self, host: FarHost, after: int, times: int = 1) -> None:
        self.host, self.after, self.times = host, after, times
        self.passed = 0

    def __call__(self) -> socket.socket:
        far = self.host.dial()
        if not self.times:
            return far
        self.times -= 1
        near, between = socket.socketpair()
        for one, other in ((between, far), (far, between)):
            threading.Thread(target=self._pump, args=(one, other), daemon=True).start()
        return near

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while self.passed < self.after and (data := one.recv(65536)):
                other.sendall(data)
                self.passed += len(data)
        except OSError:
            pass
        for end in (one, other):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def test_a_fetch_goes_on_where_a_broken_connection_left_it(host: FarHost, here: Below) -> None:
    run, folder = host.client().open_run("id")
    (folder / "a").write_bytes(BIG)
    dial = _Breaking(host, after=2_500_000)
    starts: list[int] = []
    init = partial_module.Partial.__init__

    def remember(self: partial_module.Partial, *arguments: object) -> None:
        init(self, *arguments)  # type: ignore[arg-type]
        starts.append(self.offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial_module.Partial, "__init__", remember)
        FileClient("b", dial, stall_s=10).fetch(run, "a", here, record("a", BIG))
    assert (here.root / "a").read_bytes() == BIG
    assert starts[0] == 0 and starts[1] >= 1 << 20, "the second try began after what the first had brought"


def test_a_send_goes_on_where_a_broken_connection_left_it(host: FarHost, source: Path) -> None:
    run, folder = host.client().open_run("id")
    FileClient("b", _Breaking(host, after=2_500_000), stall_s=10).send(source, record("a", BIG), run=run)
    assert (folder / "a").read_bytes() == BIG


def test_a_host_that_is_gone_is_told_after_a_few_tries(host: FarHost, here: Below) -> None:
    run, _ = host.client().open_run("id")
    with pytest.raises(TransferError, match="host b: a: the connection for files is lost"):
        FileClient("b", _Breaking(host, after=0, times=99), stall_s=10).fetch(run, "a", here, record("a", BIG))


def test_a_host_that_says_nothing_is_not_waited_for_longer_than_the_limit(here: Below) -> None:
    ends: list[socket.socket] = []

    def dial() -> socket.socket:
        ends.extend(socket.socketpair())
        return ends[-1]

    with pytest.raises(TransferError, match="host b: a: the connection for files is lost: timed out"):
        FileClient("b", dial, stall_s=0.05).fetch("run", "a", here, record("a", BIG))


def test_a_controller_that_stops_in_the_middle_of_a_file_is_hung_up_on_and_may_go_on(
    tmp_path: Path, source: Path
) -> None:
    with far_host(tmp_path / "b", stall_s=0.2) as host:
        run, folder = host.client().open_run("id")
        connection = host.dial()
        frames = SocketFrames(connection, 10)
        frames.ask({"do": "put", "run": run, "file": ["a", len(BIG), checksum_bytes(BIG)]})
        assert frames.answer() == {"offset": 0}
        frames.send(BIG[:1000])
        with pytest.raises(ConnectionError):
            frames.answer()
        assert not (folder / "a").exists()
        frames = SocketFrames(host.dial(), 10)
        frames.ask({"do": "put", "run": run, "file": ["a", len(BIG), checksum_bytes(BIG)]})
        assert frames.answer() == {"offset": 1000}


def _altered(folder: Path) -> str:
    (folder / "a").write_bytes(BIG[:-1] + bytes([BIG[-1] ^ 1]))
    return "a: it was altered"


def _torn(folder: Path) -> str:
    os.truncate(folder / "a", 5)
    return f"a: it is torn: 5 bytes, {len(BIG)} were written"


def _grown(folder: Path) -> str:
    (folder / "a").write_bytes(BIG + b"x")
    return f"a: it is torn: {len(BIG) + 1} bytes"


def _removed(folder: Path) -> str:
    (folder / "a").unlink()
    return "a: a is not there"


def _linked(folder: Path) -> str:
    (folder / "a").rename(folder / "b")
    (folder / "a").symlink_to(folder / "b")
    return "a: a is reached over a link"


@pytest.mark.parametrize("damage", [_altered, _torn, _grown, _removed, _linked])
def test_a_file_that_is_not_as_it_was_written_is_refused_by_name(host: FarHost, here: Below, damage) -> None:
    client = host.client()
    run, folder = client.open_run("id")
    (folder / "a").write_bytes(BIG)
    told = damage(folder)
    with pytest.raises(TransferError) as caught:
        client.fetch(run, "a", here, record("a", BIG))
    assert str(caught.value).startswith("host b: ") and told in str(caught.value)
    assert not (here.root / "a").exists()
    (folder / "c").write_bytes(b"c")
    assert client.fetch(run, "c", here, record("c", b"c")), "the connection, or another one, goes on"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", "a\0b", "./a", "linked/passwd", "linked"])
def test_nothing_outside_of_the_folder_is_read_written_or_removed(
    host: FarHost, here: Below, source: Path, path: str
) -> None:
    client = host.client()
    run, folder = client.open_run("id")
    (folder.parent / "x").write_bytes(b"outside")
    (folder / "linked").symlink_to("/etc")
    (folder / "a").mkdir()
    with pytest.raises(TransferError, match="host b"):
        client.fetch(run, path, here, None, name="got")
    if path != "linked":  # the link itself is the folder's
        with pytest.raises(TransferError, match="host b"):
            client.send(source, record(path, BIG), run=run)
        with pytest.raises(TransferError, match="host b"):
            client.remove(run, path)
    assert (folder.parent / "x").read_bytes() == b"outside" and os.path.exists("/etc/passwd")
    assert not (here.root / "got").exists()


@pytest.mark.parametrize("run", ["..", "id", "id.0123456789abcdef", "../b/runs", "", "a/b.0123456789abcdef"])
def test_a_run_that_was_not_opened_here_has_no_files(host: FarHost, run: str) -> None:
    host.client().open_run("id")
    with pytest.raises(TransferError, match="is no run that is kept here"):
        host.client().list_files(run)


@pytest.mark.parametrize("run_id", ["", "..", "a/b", "a b", "x" * 65])
def test_a_run_id_is_a_plain_name(host: FarHost, run_id: str) -> None:
    with pytest.raises(TransferError, match="is no name of a run"):
        host.client().open_run(run_id)


def test_each_opening_is_an_empty_folder_and_forgetting_removes_it(host: FarHost) -> None:
    client = host.client()
    (first, one), (second, two) = client.open_run("id"), client.open_run("id")
    assert first != second and one != two and one.parent != two.parent
    assert sorted(p.name for p in two.iterdir()) == [".run_id", "checkpoints"]
    client.forget(first)
    assert not one.parent.exists() and two.exists()
    with pytest.raises(TransferError, match="is no run"):
        client.list_files(first)


def test_runs_whose_controller_is_gone_without_a_word_are_forgotten(host: FarHost) -> None:
    client = host.client()
    (silent, gone), (left, stays) = client.open_run("id"), client.open_run("id")
    client.leave(left)
    before_s = time.monotonic()
    host.files.forget_those_left([left])
    assert gone.is_dir(), "of another controller"
    client.list_files(silent)
    host.files.forget_those_left([silent], since_s=before_s)
    assert gone.is_dir(), "asked for since"
    host.files.forget_those_left()
    assert not gone.exists() and stays.is_dir(), "only the one of which its user was told nothing"
    client.forget(left)


def test_a_run_that_nobody_has_used_for_a_day_goes_when_another_is_opened(tmp_path: Path) -> None:
    with far_host(tmp_path / "b") as earlier:
        _, old = earlier.client().open_run("old")
        _, held = earlier.client().open_run("held")
        lock = earlier.files._locks.pop(old.parent.name)
        os.close(lock)
        for folder in (old, held):
            os.utime(folder.parent / ".lock", (1, 1))
        with far_host(tmp_path / "b") as later:
            _, new = later.client().open_run("new")
    assert not old.exists() and held.exists() and new.exists()


def test_a_run_that_was_left_or_let_go_goes_a_day_later_from_the_same_worker(host: FarHost) -> None:
    client = host.client()
    (left, one), (cut_off, two), (in_use, three) = (client.open_run("id") for _ in range(3))
    client.leave(left)
    host.files.let_go([cut_off])
    client.open_run("another")
    assert one.exists() and two.exists(), "the day is not over"
    for folder in (one, two, three):
        os.utime(folder.parent / ".lock", (1, 1))
    client.open_run("another")
    assert not one.exists() and not two.exists() and three.exists(), in_use


def test_a_run_that_was_let_go_and_is_used_again_stays(host: FarHost) -> None:
    client = host.client()
    handle, folder = client.open_run("id")
    host.files.let_go([handle])
    client.list_files(handle)
    os.utime(folder.parent / ".lock", (1, 1))
    client.open_run("another")
    assert folder.exists()


def test_a_disk_that_is_too_small_here_says_so_before_anything_is_asked_for(
    host: FarHost, here: Below, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = host.client()
    run, folder = client.open_run("id")
    (folder / "a").write_bytes(BIG)
    monkeypatch.setattr(partial_module, "free_bytes", lambda folder: 1_000_000)
    with pytest.raises(
        TransferError, match=r"host b: a: no space left in .*here/.incoming: 3.5 MB more are needed, 1.0 MB"
    ):
        client.fetch(run, "a", here, record("a", BIG))
    with pytest.raises(TransferError, match=r"host b: a: no space left in .*b/incoming: 3.5 MB more are needed"):
        client.send(folder / "a", record("a", BIG), run=run)


@pytest.mark.parametrize("direction", ["fetch", "send"])
def test_a_disk_that_becomes_full_on_the_way_says_so_and_leaves_nothing(
    host: FarHost, here: Below, source: Path, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    client = host.client()
    run, folder = client.open_run("id")
    (folder / "a").write_bytes(BIG)
    write, written = os.write, 0

    def full(descriptor: int, data: memoryview) -> int:
        nonlocal written
        if "incoming" in os.readlink(f"/proc/self/fd/{descriptor}"):
            written += len(data)
            if written > 2_000_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(TransferError, match=r"host b: \w: no space left in .*incoming"):
            if direction == "fetch":
                client.fetch(run, "a", here, record("a", BIG))
            else:
                client.send(source, record("c", BIG), run=run)
    assert not (here.root / "a").exists() and not (folder / "c").exists()
    for place in (here.root / ".incoming", host.files.base / "incoming"):
        assert not place.exists() or not list(place.iterdir())
    client.fetch(run, "a", here, record("a", BIG))  # with room again it goes on
    assert (here.root / "a").read_bytes() == BIG


def test_a_file_that_changes_while_it_is_sent_is_refused(host: FarHost, source: Path) -> None:
    client = host.client()
    run, folder = client.open_run("id")
    with pytest.raises(TransferError, match="host b: a: it was altered: 3500000 bytes"):
        client.send(source, replace(record("a", BIG), xxh3_128="0" * 32), run=run)
    assert not (folder / "a").exists()


def test_what_is_left_of_another_try_is_taken_up_only_if_its_bytes_are_right(host: FarHost, here: Below) -> None:
    client = host.client()
    run, folder = client.open_run("id")
    (folder / "a").write_bytes(BIG)
    wanted = record("a", BIG)
    left = here.root / ".incoming" / f"{wanted.xxh3_128}-{wanted.num_bytes}"
    left.parent.mkdir()
    left.write_bytes(b"x" * 1000)  # of another file
    with pytest.raises(TransferError, match="it was altered"):
        client.fetch(run, "a", here, wanted)
    client.fetch(run, "a", here, wanted)
    assert (here.root / "a").read_bytes() == BIG


def test_two_that_bring_the_same_file_do_not_write_into_one(tmp_path: Path) -> None:
    wanted = record("a", b"12345")
    with partial_module.Partial(tmp_path, wanted) as one, partial_module.Partial(tmp_path, wanted) as other:
        one.write(b"123")
        other.write(b"12345")
        one.write(b"45")
        assert one.finish()[0] != other.finish()[0]


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"do": "format"},
        {"do": "get"},
        {"do": "put", "file": "x"},
        {"do": "lacks", "files": [["a", "b"]]},
        {"do": ["x"]},
    ],
)
def test_a_question_that_makes_no_sense_is_answered_and_the_connection_goes_on(host: FarHost, question: dict) -> None:
    frames = SocketFrames(host.dial(), 10)
    for _ in range(2):
        frames.ask(question)
        assert "error" in frames.answer()


def test_what_is_no_frame_ends_the_connection(host: FarHost) -> None:
    connection = host.dial()
    connection.settimeout(10)
    connection.sendall(b"\xff" * 64)
    assert connection.recv(1) == b""


def test_a_host_answers_whether_it_shares_the_run_folder(host: FarHost, tmp_path: Path) -> None:
    question = ask(tmp_path)
    assert judge(question, "b", host.client().share(question)) == ""
    elsewhere = replace(question, folder=str(tmp_path / "b" / "none"))
    assert "has no folder" in judge(question, "b", host.client().share(elsewhere))
