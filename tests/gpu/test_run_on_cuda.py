"""Whole jobs of three ticks on one GPU, by the command line, repeated bit for bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from llamarl.observability.keys import is_timing_key

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = {
    "run.num_ticks": 3,
    "schedule.prompts_per_step": 4,
    "generator.group_size": 4,
    "evaluation.every": 3,
    "evaluation.num_prompts": 8,
    "observability.console": '"plain"',
    "generator.device": '"cuda"',
    "trainer.device": '"cuda"',
    "evaluation.device": '"cuda"',
}


def begin(*words: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "llamarl.cli.main", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
    )


def words_of(run_dir: Path, settings: dict[str, Any]) -> list[str]:
    merged = {**SMALL, "run.dir": json.dumps(str(run_dir)), **settings}
    options = [part for key, value in merged.items() for part in (f"--{key}", str(value))]
    return [str(REPOSITORY / "recipes" / "tiny.toml"), *options]


def finished(job: subprocess.Popen[str], run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of a job but for times, when it has ended well."""
    said = job.communicate(timeout=280)[0]
    assert job.returncode == 0, said
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if not is_timing_key(key)} for line in lines]


def train(run_dir: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the job; its metrics but for times."""
    return finished(begin(*words_of(run_dir, settings)), run_dir)


BFLOAT16 = {"generator.engine.dtype": '"bfloat16"', "trainer.dtype": '"bfloat16"', "generator.engine.block_size": 16}


@pytest.mark.parametrize(
    "settings",
    [
        {"run.runtime": '"inline"'},
        {"run.runtime": '"inline"', **BFLOAT16},
        {"run.runtime": '"inline"', **BFLOAT16, "generator.engine.cuda_graphs": '"off"'},
        {"run.runtime": '"inline"', "schedule.transport": '"cuda_ipc"'},
        {"run.runtime": '"local"'},
    ],
    ids=["inline", "inline_bfloat16", "inline_bfloat16_without_graphs", "inline_cuda_ipc", "processes"],
)
def test_a_job_repeats_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    one, two = (train(tmp_path / name, settings) for name in ("one", "two"))
    assert len(one) == 3
    assert one == two
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]


def test_processes_and_one_process_give_the_same_bits(tmp_path: Path) -> None:
    rows = [train(tmp_path / runtime, {"run.runtime": f'"{runtime}"'}) for runtime in ("inline", "local")]
    assert rows[0] == rows[1]


def test_a_killed_job_goes_on_to_the_bits_of_one_left_alone(tmp_path: Path) -> None:
    """With all of its processes, after its second checkpoint."""
    settings = {"run.num_ticks": 8, "run.runtime": '"local"', "checkpoint.every": 2, "evaluation.every": 0, **BFLOAT16}
    alone = train(tmp_path / "alone", settings)
    job = begin(*words_of(tmp_path / "killed", settings))
    wait_until(lambda: (tmp_path / "killed" / "checkpoints" / "tick_000003").exists() or job.poll() is not None, 200.0)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate(timeout=60)
    again = finished(begin("--resume", str(tmp_path / "killed")), tmp_path / "killed")
    assert job.returncode != 0 and again == alone
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("alone", "killed")]
    assert weights[0] == weights[1]
