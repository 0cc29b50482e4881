"""Whether this installation computes an architecture as transformers itself does, on a few tokens
of a small random copy.

    config.json ─▶ small copy ─▶ folder ─┬─ transformers' own forward, one sequence at a time, plain attention ─ the truth
                                         ├─ engine: prefill, decode, both in one step        ─▶ largest gap, at which token
                                         └─ trainer: packed sequences, forward and backward  ─▶ largest gap, in which weight

The copy goes through the same doors as a run's model: written as a folder, loaded, served, sampled
from, trained. So a layer that looks past its sequence, a window or a cap that does not reach our
attention, a position table with an offset, a state that only the library's cache keeps: each shows
as a gap, whatever the family is called.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from llamarl.config import RunConfig
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.errors import ModelError
from llamarl.models.loading import load_model_config, quiet, record_of_check
from llamarl.models.parallel import ParallelLayout
from llamarl.models.small_copy import NUM_TOKENS, small_model
from llamarl.settings.engine import EngineConfig
from llamarl.settings.trainer import TrainerConfig
from llamarl.trainer.batch import TrainingSequence, make_microbatch
from llamarl.trainer.building import build_policy
from llamarl.trainer.shared_prompts import row_attention

__all__ = ["Finding", "check_architecture", "check_generated", "find_differences"]

_TOLERANCE = 2e-3
"""Nats. Rounding gives some 1e-5 in float32; what is computed otherwise gives tenths."""
_GRADIENT_TOLERANCE = 2e-2
"""Of the largest entry of a weight's gradient."""
_FIRST_PROMPTS = (10, 5)
_LATE_PROMPT = 29
_NEW_TOKENS = 12
_STEPS_BEFORE_THE_LATE_PROMPT = 5
_BATCH_TOKENS = 16
"""Of an engine step: the late prompt is computed in two chunks, beside decodes."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one way of computing made of the copy."""

    way: str
    """``prefill``, ``decode``, ``mixed`` (both in one step), ``packed`` (the trainer's forward) or ``gradient``."""
    gap: float
    """Largest difference from transformers' own: nats of a log-prob, or share of a gradient's largest entry."""
    where: str
    error: str = ""
    """What it raised; then there is no gap."""

    @property
    def passed(self) -> bool:
        return not self.error and self.gap <= (_GRADIENT_TOLERANCE if self.way == "gradient" else _TOLERANCE)

    def sentence(self) -> str:
        if self.error:
            return f"{self.way}: {self.error}"
        unit = "of the largest entry" if self.way == "gradient" else "nats"
        return f"{self.way} differs by {self.gap:.3g} {unit} {self.where}"


def check_architecture(
    path: str | Path, *, key: str = "model.path", generated: bool = True, trained: bool = True
) -> None:
    """Refuse a model whose architecture is not computed here as transformers computes it.

    Half a second on one core. What has passed is remembered by configuration, libraries and code,
    and not computed again.

    Args:
        path: Its folder; only ``config.json`` is read.
        key: The configuration key to name in the error.
        generated: Whether the native engine computes it.
        trained: Whether the trainer does, or whoever scores as it does.

    Raises:
        ModelError: With the differences found.
    """
    config = load_model_config(path)
    passed = record_of_check(config, generated=generated, trained=trained)
    if os.path.isfile(passed):  # False too where it may not be looked for
        return
    where = f": {path}: architecture {config.model_type!r} is not supported"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError.at(key, f"{where}: transformers {transformers.__version__} has no causal language model of it")
    try:
        failed = [f for f in find_differences(config, generated=generated, trained=trained) if not f.passed]
    except ModelError as error:
        raise ModelError.at(key, f"{where}: {error}") from error
    if failed:
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        offers = getattr(kind, "_supports_attention_backend", False)
        hint = (
            ""
            if offers
            else " (its class does not offer transformers' attention interface, through which llamarl attends)"
        )
        raise ModelError.at(
            key,
            f"{where}: computed here, a small random copy of it is not what transformers itself makes of it: "
            f"{'; '.join(f.sentence() for f in failed)}{hint}; docs/models.md tells what can be computed",
        )
    with contextlib.suppress(OSError):  # no home to write to: it is computed again next time
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def check_generated(config: RunConfig) -> None:
    """``check_architecture`` of the model that an engine is about to sample from; other engines
    than the native one know themselves what they compute.

    Raises:
        ModelError: With the differences found.
    """
    if config.generator.engine.kind.native:
        check_architecture(config.model.path, trained=False)


def find_differences(config: PretrainedConfig, *, generated: bool = True, trained: bool = True) -> list[Finding]:
    """Every way of computing against transformers' own forward.

    Args:
        config: Of the decoder that is loaded from a folder.

    Raises:
        ModelError: No small copy can be made.
    """
    unnoticed = torch.random.fork_rng(devices=[])
    with tempfile.TemporaryDirectory(prefix="llamarl-check-") as name, _one_thread(), quiet(), unnoticed:
        folder = Path(name)
        model = small_model(config)
        model.save_pretrained(folder)
        sequences = _sequences()
        findings = _check_engine(folder, model, sequences) if generated else []
        for i, sequence in enumerate(sequences):  # what was not sampled is made up
            sequence.tokens = (sequence.tokens + _prompt(_NEW_TOKENS + i))[:_NEW_TOKENS]
        if trained:
            findings += _check_trainer(folder, model, sequences)
    return findings


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # products of this size are slower on many
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prompt(length: int) -> list[int]:
    return [3 + (7 * i + 5 * length) % (NUM_TOKENS - 3) for i in range(length)]


def _sequences() -> list[TokenSequence]:
    params = SamplingParams(max_new_tokens=_NEW_TOKENS)
    prompts = [_prompt(n) for n in (*_FIRST_PROMPTS, _LATE_PROMPT)]
    return [
        TokenSequence(prompt_index=i, sample_index=0, prompt_tokens=tokens, params=params, seed=i)
        for i, tokens in enumerate(prompts)
    ]


def _check_engine(folder: Path, model: PreTrainedModel, sequences: list[TokenSequence]) -> list[Finding]:
    """Sample with the engine and score what it sampled with ``model``."""
    ways: list[list[str]] = [[] for _ in sequences]
    way = "prefill"
    try:
        config = EngineConfig(kv_cache_bytes=1 << 24, max_batch_tokens=_BATCH_TOKENS, max_sequences=4)
        engine = NativeEngine(folder, config, device="cpu", eos_token_ids=())
        engine.add(sequences[:2])
        steps = 0
        while engine.has_work:
            if steps == _STEPS_BEFORE_THE_LATE_PROMPT:
                engine.add(sequences[2:])
            waits = any(not s.tokens for s in sequences[: 3 if steps >= _STEPS_BEFORE_THE_LATE_PROMPT else 2])
            way = "decode" if not waits else "mixed" if any(s.tokens for s in sequences) else "prefill"
            counts = [len(s.tokens) for s in sequences]
            engine.step()
            steps += 1
            for i, s in enumerate(sequences):
                ways[i] += [way] * (len(s.tokens) - counts[i])
            if broken := next((s.error for s in sequences if s.error), None):
                raise ValueError(broken)
    except Exception as error:  # an architecture may refuse anything anywhere; what it says is the finding
        return [Finding(way=way, gap=float("nan"), where="", error=_words(error))]
    worst: dict[str, Finding] = {}
    with torch.no_grad():
        for i, s in enumerate(sequences):
            for t, gap in enumerate((_true_logprobs(model, s) - torch.tensor(s.logprobs)).abs().tolist()):
                kind = ways[i][t]
                if kind not in worst or not gap <= worst[kind].gap:
                    where = f"at position {len(s.prompt_tokens) + t} (token {s.tokens[t]}) of sequence {i}"
                    worst[kind] = Finding(way=kind, gap=gap, where=where)
    return [worst[kind] for kind in ("prefill", "decode", "mixed") if kind in worst]


def _true_logprobs(model: PreTrainedModel, sequence: TokenSequence) -> Tensor:
    """Of its response tokens, by transformers' own forward, [R]."""
    ids = torch.tensor([*sequence.prompt_tokens, *sequence.tokens])
    logits = model(ids[None], use_cache=False).logits[0].float()
    first = len(sequence.prompt_tokens)
    return logits[first - 1 : -1].log_softmax(-1).gather(-1, ids[first:, None])[:, 0]


def _check_trainer(folder: Path, model: PreTrainedModel, sequences: Sequence[TokenSequence]) -> list[Finding]:
    way = "packed"
    try:
        attention, share = row_attention(TrainerConfig(), "cpu", folder)
        policy = build_policy(
            folder,
            ParallelLayout(fsdp=1, tp=1, mesh=None),
            temperature=1.0,
            dtype=torch.float32,
            chunk_tokens=16,
            attention=attention,
            device=torch.device("cpu"),
        ).module
        batch = make_microbatch(
            [TrainingSequence.to_score(s.prompt_tokens, s.tokens, group=i) for i, s in enumerate(sequences)],
            [1.0] * len(sequences),
            torch.device("cpu"),
            share_prompts=share,
        )
        logprobs = policy(batch).logprobs
        true = torch.cat([_true_logprobs(model, s) for s in sequences])
        gap, at = (logprobs - true).abs().detach().max(dim=0)
        owner = int(batch.sequence_ids[at])
        position = len(sequences[owner].prompt_tokens) + int(at) - owner * _NEW_TOKENS
        where = f"at position {position} (token {int(batch.targets[at])}) of sequence {owner}"
        findings = [Finding(way=way, gap=float(gap), where=where)]
        way = "gradient"
        factors = torch.linspace(-1.0, 1.0, len(true))
        (logprobs * factors).sum().backward()
        (true * factors).sum().backward()
        return [*findings, _gradient_gap(policy.parameters_by_name(), dict(model.named_parameters()))]
    except Exception as error:
        return [Finding(way=way, gap=float("nan"), where="", error=_words(error))]


def _gradient_gap(ours: dict[str, torch.nn.Parameter], theirs: dict[str, torch.nn.Parameter]) -> Finding:
    if set(ours) != set(theirs):
        return Finding(way="gradient", gap=float("nan"), where="", error=f"other weights: {set(ours) ^ set(theirs)}")
    worst = Finding(way="gradient", gap=0.0, where="")
    largest = max(float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None)
    for name, parameter in theirs.items():
        true = torch.zeros(()) if parameter.grad is None else parameter.grad
        own = ours[name].grad
        difference = float(((0 if own is None else own) - true).abs().max())
        gap = difference / max(float(true.abs().max()), 1e-4 * largest)
        if not gap <= worst.gap:
            worst = Finding(way="gradient", gap=gap, where=f"in {name}")
    return worst


def _words(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
