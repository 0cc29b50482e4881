"""The plan for Llama-3.1-405B on 1,024 GPUs, made small: every width over 128, six layers, its axes on eight ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import CommandLine, rows
from transformers import AutoModelForCausalLM, LlamaConfig

from llamarl.forecast.model import find_model
from llamarl.models.folders import resolve_model_path

SHRINK = 128
KV_HEADS = 2
REWARD = "def score(response, answer):\n    return (sum(map(ord, response)) % 7) / 6\n"
"""A random model's responses are never right; these scores differ."""


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its widths and its ratios, all but one: 16 query heads share 2 key-value heads, not 1, so that the trainer's two ranks have one
    each, and the generator's four hold copies, as 32 ranks of the plan do with 8."""
    spec = find_model("Llama-3.1-405B")
    config = LlamaConfig(
        hidden_size=spec.hidden // SHRINK,
        intermediate_size=spec.intermediate // SHRINK,
        num_attention_heads=spec.hidden // SHRINK // 8,
        num_key_value_heads=KV_HEADS,
        num_hidden_layers=6,
        vocab_size=spec.vocab // SHRINK,
        tie_word_embeddings=spec.tied,
        initializer_range=0.1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("shrunk")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in resolve_model_path("bundled:tiny").glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.mark.long
def test_its_axes_on_eight_ranks_do_what_two_processes_do(llamarl: CommandLine, tmp_path: Path, shrunk: Path) -> None:
    """Trainer fsdp x tp, generator with twice as many ranks as key-value heads, vocabulary cut on both sides."""
    settings = {
        "model.path": json.dumps(str(shrunk)),
        "task.reward": json.dumps(f"{shrunk / 'reward.py'}:score"),
        "run.num_ticks": 3,
        "evaluation.every": 0,
        "generator.sampling.max_new_tokens": 24,
        "schedule.prompts_per_step": 4,
    }
    meshes = {"trainer.fsdp": 2, "trainer.tp": 2, "generator.tp": 4}
    found = {}
    for name, mesh in {"mesh": meshes, "again": meshes, "alone": {}}.items():
        done = llamarl.train(tmp_path / name, settings | mesh)
        assert done.returncode == 0, done.stdout + done.stderr
        found[name] = rows(tmp_path / name)
    for mesh, again, alone in zip(*found.values(), strict=True):
        assert mesh["grad_norm"] > 0
        assert (mesh["grad_norm"], mesh["reward/mean"]) == (again["grad_norm"], again["reward/mean"])
        assert mesh["reward/mean"] == alone["reward/mean"]  # the same tokens were sampled
        assert mesh["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
        assert mesh["mismatch/kl"] < 1e-3
