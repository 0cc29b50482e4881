"""Models on a real vLLM: every family, float32 and bfloat16, before and after a hand-over of weights. One engine at a time."""

import shutil
from pathlib import Path

import pytest
import torch
from sampling_with_vllm import (
    BOUND,
    BUNDLED,
    changed_model,
    drain,
    give,
    largest_gap,
    mean_gap,
    prompts,
    sequences,
    trainers_model,
    vllm_engine,
)
from tiny_models import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from llamarl.errors import ModelError
from llamarl.model_support import FAMILIES

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")


def test_what_weights_are_written_into_holds_the_folders_own_at_first() -> None:
    """Adapters are merged into it, and layers that no version changes stay as they are."""
    engine = vllm_engine(BUNDLED)
    expected = dict(trainers_model(BUNDLED).named_parameters())
    assert set(engine.parameters_for_sync()) == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in engine.parameters_for_sync().items())


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if "vllm" not in family])
def test_every_family_generates_and_takes_new_weights_as_the_library_computes_them(family: str, tmp_path: Path) -> None:
    _write_model(family, tmp_path)
    engine = vllm_engine(tmp_path)
    of = [[3 + token % 90 for token in prompt] for prompt in prompts(6, length=20)]
    before = drain(engine, sequences(of))
    assert largest_gap(trainers_model(tmp_path), before) < BOUND
    assert sum(sum(s.logprobs) for s in before) < -0.3 * sum(len(s.tokens) for s in before)  # not all certain
    model = changed_model(tmp_path, seed=1)
    give(engine, dict(model.named_parameters()), version=1)
    assert largest_gap(model, drain(engine, sequences(of))) < BOUND


def test_bfloat16_takes_new_weights_to_its_rounding() -> None:
    engine = vllm_engine(BUNDLED, dtype="bfloat16")
    of, model = prompts(24), trainers_model(BUNDLED)
    assert mean_gap(model, drain(engine, sequences(of))) < 0.03  # 8 bits of mantissa through every layer
    other = changed_model(BUNDLED, seed=1)
    give(engine, dict(other.named_parameters()), version=1)
    after = drain(engine, sequences(of))
    assert mean_gap(other, after) < 0.03
    assert mean_gap(model, after) > 0.1  # what a weight of the earlier version would look like


def test_qwen2_with_windows_in_some_layers_is_refused_in_words(tmp_path: Path) -> None:
    tiny_config("qwen2").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="windows in some layers only"):
        vllm_engine(tmp_path)


def _write_model(family: str, folder: Path) -> None:
    """A random model of heads as wide as vLLM's attention on CPU has them, with the bundled tokenizer."""
    settings = {**tiny_config(family).to_diff_dict(), "head_dim": 32, "hidden_size": 128}
    if family == "qwen2":
        settings |= {"max_window_layers": 3, "layer_types": None}  # of the windows in some layers below
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    embedding = 0.1 if "gemma" in family else 0.3  # Gemma scales it; tokens shall not all be certain
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, embedding if "embed" in name else 0.15)
    model.save_pretrained(folder)
    for file in BUNDLED.iterdir():
        if "token" in file.name:
            shutil.copy(file, folder / file.name)
