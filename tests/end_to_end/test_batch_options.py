"""Dynamic sampling and several steps a tick in whole runs: what they promise holds, and a resume repeats bits.

The runs go on in this process, one executor after the other; ``test_repeatable`` shows that processes give the same bits.
"""

import json
from pathlib import Path
from typing import Any

from conftest import LONG_LEDGERS, RECIPE, arguments, rows

from llamarl.config import load_config
from llamarl.controller.resume import resume_run
from llamarl.controller.run import start_run
from llamarl.observability.metrics import strip_timing

FAST = {
    "run.runtime": '"inline"',
    "run.cores": 1,
    "task.options": LONG_LEDGERS,
    "run.num_ticks": 4,
    "evaluation.every": 0,
    "generator.sampling.max_new_tokens": 40,
    "observability.console": '"none"',
    "observability.tensorboard": "false",
    "checkpoint.every": 2,
}
REFILLED: dict[str, Any] = {
    "dynamic_sampling.enabled": "true",
    "dynamic_sampling.oversample": 2,
    "dynamic_sampling.carry_ticks": 1,
    "schedule.prompts_per_step": 2,
    "generator.max_segments": 1,
    "generator.oversubscription": 1,
    "algorithm.name": '"decoupled_ppo"',
    "trainer.minibatches": 2,
    "trainer.epochs": 2,
}

REWARD = """
import zlib

def score(prompt, response, answer):
    '''Of the prompts 0 to 15, those in the test's ``GOOD`` give every response another reward, the others give none.'''
    good = zlib.crc32(f"32{prompt}".encode()) % 2
    return zlib.crc32(response.encode()) / 2**32 if good else 0.0
"""
COUNTS = ("generated", "no_signal", "trained", "refilled", "spare", "expired", "short")
GOOD = ({0}, {4, 5, 6, 7}, {8}, {15})  # of the four prompts that each tick generates


def _start(run_dir: Path, settings: dict[str, Any]) -> None:
    start_run(load_config(RECIPE, arguments(run_dir, settings)))


def _weights(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


def test_a_resumed_run_repeats_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    settings = {**FAST, **REFILLED, "task.reward": json.dumps(f"{tmp_path / 'rewards.py'}:score")}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _start(whole, settings)
    _start(cut, {**settings, "run.num_ticks": 2})
    resume_run(load_config(RECIPE, arguments(cut, settings)))
    table = rows(whole)
    assert [strip_timing(row) for row in rows(cut)] == [strip_timing(row) for row in table]
    assert _weights(cut) == _weights(whole)
    _check_refill(table)


def _check_refill(table: list[dict[str, Any]]) -> None:
    """Two groups wanted a tick. Tick 1 leaves 6 and 7 (version 0); tick 2 takes 6, two versions old, which is the bound
    1 + 1 - 1 + 1; 7 would be three at tick 3, so it goes. The cut after tick 1 lies between keeping and taking."""
    columns = {key: [row[f"groups/{key}"] for row in table] for key in COUNTS}
    assert columns == {
        "generated": [4, 4, 4, 4],
        "no_signal": [4 - len(good) for good in GOOD],
        "trained": [1, 2, 2, 1],
        "refilled": [0, 0, 1, 0],
        "spare": [0, 2, 0, 0],
        "expired": [0, 0, 1, 0],
        "short": [1, 0, 0, 1],
    }
    assert [row["staleness/max"] for row in table] == [0, 1, 2, 1]
    assert [row["step/empty"] for row in table] == [2, 0, 0, 2]  # one group for two minibatches, in each of two passes
    assert table[1]["staleness/steps_max"] == 4 * 1 + 3
    assert table[2]["staleness/steps_max"] in (4 * 2 + 2, 4 * 2 + 3)  # 6 trains in one of the second pass's two steps
