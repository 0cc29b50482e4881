"""The page that says which files a change touches."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def files(text: str) -> list[str]:
    return re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)+\.(?:py|toml)|[a-z_]+\.py)`", text)


def test_files_that_the_architecture_page_sends_a_reader_to_exist() -> None:
    named = files(PAGE.split("## I want to ...")[1])
    assert len(named) > 30, "the table names files"
    places = (ROOT / "src" / "llamarl", ROOT)
    assert [path for path in named if not any((place / path).exists() for place in places)] == []


def test_a_change_touches_at_most_six_files() -> None:
    table = PAGE.split("## I want to ...")[1].split("\n## ")[0]
    crowded = {row.split("|")[1].strip(): len(set(files(row))) for row in table.splitlines() if row.startswith("| ")}
    assert len(crowded) > 10 and max(crowded.values()) <= 6, crowded
