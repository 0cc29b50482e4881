"""What a rank writes is reported when it is on the disk, with size and checksum, also what was written beside the ticks."""

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


def test_what_a_save_returns_at_once_are_files_beside_its_folder_or_nothing(tmp_path: Path) -> None:
    saves = RankSaves("generator", 1, limit_s=10)
    begin(saves, tmp_path, lambda folder, tick: (folder / "g").write_bytes(b"state"))
    assert saves.take() == {3: (record("generator/rank_1/g", b"state"),)}

    def beside(folder: Path, tick: int) -> list[Path]:
        (folder.parent / "b").write_bytes(b"all")
        return [folder.parent / "b"]

    begin(saves, tmp_path, beside, tick=4)
    assert saves.take() == {4: (record("generator/b", b"all"),)}


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
    (state / "rank_0.safetensors").write_bytes(b"weights")
    (state / "rank_1.safetensors").write_bytes(b"of another rank")
    writing.set_result((state / "rank_0.safetensors",))
    saves.finish(wait=False)
    assert saves.writing == () and saves.take() == {3: (record("trainer/state/rank_0.safetensors", b"weights"),)}


def test_a_file_that_a_save_names_and_did_not_write_is_told_of(tmp_path: Path) -> None:
    saves, writing = RankSaves("trainer", 0, limit_s=10), Future[tuple[Path, ...]]()
    begin(saves, tmp_path, lambda folder, tick: writing)
    writing.set_result((tmp_path / "tick_3.partial" / "trainer" / "nothing",))
    saves.finish(wait=True)
    assert saves.take() == {} and "No such file" in saves.take_unwritten()[3]


def refused() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_beside_the_ticks_is_told_of_once_and_the_next_state_is_written(tmp_path: Path) -> None:
    saves, writing = RankSaves("trainer", 0, limit_s=10), Future[None]()
    begin(saves, tmp_path, lambda folder, tick: writing)
    state = tmp_path / "tick_3.partial" / "trainer" / "state" / "rank_0.safetensors"
    state.parent.mkdir()
    state.write_bytes(b"a part")
    writing.set_exception(refused())
    assert not state.exists(), "room is made before anybody asks: the tick that is under way may need it"
    saves.finish(wait=True)
    assert saves.writing == () and saves.take() == {}
    (why,) = saves.take_unwritten().values()
    assert why.startswith(str(tmp_path / "tick_3.partial/trainer/rank_0: No space left on device, "))
    assert "resume" not in why and saves.take_unwritten() == {}
    begin(saves, tmp_path, lambda folder, tick: None, tick=4)
    assert saves.take() == {4: ()} and saves.take_unwritten() == {}


def test_a_disk_that_is_full_within_the_tick_is_told_of(tmp_path: Path) -> None:
    def save(folder: Path, tick: int) -> None:
        raise refused()

    saves = RankSaves("generator", 0, limit_s=10)
    begin(saves, tmp_path, save)
    assert saves.take() == {} and set(saves.take_unwritten()) == {3}


def test_a_rank_without_a_folder_writes_all_the_same_since_others_may_write_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    saves = RankSaves("trainer", 0, limit_s=10)

    def mkdir(path: Path, **_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    begin(saves, tmp_path, lambda folder, tick: called.append(tick))
    assert called == [3] and "Read-only file system" in saves.take_unwritten()[3]


def test_a_mistake_in_an_executors_save_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    def save(folder: Path, tick: int) -> None:
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        begin(RankSaves("mine", 0, limit_s=10), tmp_path, save)


def test_a_runs_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    saves = RankSaves("trainer", 0, limit_s=10)
    begin(saves, tmp_path / "gone", lambda folder, tick: folder.mkdir(parents=True))
    assert "is not there any more" in saves.take_unwritten()[3] and not (tmp_path / "gone").exists()


def test_what_a_tick_wrote_into_the_runs_folder_is_reported_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    path = tmp_path / "rollouts" / "tick_000003.jsonl"
    path.write_bytes(b"{}\n")
    assert record_products(tmp_path, [path]) == (record("rollouts/tick_000003.jsonl", b"{}\n"),)
    assert record_products(None, [path]) == () and record_products(tmp_path, ()) == ()
    with pytest.raises(CheckpointError, match="StepResult.files names .*rollouts.*, which is not in the run's folder"):
        record_products(tmp_path / "elsewhere", [path])
