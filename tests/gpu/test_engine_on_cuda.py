"""The native engine on a GPU: the library's tokens, the trainer's log-probs, fp8, new weights, nothing that waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import make_sequences, run
from tiny_models import FAMILIES, tiny_model

from llamarl.engine.engine import NativeEngine
from llamarl.engine.sampler import _draw
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.models.attention import PackedSequences
from llamarl.models.loading import load_model, load_tokenizer
from llamarl.settings.engine import EngineConfig

CPU = torch.device("cpu")
ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama", "eager").save_pretrained(path)
    return path


def make_engine(
    folder: Path | str, device: torch.device, *, quantization: str = "none", **changes: Any
) -> NativeEngine:
    values = {"block_size": 4, "max_sequences": 16, "max_batch_tokens": 64, "kv_cache_bytes": 1 << 20, **changes}
    return NativeEngine(folder, EngineConfig(**values), eos_token_ids=(), device=device, quantization=quantization)


def first_logits(engine: NativeEngine, sequences: list[Sequence]) -> torch.Tensor:
    """Of the first step, which computes prompts."""
    engine.add(sequences)
    return engine._runner.execute(engine._scheduler.schedule())


def trainer_logprobs(folder: Path, sequences: list[Sequence], dtype: torch.dtype, device: torch.device) -> list[Any]:
    """The packed forward pass that training makes: [T] for each sequence."""
    model = load_model(folder, dtype=dtype, device=device, attention="llamarl_packed")
    packed = PackedSequences.of(torch.tensor([0, *[s.num_tokens for s in sequences]]).cumsum(0))
    row = torch.tensor([t for s in sequences for t in s.prompt_tokens + s.tokens], device=device)
    with torch.no_grad():
        logits = model(
            row[None], position_ids=packed.position_ids(device), packed_sequences=packed, use_cache=False
        ).logits[0]
    found = []
    for start, s in zip(packed.cu_seqlens, sequences, strict=False):
        first = start + len(s.prompt_tokens)
        predicting = torch.log_softmax(logits[first - 1 : first - 1 + len(s.tokens)].float(), -1).cpu()
        found.append(predicting.gather(1, torch.tensor(s.tokens)[:, None])[:, 0])
    return found


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any call that makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", ["auto", "copied"])
@pytest.mark.parametrize("cuda_graphs", ["off", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_float32_tokens_equal_generate(
    family: str, cuda_graphs: str, attention: str, tmp_path: Path, device: torch.device
) -> None:
    tiny_model(family, "eager").save_pretrained(tmp_path)
    engine = make_engine(tmp_path, device, cuda_graphs=cuda_graphs, attention=attention)
    sequences = run(engine, make_sequences())
    library = load_model(tmp_path, dtype=torch.float32, device=device, attention="eager")
    for s in sequences:
        out = library.generate(
            torch.tensor([s.prompt_tokens], device=device),
            max_new_tokens=len(s.tokens),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert s.tokens == out[0, len(s.prompt_tokens) :].tolist()


def test_greedy_bfloat16_tokens_are_the_librarys_likeliest_to_rounding(folder: Path, device: torch.device) -> None:
    """Equal tokens cannot be asked of two orders of rounding; a choice that the library finds much worse would be wrong."""
    sequences = run(make_engine(folder, device, dtype="bfloat16"), make_sequences())
    library = load_model(folder, dtype=torch.bfloat16, device=device, attention="sdpa")
    worse, count = 0.0, 0
    for s in sequences:
        with torch.no_grad():
            logits = library(torch.tensor([s.prompt_tokens + s.tokens], device=device)).logits[0].float().cpu()
        predicting = torch.log_softmax(logits[len(s.prompt_tokens) - 1 : -1], -1)
        chosen = predicting.gather(1, torch.tensor(s.tokens)[:, None])[:, 0]
        gap = predicting.amax(dim=-1) - chosen
        assert gap.max() < 0.5
        worse, count = worse + float((gap > 0).sum()), count + len(s.tokens)
    assert worse / count < 0.1


@pytest.mark.parametrize(("dtype", "largest", "mean"), [("float32", 1e-4, 1e-5), ("bfloat16", 0.6, 0.05)])
def test_logprobs_are_those_of_the_trainers_forward(
    folder: Path, dtype: str, largest: float, mean: float, device: torch.device
) -> None:
    sequences = run(make_engine(folder, device, dtype=dtype), make_sequences(temperature=1.0))
    expected = trainer_logprobs(folder, sequences, getattr(torch, dtype), device)
    difference = torch.cat([torch.tensor(s.logprobs) - e for s, e in zip(sequences, expected, strict=True)]).abs()
    assert difference.max() < largest
    assert difference.mean() < mean


@pytest.mark.parametrize("top", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}])
def test_float32_draws_equal_those_of_the_cpu(folder: Path, top: dict[str, Any], device: torch.device) -> None:
    """The same uniform numbers over logits that differ by rounding: a draw changes only where one lies on an edge."""
    here = run(make_engine(folder, CPU), make_sequences(temperature=1.0, **top))
    there = run(make_engine(folder, device), make_sequences(temperature=1.0, **top))
    same = sum(a.tokens == b.tokens for a, b in zip(here, there, strict=True))
    assert same >= len(here) - 1


def test_the_same_run_gives_the_same_bits(folder: Path, device: torch.device) -> None:
    one, two = (run(make_engine(folder, device), make_sequences(temperature=1.0, top_p=0.9)) for _ in range(2))
    assert [(s.tokens, s.logprobs) for s in one] == [(s.tokens, s.logprobs) for s in two]


def test_a_single_sequence_repeats_its_draws(folder: Path, device: torch.device) -> None:
    runs = [run(make_engine(folder, device), make_sequences(temperature=1.0)[-1:])[0] for _ in range(3)]
    assert len({(tuple(s.tokens), tuple(s.logprobs)) for s in runs}) == 1


def test_preempted_and_shared_prompts_give_the_tokens_of_enough_memory(folder: Path, device: torch.device) -> None:
    enough = run(make_engine(folder, device), make_sequences())
    engine = make_engine(folder, device, kv_cache_bytes=53 * 4 * 384)
    scarce = run(engine, make_sequences())
    assert engine.stats()["preemptions"] > 0
    assert [s.tokens for s in scarce] == [s.tokens for s in enough]


def test_a_poisoned_request_fails_alone(folder: Path, device: torch.device) -> None:
    healthy = run(make_engine(folder, device), make_sequences())
    engine, sequences = make_engine(folder, device), make_sequences()
    engine.add(sequences)
    for _ in range(3):
        engine.step()
    member = next(m for m in engine._members.values() if m.sequence is sequences[3])
    engine._runner._cache[:, :, member.blocks[-1]] = float("nan")
    while engine.has_work:
        engine.step()
    assert sequences[3].finish_reason == "error"
    assert [s.tokens for s in sequences if s is not sequences[3]] == [
        h.tokens for s, h in zip(sequences, healthy, strict=True) if s is not sequences[3]
    ]


def _needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9, this device has less")


def test_fp8_is_close_to_bfloat16(device: torch.device) -> None:
    """On a trained model; of its sizes the vocabulary, 43, needs filling up to a multiple of 16."""
    _needs_fp8()
    tokens = load_tokenizer("bundled:tiny")("a3 b9 c4 =").input_ids
    plain, eighth = (
        first_logits(
            make_engine("bundled:tiny", device, dtype="bfloat16", quantization=quantization),
            [
                Sequence(prompt_index=n, sample_index=0, prompt_tokens=tokens[:n], params=ONE_TOKEN, seed=n)
                for n in range(2, len(tokens) + 1)
            ],
        )
        for quantization in ("none", "fp8")
    )
    p, q = torch.log_softmax(plain, -1), torch.log_softmax(eighth, -1)
    assert torch.nn.functional.cosine_similarity(plain, eighth, dim=-1).min() > 0.98
    assert 0 < (p.exp() * (p - q)).sum(-1).mean() < 0.1


@pytest.mark.parametrize(("quantization", "dtype"), [("none", "float32"), ("fp8", "bfloat16")])
def test_new_weights_take_the_place_of_old_ones(
    folder: Path, quantization: str, dtype: str, device: torch.device, tmp_path: Path
) -> None:
    """Same addresses, same recorded graphs, and the tokens of an engine that began with the new weights."""
    if quantization == "fp8":
        _needs_fp8()
    engine = make_engine(folder, device, quantization=quantization, dtype=dtype)
    run(engine, make_sequences())
    before, graphs = engine._runner._addresses(), len(engine._runner.padded_decoder._graphs)  # type: ignore[union-attr]
    assert graphs > 0
    other = tiny_model("llama", "eager", seed=1)
    other.save_pretrained(tmp_path)
    weights = dict(other.named_parameters())
    with torch.no_grad():
        for name, parameter in engine.parameters_for_sync().items():
            parameter.copy_(weights[name])
    engine.weights_updated(1)
    assert engine._runner._addresses() == before
    assert len(engine._runner.padded_decoder._graphs) == graphs  # type: ignore[union-attr]
    swapped = run(engine, make_sequences())
    fresh = run(make_engine(tmp_path, device, quantization=quantization, dtype=dtype), make_sequences())
    assert [s.tokens for s in swapped] == [s.tokens for s in fresh]


@pytest.mark.parametrize("cuda_graphs", ["off", "auto"])
def test_nothing_in_a_step_waits_for_the_device_but_the_draws(
    folder: Path, cuda_graphs: str, device: torch.device
) -> None:
    engine, sequences = make_engine(folder, device, cuda_graphs=cuda_graphs), make_sequences(temperature=1.0)
    engine.add(sequences)
    for _ in range(12):  # libraries are set up, graphs recorded, page-locked memory is there
        engine.step()
    for _ in range(4):
        plan = engine._scheduler.schedule()
        owners = [member.sequence for member, _ in plan.samples]
        with no_waiting():
            logits = engine._runner.execute(plan)
            drawn = _draw(logits, [s.params for s in owners], [s.seed for s in owners], [len(s.tokens) for s in owners])
        for sequence, token in zip(owners, drawn[0].tolist(), strict=True):
            sequence.tokens.append(int(token))
