"""Every token of a run is accounted for, over all ranks, with all that can happen to one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LONG_LEDGERS, CommandLine, rows

from llamarl.observability.ledger import imbalance
from llamarl.observability.rollouts import read_rollouts
from llamarl.observability.trained_tokens import read_trained
from llamarl.types import Score

JUDGE = """
def some_fail(prompt, response, answer):
    if len(response) % 3 == 0:
        raise ValueError("no number in it")
    return float(len(response) % 2)
"""
REPLICAS = {
    "generator.dp": 2,
    "generator.max_segments": 2,
    "generator.oversubscription": 1.5,
    "schedule.max_staleness": 1,
    "evaluation.every": 0,
    "trainer.skip_zero_advantage": "false",  # what is not computed is not written down
}


def total(table: list[dict[str, Any]], key: str) -> int:
    return sum(row.get(key, 0) for row in table)


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param(
            {
                "trainer.fsdp": 2,
                "trainer.epochs": 2,
                "trainer.minibatches": 2,
                "run.cores": 4,
                "dynamic_sampling.enabled": "true",
                "dynamic_sampling.carry_ticks": 1,
                "algorithm.train_truncated": "false",
                "generator.sampling.max_new_tokens": 31,  # so that some are cut, at a length that does not fail
                "task.options": LONG_LEDGERS,
            },
            marks=pytest.mark.long,
        ),
    ],
    ids=["two replicas", "two trainer ranks and passes, dynamic sampling"],
)
def test_what_two_replicas_generate_is_trained_failed_dropped_or_still_there(
    llamarl: CommandLine, tmp_path: Path, more: dict[str, Any]
) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE)
    llamarl.train(tmp_path / "run", {**REPLICAS, "task.reward": f"{judge}:some_fail", **more})
    table = rows(tmp_path / "run")
    assert [imbalance(row, before) for row, before in zip(table, [None, *table[:-1]], strict=True)] == [0] * 6
    once = total(table, "tokens/trained") - total(table, "tokens/repeated")
    gone = once + sum(total(table, f"tokens/{fate}") for fate in ("unused", "failed", "dropped"))
    assert total(table, "tokens/generated") == gone + table[-1]["tokens/carried"] + table[-1].get("tokens/spare", 0)

    samples = [s for tick in range(6) for s in read_rollouts(tmp_path / "run", tick=tick)]  # what the judge was given
    judged = sum(len(s.response.tokens) for s in samples)
    failed = sum(len(s.response.tokens) for s in samples if not isinstance(s.response.outcome, Score))
    assert total(table, "tokens/generated") - table[-1]["tokens/carried"] == judged
    assert 0 < failed == total(table, "tokens/failed")
    assert total(table, "samples/delivered") == len(samples)
    for tick, row in enumerate(table):
        lengths = [len(s.response.tokens) for s in read_rollouts(tmp_path / "run", tick=tick)]
        assert row["response/length_mean"] == pytest.approx(np.mean(lengths), rel=1e-12)  # of both replicas
        assert (row["response/length_min"], row["response/length_max"]) == (min(lengths), max(lengths))
    trained = [
        r for tick in range(6) for r in read_trained(tmp_path / "run", tick)
    ]  # what both trainer ranks wrote down
    assert sum(len(r.policy_logprobs) for r in trained) == once
    for fate in ("repeated", "dropped", "unused") if more else ():
        assert total(table, f"tokens/{fate}") > 0, fate


def test_what_the_trainer_wrote_of_each_token_amounts_to_the_rows_ratio(llamarl: CommandLine, tmp_path: Path) -> None:
    settings = {"run.num_ticks": 4, "optimizer.lr": 0.01, "algorithm.rho": 1.01, "evaluation.every": 0}
    settings["trainer.skip_zero_advantage"] = "false"  # what is not computed is not written down
    llamarl.train(tmp_path / "run", {**settings, "run.runtime": '"inline"'})
    clipped = 0.0
    for tick, row in enumerate(rows(tmp_path / "run")):
        samples = {
            (s.response.prompt_index, s.response.sample_index): s for s in read_rollouts(tmp_path / "run", tick=tick)
        }
        seen = read_trained(tmp_path / "run", tick)
        assert len(seen) == row["samples/trained"]
        ratios = []
        for one in seen:
            response = samples[one.prompt_index, one.sample_index].response
            ratios.append(
                np.exp(one.policy_logprobs.astype(np.float64) - response.behavior_logprobs[response.loss_mask])
            )
        ratio = np.concatenate(ratios)
        assert ratio.mean() == pytest.approx(row["ratio/mean"], rel=1e-5)
        assert ratio.max() == pytest.approx(row["ratio/max"], rel=1e-5)
        found = np.concatenate([one.clipped for one in seen])
        assert found.mean() == pytest.approx(row["ratio/clipped_fraction"], abs=1e-9)
        np.testing.assert_array_equal(
            found, ratio.astype(np.float32) > np.float32(1.01)
        )  # AIPO bounds the ratio at rho
        clipped += found.sum()
    assert clipped > 0
