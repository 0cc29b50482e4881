"""A whole job whose generator has unlike replicas, as processes: what each samples, and the same bits whatever dies.

What a replica samples is shown rank by rank in ``tests/unit/executors/test_unlike_replicas.py``.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import LONG_LEDGERS, REPOSITORY, CommandLine, arguments, kill_after_rows, rows, wait_for_rows, wait_until
from forked_command import Started
from safetensors.torch import load_file
from same_run import assert_same_run
from tools.chaos.processes import ranks

from llamarl.models.folders import resolve_model_path
from llamarl.observability.metrics import read_warnings

UNLIKE = REPOSITORY / "recipes" / "unlike.toml"
SHORT: dict[str, Any] = {"run.num_ticks": 2, "evaluation.every": 0, "generator.sampling.max_new_tokens": 24}
PARTIAL: dict[str, Any] = {
    "task.options": LONG_LEDGERS,
    "run.num_ticks": 12,
    "evaluation.every": 0,
    "checkpoint.every": 3,
    "schedule.prompts_per_step": 6,
    "generator.max_segments": 2,
    "generator.oversubscription": 1.5,
    "generator.replicas": '[{tp = 2, share = 5, dtype = "bfloat16"}, {share = 2}, {quantization = "int8", share = 2}]',
}


def test_unlike_replicas_share_every_tick_as_the_recipe_says(llamarl: CommandLine, tmp_path: Path) -> None:
    llamarl.train(tmp_path / "run", SHORT, recipe=UNLIKE)
    for tick in range(2):
        records = map(json.loads, (tmp_path / "run" / "rollouts" / f"tick_{tick:06d}.jsonl").read_text().splitlines())
        found = list(dict.fromkeys(record["prompt_index"] for record in records))
        assert [index - 4 * tick for index in found] == [0, 2, 3, 1]  # 3 and 1 of 4, dealt in rounds
    first, second = rows(tmp_path / "run")
    assert first["samples/delivered"] == second["samples/delivered"] > 0
    for row in (first, second):
        assert 0 < max(row["time/replica_0_s"], row["time/replica_1_s"]) <= row["time/generator_s"]
    initial = load_file(resolve_model_path("bundled:tiny") / "model.safetensors")
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(not tensor.equal(initial[name]) for name, tensor in trained.items())


@pytest.mark.long
def test_unlike_replicas_make_the_same_bits_when_ranks_and_the_controller_die(
    llamarl: CommandLine, tmp_path: Path
) -> None:
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    llamarl.train(whole, PARTIAL, recipe=UNLIKE)
    run = Started(["train", str(UNLIKE), *arguments(struck, PARTIAL)], together=True)
    wait_for_rows(run, struck, 4)
    os.kill(ranks(run.pid)["generator 1"], signal.SIGKILL)  # of two tensor-parallel ranks
    wait_until(lambda: num_restarts(struck) >= 1, limit_s=60, what="its replacement")
    wait_for_rows(run, struck, 6)
    os.kill(ranks(run.pid)["generator 3"], signal.SIGKILL)
    wait_until(lambda: num_restarts(struck) >= 2, limit_s=60, what="its replacement")
    kill_after_rows(run, struck, 8)
    assert len(rows(struck)) < PARTIAL["run.num_ticks"]
    llamarl.train(struck, PARTIAL, "--resume", str(struck), recipe=UNLIKE)
    assert_same_run(struck, whole)


def num_restarts(run_dir: Path) -> int:
    return sum(warning["kind"] == "restart" for warning in read_warnings(run_dir))


@pytest.mark.long
def test_unlike_replicas_take_the_newest_weights_in_their_shares(llamarl: CommandLine, tmp_path: Path) -> None:
    settings = {**PARTIAL, "schedule.weights": "latest", "schedule.max_staleness": 2}
    llamarl.train(tmp_path / "run", settings, recipe=UNLIKE)
    assert max(row["staleness/max"] for row in rows(tmp_path / "run")) <= 2
    llamarl.run(["train", "--replay", str(tmp_path / "run"), "--run.dir", str(tmp_path / "again")])
    assert_same_run(tmp_path / "again", tmp_path / "run")
