"""Whole jobs of three ticks on one GPU, by the command line, repeated bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def train(run_dir: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs the job; its metrics but for times."""
    merged = {**SMALL, "run.dir": json.dumps(str(run_dir)), **settings}
    words = [part for key, value in merged.items() for part in (f"--{key}", str(value))]
    paths = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "llamarl.cli.main", "train", str(REPOSITORY / "recipes" / "tiny.toml"), *words],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if not is_timing_key(key)} for line in lines]


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
