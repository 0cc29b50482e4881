"""Adapters: version 0 is the base, only adapters learn, and what is handed over computes what the trainer computes."""

import dataclasses
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_fixtures import export, make_groups, write_model
from transformers import AutoModelForCausalLM

from llamarl.config import validate
from llamarl.errors import ConfigError, ModelError
from llamarl.models.adapters import AdapterReceiver, add_adapters, merge_adapter, read_adapter_folder
from llamarl.models.loading import load_model
from llamarl.models.sharded_loading import make_skeleton, where_stored
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from llamarl.trainer.sharded_state import in_background
from llamarl.trainer.step import Trainer

peft = pytest.importorskip("peft")
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = LoraConfig(rank=4, alpha=8.0, targets=LAYERS)


def make(folder: Path, lora: LoraConfig = LORA, seed: int = 0) -> Trainer:
    return Trainer(
        folder, TrainerConfig(), OptimizerConfig(lr=1e-2), AlgorithmConfig(), temperature=0.9, seed=seed, lora=lora
    )


def trained(folder: Path, lora: LoraConfig = LORA) -> Trainer:
    trainer = make(folder, lora)
    for tick in range(3):
        trainer.train(make_groups(seed=tick), tick)
    return trainer


def logprobs(trainer: Trainer) -> torch.Tensor:
    from llamarl.trainer.batch import make_microbatch, make_sequences

    sequences = make_sequences(make_groups(seed=7), AlgorithmConfig())
    microbatch = make_microbatch(
        sequences, [1.0] * len(sequences), torch.device("cpu"), share_prompts=trainer.computes.share_prompts
    )
    with torch.no_grad():
        return trainer.policy(microbatch)[0]


def test_version_0_is_the_base_model_bit_for_bit(model_folder: Path) -> None:
    adapted, base = make(model_folder), make(model_folder, LoraConfig())
    for name, tensor in base.parameters_for_sync().items():
        assert torch.equal(adapted.parameters_for_sync()[name], tensor), name
    torch.testing.assert_close(logprobs(adapted), logprobs(base), rtol=0, atol=0)


def test_only_adapters_have_gradients_moments_and_a_state(model_folder: Path) -> None:
    trainer = trained(model_folder)
    assert trainer.weights.tensors.keys() == {
        f"model.layers.{layer}.{block}.{name}.lora_{side}.default.weight"
        for layer in range(2)
        for block, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
        for name in (f"{n}_proj" for n in names)
        for side in "AB"
    }
    before = dict(load_model(model_folder, dtype=torch.float32).named_parameters())
    for name, parameter in trainer.policy.model.named_parameters():
        if ".lora_" not in name:
            assert parameter.grad is None and torch.equal(parameter, before[name.replace(".base_layer", "")]), name
    assert all("lora" in key for key in trainer.weights.state())
    assert any(tensor.abs().max() > 0 for name, tensor in trainer.weights.tensors.items() if "lora_B" in name)


def test_the_gradient_of_an_adapter_is_the_chain_rule_of_the_full_gradient(model_folder: Path) -> None:
    """At B = 0, dL/dB = (alpha / rank) * dL/dW @ A^T and dL/dA = 0, with dL/dW from full training."""
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for key, lora in (("full", LoraConfig()), ("lora", LORA)):
        trainer = make(model_folder, lora)
        kept = gradients[key] = {}
        trainer.weights.step = lambda lr, w=trainer.weights, kept=kept: kept.update(  # type: ignore[method-assign]
            {name: tensor.grad.clone() for name, tensor in w.tensors.items()}
        )
        trainer.config = dataclasses.replace(trainer.config, max_grad_norm=0.0)
        trainer.train(make_groups(), 0)
    adapters = make(model_folder).weights.tensors
    layer = "model.layers.1.mlp.up_proj"
    a = adapters[f"{layer}.lora_A.default.weight"]
    expected = (LORA.alpha / LORA.rank) * gradients["full"][f"{layer}.weight"] @ a.T
    torch.testing.assert_close(gradients["lora"][f"{layer}.lora_B.default.weight"], expected, rtol=1e-4, atol=1e-7)
    assert gradients["lora"][f"{layer}.lora_A.default.weight"].abs().max() == 0


def test_merged_weights_are_held_in_the_type_in_which_they_travel_one_in_float32_at_a_time(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained(model_folder)
    whole = trainer.parameters_for_sync()
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in merge():
            made = tensor.clone()
            alive.append(weakref.ref(made))
            del tensor
            most = max(most, sum(made() is not None for made in alive))
            yield name, made
            del made

    merge = trainer._merge
    monkeypatch.setattr(trainer, "_merge", one_by_one)
    rounded, copies = trainer.parameters_for_sync(torch.bfloat16), trainer.copies_for_sync()
    assert most <= 2, "the one before is let go of when the next is there"
    assert all(torch.equal(rounded[name], tensor.to(torch.bfloat16)) for name, tensor in whole.items())
    assert rounded.keys() == copies.keys() == whole.keys()
    assert all(torch.equal(copies[name], tensor) for name, tensor in whole.items())


def test_both_ways_of_hand_over_give_the_generator_what_the_trainer_computes(
    model_folder: Path, tmp_path: Path
) -> None:
    trainer = trained(model_folder)
    merged = trainer.parameters_for_sync()
    export(trainer, model_folder, tmp_path / "model")
    served = make(tmp_path / "model", LoraConfig())
    assert all(torch.equal(tensor, merged[name]) for name, tensor in served.parameters_for_sync().items())
    torch.testing.assert_close(logprobs(trainer), logprobs(served), rtol=0, atol=1e-5)
    alone = trained(model_folder, dataclasses.replace(LORA, hand_over="adapter"))
    engine = {n: p.detach().clone() for n, p in load_model(model_folder, dtype=torch.float32).named_parameters()}
    receiver = AdapterReceiver(engine, rank=LORA.rank, alpha=LORA.alpha, targets=LORA.targets, model_path=model_folder)
    handed = alone.parameters_for_sync()
    assert handed.keys() == receiver.tensors.keys() == alone.sync_layout().keys()
    for name, tensor in handed.items():
        receiver.tensors[name].copy_(tensor)
    for _ in range(2):  # a second version starts from the base weights again
        receiver.merge()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in engine.items())
    assert sum(t.numel() for t in handed.values()) < sum(t.numel() for t in merged.values())


def test_the_adapter_folder_loads_in_peft(model_folder: Path, tmp_path: Path) -> None:
    trainer = trained(model_folder)
    export(trainer, model_folder, tmp_path / "adapter", adapter=True)
    export(trainer, model_folder, tmp_path / "merged")
    ids = torch.arange(3, 20)[None]
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "adapter")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, expected(ids).logits, rtol=0, atol=1e-4)
        assert (expected(ids).logits - base(ids).logits).abs().max() > 1e-2


def test_resume_gives_the_same_bits(model_folder: Path, tmp_path: Path) -> None:
    whole = trained(model_folder)
    state = whole.stage({"version_2": whole.parameters_for_sync()})
    in_background(lambda: whole.write(state, tmp_path)).result(timeout=60)
    resumed = make(model_folder, seed=5)  # its own first adapters are replaced
    edge = resumed.load(tmp_path)["version_2"]
    for name, tensor in whole.parameters_for_sync().items():
        assert torch.equal(tensor, resumed.parameters_for_sync()[name]) and torch.equal(tensor, edge[name]), name
    assert whole.train(make_groups(seed=3), 3) == resumed.train(make_groups(seed=3), 3)


def test_mistakes_are_named(model_folder: Path) -> None:
    with pytest.raises(
        ModelError, match="lora.targets: qkv may have no adapter in LlamaForCausalLM, but q_proj, k_proj"
    ):
        make(model_folder, LoraConfig(rank=2, targets=("q_proj", "qkv")))
    with pytest.raises(ConfigError, match="lora.rank must be >= 0"):
        validate({"lora": {"rank": -1}})


def test_the_output_layer_takes_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="lora.targets: lm_head may have no adapter in"):
        add_adapters(
            load_model(write_model(tmp_path), dtype=torch.float32), rank=2, alpha=4.0, targets=("lm_head",), seed=0
        )


def test_an_engine_of_fewer_bits_is_given_the_merged_weights_rounded_once(model_folder: Path, tmp_path: Path) -> None:
    """Whichever way they travel: merged in float32 on top of the model as it is stored, then rounded."""
    trainer = trained(model_folder, dataclasses.replace(LORA, hand_over="adapter"))
    export(trainer, model_folder, tmp_path / "model")
    export(trainer, model_folder, tmp_path / "adapter", adapter=True)
    expected = dict(load_model(tmp_path / "model", dtype=torch.bfloat16).named_parameters())
    rounded = {n: p.detach() for n, p in load_model(model_folder, dtype=torch.bfloat16).named_parameters()}
    handed_over = {name: tensor.clone() for name, tensor in rounded.items()}
    receiver = AdapterReceiver(
        handed_over, rank=LORA.rank, alpha=LORA.alpha, targets=LORA.targets, model_path=model_folder
    )
    for name, tensor in trainer.parameters_for_sync().items():
        receiver.tensors[name].copy_(tensor)
    receiver.merge()
    from_the_folder = {name: tensor.clone() for name, tensor in rounded.items()}
    merge_adapter(read_adapter_folder(tmp_path / "adapter"), from_the_folder, model_path=model_folder)
    for name, parameter in expected.items():
        assert torch.equal(handed_over[name], parameter) and torch.equal(from_the_folder[name], parameter), name
    twice = rounded["model.layers.0.mlp.up_proj.weight"].float() + (LORA.alpha / LORA.rank) * (
        trainer.weights.tensors["model.layers.0.mlp.up_proj.lora_B.default.weight"]
        @ trainer.weights.tensors["model.layers.0.mlp.up_proj.lora_A.default.weight"]
    )
    assert not torch.equal(twice.bfloat16(), expected["model.layers.0.mlp.up_proj.weight"])


def test_an_adapter_that_peft_wrote_is_read_and_what_is_more_than_two_factors_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_folder),
        peft.LoraConfig(r=3, lora_alpha=6, use_rslora=True, target_modules=r".*layers\.1\..*(q|down)_proj", task_type="CAUSAL_LM"),
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    parameters = {n: p.detach().clone() for n, p in load_model(model_folder, dtype=torch.float32).named_parameters()}
    merge_adapter(read_adapter_folder(tmp_path / "adapter"), parameters, model_path=model_folder)
    expected = dict(model.merge_and_unload().named_parameters())
    for name, tensor in parameters.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    changed = parameters["model.layers.1.mlp.down_proj.weight"]
    assert not torch.equal(changed, dict(load_model(model_folder, dtype=torch.float32).named_parameters())["model.layers.1.mlp.down_proj.weight"])  # fmt: skip

    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for change, words in (
        ({"use_dora": True}, "use_dora = True"),
        ({"alora_invocation_tokens": [7, 8]}, "alora_invocation_tokens = "),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"r": 0}, "not a usable adapter configuration"),
        ({"r": None}, "not a usable adapter configuration"),
    ):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=words):
            read_adapter_folder(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    adapter = read_adapter_folder(tmp_path / "adapter")
    other = {name: torch.zeros(5, 5) for name in parameters}
    with pytest.raises(ModelError, match=r"down_proj does not fit the base model .*a layer of shape \(5, 5\)"):
        merge_adapter(adapter, other, model_path=model_folder)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="cannot be read"):
        read_adapter_folder(tmp_path / "adapter")


@pytest.mark.parametrize("hand_over", ["merged", "adapter"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_leaves_what_its_generators_were_given_last(
    model_folder: Path, hand_over: str, dtype: str, tmp_path: Path
) -> None:
    """Whether the trainer merges, into the base as it computes with it, or generators do, into the base as it is stored."""
    lora = dataclasses.replace(LORA, hand_over=hand_over)  # type: ignore[arg-type]
    trainer = Trainer(
        model_folder,
        TrainerConfig(dtype=dtype),
        OptimizerConfig(lr=1e-2),
        AlgorithmConfig(),
        temperature=0.9,
        lora=lora,
    )
    trainer.train(make_groups(), 0)
    given = trainer.parameters_for_sync()
    if hand_over == "adapter":
        engine = {n: p.detach() for n, p in load_model(model_folder, dtype=torch.float32).named_parameters()}
        receiver = AdapterReceiver(
            engine, rank=LORA.rank, alpha=LORA.alpha, targets=LORA.targets, model_path=model_folder
        )
        for name, tensor in given.items():
            receiver.tensors[name].copy_(tensor)
        receiver.merge()
        given = engine
    facts = export(trainer, model_folder, tmp_path / "model")
    left = load_file(tmp_path / "model" / "model.safetensors")
    assert facts is not None and facts.policy_version == 1 and left.keys() == given.keys()
    assert all(torch.equal(left[name], tensor) for name, tensor in given.items())


def test_a_base_that_cannot_be_read_in_parts_is_merged_too(model_folder: Path, tmp_path: Path) -> None:
    trainer = trained(model_folder)
    base = tmp_path / "prefixed"
    shutil.copytree(model_folder, base)
    tensors = load_file(base / "model.safetensors")
    save_file(
        {name.removeprefix("model."): t for name, t in tensors.items()}, base / "model.safetensors", {"format": "pt"}
    )
    assert where_stored(base, make_skeleton(base, attention="llamarl_packed")) is None
    export(trainer, base, tmp_path / "model")
    left = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(left[name], tensor) for name, tensor in trainer.parameters_for_sync().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_tensor_parallel_rank_merges_its_part_of_what_one_rank_merges(
    model_folder: Path, dtype: torch.dtype
) -> None:
    """Cut by rows, as ``q_proj`` is, or by columns, as ``o_proj``."""
    handed = trained(model_folder, dataclasses.replace(LORA, hand_over="adapter")).parameters_for_sync()
    weights = {n: p.detach() for n, p in load_model(model_folder, dtype=dtype).named_parameters()}
    a, b = "{}.lora_A.default.weight".format, "{}.lora_B.default.weight".format
    for layer, dim in (("model.layers.1.self_attn.q_proj", 0), ("model.layers.0.self_attn.o_proj", 1)):

        def receive(tensor: torch.Tensor, boxes: dict[str, Any] | None, layer: str = layer) -> torch.Tensor:
            engine = {f"{layer}.weight": tensor.clone()}
            receiver = AdapterReceiver(
                engine, rank=LORA.rank, alpha=LORA.alpha, targets=LORA.targets, model_path=model_folder, boxes=boxes
            )
            for name, part in receiver.tensors.items():
                box = boxes[name] if boxes else tuple((0, size) for size in part.shape)
                part.copy_(handed[name][tuple(slice(*bounds) for bounds in box)])
            receiver.merge()
            return engine[f"{layer}.weight"]

        whole = receive(weights[f"{layer}.weight"], None)
        parts = []
        for rank, part in enumerate(weights[f"{layer}.weight"].chunk(2, dim)):
            box = [(0, size) for size in whole.shape]
            box[dim] = (rank * part.shape[dim], (rank + 1) * part.shape[dim])
            parts.append(receive(part, {a(layer): ((0, LORA.rank), box[1]), b(layer): (box[0], (0, LORA.rank))}))
        step = 2e-6 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(torch.cat(parts, dim), whole, rtol=0, atol=step)
        assert not torch.equal(whole, weights[f"{layer}.weight"])
