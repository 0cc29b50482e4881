"""A whole job whose generator has unlike replicas, as processes: what each samples, and the same bits whatever dies.

What a replica samples is shown rank by rank in ``tests/unit/executors/test_unlike_replicas.py``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, CommandLine, arguments, rows, wait_until
from forked_command import Started
from safetensors.torch import load_file

from llamarl.models.folders import resolve_model_path
from llamarl.observability.warning_log import read_warnings

sys.path.append(str(Path(__file__).resolve().parents[1]))
from killing import ranks
from same_run import assert_same_run

UNLIKE = REPOSITORY / "recipes" / "unlike.toml"
SHORT: dict[str, Any] = {"run.num_ticks": 2, "evaluation.every": 0, "generator.sampling.max_new_tokens": 24}
PARTIAL: dict[str, Any] = {
    "run.num_ticks": 8,
    "evaluation.every": 0,
    "checkpoint.every": 3,
    "schedule.prompts_per_step": 6,
    "generator.max_segments": 2,
    "generator.oversubscription": 1.5,
    "generator.replicas": '[{tp = 2, share = 5, dtype = "bfloat16"}, {share = 2}, {quantization = "int8", share = 2}]',
}


def test_unlike_replicas_share_every_tick_as_the_recipe_says(llamarl: CommandLine, tmp_path: Path) -> None:
    done = llamarl.train(tmp_path / "run", SHORT, recipe=UNLIKE)
    assert done.returncode == 0, done.stdout + done.stderr
    for tick in range(2):
        records = map(json.loads, (tmp_path / "run" / "rollouts" / f"tick_{tick:06d}.jsonl").read_text().splitlines())
        found = list(dict.fromkeys(record["prompt_index"] for record in records))
        assert [index - 4 * tick for index in found] == [0, 2, 3, 1]  # 3 and 1 of 4, dealt in rounds
    first, second = rows(tmp_path / "run")
    assert first["samples/delivered"] == second["samples/delivered"] > 0
    initial = load_file(resolve_model_path("bundled:tiny") / "model.safetensors")
    trained = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(not tensor.equal(initial[name]) for name, tensor in trained.items())


@pytest.mark.long
@pytest.mark.parametrize("straggler", [0, 1.5], ids=["one attempt", "second attempts"])
def test_unlike_replicas_make_the_same_bits_when_a_rank_and_the_controller_die(
    llamarl: CommandLine, tmp_path: Path, straggler: float
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = llamarl.train(whole, PARTIAL, recipe=UNLIKE)
    assert done.returncode == 0, done.stdout + done.stderr
    twins = {"recovery.straggler_multiple": straggler, "recovery.straggler_least_s": 0.1, "run.cores": 16}
    settings = PARTIAL | (twins if straggler else {})
    run = Started(["train", str(UNLIKE), *arguments(killed, settings)], together=True)
    up: dict[str, int] = {}
    wait_until(lambda: bool(up.update(ranks(run.pid)) or "generator 3" in up), limit_s=60, what="its processes")
    wait_until(lambda: killed.exists() and len(rows(killed)) >= 1, limit_s=240, what="a row")
    os.kill(up["generator 1"], signal.SIGKILL)
    wait_until(lambda: any(w["kind"] == "restart" for w in read_warnings(killed)), limit_s=60, what="its replacement")
    wait_until(lambda: len(rows(killed)) >= 5, limit_s=240, what="five rows")
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=30)
    done = llamarl.train(killed, settings, "--resume", str(killed), recipe=UNLIKE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(killed, whole)


@pytest.mark.long
def test_unlike_replicas_take_the_newest_weights_in_their_shares(llamarl: CommandLine, tmp_path: Path) -> None:
    settings = {**PARTIAL, "schedule.weights": "latest", "schedule.max_staleness": 2}
    done = llamarl.train(tmp_path / "run", settings, recipe=UNLIKE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(row["staleness/max"] for row in rows(tmp_path / "run")) <= 2
    done = llamarl.run(["train", "--replay", str(tmp_path / "run"), "--run.dir", str(tmp_path / "again")])
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(tmp_path / "again", tmp_path / "run")
