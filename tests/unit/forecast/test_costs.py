"""Rooflines against hand-worked numbers, and consistency with published measurements (docs/forecast.md: not blind forecasts)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarl.engine.cuda_graphs import why_layout_unsupported
from llamarl.forecast.costs import (
    GeneratorLayout,
    all_reduce_s,
    captured_layer_s,
    decode_step_s,
    exchange_s,
    gather_s,
    is_captured,
    matmul_s,
    weight_sync_s,
)
from llamarl.forecast.hardware import Hardware, device_names, find_hardware, this_machine
from llamarl.forecast.lengths import Lengths, constant, lognormal
from llamarl.forecast.memory import generator_memory, trainer_memory
from llamarl.forecast.model import ModelSpec, find_model, spec_from_config
from llamarl.forecast.ticks import (
    GeneratorDemand,
    Profile,
    TrainerDemand,
    TrainerLayout,
    generator_tick_s,
    profile_of,
    trainer_tick,
)

IDEAL = dict(
    matmul=1.0, memory=1.0, attention=1.0, link=1.0, intra_node_latency_s=0.0, inter_node_latency_s=0.0,
    collective_launch_s=0.0, fused_layer_overhead_s=0.0, kernel_gap_s=0.0, hand_over_passes=0.0,
    eager_layer_overhead_s=0.0, decode_step_overhead_s=0.0, train_layer_overhead_s=0.0,
    train_step_overhead_s=0.0, tile_rows=1, tile_columns=1, compute_units=1,
)  # fmt: skip


def ideal(name: str = "h100-sxm") -> Hardware:
    return find_hardware(name).with_efficiency(**IDEAL)


def test_decode_of_one_sequence_reads_every_weight_and_its_cache_once() -> None:
    model, hardware = find_model("Llama-3.1-8B"), ideal()
    norms = (2 * 32 + 1) * 4096
    weights = 2.0 * (model.total_params - model.vocab * model.hidden - norms)  # the look-up table is not read
    expected = (weights + 1000 * 131072) / 3.35e12
    assert float(decode_step_s(hardware, model, GeneratorLayout(), 1, 1000)) == pytest.approx(expected, rel=1e-9)


def test_decode_of_many_sequences_is_bound_by_arithmetic() -> None:
    model, hardware = find_model("Llama-3.1-8B"), ideal()
    flops = 2.0 * model.active_params * 4096
    expected = flops / 989.4e12
    assert float(decode_step_s(hardware, model, GeneratorLayout(), 4096, 0)) == pytest.approx(expected, rel=1e-3)


def test_more_ranks_than_cache_heads_hold_copies_of_the_cache() -> None:
    model, hardware = find_model("Llama-3.1-405B"), find_hardware("h100")
    demand = GeneratorDemand(
        lengths=constant(1000), prompt_tokens=24, group_size=1, sequences=64, total_sequences=64, slots=64
    )
    held = [generator_memory(hardware, model, GeneratorLayout(tp), demand)["kv_cache"] for tp in (8, 16, 64)]
    assert held[0] == held[1] == held[2] == 64 * 1024 * model.kv_bytes_per_token() / 8


def test_a_sparse_layer_reads_the_experts_that_tokens_chose() -> None:
    model, hardware = find_model("Mixtral-8x7B"), ideal()
    step = [float(decode_step_s(hardware, model, GeneratorLayout(), n, 0)) for n in (1, 2)]
    expert_bytes = 2.0 * 32 * 3 * 4096 * 14336
    # Two of eight experts for one token; 8 (1 - (6/8)^2) = 3.5 for two.
    assert (step[1] - step[0]) * 3.35e12 == pytest.approx(1.5 * expert_bytes, rel=1e-9)


def test_collectives_by_hand() -> None:
    hardware = ideal()
    assert all_reduce_s(hardware, 8e9, 8) == pytest.approx(2 * 8e9 * 7 / 8 / 450e9)
    assert all_reduce_s(hardware, 8e9, 16) == pytest.approx(2 * 8e9 * 15 / 16 / 400e9)  # eight cards of 50 GB/s a node
    assert gather_s(hardware, 8e9, 16, stride=8) == pytest.approx(8e9 * 15 / 16 / 50e9)  # one member, one card a node
    latency = hardware.with_efficiency(intra_node_latency_s=1.0, inter_node_latency_s=10.0)
    assert all_reduce_s(latency, 0.0, 32) == pytest.approx(2 * (3 * 1.0 + 2 * 10.0))  # 8 in a node, 4 nodes: a tree
    assert gather_s(latency, 0.0, 16) == pytest.approx(14 * 1.0 + 2 * 10.0)  # a ring


def test_what_leaves_a_node_in_an_exchange_goes_over_a_ranks_own_card() -> None:
    hardware = ideal()
    assert exchange_s(hardware, 8e9, 8) == pytest.approx(8e9 * 7 / 8 / 450e9)
    # Of 16 shares 7 stay in the node; 8 leave it, as those of its seven neighbours do, over eight cards.
    assert exchange_s(hardware, 16e9, 16) == pytest.approx(7e9 / 450e9 + 8e9 / 50e9)
    assert exchange_s(hardware, 4e9, 4, stride=8) == pytest.approx(3e9 / 50e9)


def test_a_product_cut_thin_leaves_units_idle() -> None:
    h100 = find_hardware("h100").with_efficiency(matmul=1.0)
    hardware = replace(h100, device=replace(h100.device, memory_bytes_per_s=1e30))  # arithmetic alone
    full = matmul_s(hardware, 128 * 132, 512, 128)
    assert full == pytest.approx(2 * 128 * 132 * 512 * 128 / 989.4e12)  # exactly one wave of 132 tiles
    one_more = matmul_s(hardware, 128 * 133, 512, 128)
    assert one_more == pytest.approx(2 * full)  # a second wave for one tile


def test_hand_over_takes_the_busiest_link() -> None:
    hardware, model = ideal(), find_model("Llama-3.1-405B")
    pulled = weight_sync_s(hardware, model, trainer_devices=512, replicas=[(1, GeneratorLayout(8))])
    assert pulled == pytest.approx(model.total_params * 2 / 8 / 50e9)
    sent = weight_sync_s(hardware, model, trainer_devices=64, replicas=[(64, GeneratorLayout(8, "fp8"))])
    assert sent == pytest.approx(
        model.total_params * 2 / 50e9
    )  # 64 copies from 64 ranks, in bf16 whatever the precision
    one_node = weight_sync_s(hardware, model, trainer_devices=4, replicas=[(1, GeneratorLayout(4))])
    assert one_node == pytest.approx(model.total_params * 2 / 4 / 450e9)


def test_training_costs_six_flops_a_parameter_and_token() -> None:
    model = find_model("Llama-3.1-70B")
    hardware = replace(ideal(), device=replace(ideal().device, memory_bytes_per_s=1e30))  # arithmetic alone
    demand = TrainerDemand(lengths=constant(2), prompt_tokens=1, sequences=1024)
    for recompute, flops in ((False, 6), (True, 8)):
        time = trainer_tick(hardware, model, TrainerLayout(micro_batch=1024, recompute=recompute), demand)
        layers = (model.active_params - model.head_params) * 3
        logits = 8 * model.head_params * 2  # of more than one chunk, made twice; the prompt has none
        assert time.total_s == pytest.approx((flops * layers + logits) * 1024 / 989.4e12, rel=1e-3)
    one_chunk = replace(demand, sequences=256)
    time = trainer_tick(hardware, model, TrainerLayout(micro_batch=256, recompute=False), one_chunk)
    assert time.total_s == pytest.approx(6 * (layers + 2 * model.head_params) * 256 / 989.4e12, rel=1e-3)


def test_training_state_is_16_bytes_a_parameter_and_sharded() -> None:
    model, hardware = find_model("Llama-3.1-8B"), find_hardware("h100")
    demand = TrainerDemand(lengths=constant(100), prompt_tokens=28, sequences=64)
    for layout in (TrainerLayout(), TrainerLayout(tp=2, fsdp=4, dp=2)):
        memory = trainer_memory(hardware, model, layout, demand)
        state = memory["parameters"] + memory["gradients"] + memory["optimizer"]
        assert state == pytest.approx(16 * model.total_params / (layout.tp * layout.fsdp))


def test_a_deeper_pipeline_has_the_bubble_of_its_schedule() -> None:
    model, hardware = find_model("Llama-3.1-405B"), ideal()
    demand = TrainerDemand(lengths=constant(1000), prompt_tokens=24, sequences=128)
    own = trainer_tick(hardware, model, TrainerLayout(tp=8, pp=16, fsdp=1, dp=4, micro_batch=1), demand)
    # One stage a rank: 14 of 8 layers, which set the pace, and two of 7, the last of them with the whole output layer.
    layer = (own.compute_s + own.exchanges_s) / 32 / 8
    head = 4 * (matmul_s(hardware, 1000, 16384, 128256 / 8) + 1000 * 128256 / 8 * 8 / hardware.memory_rate)
    hops = 2 * 32 * 1024 * 16384 * 2 / 50e9  # there and back, one network card
    assert 0 < head < layer
    assert own.bubble_s == pytest.approx((13 * 8 + 2 * 7) * layer + head + hops)


# Published runs, none of them used to set a constant.


def _without_bubble_s(hardware: Hardware, model: ModelSpec, layout: TrainerLayout, demand: TrainerDemand) -> float:
    time = trainer_tick(hardware, model, layout, demand)
    return time.total_s - time.bubble_s * 3 / 4  # four virtual stages a rank


def _llama2_7b() -> ModelSpec:
    shape = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    return spec_from_config({**shape, "vocab_size": 32000, "model_type": "llama"}, "Llama-2-7B")


def test_llama3_405b_pretraining_mfu_is_forecast_within_15_percent() -> None:
    """arXiv:2407.21783, table 4: 8,192 H100, tp 8, pp 16, dp 64, sequence 8,192, 16 M tokens a batch: 43% MFU; 41% on 16,384."""
    model, hardware = find_model("Llama-3.1-405B"), find_hardware("h100")
    for copies, published in ((64, 0.43), (128, 0.41)):  # theirs is interleaved, ours is not: the bubble apart
        demand = TrainerDemand(lengths=constant(8191), prompt_tokens=1, sequences=2048)
        layout = TrainerLayout(tp=8, pp=16, fsdp=1, dp=copies, micro_batch=1, recompute=False)
        flops = (6.0 * model.active_params * 8192 + 3.0 * model.layers * model.attention_flops(8192 / 2) * 8192) * 2048
        mfu = flops / _without_bubble_s(hardware, model, layout, demand) / layout.devices / 989.4e12
        assert mfu == pytest.approx(published, rel=0.15)


def test_llama2_7b_decoding_on_a100_is_forecast_within_20_percent() -> None:
    """gpt-fast's README: 104.9 tokens/s in bf16 on one A100 80 GB, batch 1, captured graphs."""
    other = GeneratorLayout(other_system=True)
    step = float(decode_step_s(find_hardware("a100"), _llama2_7b(), other, 1, 200))
    assert 1 / step == pytest.approx(104.9, rel=0.20)


def _whole(lengths: Lengths, count: int, slots: int) -> Profile:
    return profile_of(
        GeneratorDemand(
            lengths=lengths, prompt_tokens=1, group_size=1, sequences=count, total_sequences=count, slots=slots
        )
    )


def test_constant_lengths_decode_in_whole_waves() -> None:
    profile = _whole(constant(10), 5, 2)
    assert (profile.steps.sum(), profile.peak_written) == (30, 20)
    assert profile.active.tolist() == [2, 2, 1]
    assert profile.written.tolist() == [4.5, 4.5, 4.5]  # the mean of 0 .. 9 tokens written before a step


def test_partial_rollouts_keep_slots_full_and_never_pay_for_the_longest() -> None:
    hardware, model = find_hardware("h100"), find_model("Llama-3.1-8B")
    whole = GeneratorDemand(
        lengths=lognormal(500, 1.0, 8000), prompt_tokens=100, group_size=8, sequences=64, total_sequences=1024, slots=64
    )
    partial = replace(whole, max_segments=8, oversubscription=1.5)
    assert generator_tick_s(hardware, model, GeneratorLayout(), partial) < 0.5 * generator_tick_s(
        hardware, model, GeneratorLayout(), whole
    )
    # Without groups to spare, the batch still waits for its longest response.
    none_to_spare = replace(partial, oversubscription=1.0)
    assert generator_tick_s(hardware, model, GeneratorLayout(), none_to_spare) > 0.9 * generator_tick_s(
        hardware, model, GeneratorLayout(), whole
    )


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_decode_steps_are_replayed_where_the_engine_records_them(tp: int) -> None:
    hardware, model = find_hardware("h100"), find_model("Llama-3.1-8B")
    layout = GeneratorLayout(tp)
    why = why_layout_unsupported("auto", device="cuda", num_ranks=tp)
    assert is_captured(hardware, model, layout) == (why is None)
    launched = model.layers * hardware.efficiency.eager_layer_overhead_s  # however little the device has to do
    assert (float(decode_step_s(hardware, model, layout, 1, 100)) > launched) == (why is not None)
    assert is_captured(hardware, model, replace(layout, other_system=True))
    assert is_captured(this_machine(), model, layout)  # a core launches what it computes, and all of it adds up


def test_a_layer_of_the_engine_costs_its_kernels_and_reads_its_cache_once() -> None:
    """14 kernels, counted in test_compiled_layers.py, and 57 with fp8, 3 us each; other systems fuse."""
    hardware, llama = find_hardware("h100"), find_model("Llama-3.1-8B")
    own, other = GeneratorLayout(), GeneratorLayout(other_system=True)
    assert captured_layer_s(hardware, own) == pytest.approx(14 * 3e-6)
    assert captured_layer_s(hardware, replace(own, precision="fp8")) == pytest.approx(57 * 3e-6)
    assert captured_layer_s(hardware, other) == pytest.approx(12e-6)
    long = [float(decode_step_s(hardware, llama, layout, 256, 4000) - decode_step_s(hardware, llama, layout, 256, 2000))
            for layout in (own, other)]  # fmt: skip
    assert long == pytest.approx(2 * [256 * 2000 * 32 * 2 * 8 * 128 * 2 / (3.35e12 * 0.75)])


# What an H200 measured (docs/results/gpu.md). Of these forecasts the trainer's alone is blind: the time of a kernel and the passes of
# a hand-over are set by the others.


def _measured(**wanted: Any) -> dict[str, Any]:
    """The latest row of the raw results that is so."""
    text = (Path(__file__).parents[3] / "docs" / "results" / "gpu.json").read_text(encoding="utf-8")
    *_, last = (row for row in json.loads(text)["rows"] if all(row.get(key) == wanted[key] for key in wanted))
    return last  # type: ignore[no-any-return]


def _shape(name: str) -> ModelSpec:
    if name == "8b":
        return find_model("Llama-3.1-8B")
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 151936}
    return spec_from_config({"model_type": "qwen2", "tie_word_embeddings": True, **sizes}, "Qwen2.5-1.5B")


@pytest.mark.parametrize(
    ("shape", "way", "rows", "off"),
    [("1.5b", "auto", 8, 0.10), ("1.5b", "auto", 64, -0.09), ("8b", "auto", 64, 0.02), ("8b", "fp8", 64, -0.16)],
)
def test_decode_steps_of_an_h200_are_forecast_within_17_percent(shape: str, way: str, rows: int, off: float) -> None:
    step_s = _measured(what="decode", shape=shape, way=way, rows=rows, context=1024)["step_ms"] / 1e3
    layout = GeneratorLayout(precision="bf16" if way == "auto" else way)
    forecast_s = float(decode_step_s(find_hardware("h200"), _shape(shape), layout, rows, 1024))
    assert forecast_s / step_s - 1.0 == pytest.approx(off, abs=0.01)


def test_kernels_of_a_layer_are_those_that_a_card_counted() -> None:
    plain, fp8 = (_measured(what="decode", shape="8b", way=way, rows=64)["kernels"] for way in ("auto", "fp8"))
    small = _measured(what="decode", shape="1.5b", way="auto", rows=64)["kernels"]
    assert (plain - small) / (32 - 28) == pytest.approx(14, abs=0.5)
    assert (fp8 - plain) / 32 == pytest.approx(57 - 14, abs=0.5)


def test_fp8_is_not_forecast_to_be_faster_where_it_was_slower() -> None:
    hardware, model = find_hardware("h200"), _shape("8b")
    plain, fp8 = (
        float(decode_step_s(hardware, model, GeneratorLayout(precision=p), 64, 1024)) for p in ("bf16", "fp8")
    )
    assert fp8 > 1.2 * plain


def test_a_training_step_of_an_h200_is_forecast_a_quarter_too_short() -> None:
    row = _measured(what="train", shape="1.5b", way="auto")
    mean = row["tokens"] / 64
    demand = TrainerDemand(lengths=constant(round(mean - 256)), prompt_tokens=256, sequences=64, group_size=8)
    layout = TrainerLayout(micro_batch=round(16384 / mean), recompute=False)
    forecast_s = trainer_tick(find_hardware("h200"), _shape("1.5b"), layout, demand).total_s
    assert forecast_s / row["step_s"] - 1.0 == pytest.approx(-0.25, abs=0.01)


def test_a_hand_over_on_an_h200_is_forecast_within_14_percent() -> None:
    row = _measured(what="hand_over", shape="1.5b")
    own = [(1, GeneratorLayout())]
    forecast_s = weight_sync_s(find_hardware("h200"), _shape("1.5b"), trainer_devices=1, replicas=own)
    assert forecast_s == pytest.approx(row["publish_s"] + row["load_s"], rel=0.14)


def test_a_table_of_devices_says_where_each_number_is_from() -> None:
    told = {"memory_bytes", "memory_bytes_per_s", "matmul_flops", "devices_per_node", "intra_node_bytes_per_s"}
    for name in device_names():
        device = find_hardware(name).device
        assert told | {"inter_node_bytes_per_s", "host_bytes_per_s"} <= device.sources.keys(), name
        assert {"bf16", "fp32"} & device.matmul_flops.keys() and set(
            device.weight_precisions
        ) <= device.matmul_flops.keys()
    by_hand = {  # memory in GB, TB/s, dense bf16 TFLOPS, devices of a node
        "a100-40gb": (40, 1.555, 312, 8), "h100-pcie": (80, 2.0, 756, 8), "h100-nvl": (94, 3.9, 835.5, 8),
        "b300": (270, 7.7, 2250, 8), "gb200": (186, 8.0, 2500, 72), "gb300": (279, 8.0, 2500, 72),
        "l40s": (48, 0.864, 362.05, 8), "4090": (24, 1.008, 165.2, 8), "5090": (32, 1.792, 209.5, 8),
        "mi325x": (256, 6.0, 1307.4, 8), "mi355x": (288, 8.0, 2516.6, 8),
    }  # fmt: skip
    for name, (gigabytes, terabytes_per_s, teraflops, devices) in by_hand.items():
        device = find_hardware(name).device
        assert (device.memory_bytes, device.memory_bytes_per_s) == pytest.approx(
            (gigabytes * 1e9, terabytes_per_s * 1e12)
        )
        assert (device.matmul_flops["bf16"], device.devices_per_node) == (pytest.approx(teraflops * 1e12), devices)


def test_fp8_is_planned_on_no_card_of_amds() -> None:
    assert all(
        find_hardware(name).device.weight_precisions == ["bf16"] for name in device_names() if name.startswith("mi")
    )
