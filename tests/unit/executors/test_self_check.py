"""The check of an architecture before a run: what it passes, what it finds, and where."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, tiny_config
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import llamarl.executors.self_check as self_check
from llamarl import model_support as support
from llamarl.config import RunConfig
from llamarl.controller.preflight import check_architectures
from llamarl.engine.model_runner import ModelRunner
from llamarl.errors import ModelError
from llamarl.executors.self_check import Finding, check_architecture, find_differences
from llamarl.models import paged_attention
from llamarl.models.small_copy import NUM_TOKENS, small_config, small_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_generates_and_trains_equal_to_transformers(family: str) -> None:
    findings = find_differences(tiny_config(family))
    assert [f.way for f in findings] == ["prefill", "decode", "mixed", "packed", "gradient"]
    assert all(f.gap < 1e-4 for f in findings[:4]) and findings[4].gap < 5e-3, findings


@pytest.fixture
def ask_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known to fail is not refused by name, so that the check can look at it."""
    monkeypatch.setattr(support, "NOT_COMPUTED", {})


def ways_found(config: Any) -> set[str]:
    return {f.way for f in find_differences(config) if not f.passed}


def test_a_window_that_does_not_reach_the_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = paged_attention.PrefillChunk.allowed
    monkeypatch.setattr(paged_attention.PrefillChunk, "allowed", lambda self, window: original(self, None))
    assert ways_found(tiny_config("mistral")) == {"prefill", "decode", "mixed"}


def test_a_logit_scale_that_the_engine_does_not_know_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.engine.model_runner.logit_scale", lambda config: 1.0)
    assert ways_found(tiny_config("granite")) == {"prefill", "decode", "mixed"}


def test_positions_that_are_off_by_one_in_decodes_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ModelRunner._hidden

    def late(self: ModelRunner, tokens: torch.Tensor, positions: torch.Tensor, batch: Any, *rest: Any) -> torch.Tensor:
        decodes = sum(len(d.lengths) for d in batch.decodes)
        positions = positions.clone()
        positions[:decodes] += 1
        return original(self, tokens, positions, batch, *rest)

    monkeypatch.setattr(ModelRunner, "_hidden", late)
    assert ways_found(tiny_config("llama")) == {"decode", "mixed"}
    assert ways_found(tiny_config("opt")) == {"decode", "mixed"}  # learned positions


@pytest.mark.usefixtures("ask_everything")
def test_attention_sinks_are_found_in_every_way() -> None:
    assert ways_found(CONFIG_MAPPING["gpt_oss"]()) == {"prefill", "decode", "mixed", "packed", "gradient"}


def test_a_layer_that_repeats_on_its_cache_is_found_where_the_cache_is_read() -> None:
    found = {f.way: f for f in find_differences(CONFIG_MAPPING["diffllama"]())}
    assert {way for way, f in found.items() if not f.passed} == {"decode", "mixed"}
    assert re.fullmatch(
        r"decode differs by \d[\d.]* nats at position \d+ \(token \d+\) of sequence [0-2]", found["decode"].sentence()
    )


def test_a_state_that_is_not_kept_is_found() -> None:
    config = CONFIG_MAPPING["lfm2"](layer_types=["conv", "full_attention"], num_hidden_layers=2)
    assert {"decode", "mixed", "packed"} <= ways_found(config)


@pytest.mark.skipif("minimax_m3_vl_text" not in CONFIG_MAPPING, reason="this transformers does not know it")
def test_attention_that_leaves_out_keys_of_long_texts_alone_is_found() -> None:
    layers = ["full_attention", "minimax_m3_sparse"]  # blocks of 128 keys, of which a query sees 16
    config = CONFIG_MAPPING["minimax_m3_vl_text"](layer_types=layers, num_hidden_layers=2)
    assert {"decode", "packed", "gradient"} <= ways_found(config)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "model"


def test_a_failed_check_names_key_family_and_difference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_config("llama").save_pretrained(folder)
    finding = Finding(way="decode", gap=0.25, where="at position 7 (token 3) of sequence 1")
    monkeypatch.setattr(self_check, "find_differences", lambda config, **asked: [finding])
    with pytest.raises(
        ModelError, match=r"reference.path: .*'llama' is not supported: .*decode differs by 0.25 nats at pos"
    ):
        check_architecture(folder, key="reference.path")


def test_a_class_that_does_not_offer_the_attention_interface_is_told_apart(folder: Path) -> None:
    CONFIG_MAPPING["falcon"](hidden_size=64, num_attention_heads=4, num_hidden_layers=2).save_pretrained(folder)
    with pytest.raises(ModelError, match="does not offer transformers' attention interface"):
        check_architecture(folder)


def test_what_passed_is_not_computed_again_and_what_failed_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_config("llama").save_pretrained(folder)
    computed: list[bool] = []
    gap = 1.0

    def differences(config: Any, generated: bool, trained: bool) -> list[Finding]:
        computed.append(trained)
        return [Finding(way="packed", gap=gap, where="")]

    monkeypatch.setattr(self_check, "find_differences", differences)
    for _ in range(2):
        with pytest.raises(ModelError):
            check_architecture(folder)
    assert computed == [True, True]
    gap = 0.0
    check_architecture(folder)
    check_architecture(folder)
    assert computed == [True] * 3
    check_architecture(folder, trained=False)  # another question
    other = tiny_config("llama")
    other.attention_bias = True
    other.save_pretrained(folder)
    check_architecture(folder)
    assert computed == [True] * 3 + [False, True]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C"}},
            "'mine' is not one of those .* which is never run",
        ),
        ({"model_type": "mine"}, "architecture 'mine' is not one of those that transformers [0-9.]+ knows$"),
        ({"model_type": "clip"}, "has no causal language model of it"),
    ],
)
def test_what_is_no_decoder_of_transformers_is_refused(folder: Path, values: dict[str, Any], says: str) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=says):
        check_architecture(folder)


def test_a_small_copy_keeps_every_kind_of_layer_and_cuts_the_rest() -> None:
    gemma = small_config(CONFIG_MAPPING["gemma3_text"](), head_dim=16)
    assert gemma.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert (gemma.sliding_window, gemma.vocab_size, gemma.head_dim) == (7, NUM_TOKENS, 16)
    qwen = small_config(CONFIG_MAPPING["qwen3_moe"](mlp_only_layers=[2]), head_dim=16)
    assert (qwen.num_experts, qwen.num_experts_per_tok, qwen.mlp_only_layers) == (8, 2, [2])
    assert small_config(CONFIG_MAPPING["deepseek_v3"](), head_dim=16).num_hidden_layers == 4  # three dense ones first
    gpt2 = small_config(CONFIG_MAPPING["gpt2"](), head_dim=16)
    assert (gpt2.n_layer, gpt2.n_head, gpt2.n_embd) == (4, 4, 64)


def test_heads_of_a_small_copy_are_shared_as_in_the_model() -> None:
    def heads(**kinds: int) -> tuple[int, int]:
        small = small_config(CONFIG_MAPPING["llama"](hidden_size=4096, num_attention_heads=32, **kinds), head_dim=16)
        return small.num_attention_heads, small.num_key_value_heads

    assert (heads(num_key_value_heads=32), heads(num_key_value_heads=8), heads(num_key_value_heads=1)) == (
        (4, 4),
        (4, 2),
        (4, 1),
    )


def test_making_a_small_copy_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, second = (small_model(tiny_config("llama")) for _ in range(2))
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_weights_that_are_read_otherwise_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    load = AutoModelForCausalLM.from_pretrained

    def loaded(*args: Any, **kwargs: Any) -> Any:
        model, found = load(*args, **kwargs)
        with torch.no_grad():
            model.get_output_embeddings().weight[5] += 0.5
        return model, found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    assert "packed" in ways_found(tiny_config("qwen3"))


def test_a_cache_that_may_not_be_looked_into_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another user's home is; as root that fails otherwise, by a name that no folder can have."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + "x" * 300)
    monkeypatch.setattr(self_check, "find_differences", lambda config, **uses: [])
    check_architectures(RunConfig())
