"""Tensor parallel generation over gloo against one rank: same tokens, weights pulled straight into each rank's part."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_command import SERVER

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import engine_ranks  # noqa: E402
from engine_ranks import tiny_model  # noqa: E402

FAMILIES = ("llama", "gemma3_text")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By family: the report of the single rank, then those of two."""
    folder = tmp_path_factory.mktemp("engine_ranks")
    for family in FAMILIES:
        tiny_model(family, "sdpa").save_pretrained(folder / family)
    for world in (1, 2):
        ranks = [
            SERVER.Process(target=engine_ranks.main, args=(rank, world, folder, list(FAMILIES)))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        try:
            for rank in ranks:
                rank.join(timeout=120)
            assert [rank.exitcode for rank in ranks] == [0] * world  # a rank's traceback is in the captured stderr
        finally:
            for rank in ranks:
                rank.kill()
    names = ("1-0", "2-0", "2-1")
    return {f: [json.loads((folder / f"{f}-{name}.json").read_text()) for name in names] for f in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_sample_the_tokens_of_one_through_preemption_and_new_weights(
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
    assert ranks[0] == ranks[1]  # both ranks recorded the same bits


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_holds_its_heads_cache_and_its_share_of_the_layers(
    runs: dict[str, list[dict[str, Any]]], family: str
) -> None:
    alone, *ranks = runs[family]
    whole = dict(tiny_model(family, "sdpa").named_parameters())
    in_layers = sum(t.numel() for name, t in whole.items() if "proj" in name) * 4
    for rank in ranks:
        assert rank["token_bytes"] * 2 == alone["token_bytes"]
        assert rank["held"] == alone["held"] - in_layers // 2
