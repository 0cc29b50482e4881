"""How the trainer computes and how it updates. No torch here: the command line reads this file alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llamarl.strict import STRICT, at_least, refuse

__all__ = ["CriticConfig", "LoraConfig", "OptimizerConfig", "ReferenceConfig", "SelectionConfig", "TrainerConfig"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SelectionConfig:
    """Which of a tick's responses its optimizer steps train on. Each option has a bias: docs/algorithms/batches.md."""

    tokens_per_step: int = 0
    """Trained tokens of each optimizer step (Ring-lite's C3PO): whole responses in a seeded order until the next would pass
    this number; the others are dropped. 0 trains on all. At least the longest response."""

    pairs: int = 0
    """Of each group, train on so many pairs of highest and lowest advantage (Shuffle-R1), the greatest contrasts first;
    0 trains on every response. At most half of generator.group_size."""

    shuffle: Literal["uniform", "advantage"] = "uniform"
    """How responses come to the steps of a tick. ``uniform``: each once a pass, in a seeded random order. ``advantage``:
    each step draws its share anew, with probability proportional to the absolute advantage, so that some train several
    times and others never (Shuffle-R1); needs trainer.minibatches >= 2 or tokens_per_step."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        yield from at_least(self, 0, "tokens_per_step", "pairs", what="(0 is off)")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainerConfig:
    """Devices, precision and memory of the trainer, which change nothing beyond rounding; and how a tick's batch is cut
    into optimizer steps, which does."""

    fsdp: int = 1
    """Ranks over which parameters, gradients and moments are sharded and the batch is split (FSDP2), >= 1."""

    tp: int = 1
    """Ranks over which each matrix product is split (tensor parallelism, the model's own plan), >= 1.
    The trainer runs ``fsdp * tp`` processes."""

    threads: int = 0
    """CPU threads of each trainer process; 0 divides the machine's cores. Bits depend on it, so a run records it."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"cpu", "cuda", or "auto" for CUDA where there is one."""

    minibatches: int = 1
    """Optimizer steps of one pass over a tick's batch, >= 1: whole groups are cut at random, by seed, into so many parts.
    A policy version is made once a tick, after the last."""

    epochs: int = 1
    """Passes over a tick's batch, >= 1, each cut anew."""

    selection: SelectionConfig = Field(default_factory=SelectionConfig)

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward. Master weights, gradients between micro-batches, and moments are float32."""

    max_tokens_per_microbatch: int = 4096
    """Tokens (prompt and response) that one forward pass packs, >= 1. Bounds activation memory; a single longer
    response is computed alone."""

    share_prompts: bool = True
    """Compute a group's prompt once for all of its responses; exact to rounding. Models with sliding-window or soft-capped
    attention compute it once a response all the same."""

    skip_zero_advantage: bool = False
    """Do not compute responses whose advantage is 0, where the loss has no KL or entropy term: their gradient is exactly 0.
    They still count in every mean's divisor; ratio, mismatch and entropy metrics then cover the others alone."""

    logprob_chunk_tokens: int = 512
    """Tokens whose logits exist at once, >= 1: peak memory of the output layer is this many rows of the vocabulary."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """``full`` keeps only each layer's input and recomputes the layer in the backward pass; ``selective`` does so for
    every second layer; ``none`` keeps everything."""

    offload_optimizer: bool = False
    """Keep master weights and moments in host memory and update there; the device holds the compute weights and one
    micro-batch's gradients. Saves 12 bytes a parameter of device memory; costs a copy each way a step."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 does not clip."""

    max_skipped_steps: int = 3
    """Non-finite gradients in a row that are skipped, >= 0; one more stops the run."""

    export_dtype: Literal["source", "float32", "bfloat16"] = "source"
    """Precision of the exported Hugging Face folder; ``source`` is the one that the initial model was stored in."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        yield from at_least(
            self, 1, "fsdp", "tp", "max_tokens_per_microbatch", "logprob_chunk_tokens", "minibatches", "epochs"
        )
        if self.selection.shuffle == "advantage" and self.minibatches == 1 and not self.selection.tokens_per_step:
            yield (
                "selection.shuffle 'advantage' draws a part of the batch for each step, but with minibatches = 1 a step is"
                " the whole batch: set minibatches >= 2 or selection.tokens_per_step"
            )
        yield from at_least(self, 0, "threads", "max_grad_norm", "max_skipped_steps")

    @property
    def steps_per_tick(self) -> int:
        """Optimizer steps between two policy versions."""
        return self.minibatches * self.epochs

    @property
    def plans_steps(self) -> bool:
        """Whether a tick is anything but one step on every response."""
        return self.steps_per_tick > 1 or self.selection.pairs > 0 or self.selection.tokens_per_step > 0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """AdamW and its learning rate. The rate is a function of the tick alone, so skips and resumes keep it exact; all
    optimizer steps of a tick have the same."""

    lr: float = 1e-6
    """Peak learning rate, > 0."""

    beta1: float = 0.9
    """Decay of the first moment, in [0, 1)."""

    beta2: float = 0.95
    """Decay of the second moment, in [0, 1)."""

    eps: float = 1e-8
    """Added to the root of the second moment, > 0."""

    weight_decay: float = 0.0
    """Decoupled decay of matrices, >= 0; vectors (norms, biases) never decay."""

    warmup_ticks: int = 0
    """Ticks over which the rate rises linearly to ``lr``, >= 0."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; ``linear`` and ``cosine`` fall to ``min_lr_ratio * lr`` at tick ``decay_ticks`` and stay there."""

    decay_ticks: int = 0
    """Tick by which a falling rate is down. 0: the length that the run was started with, which its config.toml then says; a
    run that is prolonged or repeated in part keeps it, so that its bits do not depend on where it stops."""

    min_lr_ratio: float = 0.0
    """Final rate over ``lr``, in [0, 1], for ``linear`` and ``cosine``."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        for name in ("lr", "eps"):
            if not getattr(self, name) > 0:
                yield f"{name} must be > 0, got {getattr(self, name)}"
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                yield f"{name} must be in [0, 1), got {getattr(self, name)}"
        yield from at_least(self, 0, "weight_decay", "warmup_ticks", "decay_ticks")
        if not 0 <= self.min_lr_ratio <= 1:
            yield f"min_lr_ratio must be in [0, 1], got {self.min_lr_ratio}"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraConfig:
    """Train low-rank adapters beside frozen weights (LoRA, by ``peft``). Moments are kept for the adapters alone."""

    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""

    alpha: float = 32.0
    """The adapters' product is multiplied by ``alpha / rank``, > 0."""

    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get one."""

    hand_over: Literal["merged", "adapter"] = "merged"
    """"merged": generators receive whole weights, as without adapters. "adapter": they receive the adapters alone, far fewer
    bytes, and add them to the base weights that they keep, one more copy of the target layers."""

    export_merged: bool = True
    """Besides the adapter folder (``RUN/adapter``), write the policy as a whole model (``RUN/model``)."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if self.rank < 0:
            yield f"rank must be >= 0 (0 trains all weights), got {self.rank}"
        if not self.alpha > 0:
            yield f"alpha must be > 0, got {self.alpha}"
        if not self.targets:
            yield "targets must name at least one layer, such as q_proj"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReferenceConfig:
    """The executor that puts a frozen model's log-probs beside every trained token. ``algorithm.kl_coef`` above 0 asks for
    it."""

    enabled: bool = False
    """Run it although ``algorithm.kl_coef`` is 0, only to see how far the policy has moved (``kl/reference``)."""

    path: str = ""
    """Hugging Face folder of the reference model, with the policy's vocabulary; empty is the policy's version 0."""

    fsdp: int = 1
    """Ranks over which its parameters are sharded and the batch is split, >= 1."""

    tp: int = 1
    """Ranks over which each matrix product is split, >= 1. The executor runs ``fsdp * tp`` processes."""

    threads: int = 0
    """CPU threads of each of its processes; 0 divides the machine's cores. Bits depend on it, so a run records it."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"cpu", "cuda", or "auto" for CUDA where there is one."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of its weights and of the forward pass."""

    max_tokens_per_microbatch: int = 8192
    """Tokens (prompt and response) that one forward pass packs, >= 1."""

    share_prompts: bool = True
    """Compute a group's prompt once for all of its responses; exact to rounding."""

    logprob_chunk_tokens: int = 512
    """Tokens whose logits exist at once, >= 1."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        yield from at_least(self, 1, "fsdp", "tp", "max_tokens_per_microbatch", "logprob_chunk_tokens")
        yield from at_least(self, 0, "threads", what="(0 divides the cores)")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CriticConfig:
    """The executor that estimates returns and learns to; ``algorithm.advantage = "gae"`` asks for it."""

    path: str = ""
    """Hugging Face folder to start from: a language model, whose value head then starts at 0, or an exported critic. Empty
    is the policy's version 0."""

    fsdp: int = 1
    """Ranks over which parameters, gradients and moments are sharded and the batch is split, >= 1."""

    tp: int = 1
    """Ranks over which each matrix product is split, >= 1. The executor runs ``fsdp * tp`` processes."""

    threads: int = 0
    """CPU threads of each of its processes; 0 divides the machine's cores. Bits depend on it, so a run records it."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"cpu", "cuda", or "auto" for CUDA where there is one."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of forward and backward. Master weights and moments are float32."""

    max_tokens_per_microbatch: int = 4096
    """Tokens (prompt and response) that one forward pass packs, >= 1."""

    share_prompts: bool = True
    """Compute a group's prompt once for all of its responses; exact to rounding."""

    updates_per_tick: int = 1
    """Optimizer steps on each tick's whole batch, >= 1. The values that the trainer uses were estimated before the first."""

    value_clip: float = 0.0
    """In updates after a tick's first, an estimate that moved further than this from the one it had is clipped, and the
    larger of both errors counts (PPO's value clipping); 0 is off."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 does not clip."""

    max_skipped_steps: int = 3
    """Non-finite gradients in a row that are skipped, >= 0; one more stops the run."""

    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """The critic's own AdamW; its schedule counts ticks, as the policy's does."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        yield from at_least(self, 1, "fsdp", "tp", "max_tokens_per_microbatch", "updates_per_tick")
        yield from at_least(self, 0, "threads", "value_clip", "max_grad_norm", "max_skipped_steps")
