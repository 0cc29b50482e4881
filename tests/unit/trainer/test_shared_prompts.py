from pathlib import Path

import pytest
import torch
from training_fixtures import make_groups, write_model
from transformers import AutoConfig

from llamarl.models.attention import PackedSequences
from llamarl.models.loading import load_model
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.shared_prompts import SharedPrompts, can_share_prompts
from llamarl.trainer.step import Trainer


@pytest.mark.parametrize("budget", [4096, 60, 10])
def test_a_step_with_shared_prompts_has_the_same_gradient_and_computes_fewer_tokens(
    budget: int, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model")
    metrics = []
    for share in (False, True):
        trainer = Trainer(
            folder, TrainerConfig(share_prompts=share, max_tokens_per_microbatch=budget), OptimizerConfig(),
            AlgorithmConfig(entropy_coef=0.1), temperature=0.9,
        )  # fmt: skip
        metrics.append(trainer.train(make_groups(max_response=30), 0))
    separate, shared = metrics
    saved = separate.pop("tokens/computed") - shared.pop("tokens/computed")
    assert shared == pytest.approx(separate, rel=2e-5)
    if budget == 4096:  # prompts of 3, 4 and 4 tokens; 3, 4 and 4 responses train
        assert saved == 2 * 3 + 3 * 4 + 3 * 4


def test_a_response_sees_its_own_prompt_and_not_another_of_the_same_length(tmp_path: Path) -> None:
    """Responses of both groups share a padded batch."""
    model = load_model(write_model(tmp_path / "model"), dtype=torch.float32, attention="llamarl_shared_prompts")
    units = SharedPrompts(((2, (2, 1)), (2, (2,)), (2, (1, 2))))
    ids = torch.arange(5, 5 + units.num_tokens)[None]  # rows: 0 1 │ 2 3 │ 4, then 5 6 │ 7 8, then 9 10 │ 11 │ 12 13

    def hidden(ids: torch.Tensor, packed: object, positions: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model.base_model(
                input_ids=ids, position_ids=positions, packed_sequences=packed, use_cache=False
            ).last_hidden_state[0]  # fmt: skip

    together = hidden(ids, units, units.position_ids("cpu"))
    for rows in ([0, 1, 2, 3], [0, 1, 4], [5, 6, 7, 8], [9, 10, 11], [9, 10, 12, 13]):
        alone = hidden(ids[:, rows], PackedSequences.of([0, len(rows)]), torch.arange(len(rows))[None])
        torch.testing.assert_close(together[rows], alone, rtol=1e-4, atol=1e-5)


def test_models_with_windows_or_caps_are_left_alone() -> None:
    def config(family: str, **kwargs: object) -> bool:
        return can_share_prompts(AutoConfig.for_model(family, **kwargs))

    assert config("llama") and config("qwen3") and config("mistral", sliding_window=None)
    assert not config("gemma2") and not config("gemma3_text") and not config("mistral", sliding_window=16)
