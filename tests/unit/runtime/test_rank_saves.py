"""What a rank writes is reported when it is on the disk, with size and checksum, also what was written beside the ticks."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from llamarl.checkpoint.snapshot import FileRecord, checksum_bytes
from llamarl.errors import CheckpointError
from llamarl.runtime.rank_saves import RankSaves, record_products


class Saves:
    """An executor of which only ``save`` is asked."""

    def __init__(self, save: Callable[[Path, int], Any]) -> None:
        self.save = save


def record(path: str, data: bytes) -> FileRecord:
    return FileRecord(path=path, num_bytes=len(data), xxh3_128=checksum_bytes(data))


def begin(saves: RankSaves, tmp_path: Path, save: Callable[[Path, int], Any], tick: int = 3) -> None:
    saves.begin(Saves(save), tick, tmp_path / f"tick_{tick}.partial")  # type: ignore[arg-type]


def test_what_is_written_at_once_is_reported_once(tmp_path: Path) -> None:
    saves = RankSaves("generator", 1, limit_s=10)
    begin(saves, tmp_path, lambda folder, tick: (folder / "g").write_bytes(b"state") and None)
    assert saves.writing == ()
    assert saves.take() == {3: (record("generator/rank_1/g", b"state"),)}
    assert saves.take() == {}


def test_a_rank_without_state_says_so(tmp_path: Path) -> None:
    saves = RankSaves("reference", 0, limit_s=10)
    begin(saves, tmp_path, lambda folder, tick: None)
    assert saves.take() == {3: ()}


def test_what_is_written_beside_the_ticks_is_reported_when_it_is_written_with_what_lies_beside_the_folder(
    tmp_path: Path,
) -> None:
    saves, writing = RankSaves("trainer", 0, limit_s=10), Future[tuple[Path, ...]]()
    begin(saves, tmp_path, lambda folder, tick: writing)
    saves.finish(wait=False)
    assert saves.writing == (3,) and saves.take() == {}
    state = tmp_path / "tick_3.partial" / "trainer" / "state"
    state.mkdir()
    (state / "__0_0.distcp").write_bytes(b"weights")
    (state / "__1_0.distcp").write_bytes(b"of another rank")
    writing.set_result((state / "__0_0.distcp",))
    saves.finish(wait=False)
    assert saves.writing == () and saves.take() == {3: (record("trainer/state/__0_0.distcp", b"weights"),)}


def test_a_file_that_a_save_names_and_did_not_write_ends_the_run(tmp_path: Path) -> None:
    saves, writing = RankSaves("trainer", 0, limit_s=10), Future[tuple[Path, ...]]()
    begin(saves, tmp_path, lambda folder, tick: writing)
    writing.set_result((tmp_path / "tick_3.partial" / "trainer" / "nothing",))
    with pytest.raises(CheckpointError, match="No such file"):
        saves.finish(wait=True)


def test_a_full_disk_while_it_is_flushed_is_a_checkpoint_error(tmp_path: Path) -> None:
    saves, writing = RankSaves("trainer", 0, limit_s=10), Future[None]()
    begin(saves, tmp_path, lambda folder, tick: writing)
    writing.set_exception(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(CheckpointError, match="No space left on device"):
        saves.finish(wait=True)


def test_a_runs_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not there any more"):
        begin(RankSaves("trainer", 0, limit_s=10), tmp_path / "gone", lambda folder, tick: None)


def test_what_a_tick_wrote_into_the_runs_folder_is_reported_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    path = tmp_path / "rollouts" / "tick_000003.jsonl"
    path.write_bytes(b"{}\n")
    assert record_products(tmp_path, [path]) == (record("rollouts/tick_000003.jsonl", b"{}\n"),)
    assert record_products(None, [path]) == () and record_products(tmp_path, ()) == ()
    with pytest.raises(CheckpointError, match="StepResult.files names .*rollouts.*, which is not in the run's folder"):
        record_products(tmp_path / "elsewhere", [path])
