"""``schedule.weights = "latest"`` on two tensor-parallel ranks: both swap before the same step, once both have the version."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from forked_command import SERVER

sys.path.insert(0, str(Path(__file__).resolve().parent))
import latest_ranks


def test_ranks_swap_together_when_the_last_of_them_has_the_version_and_a_log_repeats_them(tmp_path: Path) -> None:
    ranks = [
        SERVER.Process(target=latest_ranks.main, args=(rank, world, tmp_path))
        for world, rank in ((1, 0), (2, 0), (2, 1))
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(timeout=120)
        assert [rank.exitcode for rank in ranks] == [0, 0, 0]  # a rank's traceback is in the captured stderr
    finally:
        for rank in ranks:
            rank.kill()
    alone, first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1"))
    assert [event["swaps"] for event in first["events"]] == [
        [[0, 0]],
        [[0, 0], [9, 1]],
        [[0, 2]],
        [[0, 2], [11, 3]],
        [[0, 3], [3, 4]],
    ]
    same = [[{**event, "rank": 0} for event in rank["events"]] for rank in (first, second)]
    assert same[0] == same[1]  # steps, swaps and the digest of what was delivered, which the first rank alone hands on
    assert any(tokens for tick in first["tokens"] for tokens in tick)
    assert first["tokens"] == alone["tokens"]  # one rank to which versions come when the later of the two has them
