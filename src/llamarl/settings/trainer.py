"""How the trainer computes and how it updates. No torch here: the command line reads this file alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from llamarl.errors import Mistake
from llamarl.strict import IN_STATE, NO_BITS, STRICT, ListOf, named, refuse

__all__ = [
    "MICROBATCH_TOKENS",
    "MOST_AT_ONCE",
    "OPTIMIZERS",
    "TWO_MOMENTS",
    "CriticConfig",
    "Device",
    "Fsdp",
    "LoraConfig",
    "OptimizerConfig",
    "ReferenceConfig",
    "Threads",
    "Tp",
    "TrainerConfig",
    "cpu_microbatch_tokens",
    "num_at_once",
]

_SMALL = 20_000_000
"""Parameters below which one micro-batch is computed after the other, and may be four times as large."""
MOST_AT_ONCE = 4
"""Micro-batches that a trainer computes at the same time unless told otherwise, and so the cores
that a lone one fills: threads above that are teams, who need their cores. Each further one costs a
micro-batch's activations and a set of gradients, and takes a share of the one interpreter."""

MICROBATCH_TOKENS = 4096
"""Of a micro-batch, on a CPU and where nothing else has been settled."""

_THREADS = (
    "CPU threads of each of its processes; 0 divides the machine's cores. Bits depend on it, so a run records it."
)
_TP = "Ranks over which each matrix product is split, >= 1. The executor runs ``fsdp * tp`` processes."
Fsdp = Annotated[PositiveInt, Field(description="Ranks over which its state is sharded and the batch is split.")]
Tp = Annotated[PositiveInt, Field(description=_TP)]
Threads = Annotated[NonNegativeInt, Field(description=_THREADS)]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], Field(description='"cpu", "cuda", or "auto" for CUDA where there is one.')
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainerConfig:
    """Devices, precision and memory of the trainer, which change nothing beyond rounding; and how a tick's batch is cut
    into optimizer steps, which does."""

    fsdp: PositiveInt = 1
    """Ranks over which parameters, gradients and moments are sharded and the batch is split (FSDP2)."""

    tp: PositiveInt = 1
    """Ranks over which each matrix product is split (tensor parallelism, the model's own plan).
    The trainer runs ``fsdp * tp * pp * cp`` processes."""

    pp: PositiveInt = 1
    """Pipeline stages into which the layers are cut, >= 1; at most the model's layers. Each
    computes a micro-batch and hands it on, so a step wants several times as many micro-batches as
    stages: see ``max_tokens_per_microbatch``."""

    cp: PositiveInt = 1
    """Ranks over which each micro-batch's tokens are cut, >= 1 (Ulysses context parallelism), so
    that one sequence's activations lie over all of them; parameters are sharded over them too. ``tp
    * cp`` divides the model's attention heads."""

    ep: PositiveInt = 1
    """Ranks over which the experts of a sparse model are spread, each with some whole ones:
    neighbours among the ``fsdp * cp`` ranks, to which tokens travel and come back, none dropped.
    Divides ``fsdp * cp``; ``tp * ep`` divides the experts. 1: every rank computes all of its
    tokens' experts, gathered by FSDP2."""

    threads: NonNegativeInt = 0
    """CPU threads of each trainer process; 0 divides the machine's cores, and on up to 4 of them
    gives a lone rank one a core, which use what the others leave (``microbatches_at_once``). Bits
    depend on it, so a run records it."""

    device: Device = "auto"

    minibatches: PositiveInt = 1
    """Optimizer steps of one pass over a tick's batch: whole groups are cut at random, by seed, into so many parts.
    A policy version is made once a tick, after the last."""

    epochs: PositiveInt = 1
    """Passes over a tick's batch, >= 1, each cut anew."""

    dtype: Literal["", "auto", "float32", "bfloat16"] = ""
    """Precision of forward and backward; empty: float32 on a CPU, "auto" on a GPU. "auto" is bfloat16 for models of 20 million parameters or
    more on a GPU and on a processor with bfloat16 products (avx512_bf16, amx_bf16), else float32;
    the run's config.toml says which. Master weights, gradients between micro-batches, and moments
    are float32, but updates far smaller than bfloat16's steps are not seen until they add up."""

    max_tokens_per_microbatch: NonNegativeInt = 0
    """Tokens (prompt and response) that one forward pass packs. Bounds activation memory; a single longer
    response is computed alone. 0: 4096, on a CPU 1024 of a model of 20 million parameters or more, whose
    activations are most of what it holds; on GPUs as many of 16384, 8192 and 4096 as fit beside what
    the GPU holds, which the run's config.toml says."""

    microbatches_at_once: NonNegativeInt = 0
    """Micro-batches that a lone rank on the CPU computes at the same time, its threads divided
    among them; each further one costs a micro-batch's activations and a set of gradients. 0 takes
    as many as divide ``threads``, up to 4, of a model of 20 million parameters or more; 1 takes one
    after the other, all threads on each. Bits depend on this number and on the threads of one
    micro-batch. Several ranks, and GPUs, take one after the other."""

    attention: Literal["auto", "flex"] = "auto"
    """Kernel of the rows that are trained and scored. "auto": on a GPU in half precision flash attention
    over separate sequences, else padded batches. "flex": one kernel of torch's that also takes
    shared prompts, windows and soft caps; compiled on a GPU, and slow elsewhere."""

    share_prompts: bool | Literal["auto"] = "auto"
    """Compute a group's prompt once for all of its responses; exact to rounding. Models with
    sliding-window or soft-capped attention compute it once a response all the same, but under
    trainer.attention = "flex". "auto": on a CPU and under "flex"; else on a GPU the kernel for it is
    slower and keeps more than the one for separate sequences, so true pays there only where prompts
    are much longer than responses."""

    skip_zero_advantage: bool = True
    """Do not compute responses whose advantage is 0, where their gradient is exactly 0: under a
    loss of llamarl's own, without a KL or entropy term. They still count in the loss's divisor;
    ratio, mismatch and entropy metrics then cover the others alone."""

    logprob_chunk_tokens: PositiveInt = 512
    """Tokens whose logits exist at once: peak memory of the output layer is this many rows of the vocabulary."""

    router: Annotated[Literal["live", "replay"], IN_STATE] = "live"
    """Which experts of a sparse model compute a token in the trainer. "live": those that its router
    chooses now. "replay": those that computed it in the generator, which notes them (R3,
    arXiv:2510.11370); the router's present weights of them count, so it still learns. Rounding and
    age then no longer send a token to other experts than those under which it was sampled."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """``full`` keeps only each layer's input and recomputes the layer in the backward pass; ``selective`` does so for
    every second layer; ``none`` keeps everything."""

    offload_optimizer: bool = False
    """Keep master weights and moments in host memory and update there; the device holds the compute weights and one
    micro-batch's gradients. Saves 12 bytes a parameter of device memory; costs a copy each way a step."""

    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this global norm; 0 does not clip."""

    max_skipped_steps: Annotated[NonNegativeInt, NO_BITS] = 3
    """Non-finite gradients in a row that are skipped; one more stops the run."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[Mistake]:
        if self.fsdp * self.cp % self.ep:
            yield Mistake(
                "ep",
                f"is {self.ep}, which does not divide the {self.fsdp * self.cp} ranks of fsdp {self.fsdp} and cp {self.cp} "
                "over which experts are spread (1: the model has none, or each rank holds all)",
                ("fsdp", "cp"),
            )
        if self.attention == "flex" and self.cp > 1:
            yield Mistake("attention", f"is 'flex', which takes whole rows, but cp is {self.cp}", ("cp",))

    @property
    def num_ranks(self) -> int:
        """Processes over which the policy is spread."""
        return self.fsdp * self.tp * self.pp * self.cp

    @property
    def microbatch_tokens(self) -> int:
        """``max_tokens_per_microbatch``, also where nobody has settled it."""
        return self.max_tokens_per_microbatch or MICROBATCH_TOKENS

    def shares_prompts(self, device: str) -> bool:
        """What ``share_prompts`` means on a device."""
        if self.share_prompts == "auto":
            return device.startswith("cpu") or self.attention == "flex"
        return self.share_prompts

    @property
    def steps_per_tick(self) -> int:
        """Optimizer steps between two policy versions."""
        return self.minibatches * self.epochs


TWO_MOMENTS = 8
"""Bytes of two float32 moments of a weight."""
OPTIMIZERS: Mapping[str, tuple[str, int]] = {
    "adamw": ("llamarl.trainer.optimizer:make_adamw", TWO_MOMENTS),
    "muon": ("llamarl.trainer.muon:make_muon", TWO_MOMENTS // 2),
}
"""``optimizer.name`` -> what makes it, as ``optimizer.MakeOptimizer`` says, and the bytes that it
keeps of each weight of a matrix in a layer. One more is a line here."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """The optimizer and its learning rate. The rate is a function of the tick alone, so skips and resumes keep it exact; all
    optimizer steps of a tick have the same."""

    name: Annotated[str, named(OPTIMIZERS, "my_optimizer.py:make"), IN_STATE] = "adamw"
    """"adamw", or "muon": matrices inside the layers move along their orthogonalized momentum
    (``torch.optim.Muon``, momentum 0.95), everything else by AdamW. Its steps are scaled to the size
    of AdamW's, so ``lr`` and ``weight_decay`` mean the same; it keeps one number a matrix's weight
    in place of two. Ranks of a mesh gather matrices in turn. Or one of your own as
    package.module:function or file.py:function (docs/optimizers.md)."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment."""

    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay of matrices; vectors (norms, biases) never decay."""

    warmup_ticks: NonNegativeInt = 0
    """Ticks over which the rate rises linearly to ``lr``."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; ``linear`` and ``cosine`` fall to ``min_lr_ratio * lr`` at tick
    ``decay_ticks`` and stay there."""

    decay_ticks: NonNegativeInt = 0
    """Tick by which a falling rate is down. 0: the length that the run was started with, which its
    config.toml then says; a run that is prolonged or repeated in part keeps it, so that its bits do
    not depend on where it stops."""

    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Final rate over ``lr``, for ``linear`` and ``cosine``. With 0 the last tick changes no weight."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Of an optimizer of your own, which reads them as ``config.options``."""

    def __post_init__(self) -> None:
        if self.options and self.name in OPTIMIZERS:
            text = f"are for an optimizer of your own, but name is {self.name!r}; got {sorted(self.options)}"
            refuse([Mistake("options", text, ("name",))])

    @property
    def moment_bytes(self) -> int:
        """Kept of each weight of a matrix in a layer; two moments of what is nobody's built-in. Of all
        other weights every optimizer keeps two."""
        return OPTIMIZERS.get(self.name, ("", TWO_MOMENTS))[1]

    def is_matrix(self, name: str, num_dims: int) -> bool:
        """Whether Muon moves the parameter of that name: a matrix, or a stack of experts' matrices,
        of a numbered layer. AdamW moves everything else."""
        return self.name == "muon" and num_dims >= 2 and re.search(r"\.\d+\.", name) is not None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraConfig:
    """Train low-rank adapters beside frozen weights (LoRA, by ``peft``). Moments are kept for the adapters alone."""

    rank: Annotated[NonNegativeInt, IN_STATE] = 0
    """Rank of the adapters; 0 trains all weights."""

    alpha: Annotated[PositiveFloat, IN_STATE] = 32.0
    """The adapters' product is multiplied by ``alpha / rank``."""

    targets: Annotated[ListOf[str], IN_STATE] = ()
    """Names of the linear layers that get one. Empty: all inside the model's decoder, of a sparse
    model those of its attention; the run's config.toml then names them."""

    hand_over: Annotated[Literal["merged", "adapter"], IN_STATE] = "merged"
    """"merged": generators receive whole weights, as without adapters. "adapter": they receive the
    adapters alone, far fewer bytes, and add them to the base weights that they keep, one more copy
    of the target layers."""

    export_merged: Annotated[bool, NO_BITS] = True
    """Besides the adapter folder (``RUN/adapter``), write the policy as a whole model (``RUN/model``)."""

    def num_parameters(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """Numbers in all adapters beside a model's parameters, by their names and shapes."""
        adapted = [shape for name, shape in shapes.items() if name.split(".")[-2] in self.targets]
        return sum(self.rank * sum(shape) for shape in adapted if len(shape) == 2)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReferenceConfig:
    """The executor that puts a frozen model's log-probs beside every trained token.
    ``algorithm.kl_coef`` above 0 asks for it, and so does ``algorithm.advantage = "distillation"``, of
    which it is the teacher. Its micro-batches are packed as the trainer's, twice as long: it keeps no
    activations."""

    enabled: bool = False
    """Run it although ``algorithm.kl_coef`` is 0, only to see how far the policy has moved (``kl/reference``)."""

    path: str = ""
    """Hugging Face folder or id of the Hub of the reference model, with the policy's vocabulary, a
    teacher's with the policy's tokenizer; empty is the policy's version 0, or with ``template`` the
    policy itself, ``schedule.max_staleness`` versions ago."""

    template: str = ""
    """What a teacher is shown in place of a question: text with ``{question}`` and ``{answer}``, the task's
    reference answer, put into the prompt as the question is. Without ``path`` the policy then teaches itself."""

    fsdp: Fsdp = 1
    tp: Tp = 1
    threads: Threads = 0
    device: Device = "auto"

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of its weights and of the forward pass; "auto" is that of ``trainer.dtype``, so the
    KL of equal weights is 0."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CriticConfig:
    """The executor that estimates returns and learns to; ``algorithm.advantage`` asks for it: "gae" or
    "turn_gae". Precision, micro-batches and limits on gradients are the trainer's."""

    path: str = ""
    """Hugging Face folder or id of the Hub to start from: a language model, whose value head then
    starts at 0, or an exported critic. Empty is the policy's version 0."""

    fsdp: Fsdp = 1
    tp: Tp = 1
    threads: Threads = 0
    device: Device = "auto"

    updates_per_tick: PositiveInt = 1
    """Optimizer steps on each tick's whole batch, >= 1. The values that the trainer uses were
    estimated before the first."""

    value_clip: NonNegativeFloat = 0.0
    """In updates after a tick's first, an estimate that moved further than this from the one it had is clipped, and the
    larger of both errors counts (PPO's value clipping); 0 is off."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate of its own optimizer, which else is as ``optimizer`` says."""

    warmup_ticks: NonNegativeInt = 0
    """Ticks over which its rate rises linearly to ``lr``."""


def cpu_microbatch_tokens(num_parameters: int) -> int:
    """What ``max_tokens_per_microbatch`` 0 means on a CPU, for a model of so many parameters."""
    return MICROBATCH_TOKENS if num_parameters < _SMALL else MICROBATCH_TOKENS // 4


def num_at_once(asked: int, *, threads: int, num_parameters: int, reentrant: bool = True) -> int:
    """Micro-batches that a lone rank on the CPU computes at the same time; others, whose ranks meet in
    every layer or whose GPU has enough with one, compute one.

    Args:
        asked: As configured; 0 leaves it to this rule: the largest divisor of ``threads`` up to 4,
            for a model of 20 million parameters or more. In a smaller one the interpreter, of which
            there is one, is most of the time.
        threads: CPU threads of the rank.
        num_parameters: Of the model.
        reentrant: Whether a forward pass leaves the model as it was.
    """
    if not reentrant:
        return 1
    if asked:
        return min(asked, threads)
    if num_parameters < _SMALL:
        return 1
    return max(n for n in range(1, min(MOST_AT_ONCE, threads) + 1) if threads % n == 0)
