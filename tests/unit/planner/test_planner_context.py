"""128k tokens: what the planner says fits, against the bytes that the trainer's own layers keep on tensors without storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from llamarl.engine.config import EngineConfig
from llamarl.models import attention
from llamarl.models.attention import PackedSequences, attending
from llamarl.models.parallel import apply_tensor_parallel, make_layout
from llamarl.planner.choices import Options, Workload, trainer_choices
from llamarl.planner.generation import weight_bytes
from llamarl.planner.hardware import find_hardware
from llamarl.planner.lengths import constant
from llamarl.planner.model_spec import find_config, find_model
from llamarl.planner.recipe import plan_settings
from llamarl.planner.rooflines import (
    GeneratorLayout,
    all_reduce_s,
    context_parallel_sizes,
    decode_step_s,
    exchange_s,
    gather_s,
    prefill_s,
)
from llamarl.planner.runnable import why_not_run
from llamarl.planner.search import best_separate
from llamarl.planner.shared_prompts import SharedRows
from llamarl.planner.training import (
    TrainerDemand,
    TrainerLayout,
    kept_bytes,
    kept_with_shared_prompts,
    trainer_memory,
    trainer_tick,
)
from llamarl.trainer import shared_prompts
from llamarl.trainer.context_parallel import CONTEXT_ATTENTION, ContextRanks, RowOverRanks
from llamarl.trainer.packing import similar_responses
from llamarl.trainer.shared_prompts import SharedPrompts

H100 = find_hardware("h100")
PROMPT, RESPONSE = 1024, 130_048
LONG = PROMPT + RESPONSE
"""128k."""
MODEL = "Llama-3.1-8B"
WORK = Workload(
    model=find_model(MODEL), response=constant(RESPONSE), prompts_per_step=16, group_size=4, prompt_tokens=PROMPT
)
DEMAND = TrainerDemand(lengths=WORK.response, prompt_tokens=PROMPT, sequences=WORK.sequences)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., float]]:
    """Bytes that a decoder layer of a bundled shape keeps for its backward pass on one rank, in bfloat16."""

    def fused(
        query: Tensor, key: Tensor, value: Tensor, *, scale: float, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:  # a CPU would compute bfloat16 in float32, and keep that; a GPU repeats heads for a kernel with a mask
        if mask is not None:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, attn_mask=mask, scale=scale, enable_gqa=mask is None
        )

    monkeypatch.setattr(attention, "fused_attention", fused)
    monkeypatch.setattr(shared_prompts, "fused_attention", fused)

    def count(
        name: str, tokens: int, *, cp: int = 1, tp: int = 1, units: tuple[tuple[int, tuple[int, ...]], ...] = ()
    ) -> float:
        dist.init_process_group("fake", rank=0, world_size=cp * tp, store=FakeStore())
        layout = make_layout(fsdp=1, tp=tp, cp=cp, device="cpu")
        config = AutoConfig.for_model(**{**find_config(name)[1], "num_hidden_layers": 2, "layer_types": None})
        sizes: dict[int, int] = {}
        kept: list[Tensor] = []  # alive, so that no other storage takes a place
        ends: list[int] = []
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=CONTEXT_ATTENTION
            )
            apply_tensor_parallel(model, layout)
            own = {p.untyped_storage()._cdata for p in model.parameters()}

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in own:
                    sizes.setdefault(storage._cdata, storage.nbytes())
                    kept.append(tensor)
                return tensor

            def end(layer: nn.Module, args: object, output: object) -> None:
                ends.append(sum(sizes.values()))

            for layer in model.model.layers:
                layer.register_forward_hook(end)
            packed, ranks = SharedPrompts(units) if units else PackedSequences.of([0, tokens]), ContextRanks.of(layout)
            row = packed if ranks is None else RowOverRanks(packed, ranks)
            n = -(-tokens // cp)
            with attending(row), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                model.model(
                    input_ids=torch.zeros(1, n, dtype=torch.int64), position_ids=torch.arange(n)[None], use_cache=False
                )
        dist.destroy_process_group()
        return float(ends[1] - ends[0])

    yield count
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-8B"])
@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (1, 8), (4, 1), (16, 1), (2, 2)])
def test_a_layer_keeps_what_the_planner_says(counted: Callable[..., float], name: str, cp: int, tp: int) -> None:
    """Also with key-value heads repeated: 8 of them over 16 ranks."""
    tokens = 4096 + 3  # which 2, 4 and 16 do not divide
    layout = TrainerLayout(tp=tp, cp=cp, runnable=True)
    forecast = kept_bytes(find_model(name), layout, 2.0) * tokens / cp
    assert counted(name, tokens, cp=cp, tp=tp) == pytest.approx(forecast, rel=0.05)


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (1, 8), (2, 2)])
@pytest.mark.parametrize(("prompt", "responses"), [(1024, [512] * 8), (128, [2048, 2000, 900, 800])])
def test_a_layer_keeps_what_the_planner_says_of_shared_prompts(
    counted: Callable[..., float], prompt: int, responses: list[int], cp: int, tp: int
) -> None:
    """Prompts copied for each response, heads repeated, masks: the second case has two batches of two."""
    batches = similar_responses([(prompt, length, 0, i) for i, length in enumerate(responses)])
    padded = [(len(batch), batch[0][1]) for batch in batches]
    rows = SharedRows(
        prompts=1,
        prompt_tokens=prompt,
        queries=sum(n * longest for n, longest in padded),
        keys=sum(n * (prompt + longest) for n, longest in padded),
        pairs=0,
        masks=sum(longest * (prompt + longest) for _, longest in padded),
    )
    tokens = prompt + sum(responses)
    layout = TrainerLayout(tp=tp, cp=cp, runnable=True, share_prompts=True)
    forecast = kept_with_shared_prompts(find_model(MODEL), layout, 2.0, tokens=tokens, rows=rows)
    kept = counted(MODEL, tokens, cp=cp, tp=tp, units=((prompt, tuple(responses)),))
    assert kept == pytest.approx(forecast, rel=0.06)


def test_128k_tokens_fit_where_the_plan_cuts_rows_and_not_elsewhere(counted: Callable[..., float]) -> None:
    limit = H100.usable_memory_bytes
    chosen = list(trainer_choices(H100, WORK, Options(), 8, memory_limit=limit))
    whole = [choice.layout for choice in chosen if choice.layout.tp == 1 and choice.layout.cp == 1]
    cut = [choice.layout for choice in chosen if choice.layout.tp == 1]
    assert not whole and {layout.cp for layout in cut} == {2}  # as few as hold a row
    for layout in (TrainerLayout(fsdp=8, runnable=True), cut[0]):
        memory = trainer_memory(H100, WORK.model, layout, DEMAND)
        fits = sum(memory.values()) <= limit
        assert fits == (layout.cp > 1)
        # every layer's input, one layer recomputed, and what does not depend on tokens
        inputs = WORK.model.layers * LONG / layout.cp * WORK.model.hidden * 2
        others = sum(size for part, size in memory.items() if part != "activations")
        assert (others + inputs + counted(MODEL, LONG, cp=layout.cp) <= limit) == fits


def test_the_plan_of_128k_tokens_runs_and_its_recipe_says_how_rows_are_cut() -> None:
    plan = best_separate(H100, WORK, Options(partial_rollouts=False), 16, 1)
    on_four = min(
        trainer_choices(H100, WORK, Options(), 4, memory_limit=H100.usable_memory_bytes), key=lambda c: c.time.total_s
    )
    assert on_four.layout.cp == 2 and on_four.layout.devices == 4
    settings = plan_settings(dataclasses.replace(plan, trainer=on_four), "a folder", H100, 1.0)
    assert settings["trainer"]["cp"] == 2 and settings["trainer"]["fsdp"] == 2
    assert why_not_run(plan, WORK.model) == []


def test_cut_rows_cost_exchanges_and_nothing_else_of_note() -> None:
    """Two exchanges a layer, and each of three passes with recomputation: q, out, k, v of every token once."""
    whole = trainer_tick(H100, WORK.model, TrainerLayout(fsdp=8, runnable=True), DEMAND)
    cut = trainer_tick(H100, WORK.model, TrainerLayout(fsdp=2, cp=4, runnable=True), DEMAND)
    values = LONG / 4 * 2 * (4096 + 8 * 128) * 2
    own = exchange_s(H100, values, 4)
    assert cut.tensor_parallel_s == pytest.approx(32 * 3 * 32 * own) and whole.tensor_parallel_s == 0
    assert cut.compute_s == pytest.approx(whole.compute_s, rel=0.01)


def test_parameters_are_sharded_over_data_and_context_ranks_alike() -> None:
    parts = [
        trainer_memory(H100, WORK.model, layout, DEMAND)
        for layout in (TrainerLayout(fsdp=8, runnable=True), TrainerLayout(fsdp=2, cp=4, runnable=True))
    ]
    for name in ("parameters", "gradients", "optimizer", "gathered_layers"):
        assert parts[0][name] == parts[1][name]
    assert context_parallel_sizes(WORK.model, 8, 8) == [1] and context_parallel_sizes(WORK.model, 2, 8) == [1, 2, 4]


@pytest.mark.parametrize(
    ("name", "tp", "saved", "prefill", "time"),
    [
        ("Llama-3.1-8B", 8, 0.0006, 1.94, 0.06),
        ("Llama-3.1-70B", 8, 0.0012, 11.3, 0.05),
        ("Llama-3.1-405B", 32, 0.0027, 18.0, 0.12),
    ],
)
def test_prefill_cut_by_tokens_would_save_little(name: str, tp: int, saved: float, prefill: float, time: float) -> None:
    """The table of docs/notes/long_prompts.md: three hidden states at once; two norms and two sums a layer, ten reads and writes."""
    model, chunk = find_model(name), EngineConfig().max_batch_tokens
    rest = 1 - 1 / tp
    assert 3 * chunk * model.hidden * 2 * rest / H100.usable_memory_bytes == pytest.approx(saved, rel=0.1)
    repeated = 2**17 * model.layers * 10 * model.hidden * 2 / H100.memory_rate
    whole = prefill_s(H100, model, GeneratorLayout(tp=tp, runnable=True), 2**17, 2**16) + repeated
    assert whole == pytest.approx(prefill, rel=0.01)
    assert repeated * rest / whole == pytest.approx(time, abs=0.006)
    summed = 2 * float(all_reduce_s(H100, chunk * model.hidden * 2, tp))
    assert gather_s(H100, model.layer_params * 2, tp) > 5 * summed  # whole weights, step by step


@pytest.mark.parametrize(
    ("name", "layout", "tokens", "prefill", "messages", "weights_gb", "cache_gb", "decode_ms"),
    [
        (MODEL, GeneratorLayout(runnable=True), 2**13, 0.209, 0, 16.1, 1.07, 10.8),
        (MODEL, GeneratorLayout(tp=8, runnable=True), 2**13, 0.056, 0.022, 2.0, 0.13, 10.7),
        (MODEL, GeneratorLayout(cp=8, runnable=True), 2**13, 0.028, 0.002, 16.1, 0.13, 11.0),
        (MODEL, GeneratorLayout(runnable=True), 2**15, 1.26, 0, 16.1, 4.29, 21.0),
        (MODEL, GeneratorLayout(tp=8, runnable=True), 2**15, 0.27, 0.08, 2.0, 0.54, 10.7),
        (MODEL, GeneratorLayout(cp=8, runnable=True), 2**15, 0.17, 0.01, 16.1, 0.54, 11.0),
        (MODEL, GeneratorLayout(runnable=True), 2**17, 11.9, 0, 16.1, 17.2, 62),
        (MODEL, GeneratorLayout(tp=8, runnable=True), 2**17, 1.94, 0.34, 2.0, 2.15, 10.7),
        (MODEL, GeneratorLayout(cp=8, runnable=True), 2**17, 1.51, 0.03, 16.1, 2.15, 14.4),
        ("Llama-3.1-70B", GeneratorLayout(tp=8, runnable=True), 2**17, 11.3, 1.7, 17.6, 5.4, 29.0),
        ("Llama-3.1-70B", GeneratorLayout(tp=16, runnable=True), 2**17, 7.2, 2.0, 9.0, 5.4, 28.7),
        ("Llama-3.1-70B", GeneratorLayout(tp=8, cp=2, runnable=True), 2**17, 6.0, 1.2, 17.6, 5.4, 31.5),
        ("Llama-3.1-70B", GeneratorLayout(tp=4, cp=4, runnable=True), 2**17, 5.3, 0.6, 35.3, 5.4, 37.4),
    ],
)
def test_where_a_long_prompt_is_filled_fastest(
    name: str, layout: GeneratorLayout, tokens: int, prefill: float, messages: float, weights_gb: float, cache_gb: float,
    decode_ms: float,
) -> None:  # fmt: skip
    """The other tables of that page: two norms and two sums a layer, ten reads and writes, of all tokens unless ``cp`` cuts them."""
    model = find_model(name)
    repeated = tokens * model.layers * 10 * model.hidden * 2 / H100.memory_rate / layout.cp
    whole = prefill_s(H100, model, layout, tokens, tokens / 2)
    assert whole + repeated == pytest.approx(prefill, rel=0.03)
    between = whole - prefill_s(H100, model, GeneratorLayout(runnable=True), tokens, tokens / 2) / layout.devices
    assert between == pytest.approx(messages, abs=0.006, rel=0.05)
    assert weight_bytes(H100, model, layout) / 1e9 == pytest.approx(weights_gb, rel=0.01)
    assert tokens * model.kv_bytes_per_token(2) / min(layout.devices, 8) / 1e9 == pytest.approx(cache_gb, rel=0.04)
    assert float(decode_step_s(H100, model, layout, 8, tokens)) * 1e3 == pytest.approx(decode_ms, rel=0.02)


def test_ranks_that_share_tokens_exchange_each_query_key_value_and_output_once() -> None:
    """A key-value head a rank where they are fewer than ranks: of 32 query and 8 key-value heads over 16 ranks, 16."""
    model = find_model(MODEL)
    for cp, kv_heads in ((8, 8), (16, 16)):
        layout = GeneratorLayout(cp=cp, runnable=True)
        own = LONG / cp
        before, after = (own * heads * 128 * 2 for heads in (32 + 2 * kv_heads, 32))
        expected = 32 * (exchange_s(H100, before, cp) + exchange_s(H100, after, cp))
        alone = GeneratorLayout(runnable=True)
        computed = prefill_s(H100, model, alone, LONG, LONG / 2) / cp
        assert prefill_s(H100, model, layout, LONG, LONG / 2) - computed == pytest.approx(expected, rel=1e-6)
