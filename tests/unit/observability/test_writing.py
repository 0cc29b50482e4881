"""A disk that refuses is waited for, each byte is written once, and what does not pass is an error at once."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llamarl.errors import LlamaRLError
from llamarl.observability import writing
from llamarl.observability.writing import Patience


class Disk:
    """``os.write`` that takes ``takes[i]`` bytes at call i, fails where that is an error's number, and then takes all."""

    def __init__(self, *takes: int, fails: tuple[int, ...] = ()) -> None:
        self.takes, self.fails = list(takes), list(fails)
        self._write = os.write

    def __call__(self, descriptor: int, data: memoryview) -> int:
        if self.takes:
            return self._write(descriptor, data[: self.takes.pop(0)])
        if self.fails:
            number = self.fails.pop(0)
            raise OSError(number, os.strerror(number))
        return self._write(descriptor, data)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock is what this thread has slept; others, which earlier tests may have left, sleep as ever."""
    pauses: list[float] = []
    mine, sleep = threading.get_ident(), time.sleep
    monkeypatch.setattr(
        writing.time, "sleep", lambda s: pauses.append(s) if threading.get_ident() == mine else sleep(s)
    )
    monkeypatch.setattr(writing, "running_s", lambda: sum(pauses))
    return pauses


def append(path: Path, disk: Callable[..., int], patience: Patience, monkeypatch: pytest.MonkeyPatch) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", disk)
        patience.append(path, file, b"0123456789")
    os.close(file)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE])
def test_a_line_of_which_the_disk_took_a_part_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float], number: int
) -> None:
    told: list[str] = []
    append(tmp_path / "log", Disk(4, fails=(number,) * 3), Patience(60.0, told.append), monkeypatch)
    assert (tmp_path / "log").read_bytes() == b"0123456789"
    assert slept == [0.1, 0.2, 0.4]
    first, last = told
    assert first.startswith(f"cannot write {tmp_path / 'log'}: {os.strerror(number)}. The run waits until it can, 60 s")
    assert last == f"{tmp_path / 'log'} could be written after 1 s: the run goes on"


def test_a_disk_that_refuses_for_too_long_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    with pytest.raises(LlamaRLError, match=r"log: No space left on device\. Checkpoints .* untouched.*resume the run"):
        append(tmp_path / "log", Disk(fails=(errno.ENOSPC,) * 99), Patience(5.0, lambda text: None), monkeypatch)
    assert 5.0 <= sum(slept) < 7.1


@pytest.mark.parametrize(
    ("number", "limit_s"), [(errno.ENOENT, 5.0), (errno.EACCES, 5.0), (errno.EBADF, 5.0), (errno.ENOSPC, 0.0)]
)
def test_what_does_not_pass_is_not_waited_for_nor_anything_without_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float], number: int, limit_s: float
) -> None:
    patience = Patience(limit_s) if limit_s else Patience()
    with pytest.raises(LlamaRLError, match=os.strerror(number)):
        append(tmp_path / "log", Disk(fails=(number,)), patience, monkeypatch)
    assert slept == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_is_tried_again_as_a_whole_and_the_one_before_stays_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float], call: str
) -> None:
    path, real, seen = tmp_path / "made" / "file", getattr(os, call), []
    Patience().replace(path, b"old")

    def fail_twice(*args: object) -> object:
        seen.append(path.read_bytes())
        if len(seen) < 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    monkeypatch.setattr(os, call, fail_twice)
    Patience(60.0, lambda text: None).replace(path, b"new")
    assert seen == [b"old"] * 3 and path.read_bytes() == b"new"
    assert [one.name for one in path.parent.iterdir()] == ["file"]


def test_the_folder_of_a_run_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(LlamaRLError, match="No such file"):
        Patience(60.0).replace(tmp_path / "run" / "rollouts" / "tick_000000.jsonl", b"x")
    assert not (tmp_path / "run").exists()
