"""Experts over ranks that share data (``trainer.ep``): what they cost and save, by hand; real ranks: benchmarks/memory_forecast.py."""

from __future__ import annotations

import dataclasses

import pytest

from llamarl.planner.choices import Options, Workload, trainer_choices
from llamarl.planner.hardware import find_hardware
from llamarl.planner.lengths import constant
from llamarl.planner.model_spec import find_model, spec_from_config
from llamarl.planner.plan_report import report_text
from llamarl.planner.recipe import plan_settings
from llamarl.planner.rooflines import exchange_s, expert_parallel_sizes
from llamarl.planner.search import best_separate
from llamarl.planner.stage_memory import stages_of
from llamarl.planner.training import (
    TrainerDemand,
    TrainerLayout,
    expert_copies,
    routed_rows,
    trainer_memory,
    trainer_tick,
)

H100 = find_hardware("h100")
SMALL = spec_from_config(
    {
        "model_type": "qwen3_moe", "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "vocab_size": 100, "tie_word_embeddings": False,
    },
    "small",
)  # fmt: skip
EXPERT = 3 * 16 * 8
DEMAND = TrainerDemand(lengths=constant(512), prompt_tokens=512, sequences=64)


def test_a_token_travels_once_to_each_rank_that_has_one_of_its_experts() -> None:
    """Of 4 experts 2 are chosen: 6 pairs. Of two ranks with two each, 5 pairs touch the first; of four with one each, 3 do."""
    assert expert_copies(SMALL, TrainerLayout(fsdp=2, ep=2)) == pytest.approx(2 * 5 / 6)
    assert expert_copies(SMALL, TrainerLayout(fsdp=4, ep=4)) == pytest.approx(4 * 3 / 6)
    assert expert_copies(SMALL, TrainerLayout(fsdp=2, tp=2, ep=2)) == pytest.approx(2 * 3 / 6)
    assert routed_rows(SMALL, TrainerLayout(fsdp=4, ep=4)) == pytest.approx(2 * 2)  # each with both of its choices
    assert routed_rows(SMALL, TrainerLayout(fsdp=4)) == 2


def test_sizes_divide_the_ranks_and_leave_each_whole_experts() -> None:
    assert expert_parallel_sizes(SMALL, 1, 8) == [1, 2, 4]
    assert expert_parallel_sizes(SMALL, 2, 8) == [1, 2] and expert_parallel_sizes(SMALL, 1, 6) == [1, 2]
    assert expert_parallel_sizes(find_model("Llama-3.1-8B"), 1, 8) == [1]


def test_of_fewer_experts_than_ranks_some_ranks_hold_one_and_others_none() -> None:
    (stage,) = stages_of(3, 1, 1)
    rest = SMALL.total_params - 3 * 4 * EXPERT
    assert SMALL.routed_params == 3 * 4 * EXPERT
    for ep in (1, 2, 4):  # four experts a layer over 8 ranks, however they are spread
        assert stage.sharded_params(SMALL, tp=1, shards=8, ep=ep) == pytest.approx(rest / 8 + 3 * EXPERT)
        assert stage.sharded_params(SMALL, tp=1, shards=4, ep=ep) == pytest.approx(rest / 4 + 3 * EXPERT)
    assert stage.sharded_params(SMALL, tp=1, shards=2, ep=2) == pytest.approx(rest / 2 + 3 * 2 * EXPERT)


def test_spread_experts_are_not_gathered_and_their_tokens_are_kept() -> None:
    model = find_model("Qwen3-30B-A3B")
    shape = TrainerLayout(fsdp=8, micro_batch=1, recompute=True, runnable=True)
    long = dataclasses.replace(DEMAND, lengths=constant(7680))  # so that a layer's backward pass is the fullest moment
    whole, spread = (trainer_memory(H100, model, dataclasses.replace(shape, ep=ep), long) for ep in (1, 8))
    routed = model.routed_params / model.layers
    assert whole["gathered_layers"] - spread["gathered_layers"] == pytest.approx(2 * 2 * routed * 7 / 8)
    for name in ("parameters", "gradients", "optimizer"):
        assert whole[name] == spread[name]
    copies = expert_copies(model, dataclasses.replace(shape, ep=8))
    row = (2 * 2048 + 4 * 768 + 1) * 2 + 16  # bytes: what goes in and out, the gate's products
    way = 2 * (2048 + 2 * 768)
    grown = 8192 * 8 * (copies - 1) * (row + way) - routed * 2 * 7 / 8  # less gradients of a layer on their way
    assert spread["activations"] - whole["activations"] == pytest.approx(grown)


def test_two_exchanges_a_layer_and_pass() -> None:
    model = find_model("Qwen3-30B-A3B")
    shape = TrainerLayout(fsdp=8, ep=4, micro_batch=2, recompute=False, runnable=True)
    apart = trainer_tick(H100, model, dataclasses.replace(shape, ep=1), DEMAND)
    spread = trainer_tick(H100, model, shape, DEMAND)
    sent = 2 * 1024 * expert_copies(model, shape) * (2048 + 8) * 2
    own = 2 * exchange_s(H100, sent, 4)
    assert apart.tensor_parallel_s == 0
    assert spread.tensor_parallel_s == pytest.approx(4 * 2 * 48 * own)  # micro-batches, both passes, layers
    assert spread.fsdp_s <= apart.fsdp_s and spread.compute_s <= apart.compute_s


def test_the_search_spreads_experts_where_that_helps_and_the_recipe_says_so() -> None:
    model = find_model("Qwen3-30B-A3B")
    work = Workload(model=model, response=constant(512), prompts_per_step=32, group_size=8)
    found = list(trainer_choices(H100, work, Options(), 8, memory_limit=H100.usable_memory_bytes))
    assert {choice.layout.ep for choice in found} >= {1, 8}
    for choice in found:
        assert choice.layout.shards % choice.layout.ep == 0 and 128 % choice.layout.expert_ranks == 0
    plan = best_separate(H100, work, Options(partial_rollouts=False), 16, 1)
    best = dataclasses.replace(plan, trainer=next(choice for choice in found if choice.layout.ep == 8))
    assert plan_settings(best, "a folder", H100, 1.0)["trainer"]["ep"] == 8
    assert "ep8" in report_text([best], best, work, H100)
    dense = dataclasses.replace(work, model=find_model("Llama-3.1-8B"))
    chosen = trainer_choices(H100, dense, Options(), 8, memory_limit=H100.usable_memory_bytes)
    assert {choice.layout.ep for choice in chosen} == {1}
