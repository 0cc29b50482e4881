"""A run whose model is named by its id on the Hub, by the real command line and the real client, against a hub on loopback."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked_command import run_llamarl
from hub_server import files_of, serving_here

import llamarl
from llamarl.cli.main import main

TINY = Path(llamarl.__file__).parent / "assets" / "tiny"
SMALL = [
    *("--schedule.prompts_per_step", "2", "--generator.group_size", "2", "--generator.sampling.max_new_tokens", "8"),
    *("--evaluation.every", "0", "--run.runtime", "inline", "--checkpoint.every", "1"),
]


_PROGRAM = """
import json, sys
from llamarl.cli.main import main
for words in json.loads(sys.argv[1]):
    code = main(words)
    print(code, end=chr(12), flush=True)
    print(end=chr(12), file=sys.stderr, flush=True)
"""


@dataclass
class Done:
    """One command, and what it said."""

    returncode: int
    stdout: str
    stderr: str


def commands(folder: Path, environment: dict[str, str], *all_words: list[str]) -> list[Done]:
    """One after another in a Python of their own: the Hub's client reads its environment when it is imported."""
    cleared = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(all_words)],
        cwd=folder, env=cleared | environment, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    said = zip(ran.stdout.split(chr(12))[:-1], ran.stderr.split(chr(12))[:-1], strict=True)
    return [Done(int(out[-1]), out[:-1], err) for out, err in said]


def test_a_run_of_a_hub_model_records_its_commit_and_goes_on_offline_after_the_branch_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_here(monkeypatch, tmp_path) as hub:
        commit = hub.commit("lab/tiny", files_of(TINY))
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
        words = ["tiny", "--model.path", "lab/tiny", "--run.dir", "run", *SMALL, "--run.num_ticks", "1"]
        assert main(["train", "--dry-run", *words]) == 0
        assert f'path = "lab/tiny@{commit}"' in capsys.readouterr().out
        assert "model.safetensors" not in hub.fetched()
        begun, asked = commands(
            tmp_path,
            online,
            ["train", *words],
            ["generate", f"lab/tiny@{commit}", "--prompt", "a1 b2 ="],
        )
        assert begun.returncode == 0, begun.stderr
        assert asked.returncode == 0, asked.stderr
        hub.commit("lab/tiny", files_of(TINY) | {"config.json": b"{}"})
        (ended,) = commands(
            tmp_path, online | {"HF_HUB_OFFLINE": "1"}, ["train", "--resume", "run", "--run.num_ticks", "2"]
        )
        assert ended.returncode == 0, ended.stderr
        recorded = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["model"]
        assert recorded["path"] == f"lab/tiny@{commit}"
        same = run_llamarl(
            ["train", "tiny", "--run.dir", "plain", *SMALL, "--run.runtime=inline", "--run.num_ticks", "2"],
            cwd=tmp_path,
        )
        assert same.returncode == 0, same.stderr
        losses = [
            [json.loads(row)["loss/policy"] for row in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
            for run in ("run", "plain")
        ]
        assert losses[0] == losses[1]  # the bundled model's own folder gives the same bits
        assert main(["plan", "--model", "lab/tiny", "--devices", "2"]) == 2
        assert "config.json" in capsys.readouterr().err  # what main is now holds no model
