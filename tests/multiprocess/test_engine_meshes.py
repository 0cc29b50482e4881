"""An engine on tensor-parallel ranks over gloo against one rank: same tokens, through interruptions, preemption and new weights."""

import json
from typing import Any

import engine_mesh_ranks
import pytest
import torch
from engine_mesh_ranks import ALONE, make_model
from rank_processes import run_meshes

MESHES = {
    2: (
        "gemma2",
        "qwen3_moe",
    ),  # dense, and both ends are one tensor; the second layer has no experts, the ends are two
    4: ("gemma3_text-wide",),  # two ranks hold the same key-value head
    8: ("qwen3-wide", "gemma2-wide"),  # four do
}
"""Tensor-parallel ranks -> models of three layers."""
LONG = {"qwen3-wide", "gemma2-wide"}
"""Eight ranks on two cores take ten seconds a family."""
CASES = [(tp, family) for tp, families in MESHES.items() for family in families]
CASE_PARAMS = [pytest.param(case, marks=pytest.mark.long if case[1] in LONG else (), id=str(case)) for case in CASES]
FURTHER_CASES = [case for case in CASES if engine_mesh_ranks.FURTHER.get(case[0]) == case[1]]
Case = tuple[int, str]
Reports = dict[Case, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """By number of ranks and family: what each rank says, the single rank first."""
    folder = tmp_path_factory.mktemp("engine_meshes")
    long = any(item.get_closest_marker("long") for item in request.session.items if item.path == request.path)
    cases = [case for case in CASES if long or case[1] not in LONG]
    every = sorted({family for _, family in cases})
    for family in every:
        make_model(family).save_pretrained(folder / family)
    meshes = []
    for tp in MESHES:
        if families := [family for at, family in cases if at == tp]:
            meshes.append([(tp, rank, folder, families) for rank in range(tp)])
    run_meshes(engine_mesh_ranks.main, (ALONE, 0, folder, every), meshes, limit_s=240)

    def said(tp: int, family: str) -> list[dict[str, Any]]:
        return [json.loads((folder / f"{family}-{tp}-{rank}.json").read_text()) for rank in range(tp)]

    return {(tp, family): said(ALONE, family) + said(tp, family) for tp, family in cases}


@pytest.mark.parametrize("case", CASE_PARAMS)
def test_ranks_sample_the_tokens_of_one_through_interruptions_preemption_and_new_weights(
    reports: Reports, case: Case
) -> None:
    alone, *ranks = reports[case]
    assert alone["preemptions"] > 0
    for rank in ranks:
        assert rank["preemptions"] > 0
        for part in ("first", "carried"):
            assert rank[part]["tokens"] == alone[part]["tokens"]
            assert rank[part]["policy_versions"] == alone[part]["policy_versions"]
            for got, expected in zip(rank[part]["logprobs"], alone[part]["logprobs"], strict=True):
                torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", FURTHER_CASES, ids=str)
def test_ranks_that_are_handed_adapters_alone_sample_what_one_does(reports: Reports, case: Case) -> None:
    """From two trainer ranks that each have a part of every factor."""
    alone, *ranks = reports[case]
    expected = alone["adapted"]
    assert all(versions == [0] * 4 + [1] * 4 for versions in expected["policy_versions"])
    for rank in ranks:
        found = rank["adapted"]
        assert found["tokens"] == expected["tokens"] and found["policy_versions"] == expected["policy_versions"]
        for got, one in zip(found["logprobs"], expected["logprobs"], strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(one), atol=1e-4, rtol=0)
    base = torch.tensor(alone["without adapters"]["logprobs"])
    assert (base - torch.tensor(expected["logprobs"])).abs().amax() > 1e-3  # the adapters say something


SPARSE_CASES = [case for case in CASES if case[1] == "qwen3_moe"]


@pytest.mark.parametrize("case", SPARSE_CASES, ids=str)
@pytest.mark.parametrize("part", ["first", "carried", "renamed"])
def test_ranks_note_the_experts_of_one(reports: Reports, case: Case, part: str) -> None:
    """Of prompts and tokens; through preemption, interruption, and versions that come while responses are written."""
    alone, *ranks = reports[case]
    expected = alone[part]["experts"]
    assert len(expected) == 2 * len(alone[part]["tokens"])
    for layers in (of_token for of_row in expected for of_token in of_row):
        assert len(layers) == 2  # the first and the third of three
    assert all(rank[part]["experts"] == expected for rank in ranks)


@pytest.mark.parametrize("case", CASE_PARAMS)
def test_ranks_repeat_their_bits_and_agree_on_them(reports: Reports, case: Case) -> None:
    _, first, *others = reports[case]
    assert first["again"] == first["first"]
    assert first["again ended"] == first["first ended"]  # the same sequences, in the same steps
    for other in others:
        assert _said_by_all(other) == _said_by_all(first)


def _said_by_all(rank: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rank.items() if name not in ("held", "token_bytes")}


@pytest.mark.parametrize("case", CASE_PARAMS)
def test_tokens_from_before_a_version_stay_of_the_one_before(reports: Reports, case: Case) -> None:
    alone, first, *_ = reports[case]
    for own, tokens, expected, before in zip(
        first["renamed"]["policy_versions"],
        first["renamed"]["tokens"],
        alone["renamed"]["tokens"],
        first["carried"]["tokens"],
        strict=True,
    ):
        assert own == sorted(own)
        assert len(own) == len(tokens) >= len(before)
        assert tokens == expected
    versions = {version for own in first["renamed"]["policy_versions"] for version in own}
    assert versions == {0, 1, 2}


@pytest.mark.parametrize("case", CASE_PARAMS)
def test_each_rank_holds_its_share_of_the_layers_and_of_their_cache(reports: Reports, case: Case) -> None:
    tp, family = case
    alone, *ranks = reports[case]
    whole = {name: t.numel() for name, t in make_model(family).named_parameters()}
    step = -(-97 // tp)  # of a vocabulary of 97, the last rank has fewer
    for number, rank in enumerate(ranks):
        assert rank["token_bytes"] * min(tp, 2) == alone["token_bytes"]  # of two heads
        assert list(rank["held"]) == sorted(whole)
        for name, size in rank["held"].items():
            if "embed" in name or "lm_head" in name:
                assert size == whole[name] * min(step, 97 - step * number) // 97, name
            elif "k_proj" in name or "v_proj" in name:
                assert size == whole[name] // min(tp, 2), name
            elif "proj" in name:
                assert size == whole[name] // tp, name
            else:
                assert size == whole[name], name
