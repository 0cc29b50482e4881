"""Whether a replay has the bits of its source, as it is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from llamarl.controller.replay import compare_runs

ROW = {"reward/mean": 0.5, "time/step_s": 1.0, "eval/accuracy": 0.3}


def made(folder: Path, rows: list[dict[str, Any]], weights: bytes = b"w") -> Path:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_bytes(weights)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": n, **row}) + "\n" for n, row in enumerate(rows)))
    return folder


@pytest.mark.parametrize(
    ("rows", "weights", "words"),
    [
        (
            [ROW, {**ROW, "time/step_s": 9.0}],
            b"w",
            "equal bits: 2 rows but for times, and the policy's weights, as in SOURCE",
        ),
        ([ROW], b"other", "equal bits: 1 row but for times as in SOURCE"),  # it ended earlier
        (
            [ROW, {**ROW, "reward/mean": 0.25}],
            b"w",
            "OTHER BITS than SOURCE, from tick 1 on: reward/mean is 0.25, there 0.5",
        ),
        ([ROW, {**ROW, "entropy": 1.0}], b"w", "OTHER BITS than SOURCE, from tick 1 on: entropy is 1.0, there None"),
        ([], b"w", "no tick of SOURCE was repeated: nothing is known of its bits"),
        ([ROW, ROW], b"other", "OTHER BITS than SOURCE: the rows are equal, model/model.safetensors differs"),
    ],
)
def test_equal_and_other_bits_are_told_apart(
    rows: list[dict[str, Any]], weights: bytes, words: str, tmp_path: Path
) -> None:
    source = made(tmp_path / "source", [ROW, ROW])
    again = made(tmp_path / "again", rows, weights)
    assert compare_runs(source, again) == (words.startswith("equal"), words.replace("SOURCE", str(source)))
