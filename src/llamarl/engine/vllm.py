"""vLLM behind the engine's Protocol: ``generator.engine.name = "vllm"``, with the user's own
installation, in this process, or driven from it where it has ranks or GPUs.

    add / step / suspend ─▶ LLMEngine.add_request / step / abort_request      one request a sequence
    parameters_for_sync  ─▶ staging tensors under the trainer's names ──weights_updated──▶ vLLM's reload_weights

What differs from the native engine: bits are vLLM's own, and it promises none; a sequence that was interrupted draws from a new seed, made of its own and
its length. Sequences that run while weights change are computed again under the new ones, as in the
native engine. The staging tensors take memory for one more copy of the model, on the host.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from llamarl.determinism import derive_seed
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.engine.stop_strings import StopStrings
from llamarl.errors import ConfigError, LlamaRLError
from llamarl.models.folders import check_supported, resolve_model_path
from llamarl.models.loading import context_length, load_model_config
from llamarl.models.precision import engine_dtype
from llamarl.models.sharded_loading import skeleton_of, stored_weights
from llamarl.settings.engine import CPU_CACHE_BYTES, ENGINES, EngineConfig
from llamarl.types import FinishReason

__all__ = ["OLDEST_VLLM", "VllmEngine", "import_vllm"]

OLDEST_VLLM = (0, 32)
"""Release this was written against; earlier ones lack parts of the interface."""
_QUANTIZATIONS = {"none": None, "fp8": "fp8"}
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


def import_vllm() -> ModuleType:
    """The user's vLLM, in this process rather than in one of its own.

    Raises:
        ConfigError: It is not installed, does not import, or is too old.
    """
    # read when vllm is imported
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns of untouched layers at every hand-over
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise ConfigError(f"generator.engine.name is 'vllm', whose import fails: {error}") from error
        raise ConfigError(
            f"generator.engine.name is 'vllm', which is not installed here: {ENGINES['vllm'].install}, "
            "or set generator.engine.name to 'native'"
        ) from error
    except ImportError as error:
        raise ConfigError(f"generator.engine.name is 'vllm', whose import fails: {error}") from error
    version = str(vllm.__version__)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < OLDEST_VLLM:
        raise ConfigError(
            f"generator.engine.name is 'vllm', and vllm {version} is installed: llamarl needs "
            f"{'.'.join(map(str, OLDEST_VLLM))} or later"
        )
    return vllm


class VllmEngine:
    """Implements :class:`llamarl.engine.base.Engine` on vLLM's ``LLM``.

    Args:
        tokenizer: Reads stop strings; vLLM loads its own.
        device: Its first GPU; on a CPU not used.
        quantization: ``none``, or vLLM's own ``fp8`` on CUDA.
        eos_token_ids: Tokens that end every response; None takes those that vLLM reads from the model's folder.

    Raises:
        ConfigError: vLLM is missing or too old, cannot quantize so, or ``config.options`` name what is not for it to choose.
    """

    def __init__(
        self,
        model_path: str | Path,
        config: EngineConfig,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: str = "",
        quantization: str = "none",
        eos_token_ids: Iterable[int] | None = None,
    ) -> None:
        if quantization not in _QUANTIZATIONS:
            raise ConfigError(
                f"generator.quantization={quantization!r} is the native engine's; with vllm use one of "
                f"{', '.join(_QUANTIZATIONS)}"
            )
        self.config = config
        self._vllm = import_vllm()
        self._stops = StopStrings(tokenizer)
        self._eos = None if eos_token_ids is None else sorted(eos_token_ids)
        folder = resolve_model_path(model_path)
        check_supported(folder, "vllm")
        # A prompt in chunks draws once for each, and only a CUDA generator can take a draw back
        # (vLLM 0.32): on CPU whole sequences fit the token budget instead.
        on_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()
        longest = min(context_length(folder) or config.max_batch_tokens, config.max_batch_tokens) if on_cpu else None
        self._cache_bytes = config.kv_cache_bytes or (CPU_CACHE_BYTES if on_cpu else 0)
        dtype_name = engine_dtype(config.dtype, quantization, device="cpu" if on_cpu else "cuda", model=folder)
        set_num_threads = torch.set_num_threads
        settings: dict[str, Any] = dict(
            model=str(folder),
            trust_remote_code=False,
            dtype=dtype_name,
            quantization=_QUANTIZATIONS[quantization],
            seed=0,
            logprobs_mode="processed_logprobs",
            max_num_seqs=config.max_sequences,
            max_num_batched_tokens=config.max_batch_tokens,
            enable_chunked_prefill=not on_cpu,
            **({"max_model_len": longest} if on_cpu else {}),  # on a GPU the user's by options, else as below
            kv_cache_memory_bytes=self._cache_bytes or None,  # None: a share of the card of its own choice
            enable_prefix_caching=True,  # the prompt of a group is computed once
            disable_log_stats=True,
        )
        if taken := sorted(settings.keys() & config.options):
            raise ConfigError(f"generator.engine.options: {', '.join(taken)} follow from the recipe's other keys")
        ranks = config.options.get("tensor_parallel_size", 1)
        if ranks > 1 or not on_cpu:  # processes of its own, which alone can be told their GPUs
            settings["distributed_executor_backend"] = "mp"
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else it wants a memory node a rank
        with contextlib.nullcontext() if on_cpu else _seeing_gpus(device, ranks):
            of_cache = {"max_model_len": -1}  # the model's context, or what of it the cache holds
            self._llm: Any = self._vllm.LLM(**of_cache | settings | config.options)
        torch.set_num_threads = (
            set_num_threads  # on CPU vLLM has put a function there that does nothing, for all of the process
        )
        self._folder = folder
        self._context: int = self._llm.llm_engine.model_config.max_model_len
        skeleton = skeleton_of(AutoModelForCausalLM, folder, load_model_config(folder), attention="sdpa")
        dtype: torch.dtype = getattr(torch, dtype_name)
        self._shapes = {name: (tuple(p.shape), dtype) for name, p in skeleton.named_parameters()}
        self._staged: dict[str, Tensor] | None = None
        self._policy_version = 0
        self._next_order = 0
        self._running: dict[str, TokenSequence] = {}
        """By name (the admission number as text), in admission order."""
        self._ended: list[tuple[int, TokenSequence]] = []
        self._steps = self._tokens_sampled = 0

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def has_work(self) -> bool:
        return bool(self._running) or bool(self._ended)

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            self._check(sequence)
        for sequence in sequences:
            order, self._next_order = self._next_order, self._next_order + 1
            prompt = self._vllm.TokensPrompt(prompt_token_ids=sequence.prompt_tokens + sequence.tokens)
            name = str(order)  # outputs and aborts go by this name, whatever vLLM calls the request inside
            self._llm.llm_engine.add_request(name, prompt, self._sampling_params(sequence))
            self._running[name] = sequence

    def step(self) -> list[TokenSequence]:
        if self._running:
            self._steps += 1
            for output in self._llm.llm_engine.step():
                if output.request_id in self._running:  # else it was ended here
                    self._append(output.request_id, output.outputs[0])
        ended = [sequence for _, sequence in sorted(self._ended, key=lambda pair: pair[0])]
        self._ended = []
        return ended

    def suspend(self) -> list[TokenSequence]:
        sequences = list(self._running.values())
        self._llm.llm_engine.abort_request(list(self._running))
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()  # nothing of it is wanted
        self._running = {}
        return sequences

    def parameters_for_sync(self) -> Mapping[str, Tensor]:
        """Staging tensors on the host, read from the folder when first asked for; vLLM holds fused
        and rearranged copies."""
        if self._staged is None:
            with stored_weights(self._folder, self._shapes) as read:
                self._staged = {
                    name: torch.empty(shape, dtype=dtype).copy_(read(name))
                    for name, (shape, dtype) in self._shapes.items()
                }
        return self._staged

    def weights_updated(self, version: int) -> None:
        """Load what was staged; before the first staging there is nothing to load."""
        carried = self.suspend()
        if self._staged is not None:
            staged = list(self._staged.items())
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(staged)})
            self._llm.apply_model(_prepare_heads)
        if not self._llm.reset_prefix_cache():  # its keys and values are of the old weights
            raise LlamaRLError(
                "vllm kept the keys and values of earlier weights: it still holds blocks of ended requests"
            )
        self._policy_version = version
        self.add(carried)

    def stats(self) -> Mapping[str, float]:
        result = {
            "steps": self._steps,
            "tokens_sampled": self._tokens_sampled,
            "kv_bytes_limit": self._cache_bytes,
            "running": len(self._running),
        }
        self._steps = self._tokens_sampled = 0
        return result

    # -- inside ---------------------------------------------------------------------------------------------------

    def _check(self, sequence: TokenSequence) -> None:
        where = f"sequence {sequence.prompt_index}/{sequence.sample_index}"
        params = sequence.params
        self._stops.check(sequence, where)
        if not sequence.prompt_tokens:
            raise ValueError(f"prompt {sequence.prompt_index} is empty: a prompt needs at least one token")
        if why := ENGINES["vllm"].why_not_at(params.temperature):
            raise ValueError(f"{where}: {why}")
        if params.max_new_tokens <= len(sequence.tokens):
            raise ValueError(
                f"{where} has {len(sequence.tokens)} tokens, max_new_tokens={params.max_new_tokens} leaves none"
            )
        if len(sequence.prompt_tokens) + params.max_new_tokens > self._context:
            raise ValueError(
                f"{where}: {len(sequence.prompt_tokens)} prompt tokens and max_new_tokens={params.max_new_tokens} exceed the "
                f"{self._context} tokens that vLLM holds of one here (on CPU at most generator.engine.max_batch_tokens, "
                f"{self.config.max_batch_tokens}, on a GPU what kv_cache_bytes has room for): shorten the prompt, lower "
                "max_new_tokens or raise that limit"
            )

    def _sampling_params(self, sequence: TokenSequence) -> Any:
        params = sequence.params
        done = len(sequence.tokens)
        own_stops = list(params.stop_token_ids) + (self._eos or [])
        return self._vllm.SamplingParams(
            max_tokens=params.max_new_tokens - done,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=(derive_seed(sequence.seed, done) if done else sequence.seed) % (1 << 63),
            stop_token_ids=own_stops or None,
            ignore_eos=self._eos is not None,
            logprobs=0,  # of the token drawn alone
            detokenize=False,  # stop strings are looked for here, also across an interruption
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )

    def _append(self, name: str, output: Any) -> None:
        sequence = self._running[name]
        params, tokens = sequence.params, list(output.token_ids)
        positions = list(output.logprobs or [])[-len(tokens) :] if tokens else []
        for token, position in zip(tokens, positions, strict=True):
            logprob = position[token].logprob
            if not math.isfinite(logprob):
                sequence.error = f"log-prob is not finite at token {len(sequence.tokens)} under policy version {self._policy_version}"
                self._end(name, "error", abort=output.finish_reason is None)
                return
            sequence.tokens.append(token)
            sequence.logprobs.append(0.0 if params.temperature == 0 else logprob)
            sequence.policy_versions.append(self._policy_version)
            sequence.loss_mask.append(True)
            self._tokens_sampled += 1
            if self._stops.ended(sequence):
                self._end(name, "stop", abort=output.finish_reason is None)
                return
        if output.finish_reason is not None:
            reason = _REASONS.get(output.finish_reason, "error")
            if reason == "error":
                sequence.error = f"vllm ended the request with {output.finish_reason!r}"
            self._end(name, reason, abort=False)

    def _end(self, name: str, reason: FinishReason, *, abort: bool) -> None:
        if abort:
            self._llm.llm_engine.abort_request([name])
        sequence = self._running.pop(name)
        sequence.finish_reason = reason
        self._ended.append((int(name), sequence))


@contextlib.contextmanager
def _seeing_gpus(device: str, count: int) -> Iterator[None]:
    """Processes begun within see ``count`` GPUs from ``device`` on, and no others.

    Raises:
        ConfigError: There are fewer.
    """
    had = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = had.split(",") if had else [str(i) for i in range(torch.cuda.device_count())]
    first = torch.device(device or "cuda").index or 0
    if len(visible) < first + count:
        raise ConfigError(
            f"generator.engine.options: tensor_parallel_size is {count}, but from {device} on there are "
            f"{len(visible) - first} GPUs"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first : first + count])
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if had is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = had


def _prepare_heads(model: nn.Module) -> None:
    """Derive again what an output head computes with.

    On CPU that is a packed copy, and ``reload_weights`` (vLLM 0.32) packs only layers whose own
    weights were handed over: a head that shares its matrix with the embedding would go on with the
    old one.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            module.quant_method.process_weights_after_loading(module)
