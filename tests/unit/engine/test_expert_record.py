"""What the engine writes down of its routers, against the library's forward pass of each sequence alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import BY_LOGITS, tiny_config
from transformers import PreTrainedModel

from llamarl.engine.engine import NativeEngine
from llamarl.engine.expert_record import ExpertRecord
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.errors import ModelError
from llamarl.models.loading import load_model
from llamarl.models.small_copy import small_model
from llamarl.settings.engine import EngineConfig

PROMPT, OTHER = [3, 14, 15, 9, 26, 5, 35], [8, 9, 7]


def write(folder: Path, family: str, seed: int = 0) -> Path:
    model = small_model(tiny_config(family))
    if seed:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def engine_of(folder: Path, **settings: object) -> NativeEngine:
    small: dict[str, Any] = {"kv_cache_bytes": 1 << 20, "max_batch_tokens": 6, "max_sequences": 6}
    config = EngineConfig(block_size=4, **{**small, **settings})
    return NativeEngine(folder, config, eos_token_ids=(), note_experts=True)


def sequences(new_tokens: int = 9, temperature: float = 1.0) -> list[Sequence]:
    params = SamplingParams(max_new_tokens=new_tokens, temperature=temperature)
    return [
        Sequence(prompt_index=i, sample_index=s, prompt_tokens=list(prompt), params=params, seed=10 * i + s)
        for i, prompt in enumerate((PROMPT, OTHER))
        for s in range(3)
    ]


def run(engine: NativeEngine, asked: list[Sequence], steps: int = 10_000) -> None:
    engine.add([s for s in asked if not s.finished])
    while engine.has_work and steps:
        engine.step()
        steps -= 1


@torch.no_grad()
def router_logits(model: PreTrainedModel, sequence: Sequence) -> torch.Tensor:
    """[P + R, layers, experts]"""
    ids = torch.tensor([[*sequence.prompt_tokens, *sequence.tokens]])
    return torch.stack(model(ids, output_router_logits=True, use_cache=False).router_logits, dim=1).float()


def library(model: PreTrainedModel, sequence: Sequence) -> np.ndarray:
    """[P + R, layers, k]"""
    return router_logits(model, sequence).topk(model.config.num_experts_per_tok, dim=-1).indices.numpy()


def noted(sequence: Sequence) -> np.ndarray:
    assert sequence.experts is not None and sequence.experts.prompt is not None
    own = sequence.experts.rows(len(sequence.tokens))
    assert own is not None and own.dtype == np.uint8
    return np.concatenate([sequence.experts.prompt, own])


@torch.no_grad()
def test_deepseek_s_tokens_have_the_experts_that_its_routers_give_them(tmp_path: Path) -> None:
    folder = write(tmp_path, "deepseek_v3")
    asked = sequences()
    run(engine_of(folder), asked)
    model = load_model(folder, dtype=torch.float32, attention="eager")
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
    for sequence in asked:
        chosen.clear()
        model(torch.tensor([[*sequence.prompt_tokens, *sequence.tokens]]), use_cache=False)
        by_routers = torch.stack(chosen, dim=1)[:-1].sort(-1).values.numpy()
        assert np.array_equal(np.sort(noted(sequence)[:-1], axis=-1), by_routers)


@pytest.mark.parametrize("family", BY_LOGITS)
def test_each_token_has_the_experts_that_the_library_gives_it(family: str, tmp_path: Path) -> None:
    folder = write(tmp_path, family)
    asked = sequences()
    run(engine_of(folder), asked)
    model = load_model(folder, dtype=torch.float32, attention="eager")
    for sequence in asked:
        logits = router_logits(model, sequence)[:-1]
        largest = logits.topk(model.config.num_experts_per_tok, dim=-1).values
        found = logits.gather(-1, torch.from_numpy(noted(sequence)[:-1].astype(np.int64)))
        torch.testing.assert_close(found, largest, atol=1e-4, rtol=0)  # two experts may score alike but for rounding
        assert not noted(sequence)[-1].any()  # the last token was never put in
    prompts = [s.experts.prompt for s in asked[:3] if s.experts is not None]
    assert prompts[0] is prompts[1] is prompts[2]  # computed once, held once


def test_little_memory_and_computing_again_change_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, "mixtral")
    roomy, tight = sequences(16), sequences(16)
    run(engine_of(folder), roomy)
    engine = engine_of(folder)
    small = engine_of(folder, kv_cache_bytes=engine._runner.block_bytes * 16)
    run(small, tight)
    assert small.stats()["preemptions"] > 0
    for one, other in zip(roomy, tight, strict=True):
        assert one.tokens == other.tokens and np.array_equal(noted(one), noted(other))


def test_a_token_keeps_the_experts_under_which_the_next_one_was_sampled(tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", "mixtral"), write(tmp_path / "new", "mixtral", seed=1)
    engine, asked = engine_of(old), sequences(20)
    run(engine, asked, steps=12)
    carried = engine.suspend()
    before = [len(s.tokens) for s in asked]
    assert carried and any(before)
    weights = load_model(new, dtype=torch.float32).state_dict()
    with torch.no_grad():
        for name, parameter in engine.parameters_for_sync().items():
            parameter.copy_(weights[name])
    engine.weights_updated(1)
    state = json.loads(json.dumps([s.experts.to_plain() if s.experts else None for s in asked]))
    for sequence, saved in zip(asked, state, strict=True):  # as a checkpoint holds them
        sequence.experts = None if saved is None else ExpertRecord.from_plain(saved)
    run(engine, asked)
    first, second = (load_model(folder, dtype=torch.float32, attention="eager") for folder in (old, new))
    differs = 0
    for sequence, length in zip(asked, before, strict=True):
        if not length:
            continue
        known = len(sequence.prompt_tokens) + length - 1  # the last token was sampled, not yet put in
        found, under_old, under_new = noted(sequence), library(first, sequence), library(second, sequence)
        assert np.array_equal(found[:known], under_old[:known])
        assert np.array_equal(found[known:-1], under_new[known:-1])
        differs += int((under_old[:known] != under_new[:known]).any())
    assert differs  # else the two models would not tell them apart


def test_a_dense_model_has_nothing_to_note(tmp_path: Path) -> None:
    small_model(tiny_config("llama")).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no experts whose choice could be noted"):
        engine_of(tmp_path)


def test_a_step_does_not_go_over_the_parts_of_all_steps_before_it() -> None:
    class Part(np.ndarray):
        def __len__(self) -> int:
            asked.append(self.shape[0])
            return self.shape[0]

    asked: list[int] = []
    record = ExpertRecord(np.zeros((2, 1, 1), np.uint8))
    for start in range(100):
        record.note(start, np.zeros((1, 1, 1), np.uint8).view(Part))
        assert record.num_tokens == start + 1
    assert len(asked) <= 200  # of the new part alone, in each step


def test_more_than_256_experts_take_two_bytes() -> None:
    from llamarl.engine.expert_record import narrowed

    assert narrowed(np.array([[[255]]]), 256).dtype == np.uint8
    wide = narrowed(np.array([[[256]]]), 257)
    assert wide.dtype == np.uint16 and wide.item() == 256
    again = ExpertRecord.from_plain(json.loads(json.dumps(ExpertRecord(wide, [wide]).to_plain())))
    assert again.prompt is not None and again.prompt.dtype == np.uint16 and again.rows(2).tolist() == [[[256]], [[0]]]
