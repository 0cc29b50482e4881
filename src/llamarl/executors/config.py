"""What a recipe says of the generator and the evaluator."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llamarl.engine.config import LEAST_TEMPERATURE, EngineConfig
from llamarl.strict import STRICT, refuse

__all__ = ["DynamicSamplingConfig", "EvaluationConfig", "GeneratorConfig", "SamplingConfig"]

_DEVICE = r"(auto|cpu|cuda(:\d+)?)"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SamplingConfig:
    """How tokens are drawn and when a response ends."""

    max_new_tokens: int = 128
    """Longest response, in tokens. A response cut here has finish reason "length"."""

    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""

    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""

    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens with at least this probability; 1 keeps all."""

    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest; 0 keeps all."""

    stop_strings: tuple[str, ...] = ()
    """A response ends when its text contains one of these. The end-of-text token always ends it."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if self.max_new_tokens < 1:
            yield f"max_new_tokens must be >= 1, got {self.max_new_tokens}"
        if not (self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < math.inf):
            yield f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, got {self.temperature}"
        if self.top_k < 0:
            yield f"top_k must be >= 0 (0 keeps all tokens), got {self.top_k}"
        if not 0 < self.top_p <= 1:
            yield f"top_p must be in (0, 1], got {self.top_p}"
        if not 0 <= self.min_p < 1:
            yield f"min_p must be in [0, 1), got {self.min_p}"
        if any(not s for s in self.stop_strings):
            yield "stop_strings must not hold an empty string: it would end every response at once"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GeneratorConfig:
    """The executor that samples responses."""

    group_size: int = 8
    """Responses sampled for each prompt. A group baseline needs at least 2."""

    max_segments: int = 1
    """Most policy versions one response may span. 1 finishes every response within its tick; more lets long ones be
    cut and resumed under later weights (partial rollouts). Under schedule.weights = "latest" it counts the generator ticks
    that a response may take; the versions in it are then at most max_staleness + 1."""

    oversubscription: float = 1.0
    """Groups kept active, as a multiple of schedule.prompts_per_step, so that the slowest need not hold up a tick.
    1 .. max_segments; above 1 needs max_segments > 1."""

    sampling: SamplingConfig = Field(default_factory=SamplingConfig)

    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """KV cache of unfinished responses when new weights arrive. "recompute": computed again under them, so every token is
    sampled by one version. "keep": kept, which saves that work; later tokens are then sampled by the new weights over keys
    and values of older ones, and their log-probabilities are recorded so. A response that this happened to says so in the
    rollouts (``kept_kv``). With "keep" the cache also lives on from tick to tick and is part of checkpoints."""

    quantization: Literal["none", "int8", "fp8"] = "none"
    """Weights of the linear layers: "none", "int8" (CPU), "fp8" (CUDA). Rebuilt from every weight version."""

    engine: EngineConfig = Field(default_factory=EngineConfig)

    dp: int = 1
    """Generator replicas; each samples its share of the prompts of a tick."""

    tp: int = 1
    """Ranks over which each matrix product of one replica is split (tensor parallelism, the model's own plan), >= 1.
    The generator runs ``dp * tp`` processes; the evaluator always holds the whole model."""

    threads: int = 0
    """CPU threads of each process; 0 divides the machine's cores. A run records what it used, since bits depend on it."""

    device: str = "auto"
    """"cpu", "cuda", or "auto" for CUDA where there is one."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if self.group_size < 1:
            yield f"group_size must be >= 1 response a prompt, got {self.group_size}"
        if self.max_segments < 1:
            yield f"max_segments must be >= 1 policy version a response, got {self.max_segments}"
        if not 1.0 <= self.oversubscription <= self.max_segments:
            yield (
                f"oversubscription must be between 1 and max_segments ({self.max_segments}), got {self.oversubscription}: "
                f"a group has at most max_segments ticks to be delivered in; raise max_segments or lower oversubscription"
            )
        if self.sampling.temperature == 0 and self.group_size > 1:
            yield (
                f"sampling.temperature is 0 (greedy), so all responses of a group (group_size {self.group_size}) are equal "
                f"and teach nothing: set it to 1.0"
            )
        if self.dp < 1:
            yield f"dp must be >= 1 replica, got {self.dp}"
        if self.tp < 1:
            yield f"tp must be >= 1 rank, got {self.tp}"
        if self.engine.name == "vllm" and (self.tp > 1 or self.quantization == "int8"):
            yield (
                f"engine.name is 'vllm', which runs here on one rank without int8, but tp is {self.tp} and quantization "
                f"{self.quantization!r}: set tp to 1 and quantization to 'none' or 'fp8', or engine.name to 'native'"
            )
        if self.engine.name == "vllm" and self.kv_on_update == "keep":
            yield (
                "kv_on_update is 'keep', but engine.name is 'vllm', whose KV cache does not outlive a change of weights: "
                "set kv_on_update to 'recompute', or engine.name to 'native'"
            )
        if self.threads < 0:
            yield f"threads must be >= 0 (0 divides the cores), got {self.threads}"
        if not re.fullmatch(rf"{_DEVICE}(\s*,\s*{_DEVICE})*", self.device):
            yield f"device must be auto, cpu, cuda or cuda:N, or several joined by commas, one a rank, got {self.device!r}"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DynamicSamplingConfig:
    """Train only on groups with a signal, and refill the batch from groups generated in excess (DAPO)."""

    enabled: bool = False
    """Drop groups whose rewards are all equal before they reach the trainer. Needs a group baseline
    (``algorithm.advantage``). A batch that cannot be filled is trained short and counted (``groups/short``)."""

    oversample: float = 1.5
    """Groups generated a tick, as a multiple of schedule.prompts_per_step, >= 1; rounded up to a whole number a generator
    replica. 1 drops without refilling from the same tick. Not ``generator.oversubscription``, which are groups in flight."""

    carry_ticks: int = 0
    """Ticks by which waiting for a later batch may raise the bound on staleness, >= 0. 0 keeps the bound: a spare group
    waits only as long as its own tokens allow (those of partial rollouts that were quick, and the first ticks')."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if not self.oversample >= 1:
            yield f"oversample must be >= 1, got {self.oversample}; 1.5 generates half a batch in excess"
        if self.carry_ticks < 0:
            yield f"carry_ticks must be >= 0 trainer ticks, got {self.carry_ticks}"

    def groups_per_tick(self, prompts_per_step: int, replicas: int) -> int:
        """Groups that all ``replicas`` together deliver a tick, a multiple of their number."""
        if not self.enabled:
            return prompts_per_step
        return replicas * math.ceil(round(prompts_per_step * self.oversample, 6) / replicas)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationConfig:
    """The executor that scores policy versions on held-out prompts, beside the training."""

    every: int = 10
    """Trainer ticks between evaluations; version 0 and the last version are always scored. 0 never evaluates."""

    num_prompts: int = 100
    """Held-out prompts of one evaluation."""

    samples_per_prompt: int = 1
    """Responses a prompt; accuracy is their mean, pass@k counts prompts with a right one among k."""

    temperature: float = 1.0
    """Sampling temperature of evaluations; 0 is greedy. The seed is fixed, so evaluations compare."""

    threads: int = 0
    """CPU threads; 0 divides the machine's cores."""

    device: str = "auto"
    """"cpu", "cuda", or "auto" for CUDA where there is one."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if self.every < 0:
            yield f"every must be >= 0 trainer ticks (0 never evaluates), got {self.every}"
        if self.num_prompts < 1:
            yield f"num_prompts must be >= 1, got {self.num_prompts}"
        if self.samples_per_prompt < 1:
            yield f"samples_per_prompt must be >= 1, got {self.samples_per_prompt}"
        if not (self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < math.inf):
            yield f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, got {self.temperature}"
        if self.threads < 0:
            yield f"threads must be >= 0 (0 divides the cores), got {self.threads}"
        if not re.fullmatch(_DEVICE, self.device):
            yield f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}"
