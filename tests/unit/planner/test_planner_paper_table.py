"""The benchmark script of the paper's table: what it claims, and the form of what it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "paper_table.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paper_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["paper_table"] = module
    spec.loader.exec_module(module)
    return module


def test_every_claim_holds_and_the_file_has_the_agreed_form(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "table.json"
    assert script.main(["--quick", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert set(record) == {"machine", "versions", "command", "results", "claims"}
    assert all(set(claim) == {"claim", "value", "bar", "ok"} for claim in record["claims"])
    assert [claim["ok"] for claim in record["claims"]] == [True] * 4
    assert "Assumptions" in capsys.readouterr().out


def test_the_baseline_row_hangs_on_memory_as_the_docs_say(script: ModuleType) -> None:
    baseline = script.rows_of(script.base_case())[2][0]
    assert baseline.generator.layout.tp == 128
    assert baseline.generator.demand.slots < baseline.generator.demand.sequences  # several waves
