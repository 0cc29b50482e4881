"""Tensor parallel generation over gloo against one rank: same tokens, weights pulled straight into each rank's part."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import engine_ranks  # noqa: E402
from engine_ranks import make_model  # noqa: E402

FAMILIES = ("llama", "gemma3_text", "qwen3_moe")
WIDE = ("llama-wide", "qwen3-wide", "gemma2-wide")
"""Eight query heads over two key-value heads: of eight ranks four hold the same one."""
SIZES = {**dict.fromkeys(FAMILIES, 2), **dict.fromkeys(WIDE, 8)}
CASES = [pytest.param(family, marks=pytest.mark.long if family in WIDE[1:] else ()) for family in SIZES]
"""Eight ranks on two cores take ten seconds a family."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By family: the report of the single rank, then those of two or eight."""
    folder = tmp_path_factory.mktemp("engine_ranks")
    own = [item for item in request.session.items if item.path == request.path]
    every = any(item.get_closest_marker("long") for item in own)
    asked = {family: size for family, size in SIZES.items() if every or family not in WIDE[1:]}
    for family in asked:
        make_model(family).save_pretrained(folder / family)
    for world in (1, 2, 8):
        families = [family for family, size in asked.items() if world in (1, size)]
        run_ranks(engine_ranks.main, [(rank, world, folder, families) for rank in range(world)], limit_s=120)
    return {
        family: [
            json.loads((folder / f"{family}-{name}.json").read_text())
            for name in ("1-0", *(f"{size}-{rank}" for rank in range(size)))
        ]
        for family, size in asked.items()
    }


@pytest.mark.parametrize("family", CASES)
def test_ranks_sample_the_tokens_of_one_through_preemption_and_new_weights(
    runs: dict[str, list[dict[str, Any]]], family: str
) -> None:
    alone, *ranks = runs[family]
    assert alone["preemptions"] > 0
    assert {0, 1} == {version for versions in alone["versions"] for version in versions}
    for rank in ranks:
        assert rank["tokens"] == alone["tokens"]
        assert rank["versions"] == alone["versions"]
        assert rank["preemptions"] == alone["preemptions"]
        for name in ("logprobs", "raw_logprobs"):
            for got, expected in zip(rank[name], alone[name], strict=True):
                torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=1e-4, rtol=0)
    said = [{key: value for key, value in rank.items() if key != "held"} for rank in ranks]
    assert all(one == said[0] for one in said)  # all ranks recorded the same bits


@pytest.mark.parametrize("family", CASES)
def test_each_rank_holds_its_heads_cache_and_its_share_of_the_layers(
    runs: dict[str, list[dict[str, Any]]], family: str
) -> None:
    alone, *ranks = runs[family]
    whole = dict(make_model(family).named_parameters())
    heads = sum(t.numel() for name, t in whole.items() if "k_proj" in name or "v_proj" in name) * 4
    in_layers = sum(t.numel() for name, t in whole.items() if "proj" in name) * 4
    tokens = sum(t.numel() for name, t in whole.items() if "embed" in name or "lm_head" in name) * 4
    step = -(-97 // SIZES[family])  # of a vocabulary of 97, the last rank has fewer
    for first, rank in zip(range(0, 97, step), ranks, strict=True):
        assert rank["token_bytes"] * 2 == alone["token_bytes"]  # one of two heads
        layers = heads // 2 + (in_layers - heads) // SIZES[family]
        own_tokens = tokens * min(step, 97 - first) // 97
        assert rank["held"] == alone["held"] - in_layers - tokens + layers + own_tokens
