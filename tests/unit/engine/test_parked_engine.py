"""An engine that gives its memory back between ticks: nothing stays, and what it samples afterwards is unchanged."""

from pathlib import Path

import pytest
import torch
from engine_runs import run
from tiny_models import tiny_model

from llamarl.engine.base import Parkable
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.settings.engine import EngineConfig


def sampled(by: NativeEngine) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(max_new_tokens=9, temperature=1.0)
    prompt = [3, 5, 7, 11]
    sequences = [
        Sequence(prompt_index=0, sample_index=i, prompt_tokens=prompt, params=params, seed=i) for i in range(3)
    ]
    return [(s.tokens, s.logprobs) for s in run(by, sequences)]


def load(engine: NativeEngine, weights: dict[str, torch.Tensor], version: int) -> None:
    for name, tensor in engine.parameters_for_sync().items():
        tensor.copy_(weights[name])
    engine.weights_updated(version)


def held_bytes(engine: NativeEngine) -> int:
    """Bytes of every distinct storage behind the parameters and the cache."""
    runner = engine._runner
    tensors = [*runner._parameters.values(), runner._cache, *runner._keys, *runner._values]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def with_own_weights(engine: NativeEngine) -> NativeEngine:
    """Not the file's pages, which are mapped until a first version is loaded."""
    engine.adopt({name: t.clone() for name, t in engine.parameters_for_sync().items()})
    engine.parameters_for_sync()
    engine.weights_updated(0)
    return engine


def served(engine: NativeEngine) -> list[object]:
    return [getattr(linear, "_packed", None) for linear in engine._runner.linears]


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_tokens_after_parking_are_those_of_an_engine_that_was_never_parked(quantization: str, tmp_path: Path) -> None:
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    config = EngineConfig(kv_cache_bytes=1 << 17)
    always, parked = (NativeEngine(tmp_path, config, eos_token_ids=(), quantization=quantization) for _ in range(2))
    for version in (1, 2):
        weights = {name: t * (1 + 0.1 * version) for name, t in always.parameters_for_sync().items()}
        parked.park()
        parked.unpark()
        load(parked, weights, version)
        load(always, weights, version)
        assert sampled(parked) == sampled(always)


def test_padded_decode_steps_survive_parking_and_their_records_do_not(tmp_path: Path) -> None:
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    config = EngineConfig(kv_cache_bytes=1 << 17, cuda_graphs="padded")
    always, parked = (NativeEngine(tmp_path, config, eos_token_ids=()) for _ in range(2))
    expected = sampled(always)
    weights = {name: t.clone() for name, t in always.parameters_for_sync().items()}
    decoder = parked._runner.padded_decoder
    decoder._graphs[None] = None  # type: ignore[assignment, index]  # stands for a recorded step
    parked.park()
    assert not decoder._graphs
    parked.unpark()
    load(parked, weights, 1)
    assert sampled(parked) == expected


def test_a_parked_engine_holds_neither_weights_nor_cache() -> None:
    engine = with_own_weights(NativeEngine("bundled:tiny", EngineConfig(kv_cache_bytes=1 << 20)))
    parameters = sum(t.numel() * 4 for t in engine.parameters_for_sync().values())
    cache = engine._runner.num_blocks * engine._runner.block_bytes
    packed = sum(4 * linear.in_features * linear.out_features for linear in engine.served_linears)
    assert held_bytes(engine) == parameters + cache and None not in served(engine)
    assert engine.park() == parameters + cache + packed
    assert held_bytes(engine) == 0 and set(served(engine)) == {None}
    engine.unpark()
    assert held_bytes(engine) == parameters + cache


def test_an_engine_that_comes_up_parked_equals_one_that_was_parked() -> None:
    config = EngineConfig(kv_cache_bytes=1 << 20)
    engine, other = NativeEngine("bundled:tiny", config, parked=True), NativeEngine("bundled:tiny", config)
    weights = {name: t.clone() for name, t in other.parameters_for_sync().items()}
    assert isinstance(engine, Parkable) and not engine._runner._cache.numel() and set(served(engine)) == {None}
    engine.unpark()
    load(engine, weights, 0)
    assert sampled(engine) == sampled(other)


def test_memory_that_was_lent_is_left_to_its_owner() -> None:
    engine = NativeEngine("bundled:tiny", EngineConfig(kv_cache_bytes=1 << 20))
    lent = {name: t.clone() for name, t in engine.parameters_for_sync().items()}
    engine.adopt(lent)
    engine.weights_updated(1)
    before = {name: t.clone() for name, t in lent.items()}
    engine.park()
    assert all(torch.equal(lent[name], before[name]) for name in lent)


def test_parking_with_unfinished_sequences_and_stepping_without_a_version_are_refused() -> None:
    engine = NativeEngine("bundled:tiny", EngineConfig(kv_cache_bytes=1 << 20))
    params = SamplingParams(max_new_tokens=4, temperature=1.0)
    sequence = Sequence(prompt_index=0, sample_index=0, prompt_tokens=[3, 5], params=params, seed=0)
    engine.add([sequence])
    with pytest.raises(ValueError, match="1 unfinished sequences are in the engine: suspend them before parking"):
        engine.park()
    engine.suspend()
    engine.park()
    engine.unpark()
    engine.add([sequence])
    with pytest.raises(AssertionError, match="load a version first"):
        engine.step()
