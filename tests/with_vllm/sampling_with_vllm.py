"""What the tests of engines on a real vLLM share: engines, sequences, and the library's own forward to compare with."""

import functools
import gc
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.engine.vllm import VllmEngine, import_vllm
from llamarl.models.folders import resolve_model_path
from llamarl.models.loading import load_model, load_tokenizer
from llamarl.settings.engine import EngineConfig

BUNDLED = resolve_model_path("bundled:tiny")
BOUND = 5e-5
"""Nats between two float32 log-probs of one token; the native engine's own bound against the trainer is 1e-4."""


def vllm_engine(folder: Path, dtype: str = "float32", **settings: Any) -> VllmEngine:
    gc.collect()  # an engine that ends takes vLLM's state of the whole process with it
    vllm = import_vllm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "LLM", functools.partial(vllm.LLM, enforce_eager=True))
        config = EngineConfig(dtype=dtype, kv_cache_bytes=1 << 26, **settings)
        return VllmEngine(folder, config, tokenizer=load_tokenizer(BUNDLED))  # of all models here


def native_engine(folder: Path) -> NativeEngine:
    return NativeEngine(folder, EngineConfig(kv_cache_bytes=1 << 26), tokenizer=load_tokenizer(folder))


def prompts(count: int, length: int = 5, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 43) for _ in range(length + 3 * (i % 5))] for i in range(count)]


def sequences(
    of: Sequence[list[int]], *, seed: int = 100, samples: int = 1, tokens: int = 24, **params: Any
) -> list[TokenSequence]:
    settings = SamplingParams(max_new_tokens=tokens, **params)
    return [
        TokenSequence(prompt_index=i, sample_index=j, prompt_tokens=list(prompt), params=settings, seed=seed + 1000 * i + j)
        for i, prompt in enumerate(of)
        for j in range(samples)
    ]  # fmt: skip


def drain(engine: VllmEngine | NativeEngine, these: list[TokenSequence]) -> list[TokenSequence]:
    engine.add(these)
    while engine.has_work:
        engine.step()
    return these


def endings(of: Sequence[TokenSequence]) -> list[tuple[list[int], str | None]]:
    return [(s.tokens, s.finish_reason) for s in of]


@torch.no_grad()
def logits_of(model: PreTrainedModel, sequence: TokenSequence) -> Tensor:
    """What the library's own forward says of every token of the response: [tokens, vocabulary], float32."""
    row = torch.tensor([sequence.prompt_tokens + sequence.tokens])
    return model(row).logits[0, len(sequence.prompt_tokens) - 1 : -1].float()


def largest_gap(model: PreTrainedModel, of: Sequence[TokenSequence]) -> float:
    """Largest difference of recorded log-probs and those of the library's forward, in nats."""
    return _gaps(model, of).max().item()


def mean_gap(model: PreTrainedModel, of: Sequence[TokenSequence]) -> float:
    return _gaps(model, of).mean().item()


def _gaps(model: PreTrainedModel, of: Sequence[TokenSequence]) -> Tensor:
    """Of every token."""
    gaps = []
    for s in of:
        expected = logits_of(model, s).log_softmax(-1).gather(1, torch.tensor(s.tokens)[:, None])[:, 0]
        gaps.append((torch.tensor(s.logprobs) - expected).abs())
    return torch.cat(gaps)


def trainers_model(folder: Path) -> PreTrainedModel:
    """In float32, and with attention that knows soft caps, which the library's default leaves out."""
    return load_model(folder, dtype=torch.float32, attention="eager")


def changed_model(folder: Path, seed: int) -> PreTrainedModel:
    """The folder's model with a tenth of noise on every matrix: another policy, as far as a long training."""
    model = trainers_model(folder)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.1 * parameter.std())
    return model


def give(engine: VllmEngine | NativeEngine, parameters: dict[str, Any], version: int) -> None:
    tensors = engine.parameters_for_sync()
    assert set(tensors) == set(parameters)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(parameters[name])
    engine.weights_updated(version)
