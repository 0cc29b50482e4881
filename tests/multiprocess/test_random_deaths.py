"""Runs of a small job whose processes are killed at random moments, two at a time now and then, six in the suite and twenty at length;
``make chaos`` kills real ones."""

import json
from pathlib import Path

import pytest
from death_job import NUM_TICKS, by_hand, play
from forked_command import SERVER

KILLS = 5


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 20), marks=pytest.mark.long)], ids=str)
def test_runs_under_random_deaths_end_with_what_was_worked_by_hand(tmp_path: Path, seeds: range) -> None:
    all_struck = 0
    for seed in seeds:
        process = SERVER.Process(target=play, args=(seed, KILLS, tmp_path / "out"))
        process.start()
        process.join(60)
        ended = process.exitcode
        process.kill()
        assert ended == 0, seed
        totals, struck = json.loads((tmp_path / "out").read_text())
        assert totals == by_hand(NUM_TICKS), seed
        all_struck += struck
    assert all_struck >= len(seeds) * KILLS / 2  # the others' run had ended
