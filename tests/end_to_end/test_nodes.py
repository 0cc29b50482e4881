"""A job with a reference model and a critic: PPO with KL as token rewards, run, cut and gone on with in this process."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OF_EXAMPLES, REPOSITORY, as_flags, rows
from safetensors.torch import save_file
from same_run import untimed
from transformers import AutoModelForTokenClassification

from llamarl.config import RunConfig, load_config
from llamarl.controller.prepare import plan_run
from llamarl.controller.resume import resume_run
from llamarl.controller.run import start_run
from llamarl.errors import ConfigError

SETTINGS = OF_EXAMPLES | {
    "schedule.prompts_per_step": 4,
    "generator.group_size": 2,
    "generator.sampling.max_new_tokens": 60,
    "algorithm.kl_coef": 0.02,
    "algorithm.kl_place": "token_reward",
    "algorithm.kl_estimator": "k1",
    "reference.threads": 1,
    "evaluation.every": 0,
}


def _config(run_dir: Path, **more: Any) -> RunConfig:
    words = as_flags({**SETTINGS, "run.dir": json.dumps(str(run_dir)), **more})
    return load_config(REPOSITORY / "recipes" / "ppo_critic.toml", words)


def test_a_run_with_reference_and_critic_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    start_run(_config(whole, **{"run.num_ticks": 4}))
    shutil.copytree(whole, cut)  # what a kill after tick 3's row, before its checkpoint, leaves
    for left in ("checkpoints/tick_000003", "model", "critic"):
        shutil.rmtree(cut / left)
    resume_run(_config(cut, **{"run.num_ticks": 4}))
    assert untimed(cut) == untimed(whole)
    for folder in ("model", "critic"):
        files = [run / folder / "model.safetensors" for run in (cut, whole)]
        assert files[0].read_bytes() == files[1].read_bytes()
    table = rows(whole)
    assert table[0]["kl/reference"] == pytest.approx(0.0, abs=1e-6)  # the reference is version 0
    assert table[3]["kl/reference"] != 0.0
    assert table[0]["critic/value_mean"] == 0.0 != table[1]["critic/value_mean"]  # version 0 of the critic, then 1
    assert all(row["staleness/max"] <= 2 for row in table)  # nodes between reward and trainer add none
    assert {"time/reference_s", "idle/reference", "time/critic_s", "idle/critic"} <= table[0].keys()
    assert AutoModelForTokenClassification.from_pretrained(whole / "critic").config.num_labels == 1


def test_a_reference_of_another_vocabulary_is_refused_before_anything_starts(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 7}), encoding="utf-8")
    save_file({"a": torch.zeros(1)}, other / "model.safetensors")
    with pytest.raises(ConfigError, match=r"reference\.path: .* has a vocabulary of 7 tokens"):
        plan_run(_config(tmp_path / "run", **{"reference.path": json.dumps(str(other))}))
