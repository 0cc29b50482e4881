"""Files on their way between controller and host: in pieces, each proved, and nothing is left where a job has ended."""

import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from far_files import FarHost
from waiting import wait_until

from llamarl.checkpoint.snapshot import FileRecord, checksum_bytes
from llamarl.errors import TransferError
from llamarl.files import host_files
from llamarl.files.file_client import FileClient
from llamarl.files.incoming_file import PIECE_BYTES
from llamarl.files.safe_folder import SafeFolder

DATA = bytes(range(256)) * (2 * PIECE_BYTES // 256) + b"end"


def record(path: str, data: bytes = DATA) -> FileRecord:
    return FileRecord(path=path, num_bytes=len(data), xxh3_128=checksum_bytes(data))


@pytest.fixture
def host(tmp_path: Path) -> FarHost:
    return FarHost(tmp_path / "far")


def test_a_file_of_several_pieces_goes_there_and_comes_back_whole(host: FarHost, tmp_path: Path) -> None:
    client = host.client()
    run, folder = client.open_run("id")
    (tmp_path / "source").write_bytes(DATA)
    client.send(tmp_path / "source", record("a/b"), run)
    assert (folder / "a/b").read_bytes() == DATA
    (tmp_path / "here").mkdir()
    assert client.fetch(run, "a/b", SafeFolder(tmp_path / "here"), record("a/b")) == record("a/b")
    assert client.fetch(run, "a/b", SafeFolder(tmp_path / "here"), None, name="c") == record("a/b")
    assert (tmp_path / "here/a/b").read_bytes() == (tmp_path / "here/c").read_bytes() == DATA


def test_an_empty_file_is_a_file(host: FarHost, tmp_path: Path) -> None:
    client = host.client()
    run, folder = client.open_run("id")
    (tmp_path / "source").write_bytes(b"")
    client.send(tmp_path / "source", record("none", b""), run)
    assert (folder / "none").read_bytes() == b""
    client.fetch(run, "none", SafeFolder(tmp_path), record("none", b""))
    assert (tmp_path / "none").read_bytes() == b""


@pytest.mark.parametrize("way", ["add", "answer of read"])
def test_a_piece_that_changes_on_the_way_is_refused_by_host_and_file(host: FarHost, tmp_path: Path, way: str) -> None:
    client = host.client()
    run, _ = client.open_run("id")
    (tmp_path / "source").write_bytes(DATA)
    seen = 0

    def damage(method: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal seen
        seen += method == way
        if method != way or seen != 2:
            return values
        if way == "add":
            return values[0], b"X" + values[1][1:], values[2]
        data, checksum, size = values[0]
        return ((b"X" + data[1:], checksum, size),)

    host.on_the_way = damage
    with pytest.raises(TransferError, match="host b: a: its bytes changed on the way"):
        client.send(tmp_path / "source", record("a"), run)
        client.fetch(run, "a", SafeFolder(tmp_path), record("a"))
    assert seen == 2
    assert not host.files._coming and not list(host.files.base.rglob("new-*"))


def test_a_machine_too_busy_to_start_a_shell_in_time_keeps_a_run_all_the_same(
    host: FarHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_files, "_JANITOR_S", 0.0)
    client = host.client()
    run, folder = client.open_run("id")
    (folder / "log").write_text("x")
    client.forget(run)
    assert not folder.parent.exists()


def test_what_stopped_half_way_begins_anew_and_leaves_nothing_behind_the_run(host: FarHost, tmp_path: Path) -> None:
    client = host.client()
    run, folder = client.open_run("id")
    (tmp_path / "source").write_bytes(DATA)
    number = host.files.begin(run, record("a"))
    host.files.add(number, DATA[:PIECE_BYTES], checksum_bytes(DATA[:PIECE_BYTES]))
    client.send(tmp_path / "source", record("a"), run)
    assert (folder / "a").read_bytes() == DATA
    client.forget(run)
    assert not folder.parent.exists() and not list(host.files.base.rglob("new-*"))


@pytest.mark.parametrize(
    ("said", "left"), [("", False), ("files.leave(handle)", True), ("files.forget(handle)", False)]
)
def test_a_runs_folder_goes_with_the_process_that_made_it_unless_it_was_left(
    tmp_path: Path, said: str, left: bool
) -> None:
    program = (
        "import os, pathlib, sys; from llamarl.files.host_files import HostFiles; "
        "files = HostFiles(pathlib.Path(sys.argv[1])); handle, folder = files.open_run('id'); "
        f"(folder / 'log').write_text('x'); {said or 'None'}; print(folder, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "base")], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    folder = Path(done.stdout.strip()).parent
    wait_until(lambda: folder.exists() == left, 5.0)


def test_a_run_that_there_is_not_and_a_path_that_leads_out_are_refused(host: FarHost, tmp_path: Path) -> None:
    client = host.client()
    run, _ = client.open_run("id")
    with pytest.raises(TransferError, match="is no run that is kept here"):
        client.list_files("../x.0123456789abcdef")
    with pytest.raises(TransferError, match="is no path of a file below"):
        client.fetch(run, "../../x", SafeFolder(tmp_path), None)
    with pytest.raises(TransferError, match="is no name of a run"):
        client.open_run("../x")


def test_a_host_has_time_to_read_a_large_model_before_it_says_whether_it_holds_it(tmp_path: Path) -> None:
    waited: dict[str, float] = {}

    class Answer(Future[Any]):
        def __init__(self, method: str) -> None:
            super().__init__()
            self.method = method

        def result(self, timeout: float | None = None) -> Any:
            waited[self.method] = timeout or 0.0
            return ([] if self.method == "lacks" else 0), "", False

    client = FileClient("b", lambda method, *_: Answer(method), stall_s=60.0)
    model = [FileRecord(path=str(n), num_bytes=5 << 30, xxh3_128="0" * 32) for n in range(3)]
    client.holds(tmp_path, model)
    client.lacks(model)
    (tmp_path / "source").write_bytes(b"x")
    client.send(tmp_path / "source", model[0], "run", as_object=True)
    needed_s = 16.1e9 / 125e6
    assert waited["holds"] > needed_s > 60.0 and waited["lacks"] > needed_s, "a cloud disk of 125 MB/s"
    assert waited["finish"] > 5.3e9 / 60e6, "it is flushed there, to a disk of 60 MB/s"
    assert waited["begin"] == waited["add"] == 60.0
