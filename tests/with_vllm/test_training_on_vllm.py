"""Runs of the command line that sample with a real vLLM: weights handed over tick by tick, repeated, stopped and resumed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llamarl.observability.keys import is_timing_key
from llamarl.observability.ledger import imbalance

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

TEN_TICKS = {
    "generator.engine.name": "vllm",
    "run.num_ticks": 10,
    "schedule.prompts_per_step": 4,
    "generator.group_size": 4,
    "evaluation.every": 5,
    "evaluation.num_prompts": 8,
    "checkpoint.every": 2,
    "optimizer.schedule": '"constant"',  # a falling one would depend on the length of the run
    "observability.console": '"plain"',
}
SYNCHRONOUS = {
    "run.runtime": "inline",
    "schedule.max_staleness": 0,
    "generator.max_segments": 1,
    "generator.oversubscription": 1.0,
    "trainer.skip_zero_advantage": "false",  # of a tick without a signal too the ratios are looked at
}


def train(run_dir: Path, settings: Mapping[str, Any], *flags: str, limit_s: float = 560) -> str:
    """Run it to its end; gives what it printed."""
    given = {**TEN_TICKS, **settings, "run.dir": json.dumps(str(run_dir))}
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "llamarl.cli.main", "train", "tiny", *flags, *words],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def bits(run_dir: Path) -> tuple[list[dict[str, Any]], bytes]:
    """All that a run measured, times and evaluations apart, and its final weights. (A run evaluates at its end as well.)"""
    untimed = [
        {key: value for key, value in row.items() if not is_timing_key(key) and not key.startswith("eval/")}
        for row in rows(run_dir)
    ]
    return untimed, (run_dir / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each executor in processes of its own, one tick of staleness and responses that go on over two versions."""
    run_dir = tmp_path_factory.mktemp("asynchronous") / "run"
    printed = train(run_dir, {})
    assert "Failed to load weights" not in printed
    return run_dir


@pytest.mark.timeout(1200)
def test_ten_asynchronous_ticks_account_for_every_token_and_sample_what_is_trained(asynchronous: Path) -> None:
    table = rows(asynchronous)
    assert [row["step"] for row in table] == list(range(10))
    assert [imbalance(row, before) for row, before in zip(table, [None, *table[:-1]], strict=True)] == [0] * 10
    assert table[0]["ratio/max"] == pytest.approx(1.0, abs=1e-4)  # version 0 on both sides
    assert all(abs(row["ratio/mean"] - 1) < 0.02 and row["mismatch/kl"] < 0.01 for row in table)
    assert max(row["staleness/max"] for row in table) == 2
    assert max(row["ratio/max"] for row in table) > 1.01  # and weights did change


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "more", [{}, {"lora.rank": 4, "lora.hand_over": "adapter", "optimizer.lr": 2e-3}], ids=["whole", "adapter"]
)
def test_what_is_sampled_without_staleness_has_the_trainers_logprobs_at_every_version(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """A layer that a hand-over left behind, or a cache of earlier weights, shows here as a ratio away from 1."""
    train(tmp_path / "run", {**SYNCHRONOUS, **more})
    table = rows(tmp_path / "run")
    assert len(table) == 10
    assert all(row["ratio/max"] == pytest.approx(1.0, abs=2e-4) for row in table)
    assert all(abs(row["mismatch/kl"]) < 1e-6 for row in table)


@pytest.mark.timeout(1200)
def test_a_run_repeats_bit_for_bit_in_float32_on_cpu(asynchronous: Path, tmp_path: Path) -> None:
    train(tmp_path / "again", {})
    assert bits(tmp_path / "again") == bits(asynchronous)


@pytest.mark.timeout(1200)
def test_a_stopped_run_resumes_to_the_bits_of_one_that_was_not(asynchronous: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, {"run.num_ticks": 4})
    assert len(rows(run_dir)) == 4
    train(run_dir, {}, "--resume", str(run_dir))
    assert bits(run_dir) == bits(asynchronous)


@pytest.mark.timeout(1200)
def test_a_job_on_two_ranks_of_vllm_goes_on_when_its_engine_is_killed(tmp_path: Path) -> None:
    """The generator's process is the one whose children are vLLM's; those die with it."""
    settings = {"generator.engine.options": "{ tensor_parallel_size = 2 }", "evaluation.every": 0}
    killed: list[tuple[int, list[int]]] = []

    def strike() -> None:
        while len(rows(tmp_path / "run") if (tmp_path / "run" / "metrics.jsonl").exists() else []) < 3:
            time.sleep(0.2)
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        parents = {
            pid: int(_read(pid, "stat").rpartition(")")[2].split()[1])
            for pid in pids
            if "VLLM::Worker_TP" in _read(pid, "cmdline")
        }
        # of this run alone: engines of other tests, in this very process, may still have theirs
        (engine,) = {parent for parent in parents.values() if str(tmp_path) in _read(parent, "cmdline")}
        workers = [pid for pid, parent in parents.items() if parent == engine]
        killed.append((engine, workers))
        os.kill(engine, signal.SIGKILL)

    striker = threading.Thread(target=strike, daemon=True)
    striker.start()
    train(tmp_path / "run", settings, limit_s=1000)
    striker.join(1)
    ((_, workers),) = killed
    assert len(workers) == 2 and not any("VLLM::" in _read(pid, "cmdline") for pid in workers)
    table = rows(tmp_path / "run")
    assert [row["step"] for row in table] == list(range(10))
    assert [imbalance(row, before) for row, before in zip(table, [None, *table[:-1]], strict=True)] == [0] * 10
    assert all(abs(row["ratio/mean"] - 1) < 0.02 and row["mismatch/kl"] < 0.01 for row in table)


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except (OSError, ProcessLookupError):
        return ""
