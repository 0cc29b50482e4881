"""Bad input ends in the stated outcome, with a message that says what, where, got, expected, what to do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, REPOSITORY, CommandLine, arguments, rows

from llamarl.cli.main import main

MATH = {"task.name": '"math"', "run.num_ticks": 1}
INLINE = {"run.runtime": '"inline"', "run.num_ticks": 1, "evaluation.every": 0, "observability.console": '"none"'}


def math_files(folder: Path, text: str) -> dict[str, Any]:
    train, held_out = folder / "train.jsonl", folder / "eval.jsonl"
    train.write_text(text)
    held_out.write_text('{"question": "1+1=", "answer": "#### 2"}\n')
    return {**MATH, "task.data": json.dumps(str(train)), "task.eval_data": json.dumps(str(held_out))}


CASES: dict[str, tuple[Any, int, list[str]]] = {
    "unknown key": (
        {"schedule.max_stalenes": 0},
        2,
        ["schedule.max_stalenes", "did you mean 'schedule.max_staleness'"],
    ),
    "greedy group": ({"generator.sampling.temperature": 0}, 2, ["sampling.temperature", "greedy"]),
    "empty data file": (lambda folder: math_files(folder, ""), 2, ["train.jsonl", "empty"]),
    "run folder below a file": ({"run.dir": '"/dev/null/run"'}, 2, ["/dev/null/run", "run.dir"]),
    "run folder on a read-only system": ({"run.dir": '"/proc/run"'}, 2, ["/proc/run", "run.dir"]),
}


@pytest.fixture
def own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("own_signals")
def test_bad_input_is_refused_before_anything_runs(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, exit_code, fragments = CASES[case]
    settings = settings(tmp_path) if callable(settings) else settings
    run_dir = tmp_path / "run"
    assert (
        main(["train", str(RECIPE), *arguments(run_dir, dict(settings))]) == exit_code
    )  # nothing starts: no process needed
    told = capsys.readouterr().err
    for fragment in fragments:
        assert fragment in told
    assert "Traceback" not in told
    assert not rows(run_dir)


def test_a_folder_that_holds_a_run_is_not_overwritten(llamarl: CommandLine, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert llamarl.train(run_dir, INLINE).returncode == 0
    before = (run_dir / "metrics.jsonl").read_bytes()
    done = llamarl.train(run_dir, INLINE)
    assert done.returncode == 2 and "--resume" in done.stderr
    assert (run_dir / "metrics.jsonl").read_bytes() == before


REWARDS = """
import math, os, time
def hangs(prompt, response, answer): time.sleep(3600)
def dies(prompt, response, answer): os._exit(7)
def nan(prompt, response, answer): return math.nan
def mixed(prompt, response, answer):
    if len(response) % 2: raise ValueError("odd")
    return 1.0
"""


@pytest.mark.parametrize(
    ("function", "kind"),
    [("hangs", "timeout"), ("dies", "crash"), ("nan", "not_a_number")],
)
def test_a_reward_that_fails_is_counted_and_never_scored_zero(
    llamarl: CommandLine, tmp_path: Path, function: str, kind: str
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    settings = {
        **INLINE,
        "task.reward": json.dumps(f"{tmp_path / 'rewards.py'}:{function}"),
        "task.pool.timeout_s": 0.3,
        "schedule.prompts_per_step": 2,
        "generator.group_size": 2,
        "generator.sampling.max_new_tokens": 8,
    }
    done = llamarl.train(tmp_path / "run", settings)
    assert done.returncode == 4, done.stdout + done.stderr  # nothing was trained
    (row,) = rows(tmp_path / "run")
    assert row["reward/failed"] == 4 and row["reward/mean"] is None
    assert row["tokens/trained"] == 0
    (line, *_) = (tmp_path / "run" / "rollouts" / "tick_000000.jsonl").read_text().splitlines()
    assert kind in line


def test_failed_samples_are_left_out_of_the_baseline_and_the_rest_still_teach(
    llamarl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    done = llamarl.train(tmp_path / "run", {**INLINE, "task.reward": json.dumps(f"{tmp_path / 'rewards.py'}:mixed")})
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = rows(tmp_path / "run")
    assert 0 < row["reward/failed"] < 16
    assert row["reward/mean"] == 1.0  # a failure scored zero would pull it down


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_the_run_by_name_and_leaves_no_false_checkpoint(llamarl: CommandLine, tiny_disk: Path) -> None:
    done = llamarl.train(
        tiny_disk / "run", {"run.num_ticks": 4, "checkpoint.every": 1, "evaluation.every": 0, "deadlines.disk_s": 1}
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "disk" in done.stderr.lower() and str(tiny_disk) in done.stderr
    finished = [p for p in (tiny_disk / "run" / "checkpoints").glob("tick_*") if p.suffix == ""]
    assert all((p / "manifest.json").is_file() for p in finished)
    assert not os.path.exists(tiny_disk / "run" / "model")


def test_code_in_a_model_folder_does_not_run_though_somebody_says_yes(llamarl: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(REPOSITORY / "src" / "llamarl" / "assets" / "tiny", folder)
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for name, auto in (
        ("config.json", {"AutoConfig": "code.C"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["code.T", None]}),
    ):
        values = json.loads((folder / name).read_text()) | {"auto_map": auto, "tokenizer_class": "T"}
        (folder / name).write_text(json.dumps(values))
    words = ["train", str(RECIPE), "--dry-run", "--model.path", str(folder), "--run.dir", str(tmp_path / "run")]
    done = llamarl.run(words, stdin="yes\n" * 100)
    assert done.returncode == 2 and "which is not run" in done.stderr and "model.trust_remote_code" in done.stderr
    assert "Traceback" not in done.stderr and "[y/N]" not in done.stdout
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


def test_a_chat_template_that_takes_gigabytes_is_refused_by_a_dry_run_in_one_line(
    llamarl: CommandLine, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(REPOSITORY / "src" / "llamarl" / "assets" / "tiny", folder)
    (folder / "chat_template.jinja").write_text("{{ ('a' * 9) * 10**9 }}")  # jinja computes it while it compiles
    words = ["train", str(RECIPE), "--dry-run", "--model.path", str(folder), "--run.dir", str(tmp_path / "run")]
    done = llamarl.run(words, limit_s=40)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "chat template" in line]
    assert str(folder) in line and "more than 512 MiB of memory" in line
