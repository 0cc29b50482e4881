"""A tick of every family, and its weights on all their ways out: to the engine, to a checkpoint, to a Hugging Face folder."""

from pathlib import Path

import pytest
import torch
from engine_runs import run
from safetensors.torch import load_file
from tiny_models import FAMILIES, tiny_config
from training_fixtures import export, make_groups
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.models.attention import PACKED_ATTENTION
from llamarl.models.loading import load_model, load_model_config
from llamarl.models.reward_model import load_reward_model
from llamarl.models.small_copy import small_model
from llamarl.models.value import load_value_model
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.engine import EngineConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer


def make_trainer(folder: Path) -> Trainer:
    return Trainer(folder, TrainerConfig(), OptimizerConfig(lr=1e-2), AlgorithmConfig(), temperature=1.0)


def sampled(engine: NativeEngine) -> Sequence:
    params = SamplingParams(max_new_tokens=14)
    sequence = Sequence(prompt_index=0, sample_index=0, prompt_tokens=[3, 14, 15, 9, 26, 5], params=params, seed=4)
    return run(engine, [sequence])[0]


def names_in(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


@torch.no_grad()
def logprobs(model: PreTrainedModel, sequence: Sequence) -> torch.Tensor:
    ids = torch.tensor([*sequence.prompt_tokens, *sequence.tokens])
    logits = model.eval()(ids[None], use_cache=False).logits[0, len(sequence.prompt_tokens) - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, torch.tensor(sequence.tokens)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_weights_reach_engine_checkpoint_and_folder(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    small_model(tiny_config(family)).save_pretrained(folder)
    trainer = make_trainer(folder)
    assert trainer.train(make_groups(), 0)["grad_norm"] > 0
    engine = NativeEngine(folder, EngineConfig(kv_cache_bytes=1 << 20), eos_token_ids=())
    served, trained = engine.parameters_for_sync(), trainer.parameters_for_sync()
    assert {n: p.shape for n, p in served.items()} == {n: s.shape for n, s in trainer.sync_layout().items()}
    with torch.no_grad():
        for name, parameter in served.items():
            parameter.copy_(trained[name])
    engine.weights_updated(1)
    export(trainer, folder, tmp_path / "out")
    written, missing = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )  # transformers 5.17 takes another for Gemma 2, which leaves out its soft caps
    assert not missing["missing_keys"] and not missing["unexpected_keys"], missing
    assert names_in(tmp_path / "out") == names_in(folder)  # as transformers itself writes it, expert by expert
    sequence = sampled(engine)
    torch.testing.assert_close(torch.tensor(sequence.logprobs), logprobs(written, sequence), atol=1e-4, rtol=0)
    before = load_model(folder, dtype=torch.float32)
    assert (
        logprobs(before, sequence) - torch.tensor(sequence.logprobs)
    ).abs().max() > 1e-3  # the tick changed something
    trainer.save(tmp_path / "state")
    again = make_trainer(folder)
    again.load(tmp_path / "state")
    assert all(torch.equal(again.parameters_for_sync()[name], value) for name, value in trained.items())


TEXT = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
          "patch_size": 14}  # fmt: skip


def test_the_text_part_of_a_model_in_several_parts_is_trained_and_written_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4))
    folder = tmp_path / "gemma3"
    whole.save_pretrained(folder)
    assert load_model_config(folder).model_type == "gemma3_text"
    engine = NativeEngine(folder, EngineConfig(kv_cache_bytes=1 << 20), eos_token_ids=())
    sequence = sampled(engine)
    torch.testing.assert_close(torch.tensor(sequence.logprobs), logprobs(whole, sequence), atol=1e-4, rtol=0)
    trainer = make_trainer(folder)
    trainer.train(make_groups(), 0)
    assert set(engine.parameters_for_sync()) == set(trainer.sync_layout())
    export(trainer, folder, tmp_path / "out")
    written, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(written).__name__ == "Gemma3ForCausalLM" and not report["missing_keys"]
    for name, parameter in written.named_parameters():
        assert torch.equal(parameter, trainer.parameters_for_sync()[name]), name


def test_a_critic_begins_with_the_text_part_of_a_model_in_several_parts(tmp_path: Path) -> None:
    text = {"model_type": "llama", **TEXT}
    vision = {"model_type": "clip_vision_model", **VISION}
    whole = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=96))
    whole.save_pretrained(tmp_path)
    critic = load_value_model(tmp_path, attention=PACKED_ATTENTION)
    assert critic.get_parameter("score.weight").tolist() == [[0.0] * 32]
    embedding = critic.get_parameter("model.embed_tokens.weight")
    torch.testing.assert_close(embedding, whole.get_input_embeddings().weight)


@torch.no_grad()
def test_a_reward_model_in_several_parts_scores_a_text_as_it_does_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, num_labels=1)
    whole = Gemma3ForSequenceClassification(config).eval()
    whole.save_pretrained(tmp_path)
    alone = load_reward_model(tmp_path, dtype=torch.float32, device="cpu", attention="sdpa", key="reward_model.path")
    tokens = torch.arange(3, 19)[None]
    torch.testing.assert_close(alone(input_ids=tokens).logits, whole(input_ids=tokens).logits)
