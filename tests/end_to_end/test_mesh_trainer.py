"""The whole job with a trainer of four ranks (fsdp 2 x tp 2), as processes: it ends, and it resumes bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

from conftest import CommandLine, rows
from safetensors.torch import load_file

MESH = {
    "trainer.fsdp": 2,
    "trainer.tp": 2,
    "schedule.max_staleness": 1,
    "run.num_ticks": 4,
    "checkpoint.every": 2,
    "evaluation.every": 0,
}


def test_a_mesh_run_cut_after_a_checkpoint_resumes_bit_for_bit(llamarl: CommandLine, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = llamarl.train(run_dir, MESH)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = (run_dir / "model" / "model.safetensors").read_bytes()
    rewards = [row["reward/mean"] for row in rows(run_dir)]
    assert len(rewards) == 4
    shutil.rmtree(run_dir / "model")
    shutil.rmtree(run_dir / "checkpoints" / "tick_000003")  # what a kill in tick 2 or 3 would have left
    done = llamarl.train(run_dir, MESH, "--resume", str(run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["reward/mean"] for row in rows(run_dir)] == rewards
    assert (run_dir / "model" / "model.safetensors").read_bytes() == whole
    trained = load_file(run_dir / "model" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in trained.values())
