"""A run whose model is named by its id on the Hub, by the real command line and the real client, against a hub on loopback."""

import json
import tomllib
from pathlib import Path

import pytest
from hub_server import files_of, serving_here
from huggingface_hub import constants

import llamarl
from llamarl.cli.main import main

TINY = Path(llamarl.__file__).parent / "assets" / "tiny"
SMALL = [
    *("--schedule.prompts_per_step", "2", "--generator.group_size", "2", "--generator.sampling.max_new_tokens", "8"),
    *("--evaluation.every", "0", "--run.runtime", "inline", "--checkpoint.every", "1"),
]


def test_a_run_of_a_hub_model_records_its_commit_and_goes_on_offline_after_the_branch_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_here(monkeypatch, tmp_path) as hub:
        commit = hub.commit("lab/tiny", files_of(TINY))
        words = ["tiny", "--model.path", "lab/tiny", "--run.dir", "run", *SMALL, "--run.num_ticks", "1"]
        assert main(["train", "--dry-run", *words]) == 0
        assert f'path = "lab/tiny@{commit}"' in capsys.readouterr().out
        assert "model.safetensors" not in hub.fetched()
        assert main(["train", *words]) == 0
        assert main(["generate", f"lab/tiny@{commit}", "--prompt", "a1 b2 ="]) == 0
        hub.commit("lab/tiny", files_of(TINY) | {"config.json": b"{}"})
        asked = len(hub.asked)
        with monkeypatch.context() as offline:
            offline.setattr(constants, "HF_HUB_OFFLINE", True)
            assert main(["train", "--resume", "run", "--run.num_ticks", "2"]) == 0
        assert len(hub.asked) == asked, "offline it asks nobody"
        recorded = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["model"]
        assert recorded["path"] == f"lab/tiny@{commit}"
        assert main(["train", "tiny", "--run.dir", "plain", *SMALL, "--run.num_ticks", "2"]) == 0
        losses = [
            [json.loads(row)["loss/policy"] for row in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
            for run in ("run", "plain")
        ]
        assert losses[0] == losses[1]  # the bundled model's own folder gives the same bits
        assert main(["plan", "--model", "lab/tiny", "--devices", "2"]) == 2
        assert "config.json" in capsys.readouterr().err  # what main is now holds no model
