"""The whole job with a generator whose steps are cut by tokens over ranks (``generator.cp``)."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, CommandLine, arguments, rows, wait_until
from forked_command import Started
from same_run import assert_same_run

from llamarl.observability.rollouts import read_rollouts

SHORT: dict[str, Any] = {
    "run.num_ticks": 2,
    "evaluation.every": 0,
    "generator.max_segments": 2,
    "schedule.max_staleness": 0,
}
RESUMABLE: dict[str, Any] = {
    "generator.cp": 2,
    "run.num_ticks": 6,
    "schedule.max_staleness": 2,
    "checkpoint.every": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "whole weights": {},
    "adapters": {"lora.rank": 3, "lora.hand_over": "adapter", "optimizer.lr": 3e-2, "optimizer.warmup_ticks": 0},
    "int8": {"generator.quantization": '"int8"'},
    "in turns with the trainer": {"schedule.colocated": "true"},
    "beside tensor parallelism": {},
    "replay of experts": {"model.path": '"bundled:tiny_moe"', "trainer.router": '"replay"'},
}


def sampled(run_dir: Path) -> list[tuple[int, list[int], list[int]]]:
    """What each response of each tick holds, and the versions that said so."""
    return [
        (rollout.tick, rollout.response.tokens.tolist(), rollout.response.policy_versions.tolist())
        for rollout in read_rollouts(run_dir)
    ]


@pytest.mark.parametrize(
    "kind", ["whole weights", *(pytest.param(kind, marks=pytest.mark.long) for kind in list(KINDS)[1:])]
)
def test_ranks_deliver_the_responses_of_one_under_the_weights_that_they_are_handed(
    llamarl: CommandLine, tmp_path: Path, kind: str
) -> None:
    sizes = {"generator.cp": 2} | ({"generator.tp": 2} if kind == "beside tensor parallelism" else {})
    for name, layout in (("one", {}), ("two", sizes)):
        done = llamarl.train(tmp_path / name, {**SHORT, **KINDS[kind], **layout})
        assert done.returncode == 0, done.stdout + done.stderr
    assert sampled(tmp_path / "two") == sampled(tmp_path / "one")
    assert {version for _, _, versions in sampled(tmp_path / "two") for version in versions} == {0, 1}
    assert rows(tmp_path / "two")[0]["grad_norm"] > 0  # version 1 is another one


@pytest.mark.long
@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_an_asynchronous_job_repeats_and_resumes_bit_for_bit(llamarl: CommandLine, tmp_path: Path, kv: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = {
        **RESUMABLE,
        "generator.kv_on_update": f'"{kv}"',
        "generator.max_segments": 2,
    }
    done = llamarl.train(whole, settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(row["staleness/max"] for row in rows(whole)) >= 2  # it was asynchronous
    assert max(row["tokens/carried"] for row in rows(whole)) > 0
    run = Started(["train", str(RECIPE), *arguments(killed, settings)], together=True)
    try:
        wait_until(lambda: killed.exists() and len(rows(killed)) >= 3, limit_s=240, what="three rows")
    finally:
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=30)
    assert len(rows(killed)) < settings["run.num_ticks"]  # it was in fact cut short
    done = llamarl.train(killed, settings, "--resume", str(killed))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(killed, whole)
