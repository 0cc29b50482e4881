"""A reward model over fsdp and tp ranks (gloo) gives the scores of one process, to rounding."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from transformers import AutoConfig, AutoModelForSequenceClassification

sys.path.insert(0, str(Path(__file__).resolve().parent))
import reward_model_ranks
from reward_model_ranks import TEXTS, VOCABULARY

FAMILIES = ("llama", "gemma2")
SIZES = ("2x1", "1x2", "2x2")


def launch(folder: Path, world: int, cases: list[str]) -> None:
    run_ranks(reward_model_ranks.main, [(r, world, folder, cases) for r in range(world)], limit_s=240)


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            family, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0,
            num_labels=1,
        )  # fmt: skip
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, 0.3)
        model.save_pretrained(folder / family)
    launch(folder, 1, [f"{family}:1x1" for family in FAMILIES])
    launch(folder, 2, [f"{family}:{sizes}" for family in FAMILIES for sizes in SIZES[:2]])
    launch(folder, 4, [f"{family}:{sizes}" for family in FAMILIES for sizes in SIZES[2:]])
    return folder


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", SIZES)
def test_scores_equal_one_process(scored: Path, family: str, sizes: str) -> None:
    alone = json.loads((scored / f"{family}-1x1-0.json").read_text())["scores"]
    fsdp, tp = (int(n) for n in sizes.split("x"))
    each = len(TEXTS[0])
    seen = set()
    for rank in range(fsdp * tp):
        found = json.loads((scored / f"{family}-{sizes}-{rank}.json").read_text())
        expected = [score for g in found["groups"] for score in alone[g * each : (g + 1) * each]]
        assert found["empty"] == []
        assert found["scores"] == pytest.approx(expected, abs=2e-5)
        seen |= set(found["groups"])
    assert seen == set(range(len(TEXTS)))
