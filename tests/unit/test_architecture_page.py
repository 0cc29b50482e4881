"""The page that says which files a change touches."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_files_that_the_architecture_page_sends_a_reader_to_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().split("## I want to ...")[1].split("\n## ")[0]
    named = re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)*\.py)`", page)
    assert len(named) > 30, "the table names files"
    assert [path for path in named if not (ROOT / "src" / "llamarl" / path).exists()] == []
