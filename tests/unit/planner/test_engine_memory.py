"""What the planner says that a generator rank holds, by hand; against real ranks: benchmarks/generator_memory.py."""

from __future__ import annotations

import dataclasses

import pytest

from llamarl.planner.engine_memory import step_bytes
from llamarl.planner.generation import weight_bytes
from llamarl.planner.hardware import Hardware, find_hardware
from llamarl.planner.model_spec import ModelSpec, spec_from_config
from llamarl.planner.rooflines import GeneratorLayout

H, MLP, V, LAYERS = 256, 704, 4096, 8
LAYER = 2 * H * 256 + 2 * H * 128 + 3 * H * MLP + 2 * H  # q and o, k and v of four heads of 32, MLP, norms
ENDS = V * H


@pytest.fixture
def model() -> ModelSpec:
    config = {
        "model_type": "llama", "hidden_size": H, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "vocab_size": V, "tie_word_embeddings": False,
    }  # fmt: skip
    return spec_from_config(config, "small")


@pytest.fixture
def hardware() -> Hardware:
    return find_hardware("h100-sxm")  # bfloat16: nothing is derived from weights of that precision


@pytest.mark.parametrize(
    ("pp", "weights"),
    [
        (1, LAYERS * LAYER + 2 * ENDS),
        (2, 4 * LAYER + ENDS),
        (3, 3 * LAYER + ENDS),  # layers 3, 3, 2: the first stage has the embedding too
        (4, 2 * LAYER + ENDS),
    ],
)
def test_the_fullest_stage_has_its_layers_and_one_end(
    model: ModelSpec, hardware: Hardware, pp: int, weights: int
) -> None:
    layout = GeneratorLayout(pp=pp, precision="bf16", runnable=True)
    assert weight_bytes(hardware, model, layout) == pytest.approx(2 * weights, rel=1e-3)  # the last norm
    halves = dataclasses.replace(layout, tp=2)
    assert weight_bytes(hardware, model, halves) == pytest.approx(weights, rel=1e-3)


def test_a_steps_buffers_are_those_of_the_moment_that_needs_most(model: ModelSpec, hardware: Hardware) -> None:
    layout = GeneratorLayout(tp=2, precision="bf16", runnable=True)
    of = {"active": 64.0, "prompt_tokens": 1e6, "cache_bytes": 0.0}
    assert step_bytes(hardware, model, layout, **of) == 2048 * 2 * (4 * H + 2 * 32 + 4 * MLP / 2)
    few = {**of, "prompt_tokens": 0.0}
    assert step_bytes(hardware, model, layout, **few) == 64 * 2 * H + 8 * 64 * V / 2  # its draws
    full = {**few, "cache_bytes": 8e8}
    assert step_bytes(hardware, model, layout, **full) == pytest.approx(1.1 * 8e8 / LAYERS, rel=0.01)
    in_stages = dataclasses.replace(layout, pp=2)  # half the layers, and half of the sequences at a time
    assert step_bytes(hardware, model, in_stages, **full) == pytest.approx(1.1 * 8e8 / LAYERS, rel=0.01)


def test_a_long_prompts_attention_has_its_keys_and_values_and_a_mask(model: ModelSpec, hardware: Hardware) -> None:
    of = {"active": 1.0, "prompt_tokens": 131072.0, "cache_bytes": 0.0}
    alone = GeneratorLayout(precision="bf16", runnable=True)
    past = 131072 * 2 * (2 * 4 * 32 + 2 * 8 * 32)  # four heads of 32, then repeated for eight
    rows = 2048 * 2 * (2 * H + 2 * 8 * 32 + 2 * 4 * 32)
    assert step_bytes(hardware, model, alone, longest=131072, **of) == past + 3 * 2**25 + rows
    halves = dataclasses.replace(alone, cp=2)  # of the heads, and of the rows outside attention
    assert step_bytes(hardware, model, halves, longest=131072, **of) == past / 2 + 3 * 2**25 + rows / 2
    assert step_bytes(hardware, model, alone, longest=2048, **of) == step_bytes(hardware, model, alone, **of)
