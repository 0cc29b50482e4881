"""128k tokens: what a forecast says fits, against the bytes that the trainer's own layers keep on tensors without storage."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from llamarl.forecast import memory as forecast_memory
from llamarl.forecast.costs import GeneratorLayout, exchange_s
from llamarl.forecast.hardware import find_hardware, this_machine
from llamarl.forecast.lengths import constant, lognormal
from llamarl.forecast.memory import MARGIN, fits, generator_memory, kept_bytes, trainer_memory
from llamarl.forecast.model import find_model
from llamarl.forecast.search import Options, Workload, trainer_choices
from llamarl.forecast.ticks import GeneratorDemand, TrainerDemand, TrainerLayout, trainer_tick
from llamarl.models import attention
from llamarl.models.attention import PackedSequences, attending
from llamarl.models.parallel import apply_tensor_parallel, make_layout
from llamarl.trainer.context_parallel import CONTEXT_ATTENTION, ContextRanks, RowOverRanks

H100 = find_hardware("h100")
SHAPES = json.loads(Path(forecast_memory.__file__).with_name("models.json").read_text())
PROMPT, RESPONSE = 1024, 130_048
LONG = PROMPT + RESPONSE
"""128k."""
MODEL = "Llama-3.1-8B"
WORK = Workload(
    model=find_model(MODEL), response=constant(RESPONSE), prompts_per_step=16, group_size=4, prompt_tokens=PROMPT
)
DEMAND = TrainerDemand(lengths=WORK.response, prompt_tokens=PROMPT, sequences=WORK.sequences, group_size=4)


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

    def count(name: str, tokens: int, *, cp: int = 1, tp: int = 1) -> float:
        dist.init_process_group("fake", rank=0, world_size=cp * tp, store=FakeStore())
        layout = make_layout(fsdp=1, tp=tp, cp=cp, device="cpu")
        config = AutoConfig.for_model(**{**SHAPES[name], "num_hidden_layers": 2, "layer_types": None})
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
            packed, ranks = PackedSequences.of([0, tokens]), ContextRanks.of(layout)
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
    layout = TrainerLayout(tp=tp, cp=cp)
    forecast = kept_bytes(find_model(name), layout, 2.0) * tokens / cp
    assert counted(name, tokens, cp=cp, tp=tp) == pytest.approx(forecast, rel=0.05)


def test_128k_tokens_fit_where_the_plan_cuts_rows_and_not_elsewhere(counted: Callable[..., float]) -> None:
    limit = H100.usable_memory_bytes / (1 + MARGIN)
    cut = [choice.layout for choice in trainer_choices(H100, WORK, Options(), 8) if choice.layout.tp == 1]
    assert {layout.cp for layout in cut} == {2}  # as few as hold a row
    for layout in (TrainerLayout(fsdp=8), cut[0]):
        memory = trainer_memory(H100, WORK.model, layout, DEMAND)
        assert fits(memory, H100.usable_memory_bytes) == (layout.cp > 1)
        # every layer's input, one layer recomputed, and what does not depend on tokens
        inputs = WORK.model.layers * LONG / layout.cp * WORK.model.hidden * 2
        others = sum(size for part, size in memory.items() if part != "activations")
        assert (others + inputs + counted(MODEL, LONG, cp=layout.cp) <= limit) == (layout.cp > 1)


def test_cut_rows_cost_exchanges_and_nothing_else_of_note() -> None:
    """Two exchanges a layer, and each of three passes with recomputation: q, out, k, v of every token once."""
    whole = trainer_tick(H100, WORK.model, TrainerLayout(fsdp=8), DEMAND)
    cut = trainer_tick(H100, WORK.model, TrainerLayout(fsdp=2, cp=4), DEMAND)
    values = LONG / 4 * 2 * (4096 + 8 * 128) * 2
    own = exchange_s(H100, values, 4)
    assert cut.exchanges_s == pytest.approx(32 * 3 * 32 * own) and whole.exchanges_s == 0
    assert cut.compute_s == pytest.approx(whole.compute_s, rel=0.01)


def test_a_plan_fits_with_a_tenth_to_spare_and_not_without() -> None:
    parts = {"weights": 60.0, "kv_cache": 30.0}
    assert fits(parts, 99.1) and not fits(parts, 98.9)


def test_a_replica_holds_the_version_its_codes_and_the_caches_peak_by_hand() -> None:
    model = find_model("Llama-3.1-8B")
    demand = GeneratorDemand(
        lengths=constant(1000), prompt_tokens=24, group_size=4, sequences=8, total_sequences=8, slots=8
    )
    bf16, fp8 = (generator_memory(H100, model, GeneratorLayout(1, precision), demand) for precision in ("bf16", "fp8"))
    assert bf16["weights"] == 2 * model.total_params
    ends = model.vocab * model.hidden  # the embedding has no codes
    assert fp8["weights"] == 2 * model.total_params + model.total_params - ends
    assert bf16["kv_cache"] == pytest.approx((8 * 1000 + 2 * 24) * model.kv_bytes_per_token())  # two groups' prompts
    assert bf16["workspace"] >= 8.0 * 8 * model.vocab  # logits and probabilities of eight draws


def test_more_micro_batches_at_once_hold_activations_and_gradients_of_each() -> None:
    model, hardware = find_model("SmolLM2-135M"), this_machine()
    demand = TrainerDemand(lengths=lognormal(100), prompt_tokens=20, sequences=64)
    one, two = (trainer_memory(hardware, model, TrainerLayout(at_once=n), demand) for n in (1, 2))
    assert two["activations"] == 2 * one["activations"] and two["gradients"] == 4 * one["gradients"]
    assert two["parameters"] == one["parameters"]


def test_muon_keeps_one_moment_of_what_lies_in_layers() -> None:
    layout = TrainerLayout(fsdp=8, micro_batch=1)
    both, one = (trainer_memory(H100, WORK.model, layout, dataclasses.replace(DEMAND, moment_bytes=m)) for m in (8, 4))
    assert {key: both[key] - one[key] for key in both if both[key] != one[key]} == {
        "optimizer": pytest.approx(4 * (WORK.model.total_params - WORK.model.embedding_params) / 8)
    }
