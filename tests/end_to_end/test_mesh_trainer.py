"""The whole job with a trainer of four ranks, as processes. That such a trainer goes on bit for bit is shown rank by rank in
``tests/multiprocess``; here with all that is around it, at length in ``make test-long``."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG_LEDGERS, REPOSITORY, CommandLine, arguments, kill_after_rows, rows
from forked_command import Started
from safetensors.torch import load_file
from same_run import assert_same_run

from llamarl.models.folders import resolve_model_path

SHORT = {"run.num_ticks": 2, "evaluation.every": 0}
MESHES = [
    {"trainer.fsdp": 2, "trainer.pp": 2, "generator.tp": 2, "trainer.max_tokens_per_microbatch": 256},
    pytest.param({"trainer.fsdp": 2, "trainer.tp": 2, "generator.dp": 2, "generator.tp": 2}, marks=pytest.mark.long),
    pytest.param(
        {"trainer.fsdp": 2, "trainer.cp": 2, "reference.enabled": "true", "reference.fsdp": 2}, marks=pytest.mark.long
    ),
]
PIPELINE = REPOSITORY / "recipes" / "pipeline.toml"
RESUMABLE: dict[str, Any] = {
    "task.options": LONG_LEDGERS,
    "run.num_ticks": 6,
    "schedule.max_staleness": 2,
    "checkpoint.every": 2,
    "trainer.max_tokens_per_microbatch": 256,
}


@pytest.mark.parametrize("mesh", MESHES, ids=["fsdp x pp", "fsdp x tp", "fsdp x cp"])
def test_a_whole_job_with_a_mesh_trainer_ends_with_a_model_that_moved(
    llamarl: CommandLine, tmp_path: Path, mesh: dict[str, Any]
) -> None:
    llamarl.train(tmp_path / "run", SHORT | mesh)
    assert [row["policy_version"] for row in rows(tmp_path / "run")] == [1, 2]
    assert all(row["grad_norm"] > 0 and row["tokens/trained"] > 0 for row in rows(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / "tick_000001" / "trainer" / "state" / "rank_3.safetensors").is_file()
    initial = load_file(resolve_model_path("bundled:tiny") / "model.safetensors")
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert trained.keys() == initial.keys()
    moved = [name for name, tensor in trained.items() if not tensor.equal(initial[name])]
    assert len(moved) == len(initial)
    for name in moved:
        assert 0 < (trained[name] - initial[name]).abs().max() < 1e-2, name  # two steps of at most 2e-4


def test_adapters_alone_travel_from_ranks_to_ranks_and_evaluate_as_one_process_does(
    llamarl: CommandLine, tmp_path: Path
) -> None:
    """Trainer, generator and evaluator each over two ranks. ``llamarl eval`` of the merged model says the same, to the token."""
    pytest.importorskip("peft")
    settings = {
        "run.num_ticks": 2, "evaluation.every": 2, "evaluation.tp": 2, "evaluation.num_prompts": 5,
        "generator.tp": 2, "trainer.fsdp": 2, "lora.rank": 3, "lora.hand_over": "adapter", "optimizer.lr": 3e-2,
        "optimizer.warmup_ticks": 0, "generator.sampling.max_new_tokens": 40,
    }  # fmt: skip
    llamarl.train(tmp_path / "run", settings)
    found = [row for row in rows(tmp_path / "run") if "eval/policy_version" in row]
    assert [row["eval/policy_version"] for row in found] == [0, 2]
    again = llamarl.run(["eval", str(tmp_path / "run"), "--json"])
    alone = json.loads(again.stdout)
    for key in ("accuracy", "length_mean", "reward_mean"):
        assert found[1][f"eval/{key}"] == alone[key]
    assert found[1]["eval/length_mean"] != found[0]["eval/length_mean"]  # it was another version
    run_dir = tmp_path / "run"
    assert (run_dir / "adapter" / "adapter_config.json").is_file()
    initial = load_file(resolve_model_path("bundled:tiny") / "model.safetensors")
    trained = load_file(run_dir / "model" / "model.safetensors")
    moved = {name.split(".")[-2] for name, tensor in trained.items() if not tensor.equal(initial[name])}
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.long
def test_an_asynchronous_job_in_stages_repeats_and_resumes_bit_for_bit(llamarl: CommandLine, tmp_path: Path) -> None:
    """Also into one process, to rounding."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    llamarl.train(whole, RESUMABLE, recipe=PIPELINE)
    assert max(row["staleness/max"] for row in rows(whole)) == 2  # it was asynchronous
    kill_after_rows(Started(["train", str(PIPELINE), *arguments(killed, RESUMABLE)], together=True), killed, 3)
    assert len(rows(killed)) < RESUMABLE["run.num_ticks"]  # it was in fact cut short
    llamarl.train(killed, RESUMABLE, "--resume", str(killed), recipe=PIPELINE)
    assert_same_run(killed, whole)
    alone = {**RESUMABLE, "run.num_ticks": 8, "trainer.pp": 1, "trainer.tp": 1, "checkpoint.reshard": "true"}
    llamarl.train(whole, alone, "--resume", str(whole), recipe=PIPELINE)
    assert [row["policy_version"] for row in rows(whole)] == list(range(1, 9))
