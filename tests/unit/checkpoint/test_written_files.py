"""A checkpoint counts by what was written: each reported file must be there, byte for byte, and none besides."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamarl.checkpoint import written
from llamarl.checkpoint.snapshot import FileRecord, checksum_bytes
from llamarl.checkpoint.storage import CheckpointStore
from llamarl.checkpoint.written import is_inside, look_at, record_files, silent_ranks, sync_folder, why_not_whole
from llamarl.errors import CheckpointError
from llamarl.settings.checkpoint import CheckpointConfig

DATA = b"weights" * 1000
RECORD = FileRecord(path="trainer/state/a", num_bytes=7000, xxh3_128=checksum_bytes(DATA))


def _put(root: Path, path: str, data: bytes = DATA) -> Path:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(data)
    return root / path


def test_a_rank_says_what_its_files_hold_in_order_and_once(tmp_path: Path) -> None:
    first, second = _put(tmp_path, "trainer/state/a"), _put(tmp_path, "trainer/rank_0/b", b"")
    assert record_files(tmp_path, [first, second, first]) == (
        FileRecord(path="trainer/rank_0/b", num_bytes=0, xxh3_128="99aa06d3014798d86001c324468d497f"),
        RECORD,
    )


def test_what_is_said_to_be_written_is_on_the_disk_with_every_folder_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _put(tmp_path, "trainer/state/a")
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    record_files(tmp_path, [path])
    assert synced == [str(path), str(tmp_path / "trainer/state"), str(tmp_path / "trainer"), str(tmp_path)]


def test_a_file_outside_of_the_folder_cannot_be_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        record_files(tmp_path / "run", [_put(tmp_path, "elsewhere")])


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "a/../../b", "", ".", "a/./b", "a\0b", "a/.."])
def test_a_path_that_leads_out_names_no_file(path: str, tmp_path: Path) -> None:
    assert not is_inside(path)
    record = FileRecord(path=path, num_bytes=1, xxh3_128="")
    assert why_not_whole(tmp_path, {"r": [record]}, patience_s=0) == [
        f"r names {path!r}, which is no file of this folder"
    ]


@pytest.mark.parametrize("path", ["a", "a/b", ".metadata", "..a", "a/..b/c.d"])
def test_other_paths_do(path: str) -> None:
    assert is_inside(path)


def test_two_ranks_may_report_one_file_if_they_agree(tmp_path: Path) -> None:
    _put(tmp_path, RECORD.path)
    other = FileRecord(path=RECORD.path, num_bytes=7000, xxh3_128="0" * 32)
    assert why_not_whole(tmp_path, {"t rank 0": [RECORD], "t rank 1": [RECORD]}, patience_s=0) == []
    assert why_not_whole(tmp_path, {"t rank 0": [RECORD], "t rank 1": [other]}, patience_s=0) == [
        "trainer/state/a was written by t rank 0 and by t rank 1, differently"
    ]


def test_a_file_that_is_shown_late_is_waited_for(tmp_path: Path) -> None:
    writer = threading.Timer(0.1, lambda: _put(tmp_path, RECORD.path))
    writer.start()
    assert why_not_whole(tmp_path, {"r": [RECORD]}, patience_s=20) == []
    writer.join()


def test_the_time_that_reading_takes_is_none_of_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _put(tmp_path, RECORD.path)
    late, now = FileRecord(path="b", num_bytes=7000, xxh3_128=RECORD.xxh3_128), [0.0]

    def look(folder: Path, record: FileRecord) -> str:
        now[0] += 600.0 * (record is RECORD)  # a terabyte
        return look_at(folder, record)

    def sleep(pause_s: float) -> None:
        now[0] += pause_s
        _put(tmp_path, "b")  # was on its way

    monkeypatch.setattr(written, "look_at", look)
    monkeypatch.setattr(written, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    assert why_not_whole(tmp_path, {"r": [late, RECORD]}, patience_s=30) == []


def test_the_wait_for_a_file_that_never_comes_is_bounded(tmp_path: Path) -> None:
    began = time.monotonic()
    assert why_not_whole(tmp_path, {"r": [RECORD]}, patience_s=0.2) == ["trainer/state/a is missing (written by r)"]
    assert 0.2 <= time.monotonic() - began < 2


def test_ranks_that_say_nothing_are_named_and_those_without_files_are_not() -> None:
    assert silent_ranks({"trainer": 2, "reward": 1}, {"trainer rank 0": [RECORD], "reward rank 0": []}) == [
        "trainer rank 1"
    ]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(keep=0))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda p: (p / "trainer/state/a").unlink(), "trainer/state/a is missing (written by trainer rank 1)"),
        (lambda p: os.truncate(p / "trainer/state/a", 5), "trainer/state/a is torn: 5 bytes, 7000 were written"),
        (lambda p: _put(p, "trainer/state/a", DATA[::-1]), "trainer/state/a was altered"),
        (lambda p: _put(p, "trainer/late", b"x"), "trainer/late was written by no rank that says so"),
        (lambda p: (p / "generator/rank_0/g").unlink(), "generator/rank_0/g is missing (written by generator rank 0)"),
    ],
)
def test_a_checkpoint_is_not_finished_unless_it_holds_what_was_written_and_nothing_else(
    store: CheckpointStore, damage, told: str
) -> None:
    partial = store.begin(1)
    written = {
        "generator rank 0": record_files(partial, [_put(partial, "generator/rank_0/g", b"g")]),
        "trainer rank 1": record_files(partial, [_put(partial, "trainer/state/a")]),
    }
    damage(partial)
    with pytest.raises(CheckpointError) as caught:
        store.finish(1, written)
    assert "cannot finish checkpoint tick_000001" in str(caught.value) and told in str(caught.value)
    assert list(store.folder.iterdir()) == [], "no unfinished folder is left"


def test_all_that_is_wrong_is_named_at_once(store: CheckpointStore) -> None:
    partial = store.begin(1)
    written = {
        f"trainer rank {rank}": record_files(partial, [_put(partial, f"trainer/state/{rank}")]) for rank in range(3)
    }
    for rank in (0, 2):
        (partial / f"trainer/state/{rank}").unlink()
    with pytest.raises(CheckpointError) as caught:
        store.finish(1, written)
    assert "trainer/state/0 is missing (written by trainer rank 0)" in str(caught.value)
    assert "trainer/state/2 is missing (written by trainer rank 2)" in str(caught.value)
    assert "trainer/state/1" not in str(caught.value)


def test_a_file_system_that_flushes_no_folders_is_written_to_all_the_same(tmp_path: Path) -> None:
    sync_folder(Path("/proc"))  # which answers EINVAL, as VirtualBox's shared folders do
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "gone")
