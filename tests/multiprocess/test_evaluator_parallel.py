"""An evaluator of several replicas, each on tensor-parallel ranks, against one process: the same tokens, the same verdicts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))
import evaluator_ranks

SIZES = ((2, 2), pytest.param(3, 1, marks=pytest.mark.long), pytest.param(1, 4, marks=pytest.mark.long))


def _run(folder: Path, dp: int, tp: int) -> list[dict[str, Any]]:
    run_ranks(evaluator_ranks.main, [(rank, folder, dp, tp) for rank in range(dp * tp)], limit_s=120)
    return [json.loads((folder / f"{dp}x{tp}-{rank}.json").read_text()) for rank in range(dp * tp)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _run(tmp_path_factory.mktemp("alone"), 1, 1)[0]


@pytest.mark.parametrize(("dp", "tp"), SIZES)
def test_replicas_of_tensor_parallel_ranks_say_what_one_process_says(
    alone: dict[str, Any], tmp_path: Path, dp: int, tp: int
) -> None:
    ranks = _run(tmp_path, dp, tp)
    assert ranks[0]["metrics"] == alone["metrics"]
    assert alone["metrics"]["eval/length_mean"] > 0 and alone["metrics"]["eval/failed"] == 0
    assert not any(rank["metrics"] for rank in ranks[1:])
    assert len(alone["played"]) == 7
    for number, rank in enumerate(ranks):  # every replica's prompts, to the token; by their place
        assert rank["played"] == alone["played"][number // tp :: dp]
