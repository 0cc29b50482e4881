"""From a recipe to an engine and its sampling parameters, and from a finished sequence to the record of a response.

Whoever samples builds its engine here: generator, evaluator, ``llamarl generate`` and ``llamarl eval``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from llamarl.config import RunConfig
from llamarl.engine.base import Engine
from llamarl.engine.sequence import SamplingParams
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.errors import ConfigError
from llamarl.import_path import resolve
from llamarl.models.parallel import ParallelLayout
from llamarl.settings.engine import EngineConfig
from llamarl.settings.executors import SamplingConfig
from llamarl.types import Failure, FailureKind, Response

__all__ = ["load_engine", "make_engine", "resolve_device", "sampling_params", "to_response"]


def make_engine(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: str,
    layout: ParallelLayout | None = None,
    parked: bool = False,
    note_experts: bool = False,
) -> Engine:
    """The engine that the recipe's generator section asks for.

    Args:
        layout: This rank's place among tensor-parallel ranks; None holds the whole model.
        parked: Without its memory until ``unpark``; the native engine only.
        note_experts: Write down which experts compute which token; the native engine only.
    """
    native = {"layout": layout, "parked": parked, "note_experts": note_experts}
    return load_engine(
        config.model.path,
        config.generator.engine,
        tokenizer,
        device=device,
        quantization=config.generator.quantization,
        **(native if config.generator.engine.kind.native else {}),
    )


def load_engine(
    path: str,
    settings: EngineConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: str,
    quantization: str = "none",
    **options: Any,
) -> Engine:
    """An engine over the model at ``path``; what its constructor raises passes through.

    Args:
        options: What the native engine takes beside.

    Raises:
        ConfigError: One of the user's own lacks what an engine has.
    """
    if settings.kind.quantizations:
        options["quantization"] = quantization
    make = resolve(settings.kind.factory or settings.name)
    engine = make(path, settings, tokenizer=tokenizer, device=device, **options)
    missing = sorted(name for name in dir(Engine) if not name.startswith("_") and not hasattr(engine, name))
    if missing:
        raise ConfigError(
            f"generator.engine.name {settings.name!r}: {type(engine).__name__} lacks {', '.join(missing)}, which an engine has "
            f"(llamarl.engine.base.Engine)"
        )
    return cast(Engine, engine)


def resolve_device(device: str, key: str = "it") -> str:
    """ "auto" is CUDA where there is one.

    Args:
        key: Where to set another one, for the error.

    Raises:
        ConfigError: There is no such device here.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    there = torch.cuda.device_count()
    if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= there:
        raise ConfigError(f"there is no device {device!r} here ({there} CUDA devices): set {key} to cpu or auto")
    return device


def sampling_params(config: SamplingConfig, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> SamplingParams:
    """Sampling parameters of a recipe; the tokenizer's end-of-text token always stops a response."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)} | changes
    eos = tokenizer.eos_token_id
    stops = dict.fromkeys([*(() if eos is None else (int(eos),)), *values.pop("stop_token_ids")])
    return SamplingParams(stop_token_ids=tuple(stops), **values)


def to_response(sequence: TokenSequence, tokenizer: PreTrainedTokenizerBase) -> Response:
    """The record of a finished sequence. One that the engine had to give up is failed, not scored."""
    assert sequence.finish_reason is not None, "only a finished sequence becomes a response"
    failed = sequence.finish_reason == "error"
    episode = sequence.episode
    kind: FailureKind = "environment" if episode is not None and episode.failure else "generation"
    return Response(
        prompt_index=sequence.prompt_index,
        sample_index=sequence.sample_index,
        tokens=np.asarray(sequence.tokens, np.int32),
        behavior_logprobs=np.asarray(sequence.logprobs, np.float32),
        policy_versions=np.asarray(sequence.policy_versions, np.int32),
        loss_mask=np.asarray(sequence.loss_mask, np.bool_),
        text=str(tokenizer.decode(sequence.tokens, skip_special_tokens=True)),
        finish_reason=sequence.finish_reason,
        outcome=Failure(kind=kind, detail=sequence.error or sequence.finish_reason) if failed else None,
        turns=() if episode is None else tuple(episode.turns),
        routed_experts=None if sequence.experts is None else sequence.experts.rows(len(sequence.tokens)),
    )
