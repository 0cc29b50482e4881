"""Episodes on two ranks, of whichever kind: one has the environments, both play the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rank_processes import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))
import episode_rank_program


def test_two_ranks_hear_the_same_replies_and_play_what_one_plays_alone(tmp_path: Path) -> None:
    run_ranks(
        episode_rank_program.main,
        [(rank, axis, tmp_path) for axis, rank in (("", 0), ("tp", 0), ("tp", 1), ("pp", 0), ("pp", 1))],
        limit_s=120,
    )
    alone = json.loads((tmp_path / "-0.json").read_text())
    assert sum(len(sequence["turns"]) for sequence in alone) > 2 * len(alone)
    assert [sequence["reason"] for sequence in alone].count("error") == 1  # a failure is heard by all too
    for axis in ("tp", "pp"):
        first, second = (json.loads((tmp_path / f"{axis}-{rank}.json").read_text()) for rank in (0, 1))
        assert first == second == alone
        # where replies join on arrival, what the first rank has seen decides for both
        first, second = (json.loads((tmp_path / f"{axis}-{rank}-arriving.json").read_text()) for rank in (0, 1))
        assert first == second
        assert len(first[1]) == sum(len(sequence["turns"]) for sequence in first[0])
