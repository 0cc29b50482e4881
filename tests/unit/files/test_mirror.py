"""A run's folder that is kept on another host too: what goes there, in which order, and who goes on with it when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llamarl.checkpoint.snapshot import MANIFEST, FileRecord, checksum_file
from llamarl.cli.take_over import hosts_that_are_left
from llamarl.config import RunConfig, validate
from llamarl.controller.standby import Standby, consents, open_standby
from llamarl.errors import ConfigError, RunTakenOver, TransferError
from llamarl.files.host_files import HostFiles, StandBy
from llamarl.files.mirror import Mirror, changes
from llamarl.runtime.config import Worker


def test_the_journal_goes_before_checkpoints_and_a_manifest_after_all_of_its_files() -> None:
    names = [
        f"checkpoints/tick_000004/{MANIFEST}",
        "checkpoints/tick_000004/trainer/rank_0/z",
        "metrics.jsonl",
        "journal/000009",
    ]
    here = dict.fromkeys(names, (1, 1))
    assert changes(here, {}) == (["journal/000009", "metrics.jsonl", names[1], names[0]], [])


def test_what_has_changed_is_sent_again_and_what_is_gone_is_removed() -> None:
    there = {"metrics.jsonl": (10, 1), "config.toml": (5, 1), "journal/000001": (3, 1)}
    here = {"metrics.jsonl": (20, 2), "config.toml": (5, 1)}
    assert changes(here, there) == (["metrics.jsonl"], ["journal/000001"])


class Host:
    """What a client says to a worker, and what that then holds."""

    host = "b"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.said: list[str] = []
        self.keeps_it = True

    def send(self, source: Path, record: FileRecord, *, run: str | None) -> None:
        if not self.keeps_it:
            raise TransferError("no")
        assert checksum_file(source) == (record.num_bytes, record.xxh3_128)
        self.files[record.path] = source.read_bytes()

    def remove(self, run: str, path: str) -> None:
        del self.files[path]

    def keeps(self, run: str) -> bool:
        return self.keeps_it

    def forget(self, run: str) -> None:
        self.said.append("forget")

    def hurry(self) -> None: ...

    def close(self) -> None: ...


def mirror_of(folder: Path, host: Host, told: list[str] | None = None) -> Mirror:
    return Mirror(folder, host, "run", (told if told is not None else []).append)  # type: ignore[arg-type]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_copy_is_the_folder_without_what_is_unfinished(tmp_path: Path) -> None:
    host = Host()
    write(tmp_path, metrics="1", checkpoints__tick_000001__state="2", journal__000001="3")
    for unfinished in ("checkpoints/tick_000002.partial/state", "config.toml.new", ".incoming/x", ".lock"):
        write(tmp_path, **{unfinished.replace("/", "__"): "no"})
    mirror = mirror_of(tmp_path, host)
    mirror.once()
    whole = {"metrics": b"1", "checkpoints/tick_000001/state": b"2", "journal/000001": b"3"}
    assert host.files == whole
    (tmp_path / "journal" / "000001").unlink()
    write(tmp_path, metrics="1\n2")
    mirror.once()
    assert set(host.files) == {"metrics", "checkpoints/tick_000001/state"}


def test_a_controller_whose_run_was_taken_over_is_told_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamarl.files.mirror._EVERY_S", 0.01)
    host, told = Host(), list[str]()
    mirror = mirror_of(tmp_path, host, told)
    standby = Standby(host, "run", mirror)  # type: ignore[arg-type]
    mirror.start()
    standby.check()
    host.keeps_it = False
    write(tmp_path, metrics="1")
    until = time.monotonic() + 10.0
    while not mirror.lost and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(RunTakenOver, match="the standby b had not heard of this controller"):
        standby.check()
    standby.close()
    assert host.said == ["forget"] and not told


def test_a_standby_that_cannot_be_reached_is_told_once_and_so_is_its_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamarl.files.mirror._EVERY_S", 0.01)
    monkeypatch.setattr("llamarl.files.mirror._AGAIN_S", 0.01)
    told: list[str] = []

    class Away(Host):
        away = 3

        def send(self, source: Path, record: FileRecord, *, run: str | None) -> None:
            self.away -= 1
            if self.away >= 0:
                raise TransferError("host b: nobody answers")
            super().send(source, record, run=run)

    host = Away()
    write(tmp_path, metrics="1")
    mirror = mirror_of(tmp_path, host, told)
    mirror.start()
    until = time.monotonic() + 10.0
    while len(told) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    mirror.close(5.0)
    assert host.files == {"metrics": b"1"}
    assert ["not up to date" in told[0], "up to date again" in told[1], len(told)] == [True, True, 2]


HOW = StandBy(words=("--x=1",), after_s=1.0)


def test_a_host_takes_over_a_run_that_nobody_asks_for_and_keeps_its_folder(tmp_path: Path) -> None:
    files = HostFiles(tmp_path)
    handle, folder = files.open_run("id")
    files.stand_by(handle, HOW)
    (folder / "metrics.jsonl").write_text("1")
    assert files.patience_s({handle}) == 1.0 and files.patience_s({"other"}) is None
    assert files.take_over({handle}, since_s=0.0) == [], "it was asked for since"
    ((place, how),) = files.take_over({handle}, since_s=time.monotonic())
    assert how == HOW and (place / "metrics.jsonl").read_text() == "1"
    assert not files.keeps(handle)
    files.forget_those_left()
    assert place.is_dir()


def test_a_run_whose_controller_has_come_back_under_another_handle_is_left_to_it(tmp_path: Path) -> None:
    files = HostFiles(tmp_path)
    first, _ = files.open_run("id")
    files.stand_by(first, HOW)
    lost_s = time.monotonic()
    second, _ = files.open_run("id")
    files.stand_by(second, HOW)
    assert files.take_over({first}, since_s=lost_s) == []
    assert files.keeps(second)


def config(**hosts: Any) -> RunConfig:
    return validate({"hosts": hosts})


def test_a_successor_waits_for_no_host_and_where_none_is_left_goes_on_alone() -> None:
    def only(*names: str) -> Any:
        return lambda worker: "" if worker.name in names else f"{worker.name} is gone"

    three = config(workers=["a", "b", "c"])
    assert hosts_that_are_left(three, only("a", "b", "c")) == []
    assert hosts_that_are_left(three, only("b", "c")) == ["--hosts.absent_after_s=0"]
    assert hosts_that_are_left(three, only()) == ["--hosts", "here"]
    assert hosts_that_are_left(config(), only()) == []


def test_a_successor_uses_its_own_key_where_the_runs_is_not_there(tmp_path: Path) -> None:
    def answers(worker: Worker) -> str:
        return ""

    assert hosts_that_are_left(config(key=str(tmp_path / "none")), answers) == ['--hosts.key=""']
    (tmp_path / "one").write_text("")
    assert hosts_that_are_left(config(key=str(tmp_path / "one")), answers) == []


def test_a_run_that_goes_on_does_so_without_a_standby_that_is_gone_and_a_new_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("ab" * 32)
    (tmp_path / "key").chmod(0o600)
    run, told = config(key=str(tmp_path / "key"), standby="127.0.0.1:1"), list[str]()
    assert open_standby(run, run, tmp_path, "id", told.append, goes_on=True) is None
    (line,) = told
    assert line.startswith("the run goes on without its standby") and "host 127.0.0.1:1" in line
    with pytest.raises(ConfigError, match="hosts.standby: host 127.0.0.1:1"):
        open_standby(run, run, tmp_path, "id", told.append)


def test_what_a_person_has_consented_to_is_passed_on() -> None:
    def words(plain: dict[str, Any]) -> Sequence[str]:
        return consents(validate(plain))

    assert words({}) == []
    assert words({"model": {"trust_remote_code": True}}) == ["--model.trust_remote_code=true"]
    command = {"workers": ["a"], "start": "ssh", "command": "/opt/llamarl worker"}
    assert words({"hosts": command}) == ["--hosts.command=/opt/llamarl worker"]
