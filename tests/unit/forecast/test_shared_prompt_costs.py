"""A group's prompt computed once: what a forecast counts, against the trainer's own batches, products and attention calls."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from llamarl.config import validate
from llamarl.forecast.calibrate import trainer_layout
from llamarl.forecast.hardware import Hardware, find_hardware
from llamarl.forecast.lengths import Lengths, constant, lognormal
from llamarl.forecast.model import find_model, spec_from_config
from llamarl.forecast.scenario import scenario_from_recipe
from llamarl.forecast.search import Options, Workload, trainer_choices
from llamarl.forecast.ticks import TrainerDemand, TrainerLayout, sequences_within, trainer_tick
from llamarl.models import attention
from llamarl.models.attention import PackedSequences, attending
from llamarl.models.parallel import make_layout
from llamarl.trainer import shared_prompts
from llamarl.trainer.batch import TrainingSequence, make_microbatch, pack_sequences
from llamarl.trainer.shared_prompts import SharedPrompts, can_share_prompts

H100 = find_hardware("h100")
SHAPE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip


def arithmetic_alone() -> Hardware:
    """Where a second is a FLOP, and nothing but products and attention takes time."""
    efficiency = {
        "matmul": 1.0,
        "attention": 1.0,
        "masked_attention": 1.0,
        "train_step_overhead_s": 0.0,
        "train_layer_overhead_s": 0.0,
    }
    device = replace(H100.device, matmul_flops={"bf16": 1.0}, memory_bytes_per_s=1e30)
    return replace(H100, device=device).with_efficiency(**efficiency, tile_rows=1, tile_columns=1, compute_units=1)  # fmt: skip


def sequences_of(lengths: list[int], prompt: int, group: int) -> list[TrainingSequence]:
    """Groups of such responses, whose tokens all train; the last one is no input."""
    made = []
    for i, length in enumerate(lengths):
        tokens = np.arange(prompt + length, dtype=np.int64) % 64
        positions = np.arange(prompt - 1, prompt + length - 1, dtype=np.int64)
        made.append(
            TrainingSequence(
                tokens=tokens,
                positions=positions,
                targets=tokens[positions + 1],
                behavior_logprobs=np.zeros(length, np.float32),
                policy_versions=np.zeros(length, np.int64),
                advantage=1.0,
                group=i // group,
                sample=i % group,
                num_prompt=prompt,
            )  # fmt: skip
        )
    return made


def counted_flops(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], *, prompt: int, group: int, budget: int, share: bool
) -> tuple[int, float]:
    """(tokens, FLOPs of forward and backward) of a tick in the trainer's micro-batches: products as torch counts them, attention under a
    mask by the shapes of its calls, causal attention by the sequences of the row, which a GPU does not pad."""
    pairs = [0.0]
    real = attention.fused_attention

    def fused(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, **how: Any) -> Tensor:
        pairs[0] += 0 if causal else query.shape[0] * query.shape[2] * key.shape[2]
        return real(query, key, value, causal=causal, **how)

    monkeypatch.setattr(attention, "fused_attention", fused)
    monkeypatch.setattr(shared_prompts, "fused_attention", fused)
    name = "llamarl_shared_prompts" if share else "llamarl_packed"
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SHAPE), dtype=torch.float32, attn_implementation=name
    )
    sequences = sequences_of(lengths, prompt, group)
    packing = pack_sequences(
        sequences, max_tokens=budget, share_prompts=share, layout=make_layout(fsdp=1, tp=1, device="cpu"), device="cpu"
    )
    tokens = 0
    with FlopCounterMode(display=False) as flops:
        for members in packing:
            batch = make_microbatch(
                [sequences[i] for i in members], [1.0] * len(members), torch.device("cpu"), share_prompts=share
            )
            tokens += batch.input_ids.shape[1]
            causal = batch.packed.prompts if isinstance(batch.packed, SharedPrompts) else batch.packed
            assert isinstance(causal, PackedSequences)
            pairs[0] += SHAPE["num_hidden_layers"] * sum(n * n for n in causal.lengths) / 2
            with attending(batch.packed):
                hidden = model.model(batch.input_ids, position_ids=batch.position_ids, use_cache=False)
            model.lm_head(hidden.last_hidden_state[0][batch.positions]).sum().backward()
    own = {op for op in flops.get_flop_counts()["Global"] if "dot_product" in str(op)}
    products = flops.get_total_flops() - sum(flops.get_flop_counts()["Global"][op] for op in own)
    heads, head_dim = SHAPE["num_attention_heads"], SHAPE["head_dim"]
    return tokens, products + 3.0 * 4.0 * heads * head_dim * pairs[0]


@pytest.mark.parametrize(
    ("share", "prompt", "response", "group", "micro"),
    [
        (True, 40, constant(24), 4, 4),
        (True, 16, lognormal(60), 8, 16),
        (True, 60, lognormal(60), 16, 5),
        (False, 60, lognormal(60), 16, 5),
    ],
)
def test_a_step_has_the_arithmetic_that_the_trainer_does(
    monkeypatch: pytest.MonkeyPatch, share: bool, prompt: int, response: Lengths, group: int, micro: int
) -> None:
    """Whole groups in a micro-batch, several, and parts of one."""
    model = spec_from_config(SHAPE, "small")
    count = (24 if response.limit == response.mean else 96) // group * group
    lengths = np.random.default_rng(1).permutation(response.representative(count)).tolist()
    demand = TrainerDemand(lengths=response, prompt_tokens=prompt, sequences=count, group_size=group)
    layout = TrainerLayout(micro_batch=micro, recompute=False, share_prompts=share)
    tokens, flops = counted_flops(
        monkeypatch, lengths, prompt=prompt, group=group, budget=demand.budget(layout), share=share
    )
    rows = demand.shared_rows(layout)
    forecast = count * (demand.mean_tokens if rows is None else rows.prompt_tokens + response.mean)
    assert forecast == pytest.approx(tokens, rel=1e-6 if response.limit == response.mean else 0.03)
    assert trainer_tick(arithmetic_alone(), model, layout, demand).compute_s == pytest.approx(flops, rel=0.03)


def test_what_a_shared_prompt_costs_by_hand() -> None:
    """Eight responses of 100 tokens to a prompt of 60, in micro-batches of four: two prompts, and two batches without padding."""
    demand = TrainerDemand(lengths=constant(100), prompt_tokens=60, sequences=8, group_size=8)
    budgets = [
        demand.budget(TrainerLayout(micro_batch=n, share_prompts=s)) for n, s in ((4, True), (16, True), (4, False))
    ]
    assert budgets == [460, 1720, 640]
    rows = demand.shared_rows(TrainerLayout(micro_batch=4, share_prompts=True))
    assert rows is not None and (rows.prompts, rows.prompt_tokens) == (2 / 8, 15.0)
    assert (rows.queries, rows.keys, rows.pairs, rows.masks) == (100.0, 160.0, 16_000.0, 4_000.0)
    assert [sequences_within(budget, 60, 100, 8) for budget in (160, 460, 860, 1720)] == [1, 4, 8, 16]
    assert sequences_within(640, 60, 100, 1) == 4


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "starcoder2", "cohere2", "qwen3_moe", "mixtral", "smollm3", "exaone4", "deepseek_v3"])  # fmt: skip
def test_forecast_and_trainer_agree_on_who_can_share(name: str) -> None:
    config = AutoConfig.for_model(name)
    assert spec_from_config(config.to_dict(), name).shares_prompts == can_share_prompts(config)


def test_windows_that_a_qwen_file_names_and_does_not_use_are_none() -> None:
    file = {**SHAPE, "model_type": "qwen2", "sliding_window": 32_768, "max_window_layers": 28}
    assert spec_from_config(file, "a").shares_prompts
    assert spec_from_config({**file, "use_sliding_window": False}, "a").shares_prompts
    assert not spec_from_config({**file, "model_type": "mistral"}, "a").shares_prompts


def work(prompt: int, response: int) -> Workload:
    return Workload(
        model=find_model("Llama-3.1-8B"), response=lognormal(response), prompts_per_step=32, group_size=16, prompt_tokens=prompt
    )  # fmt: skip


@pytest.mark.parametrize(("prompt", "response", "pays"), [(512, 512, True), (2048, 512, True), (256, 4096, False)])
def test_prompts_are_shared_where_that_is_faster(prompt: int, response: int, pays: bool) -> None:
    asked = work(prompt, response)
    chosen = {
        share: min(trainer_choices(H100, asked, Options(share_prompts=share), 4), key=lambda c: c.time.total_s)
        for share in (True, False, None)
    }
    assert [chosen[share].layout.share_prompts for share in (True, False)] == [True, False]  # a setting is heeded
    assert (chosen[True].time.total_s < chosen[False].time.total_s) == pays == chosen[None].layout.share_prompts


def test_a_recipe_is_simulated_with_its_own_setting_and_budget() -> None:
    """512 and 128 tokens, eight responses: a budget of 4096 holds two whole groups (3,072), or six sequences of their own."""
    asked = Workload(
        model=find_model("Llama-3.1-8B"), response=constant(128), prompts_per_step=8, group_size=8, prompt_tokens=512
    )
    found = {}
    for share in (True, False):
        config = validate({"model": {"path": "m"}, "generator": {"group_size": 8}, "trainer": {"share_prompts": share}})
        layout = trainer_layout(config, asked.model, H100, prompt_tokens=512, response_tokens=128)
        assert (layout.share_prompts, layout.micro_batch) == (share, 16 if share else 6)
        demand = TrainerDemand(lengths=asked.response, prompt_tokens=512, sequences=64, group_size=8)
        scenario = scenario_from_recipe(config, asked, H100, {"generator": 1, "trainer": 1})
        whole = scenario.trainer.tick_s + scenario.trainer.token_s * asked.tokens
        found[share] = trainer_tick(H100, asked.model, layout, demand).total_s
        assert whole == pytest.approx(found[share])
    assert 2.5 < found[False] / found[True] < 640 / 192
    windows = replace(asked.model, shares_prompts=False)
    assert not trainer_layout(config, windows, H100, prompt_tokens=512, response_tokens=128).share_prompts
