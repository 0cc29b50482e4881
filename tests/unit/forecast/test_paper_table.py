"""The paper's table, as benchmarks/paper_table.py makes it and docs/forecast.md tells it."""

import json
from pathlib import Path

import paper_table
import pytest


def test_every_claim_holds_and_the_file_has_the_agreed_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    assert paper_table.main(["--quick", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert all(set(claim) >= {"claim", "value", "bar"} for claim in record["claims"])
    assert [claim["ok"] for claim in record["claims"]] == [True] * 4
    assert "nothing was measured" in capsys.readouterr().out


def test_the_baseline_row_hangs_on_memory_and_the_verdict_on_one_estimate_as_the_docs_say() -> None:
    base = paper_table.base_case()
    pairs = paper_table.rows_of(base)
    assert pairs[2][0].tp == 128
    assert pairs[2][0].slots < 2048 / pairs[2][0].copies  # several waves
    assert paper_table.within(paper_table.speed_ups(pairs))
    e = base.hardware.efficiency
    assert "eager_layer_overhead_s" in e.estimates
    changed = base.hardware.with_efficiency(eager_layer_overhead_s=1.2 * e.eager_layer_overhead_s)
    ratios = paper_table.speed_ups(paper_table.rows_of(paper_table.replace(base, hardware=changed)))
    assert not paper_table.within(ratios)
