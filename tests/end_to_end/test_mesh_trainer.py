"""The whole job with a trainer of four ranks (fsdp 2 x tp 2), as processes. That such a trainer resumes bit for bit is shown
by ``tests/multiprocess/test_trainer_checkpoints.py``."""

from __future__ import annotations

from pathlib import Path

from conftest import CommandLine, rows
from safetensors.torch import load_file

from llamarl.models.folders import resolve_model_path

MESH = {"trainer.fsdp": 2, "trainer.tp": 2, "run.num_ticks": 2, "evaluation.every": 0}


def test_a_whole_job_with_a_mesh_trainer_ends_with_a_model_that_moved(llamarl: CommandLine, tmp_path: Path) -> None:
    done = llamarl.train(tmp_path / "run", MESH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["policy_version"] for row in rows(tmp_path / "run")] == [1, 2]
    assert (tmp_path / "run" / "checkpoints" / "tick_000001" / "trainer" / "state" / "__3_0.distcp").is_file()
    initial = load_file(resolve_model_path("bundled:tiny") / "model.safetensors")
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert trained.keys() == initial.keys()
    moved = [name for name, tensor in trained.items() if not tensor.equal(initial[name])]
    assert len(moved) == len(initial)
    for name in moved:
        assert 0 < (trained[name] - initial[name]).abs().max() < 1e-2, name  # two steps of at most 2e-4
