"""A step replayed from a CUDA graph against the same step launched kernel by kernel."""

from pathlib import Path

import pytest
import torch
from test_engine_on_cuda import make_engine, make_sequences, run
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_model("qwen3", "eager").save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_steps_give_the_bits_of_launched_ones(folder: Path, dtype: str, device: torch.device) -> None:
    replayed = make_engine(folder, device, cuda_graphs="on", dtype=dtype)
    one = run(replayed, make_sequences(temperature=1.0))
    two = run(make_engine(folder, device, cuda_graphs="padded", dtype=dtype), make_sequences(temperature=1.0))
    assert len(replayed._runner.padded_decoder._graphs) > 1  # type: ignore[union-attr]
    assert [(s.tokens, s.logprobs) for s in one] == [(s.tokens, s.logprobs) for s in two]


def test_padded_steps_give_the_tokens_of_exact_ones(folder: Path, device: torch.device) -> None:
    exact = run(make_engine(folder, device, cuda_graphs="off"), make_sequences())
    replayed = run(make_engine(folder, device, cuda_graphs="on"), make_sequences())
    assert [s.tokens for s in replayed] == [s.tokens for s in exact]


def test_a_second_run_records_nothing_and_repeats_the_first(folder: Path, device: torch.device) -> None:
    """Graphs share their memory: one that was recorded between two replays must not have spoilt the other's."""
    engine = make_engine(folder, device, cuda_graphs="on")
    decoder = engine._runner.padded_decoder
    first = run(engine, make_sequences(temperature=1.0))
    recorded = len(decoder._graphs)
    second = run(engine, make_sequences(temperature=1.0))
    assert len(decoder._graphs) == recorded
    assert [(s.tokens, s.logprobs) for s in second] == [(s.tokens, s.logprobs) for s in first]


def test_graphs_recorded_on_the_way_change_nothing_for_a_resumed_engine(folder: Path, device: torch.device) -> None:
    engine, sequences = make_engine(folder, device, cuda_graphs="on"), make_sequences(temperature=1.0)
    engine.add(sequences)
    for _ in range(15):
        engine.step()
    resumed = make_engine(folder, device, cuda_graphs="on")
    resumed.add(engine.suspend())
    while resumed.has_work:
        resumed.step()
    again, other = make_engine(folder, device, cuda_graphs="on"), make_sequences(temperature=1.0)
    again.add(other)
    for _ in range(15):
        again.step()
    again.add(again.suspend())
    while again.has_work:
        again.step()
    assert [(s.tokens, s.logprobs) for s in sequences] == [(s.tokens, s.logprobs) for s in other]
