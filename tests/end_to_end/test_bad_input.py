"""Bad input ends in the stated outcome, with a message that says what, where, got, expected, what to do."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import RECIPE, REPOSITORY, CommandLine, rows

from llamarl.cli.main import main

INLINE = {"run.runtime": '"inline"', "run.num_ticks": 1, "evaluation.every": 0, "observability.console": '"none"'}


@pytest.mark.parametrize("run_dir", ["/dev/null/run", "/proc/run"])
@pytest.mark.usefixtures("own_signals")
def test_a_run_folder_below_a_file_or_on_a_read_only_system_is_refused_before_anything_runs(
    run_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(RECIPE), "--run.dir", run_dir]) == 2  # nothing starts: no process needed
    told = capsys.readouterr().err
    assert run_dir in told and "run.dir" in told and "Traceback" not in told


REWARDS = """
import os
def dies(prompt, response, answer): os._exit(7)
"""


def test_a_reward_that_fails_is_counted_and_never_scored_zero(llamarl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    settings = {
        **INLINE,
        "task.reward": json.dumps(f"{tmp_path / 'rewards.py'}:dies"),
        "schedule.prompts_per_step": 2,
        "generator.group_size": 2,
        "generator.sampling.max_new_tokens": 8,
    }
    llamarl.train(tmp_path / "run", settings, status=4)  # nothing was trained
    (row,) = rows(tmp_path / "run")
    assert row["reward/failed"] == 4 and row["reward/mean"] is None
    assert row["tokens/trained"] == 0
    (line, *_) = (tmp_path / "run" / "rollouts" / "tick_000000.jsonl").read_text().splitlines()
    assert "crash" in line


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
    done = llamarl.run(words, stdin="yes\n" * 100, status=2)
    assert "which is not run" in done.stderr and "model.trust_remote_code" in done.stderr
    assert "Traceback" not in done.stderr and "[y/N]" not in done.stdout
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


def test_a_chat_template_that_takes_gigabytes_is_refused_by_a_dry_run_in_one_line(
    llamarl: CommandLine, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(REPOSITORY / "src" / "llamarl" / "assets" / "tiny", folder)
    (folder / "chat_template.jinja").write_text("{{ ('a' * 9) * 10**9 }}")  # jinja computes it while it compiles
    words = ["train", str(RECIPE), "--dry-run", "--model.path", str(folder), "--run.dir", str(tmp_path / "run")]
    done = llamarl.run(words, limit_s=40, status=2)
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "chat template" in line]
    assert str(folder) in line and "more than 512 MiB of memory" in line
