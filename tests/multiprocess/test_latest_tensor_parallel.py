"""``schedule.weights = "latest"`` on two ranks, of whichever kind: both swap before the same step, once both have the version."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rank_processes import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))
import latest_ranks


def test_ranks_swap_together_when_the_last_of_them_has_the_version_and_a_log_repeats_them(tmp_path: Path) -> None:
    places = [("", 0), *((axis, rank) for axis in ("tp", "pp") for rank in range(2))]
    run_ranks(latest_ranks.main, [(rank, axis, tmp_path) for axis, rank in places], limit_s=120)
    alone, *both = (json.loads((tmp_path / (axis or "alone") / f"{rank}.json").read_text()) for axis, rank in places)
    for first, second in zip(both[::2], both[1::2], strict=True):
        assert [event["swaps"] for event in first["events"]] == [
            [[0, 0]],
            [[0, 0], [9, 1]],
            [[0, 2]],
            [[0, 2], [11, 3]],
            [[0, 3], [3, 4]],
        ]
        same = [[{**event, "rank": 0} for event in rank["events"]] for rank in (first, second)]
        assert (
            same[0] == same[1]
        )  # steps, swaps and the digest of what was delivered, which the first rank alone hands on
        assert any(tokens for tick in first["tokens"] for tokens in tick)
    # one rank to which versions come when the later of the two has them; a stage's steps are others
    assert both[0]["tokens"] == alone["tokens"]
