"""The law of the ``tokens/*`` keys, against a bookkeeping of single tokens."""

import random
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from made_run import Report

from llamarl.controller.recorder import Recorder
from llamarl.errors import CheckpointError
from llamarl.observability.ledger import check_ledger, imbalance
from llamarl.settings.observability import ObservabilityConfig

FLOWS = ("generated", "trained", "repeated", "unused", "failed", "dropped")


def random_rows(seed: int, num_ticks: int) -> list[dict[str, Any]]:
    """Rows of a run in which every token is followed on its way, one by one."""
    rng = random.Random(seed)
    in_generator = in_reward = 0
    rows = []
    for tick in range(num_ticks):
        flows: Counter[str] = Counter()
        new = rng.randrange(50)
        flows["generated"] += new
        tokens = in_generator + new
        waiting, in_generator = in_reward, 0
        in_reward = 0
        trained = 0
        for _ in range(tokens):
            fate = rng.choice(("stays", "fails", "drops", "waits", "unused", "trains"))
            in_generator += fate == "stays"
            in_reward += fate == "waits"
            flows["failed"] += fate == "fails"
            flows["dropped"] += fate == "drops"
            flows["unused"] += fate == "unused"
            trained += fate == "trains"
        for _ in range(waiting):
            fate = rng.choice(("waits", "trains", "drops"))
            in_reward += fate == "waits"
            flows["dropped"] += fate == "drops"
            trained += fate == "trains"
        for _ in range(trained):
            passes = rng.randint(1, 3)
            flows["trained"] += passes
            flows["repeated"] += passes - 1
        row = {f"tokens/{name}": flows[name] for name in FLOWS}
        rows.append({"step": tick, **row, "tokens/carried": in_generator, "tokens/spare": in_reward})
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_tokens_followed_one_by_one_close_and_no_other_do(seed: int) -> None:
    rows = random_rows(seed, 12)
    for before, row in zip([None, *rows[:-1]], rows, strict=True):
        assert imbalance(row, before) == 0
        check_ledger(row, before)
        for key in row.keys() - {"step"}:
            into = key in ("tokens/generated", "tokens/repeated")
            assert imbalance({**row, key: row[key] + 1}, before) == (1 if into else -1), key
    total = Counter[str]()
    for row in rows:
        total.update({name: row[f"tokens/{name}"] for name in FLOWS})
    held = rows[-1]["tokens/carried"] + rows[-1]["tokens/spare"]
    went = total["trained"] - total["repeated"] + total["unused"] + total["failed"] + total["dropped"] + held
    assert total["generated"] == went  # over the run


def test_rows_to_imitate_come_in_beside_what_is_generated() -> None:
    (row,) = random_rows(2, 1)
    beside = {
        **row,
        "tokens/imitated": 7,
        "tokens/trained": row["tokens/trained"] + 5,
        "tokens/unused": row["tokens/unused"] + 2,
    }
    assert imbalance(beside, None) == 0 and imbalance({**beside, "tokens/imitated": 8}, None) == 1


def test_a_row_that_does_not_close_is_refused_with_every_term() -> None:
    before, row = random_rows(3, 2)
    with pytest.raises(AssertionError, match=r"tick 1 do not add up: \+2 of .*tokens/carried before \d+"):
        check_ledger({**row, "tokens/generated": row["tokens/generated"] + 2}, before)


def test_a_job_whose_executors_do_not_all_count_has_no_ledger() -> None:
    row = random_rows(1, 1)[0]
    del row["tokens/failed"]
    assert imbalance(row, None) is None
    assert imbalance(random_rows(1, 1)[0], {"step": 3}) is None  # a row of before there were stocks


def recorder(run_dir: Path, **how: Any) -> Recorder:
    quiet = ObservabilityConfig(console="none", tensorboard=False, trace=False)
    return Recorder(run_dir, quiet, ["trainer"], 4, **how)


def report(row: dict[str, Any]) -> Report:
    metrics = {key: float(value) for key, value in row.items() if key != "step"}
    return Report("trainer", row["step"], metrics, 0.0, 1.0)


def test_the_recorder_checks_each_row_against_the_one_before_also_after_a_resume(tmp_path: Path) -> None:
    rows = random_rows(7, 4)
    first = recorder(tmp_path)
    for row in rows[:3]:
        first.on_report(report(row))
    first.close()
    resumed = recorder(tmp_path, resume_after_tick=1)
    resumed.on_report(report(rows[2]))
    with pytest.raises(AssertionError, match="tick 3 do not add up"):
        resumed.on_report(report({**rows[3], "tokens/carried": rows[3]["tokens/carried"] + 1}))
    resumed.close()


@pytest.mark.parametrize(
    ("wrong", "told"), [({"tokens/carried": 7e9}, "do not add up"), ({"mine": 1.0}, ""), ({"step": -5}, "reports step")]
)
def test_what_a_journal_tells_that_cannot_be_is_told_with_the_cure(
    tmp_path: Path, wrong: dict[str, float], told: str
) -> None:
    row = random_rows(7, 1)[0]
    found = report(row)
    found.metrics.update(wrong)
    resumed = recorder(tmp_path, resume_after_tick=-1, written_until=0)
    with pytest.raises(CheckpointError, match=f"{told}.*; remove .*/journal to go on") if told else nullcontext():
        resumed.on_report(found)
    resumed.close()
