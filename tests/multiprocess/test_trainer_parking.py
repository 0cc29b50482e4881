"""A sharded trainer that moves out between its ticks: FSDP2's own views of its shards survive it, and so does every bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_ranks

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "unit" / "trainer"))
sys.path.insert(0, str(HERE))
import parking_ranks  # noqa: E402
from training_fixtures import write_model  # noqa: E402

WORLD = 2
CASES = [(2, 1, "float32", False), (2, 1, "bfloat16", True), (1, 2, "float32", False), (1, 2, "bfloat16", False)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, list[Any]]]]:
    """[rank][case] -> what each tick of it showed."""
    folder = tmp_path_factory.mktemp("parking")
    write_model(folder / "model", "llama")
    run_ranks(parking_ranks.main, [(rank, WORLD, folder, CASES) for rank in range(WORLD)], limit_s=240)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: "-".join(str(v) for v in CASES[i]))
def test_sharded_trainer_parked_between_ticks_gives_the_bits_of_one_that_stays(
    found: list[list[dict[str, list[Any]]]], case: int
) -> None:
    for rank in range(WORLD):
        shown = found[rank][case]
        for what in ("metrics", "handed_over", "back"):
            assert shown[what] == [True] * parking_ranks.NUM_TICKS, what
        for before, freed, left in shown["parked"]:
            assert before == freed > 0 and left == 0
