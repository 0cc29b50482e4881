"""The trainer executor on a mesh of four ranks: its state is written beside the training, and goes on from there.

A kill in the middle of a write is a real SIGKILL: the child blocks in the library's writer until it comes.
"""

import os
import signal
from pathlib import Path

import checkpoint_ranks
import pytest
from forked_command import SERVER
from training_fixtures import write_model

from llamarl.checkpoint.storage import CheckpointStore


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mesh") / "model").parent


def _launch(world: int, *arguments: object) -> list[int | None]:
    ranks = [SERVER.Process(target=checkpoint_ranks.main, args=(rank, world, *arguments)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(timeout=240)
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.exitcode for rank in ranks]


def test_a_mesh_goes_on_bit_for_bit_from_a_state_written_beside_its_training_also_after_a_full_disk_refused_one(
    folder: Path,
) -> None:
    # each rank compares its own parts: see checkpoint_ranks.resume
    assert _launch(4, "resume", folder) == [0] * 4
    # and one process reads what four ranks wrote, the versions on the weights edge included
    assert _launch(1, "reshard", folder) == [0]


def test_a_kill_during_the_write_leaves_the_checkpoint_before(folder: Path) -> None:
    store = CheckpointStore(folder / "killed" / "checkpoints")
    store.begin(0)
    good = store.finish(0, {}, {})
    assert _launch(1, "die", folder) == [-signal.SIGKILL]
    assert sorted(p.name for p in store.folder.iterdir()) == ["tick_000000", "tick_000001.partial"]
    assert any(os.scandir(store.folder / "tick_000001.partial" / "trainer" / "state"))  # it was in the middle
    assert store.load().manifest == good.manifest
    assert store.clean() == ("tick_000001.partial",)
    assert store.load().tick == 0
