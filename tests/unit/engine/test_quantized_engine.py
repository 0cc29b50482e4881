import math
from pathlib import Path

import pytest
import torch
from engine_runs import make_sequences, run
from tiny_models import tiny_model

from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import Sequence
from llamarl.errors import ConfigError
from llamarl.models.loading import load_model
from llamarl.settings.engine import EngineConfig

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=1 << 20, max_sequences=8, max_batch_tokens=24)


def _tokens(engine: NativeEngine, sequences: list[Sequence]) -> list[list[int]]:
    return [sequence.tokens for sequence in run(engine, sequences)]


@pytest.mark.parametrize("family", ["qwen2", "phi3"])
def test_int8_serves_a_distribution_close_to_the_weights_it_was_built_from(family: str, tmp_path: Path) -> None:
    tiny_model(family, "eager").save_pretrained(tmp_path)
    exact = NativeEngine(tmp_path, CONFIG, eos_token_ids=())
    rounded = NativeEngine(tmp_path, CONFIG, eos_token_ids=(), quantization="int8")
    sequences = run(rounded, make_sequences(temperature=1.0))
    model = load_model(tmp_path, dtype=torch.float32, attention="eager")
    differences = []
    for s in sequences:
        row = torch.tensor([s.prompt_tokens + s.tokens])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(row, use_cache=False).logits[0], -1)
        first = len(s.prompt_tokens) - 1
        expected = logprobs[first:-1].gather(1, torch.tensor(s.tokens)[:, None])[:, 0]
        differences += (torch.tensor(s.logprobs) - expected).tolist()
    spread = math.sqrt(sum(d * d for d in differences) / len(differences))
    assert 0 < spread < 0.25, "int8 must differ from fp32, by little"
    assert abs(sum(differences) / len(differences)) < 0.1
    assert set(rounded.parameters_for_sync()) == set(exact.parameters_for_sync())


def test_int8_is_rebuilt_from_new_weights(tmp_path: Path) -> None:
    tiny_model("llama", "eager", seed=1).save_pretrained(tmp_path / "old")
    tiny_model("llama", "eager", seed=2).save_pretrained(tmp_path / "new")
    engine = NativeEngine(tmp_path / "old", CONFIG, eos_token_ids=(), quantization="int8")
    fresh = NativeEngine(tmp_path / "new", CONFIG, eos_token_ids=(), quantization="int8")
    before = _tokens(engine, make_sequences())
    with torch.no_grad():
        for name, tensor in engine.parameters_for_sync().items():
            tensor.copy_(fresh.parameters_for_sync()[name])
    engine.weights_updated(1)
    after = _tokens(engine, make_sequences())
    assert after == _tokens(fresh, make_sequences())
    assert after != before


def test_a_row_in_int8_does_not_depend_on_the_rest_of_its_batch(tmp_path: Path) -> None:
    tiny_model("llama", "eager").save_pretrained(tmp_path)
    engine = NativeEngine(tmp_path, CONFIG, eos_token_ids=(), quantization="int8")
    together = _tokens(engine, make_sequences())
    alone = [_tokens(engine, [one])[0] for one in make_sequences()]
    assert together == alone


def test_quantization_that_the_device_does_not_have_is_refused(tmp_path: Path) -> None:
    tiny_model("llama", "eager").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'fp8' is not available on cpu; use one of none, int8"):
        NativeEngine(tmp_path, CONFIG, quantization="fp8")
