"""Runs one step plan on the model: tensors in, logits of the sampling rows out. Holds the weights and the KV cache.

StepPlan ──▶ [1, T] token row + PagedBatch ──▶ transformers decoder ──▶ hidden states of sampling rows ──▶ logits

On a GPU nothing in a step waits: integers go over in queued copies, and who reads the logits waits for them. A step of
decodes alone may go through ``cuda_graphs.py``, padded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llamarl.compiler import check_compiler
from llamarl.engine.block_tables import BlockTables
from llamarl.engine.compiled_layers import FIRST_ROWS, compile_layers, compiles_layers, compiling
from llamarl.engine.cuda_graphs import (
    Buckets,
    DecodeInputs,
    PaddedDecoder,
    why_graphs_unsupported,
    why_layout_unsupported,
)
from llamarl.engine.expert_record import Experts, narrowed
from llamarl.engine.linears import serve_linears, supported_quantizations
from llamarl.engine.ranks import EngineRanks
from llamarl.engine.scheduler import Chunk, Prompt, StepPlan
from llamarl.errors import ConfigError, ModelError
from llamarl.model_support import Use, why_unsupported
from llamarl.models.decoder import logit_scale, logit_softcap
from llamarl.models.device_memory import give_back_freed, own_storages, zero_pages
from llamarl.models.experts import Routing, num_experts, watch_experts, watching
from llamarl.models.loading import cache_shape
from llamarl.models.paged_attention import DecodeBatch, PagedBatch, PrefillChunk, paged_step
from llamarl.models.parallel import ParallelLayout
from llamarl.models.precision import engine_dtype
from llamarl.models.repeatable import suspended
from llamarl.models.sharded_loading import load_tensor_parallel
from llamarl.models.transfer import indices
from llamarl.settings.engine import CPU_CACHE_BYTES, EngineConfig

__all__ = ["ModelRunner", "cut_decodes"]

_MAX_PADDED_RATIO = 1.25  # decodes share a batch while its padded size stays within this factor of what they hold
_MOST_COPIED = 8 << 20
"""Bytes of K and V that a batch on a CPU copies together, a layer: attention then finds them in the processor's cache,
and the C library keeps their memory, which of copies over 32 MB it would give back and fault in again in each layer."""


class ModelRunner:
    """The model of one engine, or this rank's part of it."""

    def __init__(
        self,
        model_path: str | Path,
        config: EngineConfig,
        *,
        device: torch.device | str,
        quantization: str,
        layout: ParallelLayout | None = None,
        parked: bool = False,
        note_experts: bool = False,
    ) -> None:
        self.device = torch.device(device)
        name = engine_dtype(config.dtype, quantization, device=self.device.type, model=model_path)
        self.dtype: torch.dtype = getattr(torch, name)
        self.ranks = EngineRanks(layout)
        self.model, cuts = load_tensor_parallel(
            model_path, layout or ParallelLayout(fsdp=1, tp=1, mesh=None), dtype=self.dtype, device=self.device
        )
        self.model.requires_grad_(False)
        self.model_config = self.model.config
        self.model_config.pad_token_id = None  # there is no padding; GPT-2 would wait for the device to look for it
        self._check_quantization(quantization)
        self.notes_experts = note_experts
        self._expert_layers = watch_experts(self.model) if note_experts else []
        if note_experts and not self._expert_layers:
            raise ModelError(f"{type(self.model).__name__} has no experts whose choice could be noted")
        self._routing: Routing | None = None
        """Of the last step, where it is noted."""
        self._tables = BlockTables()
        self._row_of: list[int] = []
        """The first row of each chunk in it."""
        self._parameters = dict(self.model.named_parameters())
        self._adopted = False
        self.linears = serve_linears(
            self.model,
            quantization=quantization,
            device=self.device,
            ranks=self.ranks,
            summed=frozenset(name.removesuffix(".weight") for name, cut in cuts.items() if cut.dim == 1),
        )
        self._logit_scale, self._final_softcap = logit_scale(self.model_config), logit_softcap(self.model_config)
        self._in_place = reads_in_place(config.attention, self.device)
        fused = quantization != "int8" and why_graphs_unsupported(self.model_config) is None
        self._uncompiled = fused and compiles_layers(self._in_place, self.dtype, self.ranks.size)
        if self._uncompiled:
            compile_layers(self.model)
        padded = self._pads_decodes(config)
        self._size_cache(config, scratch=padded)
        self._cache = torch.empty(0)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._parked: list[tuple[torch.UntypedStorage, int]] | None = None  # storages taken away, and their sizes
        self._awaits_version = False
        self.padded_decoder: PaddedDecoder | None = None
        if parked:
            self.park()
        else:
            self._make_cache()
        if padded:
            self.padded_decoder = self._make_padded_decoder(config)

    def _check_quantization(self, quantization: str) -> None:
        supported = supported_quantizations(self.device)
        if quantization not in supported:
            raise ConfigError(
                f"generator.quantization={quantization!r} is not available on {self.device.type}; "
                f"use one of {', '.join(supported)}"
            )
        if quantization != "none" and (reason := why_unsupported(self.model_config.to_dict(), cast(Use, quantization))):
            raise ModelError(f"generator.quantization={quantization!r}: {reason}")

    def _size_cache(self, config: EngineConfig, *, scratch: bool) -> None:
        """Which heads this rank caches, and how many blocks; with ``scratch`` the last one is nobody's."""
        self.block_size = config.block_size_on(self.device.type)
        self.cache_bytes = config.kv_cache_bytes or _open_cache_bytes(self.device)
        self._num_layers, num_kv_heads, self._head_dim = cache_shape(self.model_config)
        self._num_kv_heads = max(1, num_kv_heads // self.ranks.size)
        self._cache_blocks = self.cache_bytes // self.block_bytes
        self.num_blocks = self._cache_blocks - scratch
        if self.num_blocks < 1:
            raise ConfigError(
                f"generator.engine.kv_cache_bytes is {self.cache_bytes}, less than {1 + scratch} blocks of "
                f"{self.block_size} tokens: {self.block_bytes} bytes each over {self._num_layers} layers"
            )

    def _pads_decodes(self, config: EngineConfig) -> bool:
        mode = config.cuda_graphs
        if mode == "off":
            return False
        reason = why_layout_unsupported(mode, device=self.device.type, num_ranks=self.ranks.size)
        if reason is None and mode != "padded":
            reason = why_graphs_unsupported(self.model_config)
        if reason is not None and mode != "auto":
            raise ConfigError(f"generator.engine.cuda_graphs is {mode!r}, which this engine cannot have: {reason}")
        return reason is None

    def _make_padded_decoder(self, config: EngineConfig) -> PaddedDecoder:
        def forget() -> None:
            for linear in self.linears:
                linear.forget()

        buckets = Buckets(
            max_rows=config.max_sequences,
            max_tokens=self.context_length,
            block_size=self.block_size,
            in_place=self._in_place,
        )
        decoder = PaddedDecoder(
            self._decode_padded,
            buckets,
            device=self.device,
            block_size=self.block_size,
            scratch=self.num_blocks,
            record=config.cuda_graphs != "padded",
            forget=forget,
        )
        decoder.served_from(self._addresses())
        return decoder

    def _addresses(self) -> tuple[int, ...]:
        """Where everything lies that a recorded step reads besides its inputs."""
        tensors = [*self._parameters.values(), *self.model.buffers(), self._cache]
        return (*(t.data_ptr() for t in tensors), *(a for linear in self.linears for a in linear.addresses))

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token over all layers, on this rank."""
        return 2 * self._num_layers * self._num_kv_heads * self._head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    @property
    def context_length(self) -> int:
        return self.model_config.max_position_embeddings

    def _make_cache(self) -> None:
        shape = (2, self._num_layers, self._cache_blocks, self.block_size, self._num_kv_heads, self._head_dim)
        if self.device.type == "cpu":
            self._cache = zero_pages(math.prod(shape) * self.dtype.itemsize).view(self.dtype).view(shape)
        else:
            self._cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._keys[:], self._values[:] = self._cache[0].unbind(0), self._cache[1].unbind(0)

    @property
    def parked(self) -> bool:
        return self._parked is not None

    def park(self) -> int:
        """Give back the KV cache, the served form of the weights and the weights, unless those are
        another's memory; returns the bytes. Afterwards no parameter may be touched before
        ``unpark``."""
        assert self._parked is None, "parked already"
        if self.padded_decoder is not None:
            self.padded_decoder.drop()  # what is recorded holds memory of its own, and reads addresses that go
        freed = self._cache.numel() * self._cache.element_size() + sum(linear.drop_served() for linear in self.linears)
        self._keys.clear()
        self._values.clear()
        self._cache = torch.empty(0)
        self._parked = []
        if not self._adopted:
            self._parked = [(s, s.nbytes()) for s in own_storages(self._parameters.values(), self.device)]
        for storage, nbytes in self._parked:
            storage.resize_(0)
            freed += nbytes
        give_back_freed(self.device)
        return freed

    def unpark(self) -> None:
        """Take memory for cache and weights again. The weights' values are gone: a version must be loaded next."""
        assert self._parked is not None, "not parked"
        for storage, nbytes in self._parked:
            storage.resize_(nbytes)
        self._parked = None
        self._awaits_version = True
        self._make_cache()

    def parameters_for_sync(self) -> Mapping[str, Tensor]:
        """Parameters, or this rank's parts, by their Hugging Face name; a tied one once, under its
        first name. They may be written."""
        if self._adopted:
            for parameter in self._parameters.values():
                parameter.data = parameter.data.clone()
            self._adopted = False
        return self._parameters

    def can_adopt(self, dtypes: Mapping[str, str]) -> bool:
        """Whether ``adopt`` takes whole parameters of these names and types (``float32``, ``bfloat16``, ...)."""
        return (
            self.device.type == "cpu"
            and all(linear.follows_parameters for linear in self.linears)
            and dict(dtypes) == {name: str(p.dtype).removeprefix("torch.") for name, p in self._parameters.items()}
        )

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with ``tensors`` from the next ``weights_updated`` on, in place of own copies; they are only read.

        Raises:
            ValueError: One is missing or of another shape.
        """
        for name, parameter in self._parameters.items():
            tensor = tensors.get(name)
            if tensor is None or tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
                got = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise ValueError(f"{name}: the engine holds {tuple(parameter.shape)} {parameter.dtype}, got {got}")
        for name, parameter in self._parameters.items():
            parameter.data = tensors[name]
        self._adopted = True

    @torch.no_grad()
    def weights_updated(self) -> None:
        """The parameters hold new values: derive from them what is computed with."""
        for linear in self.linears:
            linear.refresh()
        self._awaits_version = False
        if self.padded_decoder is not None:
            self.padded_decoder.served_from(self._addresses())

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Tensor:
        """Compute the plan's tokens and return the logits of its sampling rows, [len(plan.samples), V].

        The rows of one prompt's members are equal. Of tensor-parallel ranks each gets its slice of
        the vocabulary.
        """
        assert self._parked is None and not self._awaits_version, "parked: unpark the engine and load a version first"
        with suspended(self.device):
            return self._execute(plan)

    def _compile(self) -> None:
        """Have the layers compiled for rows that are the same in every run, before the first real ones.

        Torch fits to the first rows that it sees in which order code for any number of them adds, and a resumed run
        begins with others. They are written into the scratch block; without one nothing is cached yet.
        """
        self._uncompiled = False
        slot = self.num_blocks % self._cache_blocks * self.block_size
        for rows in (min(most, self.context_length) for most in FIRST_ROWS):
            tokens, positions = torch.zeros(2, rows, dtype=torch.int64, device=self.device)
            positions += torch.arange(rows, device=self.device)
            chunk = PrefillChunk(0, rows, 0, tokens[:1])
            batch = PagedBatch(self._keys, self._values, tokens + slot, [], [chunk], self._in_place)
            with compiling():
                self._hidden(tokens, positions, batch)

    def _execute(self, plan: StepPlan) -> Tensor:
        if plan.copies:
            sources, targets = indices(list(zip(*plan.copies, strict=True)), self.device)
            self._cache.index_copy_(2, targets, self._cache.index_select(2, sources))
        # a padded kernel multiplies slots it must not see by zero, and zero times a NaN that another request left is NaN
        if plan.fresh and not self._in_place:
            (fresh,) = indices([plan.fresh], self.device)
            self._cache.index_fill_(2, fresh, 0)
        if self.padded_decoder is not None and _only_decodes(plan):
            self._row_of = list(range(len(plan.chunks)))
            logits = self.padded_decoder.run(plan.chunks)
            if logits is not None:
                return logits
        hidden_TE, last_row = self._forward(plan.chunks)
        for prompt, chunk in plan.completed:
            prompt.end_state = hidden_TE[last_row[chunk]].clone()
        # one row of logits for all members that sample from the end of one prompt
        ends: list[Tensor] = []
        states: list[int] = []
        row_of: dict[int, int] = {}
        rows: list[int] = []
        for _, source in plan.samples:
            key = id(source) if isinstance(source, Prompt) else last_row[source]
            if key not in row_of:
                row_of[key] = len(states)
                states.append(len(hidden_TE) + len(ends) if isinstance(source, Prompt) else key)
                if isinstance(source, Prompt):
                    ends.append(cast(Tensor, source.end_state))
            rows.append(row_of[key])
        if not states:
            return torch.empty(0, self.model_config.vocab_size)
        state_ids, row_ids = indices([states, rows], self.device)
        logits = self._logits((torch.cat([hidden_TE, torch.stack(ends)]) if ends else hidden_TE)[state_ids])
        return logits if rows == list(range(len(states))) else logits[row_ids]

    def chosen_experts(self, plan: StepPlan) -> list[Experts]:
        """Of each chunk of the plan that ``execute`` has just computed, [its tokens, layers, k]."""
        if not plan.chunks:
            return []
        assert self._routing is not None
        layers = [layer for layer in self._routing.chosen if layer is not None]
        chosen = torch.stack(layers, dim=1)
        rows = narrowed(chosen.cpu().numpy(), num_experts(self._expert_layers[0]))
        return [
            np.ascontiguousarray(rows[first : first + len(chunk.tokens)])
            for first, chunk in zip(self._row_of, plan.chunks, strict=True)
        ]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden).float()
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._final_softcap is not None:
            logits = torch.tanh(logits / self._final_softcap) * self._final_softcap
        return logits

    def _forward(self, chunks: list[Chunk]) -> tuple[Tensor, list[int]]:
        """Hidden states [T, E] of the step's row, and for each chunk the row of its last token."""
        last_row = [0] * len(chunks)
        first_row = self._row_of = [0] * len(chunks)
        if not chunks:
            width = self.model_config.get_text_config().hidden_size
            return torch.empty(0, width, dtype=self.dtype, device=self.device), last_row
        size = self.block_size
        starts = np.array([chunk.start for chunk in chunks if chunk.decode], np.int64)  # these come first
        order = np.argsort(-starts, kind="stable")  # longest context first, so that neighbours pad each other little
        decoding, starts = [chunks[i] for i in order.tolist()], starts[order]
        counts = starts // size + 1
        tables = self._tables.write([chunk.blocks for chunk in decoding], counts)
        tokens = [chunk.tokens[0] for chunk in decoding]
        positions, slots = [starts], [tables[np.arange(len(decoding)), starts // size] * size + starts % size]
        filling: list[tuple[int, Chunk]] = []
        filled: list[npt.NDArray[np.int64]] = []
        for row, i in enumerate(order.tolist()):
            first_row[i] = last_row[i] = row
        for i in range(len(decoding), len(chunks)):
            chunk, end = chunks[i], chunks[i].start + len(chunks[i].tokens)
            blocks, places = np.array(chunk.blocks[: -(-end // size)]), np.arange(chunk.start, end)
            first_row[i] = len(tokens)
            filling.append((len(tokens), chunk))
            filled.append(blocks)
            tokens += chunk.tokens
            positions.append(places)
            slots.append(blocks[places // size] * size + places % size)
            last_row[i] = len(tokens) - 1
        copied = _MOST_COPIED * self._num_layers // self.block_bytes if self.device.type == "cpu" else math.inf
        padding = math.inf if self._in_place else _MAX_PADDED_RATIO  # a kernel that reads blocks in place pads nothing
        cuts = cut_decodes(counts.tolist(), padding=padding, copied=copied)
        cut_tables = [part for cut in cuts for part in (tables[cut, : counts[cut.start]].ravel(), starts[cut] + 1)]
        whole = [np.array(tokens), np.concatenate(positions), np.concatenate(slots)]
        moved = iter(indices([*whole, *filled, *cut_tables], self.device))
        token_ids, position_ids, slot_ids = next(moved), next(moved), next(moved)
        prefills = [PrefillChunk(first, len(chunk.tokens), chunk.start, next(moved)) for first, chunk in filling]
        decodes = [DecodeBatch(cut.start, next(moved), next(moved), int(counts[cut.start]) * size) for cut in cuts]
        batch = PagedBatch(self._keys, self._values, slot_ids, decodes, prefills, self._in_place)
        return self._hidden(token_ids, position_ids, batch), last_row

    def _hidden(self, tokens: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Hidden states [T, E] of a row of tokens [T]."""
        if self._uncompiled:
            self._compile()
        self._routing = Routing(len(self._expert_layers)) if self._expert_layers else None
        with paged_step(batch), watching(self._routing):
            row: dict[str, Any] = {"input_ids": tokens[None], "position_ids": positions[None]}
            return self.model.base_model(**row, use_cache=False).last_hidden_state[0]

    def _decode_padded(self, inputs: DecodeInputs) -> Tensor:
        decode = DecodeBatch(0, inputs.tables, inputs.lengths, inputs.bucket.width * self.block_size)
        batch = PagedBatch(self._keys, self._values, inputs.slots, [decode], [], self._in_place)
        return self._logits(self._hidden(inputs.tokens, inputs.positions, batch))


def cut_decodes(counts: list[int], *, padding: float, copied: float) -> list[slice]:
    """Cut decodes that hold so many blocks each, the most first, into batches, which are padded to their longest.

    Args:
        padding: How often what a batch's decodes hold it may be, padded.
        copied: Blocks that a batch of more than one may be, padded.
    """
    cuts: list[slice] = []
    first = 0
    while first < len(counts):
        held, last = counts[first], first + 1
        while last < len(counts):
            held += counts[last]
            padded = counts[first] * (last + 1 - first)
            if padded > padding * held or padded > copied:
                break
            last += 1
        cuts.append(slice(first, last))
        first = last
    return cuts


def _open_cache_bytes(device: torch.device) -> int:
    """Of the KV cache of an engine outside of a run, which leaves it open: on a GPU most of what the weights left."""
    return int(0.7 * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else CPU_CACHE_BYTES


def reads_in_place(attention: str, device: torch.device) -> bool:
    """Whether decodes read their blocks by ``paged_kernel``.

    Raises:
        ConfigError: They would, but its compiler is missing.
    """
    if attention != "auto" or device.type != "cuda":
        return False
    check_compiler("kernels of decoded tokens", 'generator.engine.attention = "copied"')
    return True


def _only_decodes(plan: StepPlan) -> bool:
    """Whether row i of the step is a decoded token, and sample i its successor."""
    return bool(plan.chunks) and plan.chunks[-1].decode and len(plan.samples) == len(plan.chunks)
