"""A checkpoint waits for every rank's word and every rank's file; what else a tick wrote is proved too, and fetched where it must."""

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llamarl.checkpoint.snapshot import FileRecord
from llamarl.checkpoint.storage import CheckpointStore, RunIdentity
from llamarl.checkpoint.written import record_files
from llamarl.controller import saving
from llamarl.controller.saving import RunCheckpoints
from llamarl.errors import CheckpointError
from llamarl.runtime.base import Report
from llamarl.settings.checkpoint import CheckpointConfig


class Far:
    """A host's folder, from which files are copied when they are fetched."""

    def __init__(self, there: Path, here: Path) -> None:
        self.there, self.here, self.swept, self.dropped = there, here, 0, list[Path]()

    def fetch(self, written: Mapping[str, Sequence[FileRecord]], below: Path) -> None:
        if not written:
            self.dropped.append(below)
        for record in (record for files in written.values() for record in files):
            place = below / record.path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes((self.there / below.relative_to(self.here) / record.path).read_bytes())

    def sweep(self) -> None:
        self.swept += 1


WARNINGS: list[tuple[int, str, str]] = []


def checkpoints(run_dir: Path, far: Any = None, **config: Any) -> RunCheckpoints:
    WARNINGS.clear()
    silent = cast("Any", SimpleNamespace(sync=lambda: None, warn=lambda *said: WARNINGS.append(said)))
    folder = cast(
        "Any", SimpleNamespace(path=run_dir, identity=RunIdentity.of(run_dir), check=RunIdentity.of(run_dir).check)
    )
    return RunCheckpoints(
        CheckpointStore(run_dir / "checkpoints"),
        CheckpointConfig(**{"every": 2, "every_minutes": 0, **config}),
        8,
        {},
        silent,
        folder,
        ranks={"generator": 1, "trainer": 2},
        far=far,
    )


def put(root: Path, path: str, data: bytes = b"x") -> tuple[FileRecord, ...]:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(data)
    return record_files(root, [root / path])


def report(files: Mapping[int, tuple[FileRecord, ...]]) -> Report:
    return Report(executor="trainer", tick=0, files=files)


def test_a_rank_that_told_of_nothing_is_named(tmp_path: Path) -> None:
    made = checkpoints(tmp_path)
    folder = made.folder_for(1)
    assert folder is not None
    written = {"generator rank 0": put(folder, "generator/rank_0/g"), "trainer rank 0": ()}
    with pytest.raises(CheckpointError, match="of tick 1 is not whole: trainer rank 1 told of no state"):
        made.on_saved(1, written)
    made.flush()
    assert not CheckpointStore(tmp_path / "checkpoints").list()


def save(made: RunCheckpoints, tick: int, *, spoil: bool = False) -> None:
    """All ranks write; the controller hears of it, and of the outcome."""
    folder = made.folder_for(tick)
    written: dict[str, Sequence[FileRecord]] = {"generator rank 0": (), "trainer rank 0": (), "trainer rank 1": ()}
    if folder is not None:
        written["generator rank 0"] = put(folder, "generator/rank_0/g")
    if spoil and folder is not None:
        (folder / "generator/rank_0/g").unlink()
    made.on_saved(tick, written)
    made.finished(wait=True)


def test_a_file_that_was_removed_before_the_checkpoint_is_finished_is_told_of_and_the_next_one_is_taken(
    tmp_path: Path,
) -> None:
    made = checkpoints(tmp_path)
    save(made, 1, spoil=True)
    ((tick, kind, text),) = WARNINGS
    assert (tick, kind) == (1, "checkpoint")
    assert "generator/rank_0/g is missing (written by generator rank 0)" in text
    assert "There is none before it. The run goes on: this is failure 1 of 3 in a row" in text
    save(made, 3)
    made.close()
    assert [path.name for path in CheckpointStore(tmp_path / "checkpoints").list()] == ["tick_000003"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["tick_000003"]


def test_a_file_that_no_rank_tells_of_is_a_mistake_that_ends_the_run(tmp_path: Path) -> None:
    made = checkpoints(tmp_path)
    folder = made.folder_for(1)
    assert folder is not None
    put(folder, "generator/beside")
    made.on_saved(1, {"generator rank 0": (), "trainer rank 0": (), "trainer rank 1": ()})
    with pytest.raises(CheckpointError, match="generator/beside was written by no rank that says so"):
        made.close()


def test_more_failed_checkpoints_in_a_row_than_allowed_end_the_run_and_a_good_one_begins_the_count_anew(
    tmp_path: Path,
) -> None:
    made = checkpoints(tmp_path, every=1, max_failed=1)
    save(made, 0, spoil=True)
    save(made, 1)
    save(made, 2, spoil=True)
    with pytest.raises(
        CheckpointError, match=r"2 checkpoints in a row .*max_failed = 1.*of tick 3: .*is tick_000001\."
    ):
        save(made, 3, spoil=True)
    assert [tick for tick, _, _ in WARNINGS] == [0, 2]
    made.flush()
    assert CheckpointStore(tmp_path / "checkpoints").load().tick == 1


def test_with_none_allowed_the_first_that_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="1 checkpoint in a row could not be written"):
        checkpoints(tmp_path, max_failed=0).on_unsaved(1, "trainer rank 0: full")


def test_a_rank_that_could_not_write_is_named_and_nothing_of_the_checkpoint_is_left(tmp_path: Path) -> None:
    made = checkpoints(tmp_path)
    folder = made.folder_for(1)
    assert folder is not None
    put(folder, "generator/rank_0/g")
    made.on_unsaved(1, "trainer rank 1: No space left on device")
    assert "of tick 1 could not be written: trainer rank 1: No space left on device" in WARNINGS[0][2]
    assert not folder.exists() and made.folder_for(1) is None, "those who come to the tick later do not write"


def test_a_disk_on_which_none_can_be_begun_is_tried_again_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda path, **_: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only")))
        save(made, 1)
    assert made.folder_for(1) is None and [(tick, "Read-only" in text) for tick, _, text in WARNINGS] == [(1, True)]
    save(made, 3)
    assert made.finished() == (3, tmp_path / "checkpoints" / "tick_000003")


def test_the_one_after_the_last_tick_is_not_tried_again_so_it_ends_the_run(tmp_path: Path) -> None:
    made = checkpoints(tmp_path)
    save(made, 5)
    save(made, 7, spoil=True)
    assert WARNINGS == []
    with pytest.raises(
        CheckpointError, match="the last of 8 ticks is done, but .* is missing.*The last good one is tick_000005"
    ):
        made.close()


def test_a_failed_checkpoint_is_due_again_after_as_long_as_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(saving, "running_s", lambda: now_s[0])
    made = checkpoints(tmp_path, every=0, every_minutes=1)
    assert not made.overdue()
    now_s[0] = 61.0
    assert made.overdue()
    made.require(2)
    now_s[0] = 70.0
    save(made, 2, spoil=True)
    now_s[0] = 129.0
    assert not made.overdue()
    now_s[0] = 130.0
    assert made.overdue()


def test_what_a_host_holds_of_a_failed_checkpoint_is_removed_there(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    far = Far(tmp_path / "there", here)
    made = checkpoints(here, far)
    folder = made.folder_for(1)
    made.on_unsaved(1, "trainer rank 1: No space left on device")
    made.close()
    assert far.dropped == [folder]


def test_a_product_that_is_not_as_it_was_written_ends_the_run(tmp_path: Path) -> None:
    made = checkpoints(tmp_path)
    files = put(tmp_path, "model/model.safetensors", b"weights")
    (tmp_path / "model/model.safetensors").write_bytes(b"weightz")
    made.on_report(report({1: files}))
    with pytest.raises(CheckpointError, match=r"model/model.safetensors was altered.*\(written by trainer rank 1\)"):
        made.close()


def test_files_of_a_host_are_fetched_before_they_are_asked_for(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    far = Far(there, here)
    made = checkpoints(here, far)
    made.on_report(report({0: put(there, "rollouts/tick_000000.jsonl")}))
    assert made.folder_for(1) is not None
    at = there / "checkpoints" / "tick_000001.partial"
    written = {
        "generator rank 0": put(at, "generator/rank_0/g"),
        "trainer rank 0": put(at, "trainer/state/0"),
        "trainer rank 1": put(at, "trainer/state/1"),
    }
    made.on_saved(1, written)
    made.close()
    assert (here / "rollouts/tick_000000.jsonl").read_bytes() == b"x"
    loaded = CheckpointStore(here / "checkpoints").load()
    assert [record.path for record in loaded.manifest.files] == [
        "generator/rank_0/g",
        "trainer/state/0",
        "trainer/state/1",
    ]
    assert far.swept == 2, "with the checkpoint, and at the end"
