"""Memory of the trainer's stages, by hand for a small model; benchmarks/memory_forecast.py holds it against real ranks."""

from __future__ import annotations

import dataclasses

import pytest

from llamarl.planner.hardware import find_hardware
from llamarl.planner.lengths import constant
from llamarl.planner.model_spec import spec_from_config
from llamarl.planner.stage_memory import stages_of
from llamarl.planner.training import TrainerDemand, TrainerLayout, trainer_memory

SHAPE = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip
LAYER = 2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16 + 2 * 16
END = 100 * 16
KEPT = 4 * (2 * 3 * 16 + 3 * 16 + 2 * 8 + 4 * 24)
"""Bytes a token of a layer in float32: two norms, queries, attention's output twice, keys, values, four widths of the MLP."""
HARDWARE = find_hardware("h100")
CPU = dataclasses.replace(
    HARDWARE, device=dataclasses.replace(HARDWARE.device, weight_precisions=("fp32",), matmul_flops={"fp32": 1e12})
)


def memory(sequences: int = 8, **layout: object) -> dict[str, float]:
    demand = TrainerDemand(lengths=constant(6), prompt_tokens=4, sequences=sequences)
    shape = spec_from_config({**SHAPE, **layout.pop("shape", {})}, "small")  # type: ignore[dict-item]
    return trainer_memory(CPU, shape, TrainerLayout(runnable=True, **layout), demand)  # type: ignore[arg-type]


def test_the_last_stage_has_the_output_layer_and_the_first_the_embedding() -> None:
    model = spec_from_config(SHAPE, "small")
    assert model.layer_params == LAYER
    first, middle, last = stages_of(6, 3, 8)
    assert [stage.end_params(model) for stage in (first, middle, last)] == [END, 0, END]
    assert [stage.params(model, 1) - stage.end_params(model) for stage in (first, last)] == pytest.approx(
        [2 * LAYER + 16 / 3] * 2
    )
    tied = spec_from_config({**SHAPE, "tie_word_embeddings": True}, "small")
    assert [stage.end_params(tied) for stage in stages_of(6, 2, 8)] == [END, END]  # both hold it
    assert stages_of(6, 1, 8)[0].end_params(tied) == END
    assert [stage.alive for stage in stages_of(6, 3, 2)] == [2, 2, 1]
    found = memory(pp=3, micro_batch=1, recompute=False)
    assert found["parameters"] == pytest.approx(4 * (2 * LAYER + 16 / 3 + END))
    assert found["activations"] == pytest.approx(
        3 * 2 * 10 * KEPT + 10 * 4 * (16 + 2 * 24)
    )  # three micro-batches of two layers, and what goes back through the last of these


def test_tensor_parallel_ranks_hold_hidden_states_whole() -> None:
    whole, cut = (memory(tp=tp, micro_batch=1, recompute=False) for tp in (1, 2))
    hidden = 4 * 2 * 3 * 16
    logits = 2 * 6 * 100 * 4  # two chunks of six trained tokens
    ends = 10 * 16 * 4 * 4  # the last norm's three, and what the loss looks at
    assert whole["activations"] + whole["logits"] == pytest.approx(
        max(6 * 10 * KEPT + ends + logits, 6 * 10 * KEPT + ends + END * 4 + logits / 2)
    )
    assert cut["activations"] + cut["logits"] == pytest.approx(
        6 * 10 * (hidden + (KEPT - hidden) / 2) + ends + max(logits, END * 4 + logits / 2) / 2
    )


def test_recomputed_layers_keep_what_comes_in() -> None:
    found = memory(
        micro_batch=1, shape={"vocab_size": 8}
    )  # so few words that a layer's backward pass is the fullest moment
    assert found["activations"] == pytest.approx(6 * 10 * 16 * 4 + 10 * KEPT + 10 * 4 * (16 + 2 * 24))
    assert found["logits"] == 0
