"""Writes the tables of names on docs/from_trl.md and docs/from_verl.md: ``python tests/tools/other_names.py``."""

import re
from pathlib import Path

from llamarl.other_names import other_names

DOCS = Path(__file__).parents[2] / "docs"


def page_of(program: str) -> Path:
    """Where a program's names are shown."""
    return DOCS / f"from_{program.lower()}.md"


def with_table(program: str, text: str) -> str:
    """The page with its table of names as ``other_names.toml`` has it."""
    head = f"| {program} | here | note |\n|---|---|---|\n"
    rows = "".join(
        f"| {theirs} | {ours} | {note}{' ' * bool(note)}|\n" for theirs, ours, note in other_names()[program]
    )
    found = re.compile(re.escape(head) + r"(?:\|.*\n)*")
    assert len(found.findall(text)) == 1, f"{page_of(program)} has no table that begins {head!r}"
    return found.sub(lambda _: head + rows, text)


if __name__ == "__main__":
    for name in other_names():
        page_of(name).write_text(with_table(name, page_of(name).read_text(encoding="utf-8")), encoding="utf-8")
