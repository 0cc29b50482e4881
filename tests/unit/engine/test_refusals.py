"""What the engine refuses before it computes anything, so that neighbours never pay for it."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

import llamarl
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sampler import sample
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.errors import ModelError
from llamarl.models.loading import load_model
from llamarl.settings.engine import EngineConfig


def sequence(**changes: Any) -> Sequence:
    made = Sequence(
        prompt_index=0, sample_index=0, prompt_tokens=[3, 4, 5], params=SamplingParams(max_new_tokens=4), seed=1
    )
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_tokens": [3, 100_000]}, "token 100000 is not in the model's vocabulary"),
        ({"prompt_tokens": [-1]}, "token -1 is not"),
    ],
)
def test_a_bad_request_is_refused_and_the_others_go_on(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    engine = NativeEngine(tmp_path, EngineConfig(kv_cache_bytes=1 << 20), eos_token_ids=())
    good = sequence(prompt_index=1)
    engine.add([good])
    with pytest.raises(ValueError, match=words):
        engine.add([sequence(**changes)])
    while engine.has_work:
        engine.step()
    assert good.finish_reason == "length" and len(good.tokens) == 4


def test_the_least_temperature_still_gives_a_finite_log_prob() -> None:
    draws = sample(torch.randn(1, 50) * 30, [SamplingParams(max_new_tokens=1, temperature=1e-6)], [7], [0])
    assert draws.ok == [True] and math.isfinite(draws.logprobs[0])


def test_a_folder_that_lacks_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors .*layers\.1\.mlp\.down_proj"):
        load_model(tmp_path, dtype=torch.float32)


def test_rotary_factors_that_depend_on_the_batch_are_refused(tmp_path: Path) -> None:
    tiny_model("phi3", "sdpa").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    config["rope_parameters"] = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * half, "long_factor": [2.0] * half,
        "original_max_position_embeddings": 40,
    }  # fmt: skip
    config["original_max_position_embeddings"] = 40
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="longrope"):
        load_model(tmp_path, dtype=torch.float32, attention="llamarl_paged")


def test_nothing_executable_is_opened_by_a_path_that_a_folder_or_configuration_names() -> None:
    """A run's folder may come from a stranger. The process's own C library is opened, and nothing else."""
    sources = [path.read_text(encoding="utf-8") for path in Path(llamarl.__file__).parent.rglob("*.py")]
    opened = [name for text in sources for name in re.findall(r"(?:CDLL|cdll\.\w+|load_library)\(\s*([^,)]*)", text)]
    assert opened and set(opened) == {"None"}
    for key in ("library", "kernels"):
        with pytest.raises(ValidationError, match=key):
            EngineConfig(**{key: "a_library.so"})  # type: ignore[arg-type]
