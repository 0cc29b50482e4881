"""A checkpoint waits for every rank's word and every rank's file; what else a tick wrote is proved too, and fetched where it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llamarl.checkpoint.config import CheckpointConfig
from llamarl.checkpoint.run_identity import RunIdentity
from llamarl.checkpoint.snapshot import FileRecord
from llamarl.checkpoint.storage import CheckpointStore
from llamarl.checkpoint.written import record_files
from llamarl.controller.run_checkpoints import FarFiles, RunCheckpoints
from llamarl.errors import CheckpointError
from llamarl.runtime.base import Report


class Far:
    """A host's folder, from which files are copied when they are fetched."""

    def __init__(self, there: Path, here: Path) -> None:
        self.there, self.here, self.swept = there, here, 0

    def fetch(self, written: Mapping[str, Sequence[FileRecord]], below: Path) -> None:
        for record in (record for files in written.values() for record in files):
            place = below / record.path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes((self.there / below.relative_to(self.here) / record.path).read_bytes())

    def sweep(self) -> None:
        self.swept += 1


def checkpoints(run_dir: Path, far: FarFiles | None = None) -> RunCheckpoints:
    silent = cast("Any", SimpleNamespace(sync=lambda: None))
    folder = cast(
        "Any", SimpleNamespace(path=run_dir, identity=RunIdentity.of(run_dir), check=RunIdentity.of(run_dir).check)
    )
    return RunCheckpoints(
        CheckpointStore(run_dir / "checkpoints"),
        CheckpointConfig(every=2),
        8,
        {},
        silent,
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
    made.settle()
    assert not CheckpointStore(tmp_path / "checkpoints").list()


def test_a_file_that_was_removed_before_the_checkpoint_is_finished_ends_the_run(tmp_path: Path) -> None:
    made = checkpoints(tmp_path)
    folder = made.folder_for(1)
    assert folder is not None
    written = {"generator rank 0": put(folder, "generator/rank_0/g"), "trainer rank 0": (), "trainer rank 1": ()}
    (folder / "generator/rank_0/g").unlink()
    made.on_saved(1, written)
    with pytest.raises(CheckpointError, match=r"generator/rank_0/g is missing \(written by generator rank 0\)"):
        made.close()


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
