"""The whole job with a trainer of four ranks, as processes. That such a trainer goes on bit for bit is shown rank by rank in
``tests/multiprocess``; here with all that is around it, at length in ``make test-long``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, CommandLine, arguments, rows, wait_until
from forked_command import Started
from safetensors.torch import load_file
from same_run import assert_same_run

from llamarl.models.folders import resolve_model_path

SHORT = {"run.num_ticks": 2, "evaluation.every": 0}
MESHES = [
    {"trainer.fsdp": 2, "trainer.pp": 2, "generator.tp": 2, "trainer.max_tokens_per_microbatch": 256},
    pytest.param({"trainer.fsdp": 2, "trainer.tp": 2}, marks=pytest.mark.long),
    pytest.param(
        {"trainer.fsdp": 2, "trainer.cp": 2, "reference.enabled": "true", "reference.cp": 2}, marks=pytest.mark.long
    ),
]
PIPELINE = REPOSITORY / "recipes" / "pipeline.toml"
RESUMABLE: dict[str, Any] = {
    "run.num_ticks": 6,
    "schedule.max_staleness": 2,
    "checkpoint.every": 2,
    "trainer.max_tokens_per_microbatch": 256,
}


@pytest.mark.parametrize("mesh", MESHES, ids=["fsdp x pp", "fsdp x tp", "fsdp x cp"])
def test_a_whole_job_with_a_mesh_trainer_ends_with_a_model_that_moved(
    llamarl: CommandLine, tmp_path: Path, mesh: dict[str, Any]
) -> None:
    done = llamarl.train(tmp_path / "run", SHORT | mesh)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["policy_version"] for row in rows(tmp_path / "run")] == [1, 2]
    assert all(row["grad_norm"] > 0 and row["tokens/trained"] > 0 for row in rows(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / "tick_000001" / "trainer" / "state" / "__3_0.distcp").is_file()
    initial = load_file(resolve_model_path("bundled:tiny") / "model.safetensors")
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert trained.keys() == initial.keys()
    moved = [name for name, tensor in trained.items() if not tensor.equal(initial[name])]
    assert len(moved) == len(initial)
    for name in moved:
        assert 0 < (trained[name] - initial[name]).abs().max() < 1e-2, name  # two steps of at most 2e-4


@pytest.mark.long
def test_an_asynchronous_job_in_stages_repeats_and_resumes_bit_for_bit(llamarl: CommandLine, tmp_path: Path) -> None:
    """Also into one process, to rounding."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = llamarl.train(whole, RESUMABLE, recipe=PIPELINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(row["staleness/max"] for row in rows(whole)) == 2  # it was asynchronous
    run = Started(["train", str(PIPELINE), *arguments(killed, RESUMABLE)], together=True)
    try:
        wait_until(lambda: killed.exists() and len(rows(killed)) >= 3, limit_s=240, what="three rows")
    finally:
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=30)
    assert len(rows(killed)) < RESUMABLE["run.num_ticks"]  # it was in fact cut short
    done = llamarl.train(killed, RESUMABLE, "--resume", str(killed), recipe=PIPELINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(killed, whole)
    alone = {**RESUMABLE, "run.num_ticks": 8, "trainer.pp": 1, "trainer.tp": 1, "checkpoint.reshard": "true"}
    done = llamarl.train(whole, alone, "--resume", str(whole), recipe=PIPELINE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["policy_version"] for row in rows(whole)] == list(range(1, 9))
