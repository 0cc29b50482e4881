"""Real jobs that take turns at this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from llamarl.config import load_config
from llamarl.errors import ExecutorFailed
from llamarl.simulator.run_finals import run_finals
from llamarl.simulator.splits import Split
from llamarl.simulator.taking_turns import Job

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"
SMALL = ["--schedule.prompts_per_step", "2", "--generator.group_size", "2", "--generator.sampling.max_new_tokens", "8"]
ONE_KIND = {
    "generator.max_segments": 1, "generator.oversubscription": 1.0, "generator.quantization": "none",
    "generator.threads": 1, "trainer.threads": 1,
}  # fmt: skip
QUIET = [*SMALL, "--evaluation.every", "0", "--checkpoint.every", "0", "--run.num_ticks", "100000"]


def test_a_job_writes_rows_only_in_its_turns(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with Job(["train", str(RECIPE), *QUIET, "--run.dir", str(run_dir)], run_dir, warm_up=3) as job:
        rows = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
        time.sleep(0.5)
        stopped = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
        took = job.turn(4)
        after = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    assert rows >= 3 and stopped - rows <= 1 and after >= rows + 4 and took > 0.0
    assert job.returncode is not None


def test_a_job_that_ends_too_early_says_why(tmp_path: Path) -> None:
    with pytest.raises(
        ExecutorFailed, match=r"(?s)0 rows, 3 were awaited; the job ended with exit code 2:.*does not exist"
    ):
        Job(["train", str(tmp_path / "none.toml")], tmp_path / "run", warm_up=3)


def test_a_stopped_job_does_not_outlive_who_is_killed(tmp_path: Path) -> None:
    words = ["train", str(RECIPE), *QUIET, "--run.dir", str(tmp_path / "run")]
    code = (
        "import sys, time; from pathlib import Path; from llamarl.simulator.taking_turns import Job, tree_of\n"
        f"job = Job({words!r}, Path({str(tmp_path / 'run')!r}), warm_up=1)\n"
        "print(*tree_of(job._process.pid), flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) > 3
        wait_for(pids, "T")
    finally:
        owner.kill()
        owner.communicate()
    wait_for(pids, "", "Z")


def wait_for(pids: list[int], *states: str) -> None:
    until = time.monotonic() + 60.0
    while others := {pid: state(pid) for pid in pids if state(pid) not in states}:
        assert time.monotonic() < until, f"after a minute: {others}"
        time.sleep(0.05)


def state(pid: int) -> str:
    """T: stopped; Z: ended, not yet waited for; empty: gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_final_measures_every_split_that_takes_part() -> None:
    config = load_config(RECIPE, SMALL)
    result = type("Result", (), {"step_s": 0.5})()
    splits = [
        Split(name=f"staleness {s}", settings={"schedule.max_staleness": s, **ONE_KIND}, result=result)
        for s in (1, 2)
    ]  # fmt: skip
    lines: list[str] = []
    began = time.monotonic()
    found = run_finals(config, splits, budget_s=9.0, least_rounds=2, log=lines.append)
    assert set(found) == {"staleness 1", "staleness 2"} and all(0.0 < step_s < 30.0 for step_s in found.values())
    assert not [line for line in lines if "failed" in line] and time.monotonic() - began < 300.0
