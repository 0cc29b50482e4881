"""Fenced blocks of Markdown pages, with the mark that says what a test does with each.

A mark is an HTML comment on the line above a fence. Readers of the page do not see it, so it says what is checked of a block and
never changes what the block does::

    <!-- run -->             run the block: sh by bash, python as a script of its own
    <!-- run exit=4 -->      the same; it must end with that status
    <!-- run needs=plotly -->  the same; left out where the module is not installed
    <!-- file NAME -->       write the block to NAME
    <!-- output -->          lines that the block run last must print, numbers apart
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "blocks_of"]

_FENCE = re.compile(r"^(\s*)```\s*([\w-]*)\s*$")
_MARK = re.compile(r"^\s*<!--\s*(run|file|output)\b((?: (?:exit=\d+|needs=\w+|[\w./-]+))*) -->\s*$")


@dataclass(frozen=True, kw_only=True)
class Block:
    """What stands between two fences."""

    page: Path
    line: int
    """Of its opening fence, from 1."""
    language: str
    text: str
    mark: str = ""
    """``run``, ``file``, ``output``, or empty."""
    words: tuple[str, ...] = ()
    """Of the mark, after its name."""

    def word(self, name: str) -> str:
        """The value of ``name=value`` among the mark's words, empty without."""
        return next((word.partition("=")[2] for word in self.words if word.startswith(f"{name}=")), "")

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """In order.

    Raises:
        ValueError: A fence is not closed, or a mark stands above none.
    """
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    mark = None
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence is None:
            if mark is not None:
                raise ValueError(f"{page.name}:{number}: this mark does not stand right above a fence")
            mark = _MARK.match(lines[number])
            number += 1
            continue
        end = next((n for n in range(number + 1, len(lines)) if lines[n].strip() == "```"), None)
        if end is None:
            raise ValueError(f"{page.name}:{number + 1}: this fence is not closed")
        text = "".join(line.removeprefix(fence[1]) + "\n" for line in lines[number + 1 : end])
        words = tuple(shlex.split(mark[2])) if mark else ()
        found.append(
            Block(page=page, line=number + 1, language=fence[2], text=text, mark=mark[1] if mark else "", words=words)
        )
        mark, number = None, end + 1
    return found
