"""An engine whose steps are cut by tokens over ranks with whole weights, over gloo against one rank: same tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_token_ranks
from engine_ranks import make_model
from engine_token_ranks import ALONE, KV_HEADS, Mesh, report
from tiny_models import SPARSE

MESHES: dict[Mesh, list[str]] = {
    (2, 1): ["gemma2"],
    (4, 1): ["qwen3_moe"],
    (2, 2): ["llama"],
}
"""Parts of the tokens and tensor-parallel ranks -> models of four query heads over two key-value heads."""
LONG: dict[Mesh, list[str]] = {
    (2, 1): ["llama", "deepseek_v3", "qwen3_moe"],
    (4, 1): ["qwen3", "gemma2"],
    (8, 1): ["llama-wide", "qwen3-wide"],
    (2, 2): ["qwen3_moe", "gemma2"],
    (2, 4): ["llama-wide"],
}
CASES = [(mesh, family) for mesh, families in MESHES.items() for family in families]
CASES_AT_LENGTH = [(mesh, family) for mesh, families in LONG.items() for family in families]
EVERY_CASE = [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in CASES_AT_LENGTH)]
PHASES = ("crowd", "lone", "parked", "kept", "restored")
Case = tuple[Mesh, str]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what each rank says of each case."""
    path = tmp_path_factory.mktemp("engine_tokens")
    own = [item for item in request.session.items if item.path == request.path]
    every = any(item.get_closest_marker("long") for item in own)
    asked = [*CASES, *(CASES_AT_LENGTH if every else ())]
    for family in {family for _, family in asked}:
        make_model(family).save_pretrained(path / family)
    for mesh in (ALONE, *sorted({mesh for mesh, _ in asked})):
        families = sorted({family for other, family in asked if mesh in (ALONE, other)})
        num_ranks = mesh[0] * mesh[1]
        run_ranks(engine_token_ranks.main, [(mesh, rank, path, families) for rank in range(num_ranks)], limit_s=240)
    return path


def said(folder: Path, mesh: Mesh, family: str) -> list[dict[str, Any]]:
    return [json.loads(report(folder, family, mesh, rank).read_text()) for rank in range(mesh[0] * mesh[1])]


@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_ranks_sample_the_tokens_of_one(folder: Path, case: Case) -> None:
    """Through chunks of a long prompt beside decodes, shared prompts, interruption, preemption, new weights, steps of one token, a
    parked engine, and a cache that is kept and restored."""
    (alone,) = said(folder, ALONE, case[1])
    assert alone["preemptions"] > 0 and alone["prompt_tokens_shared"] > 0
    for rank in said(folder, *case):
        assert {name: rank[name] for name in ("preemptions", "prompt_tokens_shared", "steps")} == {
            name: alone[name] for name in ("preemptions", "prompt_tokens_shared", "steps")
        }
        for phase in PHASES:
            assert rank[phase]["tokens"] == alone[phase]["tokens"]
            assert rank[phase]["policy_versions"] == alone[phase]["policy_versions"]
            assert rank[phase]["experts"] == alone[phase]["experts"]
            assert all(rows is not None for rows in rank[phase]["experts"]) == (case[1] in SPARSE)
            for name in ("logprobs", "raw_logprobs"):
                for got, expected in zip(rank[phase][name], alone[phase][name], strict=True):
                    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_all_ranks_record_the_same_bits_and_a_restored_cache_goes_on_bit_for_bit(folder: Path, case: Case) -> None:
    first, *others = ({name: value for name, value in rank.items() if name != "held"} for rank in said(folder, *case))
    assert all(other == first for other in others)
    assert first["parked"] == first["lone"] and first["restored"] == first["kept"]
    assert {version for versions in first["crowd"]["policy_versions"] for version in versions} == {0, 1}


@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_each_rank_holds_the_whole_weights_but_for_tensor_parallel_parts_and_the_cache_of_its_heads(
    folder: Path, case: Case
) -> None:
    (alone,) = said(folder, ALONE, case[1])
    cp, tp = case[0]
    for rank in said(folder, *case):
        assert (rank["held"] == alone["held"]) == (tp == 1)
        assert rank["token_bytes"] * min(cp * tp, KV_HEADS.get(case[1], 2)) == alone["token_bytes"]


@pytest.mark.parametrize("cp", [2, 4])
def test_heads_travel_to_their_rank_and_back_bit_for_bit_in_every_precision(folder: Path, cp: int) -> None:
    """Seven tokens, which neither 2 nor 4 divide."""
    assert [json.loads((folder / f"exchange-{cp}-{rank}.json").read_text()) for rank in range(cp)] == [[]] * cp
