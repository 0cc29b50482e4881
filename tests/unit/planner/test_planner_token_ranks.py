"""Generators whose steps' tokens lie over ranks (``generator.cp``): every size tried, what runs, and where it wins."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from test_planner_as_run import plan
from transformers import AutoConfig

from llamarl.config import load_config
from llamarl.engine.token_ranks import why_tokens_not_cut
from llamarl.models.decoder import changes_with_length
from llamarl.planner.choices import Options, Workload, generator_choice, generator_choices
from llamarl.planner.every_rank import count_every_rank
from llamarl.planner.generation import GeneratorDemand, generator_memory
from llamarl.planner.hardware import find_hardware
from llamarl.planner.lengths import constant
from llamarl.planner.model_spec import find_config, find_model, spec_from_config
from llamarl.planner.over_hosts import place_roles
from llamarl.planner.rooflines import GeneratorLayout, tensor_parallel_sizes, token_parallel_sizes
from llamarl.planner.search import best_resharding, best_separate
from llamarl.weight_sync.model_layouts import model_parameters

H100 = find_hardware("h100")


def work(model: str, prompt: int, response: int, prompts: int) -> Workload:
    return Workload(
        model=find_model(model), response=constant(response), prompts_per_step=prompts, group_size=8, prompt_tokens=prompt
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "devices", "prompt", "response", "prompts", "wins"),
    [("Llama-3.1-8B", 8, 32_768, 16, 1, True), ("Llama-3.1-8B", 8, 32_768, 256, 4, False), ("Qwen3-30B-A3B", 8, 16_384, 16, 3, True), ("Qwen2.5-0.5B", 8, 16_384, 1, 4, True), ("Qwen2.5-0.5B", 6, 8192, 1, 4, False), ("Llama-3.1-8B", 8, 512, 512, 8, False)],
)  # fmt: skip
def test_no_generator_of_any_layout_is_faster_than_those_of_the_search(
    model: str, devices: int, prompt: int, response: int, prompts: int, wins: bool
) -> None:
    """Every tensor-parallel size, part of the tokens, number of replicas, precision and concurrency, tried."""
    asked, shape, limit = work(model, prompt, response, prompts), find_model(model), H100.usable_memory_bytes
    best: dict[bool, float] = {False: math.inf, True: math.inf}
    precisions = ("bf16", "fp8") if shape.quantized_by_llamarl else ("bf16",)
    for tp, cp in itertools.product(tensor_parallel_sizes(shape, devices), range(1, devices + 1)):
        heads = max(1, shape.kv_heads // tp)
        if tp * cp > devices or shape.heads % (tp * cp) or (heads % cp and cp % heads):
            continue
        for replicas, precision in itertools.product(range(1, prompts + 1), precisions):
            if replicas * tp * cp > devices or (cp > 1 and prompts % replicas):
                continue
            share = math.ceil(prompts / replicas) * 8
            for slots in range(1, share + 1):
                demand = GeneratorDemand(
                    lengths=asked.response, prompt_tokens=prompt, group_size=8, sequences=share, total_sequences=asked.sequences, slots=slots
                )  # fmt: skip
                layout = GeneratorLayout(tp, 1, precision, runnable=True, cp=cp)
                found = generator_choice(H100, shape, layout, demand, replicas)
                if sum(found.memory.values()) <= limit:
                    best[cp > 1] = min(best[cp > 1], found.time_s)
    searched = generator_choices(H100, asked, Options(), devices, memory_limit=limit, partial=False, any_number=True)
    fastest = min(searched, key=lambda choice: choice.time_s)
    assert fastest.time_s == pytest.approx(min(best.values()), rel=0.01)
    assert (best[True] < best[False]) == wins == (fastest.layout.cp > 1)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Llama-3.1-70B", "Qwen2.5-7B", "Qwen3-30B-A3B", "DeepSeek-V3"])
def test_sizes_are_those_that_the_engine_takes(name: str) -> None:
    shape, config = find_model(name), AutoConfig.for_model(**find_config(name)[1])
    for tp in tensor_parallel_sizes(shape, 8):
        taken = [cp for cp in (1, 2, 4, 8, 16, 32, 64) if tp * cp <= 64 and not why_tokens_not_cut(config, cp, tp=tp)]
        assert token_parallel_sizes(shape, tp, 64) == taken


@pytest.mark.parametrize("rope", [None, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}, {"rope_type": "dynamic", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}])  # fmt: skip
def test_frequencies_that_follow_the_length_cannot_be_cut(rope: dict[str, object] | None) -> None:
    file = {**find_config("Llama-3.2-1B")[1], "rope_scaling": rope}
    spec = spec_from_config(file, "a")
    assert spec.rotary_by_length == changes_with_length(AutoConfig.for_model(**file))
    assert token_parallel_sizes(spec, 1, 8) == ([1] if spec.rotary_by_length else [1, 2, 4, 8])


def test_a_plan_of_long_prompts_cuts_them_and_its_recipe_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = "--model Llama-3.1-8B --hardware h100 --devices 8 --prompts 1 --prompt-tokens 32768 --response-tokens 16"
    assert plan(f"{job} --group-size 16 --staleness 0 --system separate --recipe {tmp_path / 'out.toml'}") == 0
    said, written = capsys.readouterr().out, load_config(tmp_path / "out.toml").generator
    assert written.cp > 1 and f"tp{written.tp}·cp{written.cp}·dp{written.dp}" in said
    assert not written.replicas


def test_short_prompts_and_kinds_of_replicas_of_their_own_have_none() -> None:
    for found in (best_separate, best_resharding):
        args = (1,) if found is best_separate else ()
        assert found(H100, work("Llama-3.1-8B", 256, 1024, 32), Options(), 8, *args).generator.layout.cp == 1
    uneven = [
        choice.layout.cp
        for choice in generator_choices(
            H100, work("Llama-3.1-8B", 16_384, 16, 7), Options(), 8, memory_limit=7e10, partial=False, any_number=True
        )
        if not choice.is_even
    ]
    assert uneven and set(uneven) == {1}


def test_each_rank_holds_all_weights_and_its_heads_part_of_the_cache() -> None:
    shape = find_model("Llama-3.1-8B")
    demand = GeneratorDemand(
        lengths=constant(16), prompt_tokens=32_768, group_size=8, sequences=8, total_sequences=8, slots=8
    )
    one, four = (generator_memory(H100, shape, GeneratorLayout(runnable=True, cp=cp), demand) for cp in (1, 4))
    assert four["weights"] == one["weights"] and four["kv_cache"] == one["kv_cache"] / 4


def test_every_rank_of_such_a_generator_is_counted_and_placed() -> None:
    model = find_model("Llama-3.2-1B")
    asked = Workload(model=model, response=constant(200), prompts_per_step=16, group_size=4)
    found = best_separate(H100, asked, Options(partial_rollouts=False), 16, 1)
    layout = GeneratorLayout(2, 1, "bf16", runnable=True, cp=2)
    cut = replace(found, generator=replace(found.generator, layout=layout, replicas=2))
    counted = count_every_rank(model_parameters(find_config("Llama-3.2-1B")[1]), cut, model, H100)
    assert dict(counted.generator_mesh) == {"replica": 2, "pp": 1, "cp": 2, "tp": 2}
    assert len(counted.generator["received"]) == 8
    assert counted.whole_sums["generator"] == pytest.approx(counted.model_bytes)
    assert counted.generator["received"].max() == pytest.approx(counted.forecast["received"], rel=0.005)
    small = replace(cut, trainer=replace(cut.trainer, layout=replace(cut.trainer.layout, fsdp=8, dp=1, tp=1, cp=1)))
    assert place_roles(small, H100, ["a", "b"]) == {"generator": ["a"], "trainer": ["b"]}
