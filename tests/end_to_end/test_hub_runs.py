"""A run whose model is named by its id on the Hub, by the real command line and the real client, against a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from forked_command import run_llamarl
from hub_server import files_of, serving

import llamarl

TINY = Path(llamarl.__file__).parent / "assets" / "tiny"
SMALL = [
    *("--schedule.prompts_per_step", "2", "--generator.group_size", "2", "--generator.sampling.max_new_tokens", "8"),
    *("--evaluation.every", "0", "--run.runtime", "inline", "--checkpoint.every", "1"),
]


def llamarl_command(folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamarl.cli.main", *words]
    cleared = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    return subprocess.run(
        command, cwd=folder, env=cleared | environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_run_of_a_hub_model_records_its_commit_and_goes_on_offline_after_the_branch_has_moved(tmp_path: Path) -> None:
    with serving() as hub:
        commit = hub.commit("lab/tiny", files_of(TINY))
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
        words = ["tiny", "--model.path", "lab/tiny", "--run.dir", "run", *SMALL]
        dry = llamarl_command(tmp_path, online, "train", "--dry-run", *words, "--run.num_ticks", "1")
        assert dry.returncode == 0, dry.stderr
        assert f'revision = "{commit}"' in dry.stdout
        assert "model.safetensors" not in hub.fetched()
        begun = llamarl_command(tmp_path, online, "train", *words, "--run.num_ticks", "1")
        assert begun.returncode == 0, begun.stderr
        hub.commit("lab/tiny", files_of(TINY) | {"config.json": b"{}"})
        offline = online | {"HF_HUB_OFFLINE": "1"}
        ended = llamarl_command(tmp_path, offline, "train", "--resume", "run", "--run.num_ticks", "2")
        assert ended.returncode == 0, ended.stderr
        recorded = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["model"]
        assert (recorded["path"], recorded["revision"]) == ("lab/tiny", commit)
        same = run_llamarl(["train", "tiny", "--run.dir", "plain", *SMALL, "--run.num_ticks", "2"], cwd=tmp_path)
        assert same.returncode == 0, same.stderr
        losses = [
            [json.loads(row)["loss/policy"] for row in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
            for run in ("run", "plain")
        ]
        assert losses[0] == losses[1]  # the bundled model's own folder gives the same bits
        asked = llamarl_command(tmp_path, online, "generate", "lab/tiny", "--revision", commit, "--prompt", "a1 b2 =")
        assert asked.returncode == 0, asked.stderr
        planned = llamarl_command(tmp_path, online, "plan", "--model", "lab/tiny", "--devices", "2")
        assert "config.json" in planned.stderr  # what main is now holds no model
