"""examples/notebook.ipynb in a real kernel, from its first cell to its last; smaller, and in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    for cell in book.cells:
        cell.source = cell.source.replace("NUM_TICKS = 30", "NUM_TICKS = 2")
        cell.source = cell.source.replace('"prompts_per_step": 16', '"prompts_per_step": 2')
        cell.source = cell.source.replace("num_ticks=NUM_TICKS,", 'num_ticks=NUM_TICKS, run={"runtime": "inline"},')
    nbclient.NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    last = book.cells[-1].outputs[-1]["data"]["text/plain"]
    assert "4 of 4 ticks" in last
    texts = [str(output) for cell in book.cells for output in cell.get("outputs", [])]
    assert any("tick" in text and "reward" in text for text in texts), "no progress was shown"
