"""How far a generator is from the trainer: the same tokens' log-probs under both, and what that does to AIPO.

    prompts ─▶ engine (its dtype, its quantization) ─▶ tokens, log mu ─▶ trainer's forward ─▶ log pi ─▶ Mismatch ─▶ Verdict

Both hold the same weights, so any difference is arithmetic: precision, quantization, kernels. AIPO multiplies a token's
gradient by ``min(pi / mu, rho)``, which makes up for such a difference where the ratio stays below rho and near 1.
Measuring and judging are pure functions of log-probs; only ``sample_and_score`` holds models.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llamarl.config import RunConfig
from llamarl.determinism import derive_seed
from llamarl.engine.factory import make_engine, sampling_params
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.errors import ModelError
from llamarl.models.parallel import ParallelLayout
from llamarl.models.precision import torch_dtype
from llamarl.trainer.batch import TrainingSequence, make_microbatch, pack_sequences
from llamarl.trainer.building import build_policy
from llamarl.trainer.shared_prompts import row_attention

__all__ = ["LargestGap", "Mismatch", "Verdict", "judge", "measure", "sample_and_score"]

_MICROBATCH_TOKENS = 2048

_SMALL_KL, _LARGE_KL = 1e-3, 5e-2
"""Nats a token. Below the first, hundreds of tokens of a response weigh about 1 together; above the
second, the tokens that train are visibly another policy's."""
_FEW_CLIPPED, _MANY_CLIPPED = 1e-4, 1e-2
"""Share of tokens."""
_LEAST_EFFECTIVE = 0.9
"""Share of the tokens that the weighted ones are worth."""


@dataclass(frozen=True, kw_only=True)
class LargestGap:
    """The token at which both differ most."""

    response: int
    position: int
    """Of the token in its response, from 0."""
    token: int
    text: str
    policy_logprob: float
    behavior_logprob: float


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Over all sampled tokens. The ratio is pi / mu: trainer over generator."""

    num_tokens: int
    kl: float
    """KL(mu || pi), nats a token: the mean of ``ratio - 1 - log(ratio)`` over tokens sampled from
    mu, which is never negative."""
    kl_error: float
    """Its standard error."""
    mean_gap: float
    """Of |log pi - log mu|, nats."""
    clipped: float
    """Share of tokens whose ratio lies above rho: AIPO scales these down."""
    effective: float
    """Share of the tokens that the weighted ones are worth: (sum w)^2 / (n sum w^2) of w = min(ratio, rho)."""
    least_ratio: float
    largest_ratio: float
    largest: LargestGap


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """For a person."""

    safe: bool
    sentence: str
    advice: tuple[str, ...]


def measure(
    policy_logprobs: Sequence[npt.NDArray[np.float32]],
    behavior_logprobs: Sequence[npt.NDArray[np.float32]],
    tokens: Sequence[Sequence[int]],
    texts: Sequence[Sequence[str]],
    *,
    rho: float,
) -> Mismatch:
    """Compare log-probs token by token.

    Args:
        policy_logprobs, behavior_logprobs: A response each: [R] of the trainer, [R] of the generator, nats.
        tokens, texts: Of the same tokens.
        rho: Clip on the ratio; infinite for none.

    Raises:
        ValueError: No token, or a log-prob that is not finite.
    """
    gaps = [
        np.asarray(p, np.float64) - np.asarray(b, np.float64)
        for p, b in zip(policy_logprobs, behavior_logprobs, strict=True)
    ]
    log_ratio = np.concatenate([np.zeros(0), *gaps])
    if not log_ratio.size:
        raise ValueError("nothing was sampled, so there is nothing to compare")
    if not np.isfinite(log_ratio).all():
        raise ValueError(
            f"{int((~np.isfinite(log_ratio)).sum())} of {log_ratio.size} tokens have a log-prob that is not finite"
        )
    ratio = np.exp(np.minimum(log_ratio, 50.0))
    terms = ratio - 1.0 - log_ratio
    weights = np.minimum(ratio, rho)
    flat = int(np.abs(log_ratio).argmax())
    ends = np.cumsum([len(gap) for gap in gaps])
    response = int(np.searchsorted(ends, flat, side="right"))
    position = flat - int(ends[response]) + len(gaps[response])
    return Mismatch(
        num_tokens=log_ratio.size,
        kl=float(terms.mean()),
        kl_error=float(terms.std() / math.sqrt(log_ratio.size)),
        mean_gap=float(np.abs(log_ratio).mean()),
        clipped=float((ratio > rho).mean()),
        effective=float(weights.sum() ** 2 / (log_ratio.size * (weights**2).sum())),
        least_ratio=float(ratio.min()),
        largest_ratio=float(ratio.max()),
        largest=LargestGap(
            response=response,
            position=position,
            token=int(tokens[response][position]),
            text=texts[response][position],
            policy_logprob=float(policy_logprobs[response][position]),
            behavior_logprob=float(behavior_logprobs[response][position]),
        ),
    )


def judge(found: Mismatch, *, rho: float, dtype: str, quantization: str, trainer_dtype: str) -> Verdict:
    """Whether AIPO at this ``rho`` can learn from this generator, and what to do."""
    kl = found.kl + 2 * found.kl_error
    lost = found.clipped > _MANY_CLIPPED or found.effective < _LEAST_EFFECTIVE
    if kl > _LARGE_KL or lost:
        why = []
        if kl > _LARGE_KL:
            why.append(f"it samples from another policy than the one that trains (KL {found.kl:.2g} nats a token)")
        if found.clipped > _MANY_CLIPPED:
            why.append(f"{found.clipped:.1%} of the tokens lie above rho {rho:g}")
        if found.effective < _LEAST_EFFECTIVE:
            why.append(f"weighted tokens are worth {found.effective:.0%} of their number")
        return Verdict(
            safe=False, sentence=f"Not safe: {'; '.join(why)}.", advice=_closer(dtype, quantization, trainer_dtype)
        )
    if kl <= _SMALL_KL and found.clipped <= _FEW_CLIPPED:
        return Verdict(safe=True, sentence="Safe: generator and trainer are the same policy to rounding.", advice=())
    sentence = f"Safe: AIPO's weights make up for this difference, {found.clipped:.2%} of the tokens are clipped at rho {rho:g}."
    watch = "watch mismatch/kl and ratio/clipped_fraction: staleness adds to what is measured here"
    return Verdict(safe=True, sentence=sentence, advice=(watch,))


def _closer(dtype: str, quantization: str, trainer_dtype: str) -> tuple[str, ...]:
    """What brings generator and trainer closer, the cheapest first."""
    steps = []
    if quantization != "none":
        steps.append(f"serve without {quantization}: --generator.quantization none")
    if dtype == "float16":
        steps.append("serve in float32 or bfloat16: --generator.engine.dtype bfloat16")
    elif dtype == "bfloat16":
        steps.append("serve in float32: --generator.engine.dtype float32")
    if trainer_dtype != "float32":
        steps.append("compute the trainer's log-probs in float32: --trainer.dtype float32")
    if not steps:
        steps.append(
            "both compute in float32, so this is no rounding: the weights or the model's code differ; llamarl's own check of the "
            "architecture is llamarl train RECIPE --dry-run"
        )
    return tuple(steps)


def sample_and_score(
    config: RunConfig, prompts: Sequence[Sequence[int]], tokenizer: Any, *, device: str, seed: int = 0
) -> tuple[list[TokenSequence], list[npt.NDArray[np.float32]]]:
    """One response a prompt from the generator that ``config`` describes, and the trainer's log-probs of its tokens.

    Raises:
        ModelError: A response broke off because its logits were not finite.
    """
    params = sampling_params(config.generator.sampling, tokenizer)
    replay = config.trainer.router == "replay"
    engine = make_engine(config, tokenizer, device=device, note_experts=replay)
    sequences = [
        TokenSequence(
            prompt_index=i, sample_index=0, prompt_tokens=list(prompt), params=params, seed=derive_seed(seed, i, 0)
        )
        for i, prompt in enumerate(prompts)
    ]
    engine.add(sequences)
    while engine.has_work:
        engine.step()
    if broken := [s.error for s in sequences if s.error is not None]:
        raise ModelError(f"{len(broken)} of {len(sequences)} responses broke off: {broken[0]}")
    del engine
    gc.collect()  # both models at once may not fit
    return sequences, _score(config, [s for s in sequences if s.tokens], device)


@torch.no_grad()
def _score(config: RunConfig, sequences: Sequence[TokenSequence], device: str) -> list[npt.NDArray[np.float32]]:
    layout = ParallelLayout(fsdp=1, tp=1, mesh=None)
    attention, share = row_attention(config.trainer, device, config.model.path)
    replay = config.trainer.router == "replay"
    policy = build_policy(
        config.model.path,
        layout,
        temperature=config.generator.sampling.temperature,
        dtype=torch_dtype(config.trainer.dtype, device=device, model=config.model.path),
        chunk_tokens=config.trainer.logprob_chunk_tokens,
        attention=attention,
        device=torch.device(device),
        trained=False,
        replay=replay,
    ).module
    items = [
        TrainingSequence.to_score(s.prompt_tokens, s.tokens, group=i, experts=_experts(s))
        for i, s in enumerate(sequences)
    ]
    packing = pack_sequences(items, max_tokens=_MICROBATCH_TOKENS, share_prompts=share, layout=layout, device=device)
    found: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(items)
    for members in packing:
        batch = make_microbatch(
            [items[i] for i in members], [1.0] * len(members), torch.device(device), share_prompts=share, replay=replay
        )
        parts = policy(batch).logprobs.float().cpu().split([len(items[i].targets) for i in members])
        for i, part in zip(members, parts, strict=True):
            found[i] = part.numpy()
    return found


def _experts(sequence: TokenSequence) -> npt.NDArray[np.unsignedinteger[Any]] | None:
    """That computed its tokens in the engine, prompt first; None where nobody noted them."""
    record = sequence.experts
    own = None if record is None else record.rows(len(sequence.tokens))
    return None if record is None or record.prompt is None or own is None else np.concatenate([record.prompt, own])
