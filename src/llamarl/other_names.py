"""What TRL, verl and Hugging Face's trainers call a key: one table, ``other_names.toml``.

docs/from_trl.md and docs/from_verl.md show it; whoever writes one of those names is led to ours.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources

__all__ = ["other_names", "our_name"]


@cache
def other_names() -> dict[str, list[list[str]]]:
    """Program -> rows of (their names, ours, note), each as the page shows it."""
    return tomllib.loads((resources.files("llamarl") / "other_names.toml").read_text(encoding="utf-8"))


def our_name(word: str) -> tuple[str | None, str]:
    """What to write for another program's name of a setting.

    Args:
        word: Dots are allowed: of verl's ``actor_rollout_ref.rollout.n`` the last word is enough.

    Returns:
        Our key where there is one alone, and the words for a user; ``(None, "")`` where no program has such a name.
    """
    last = word.rpartition(".")[2]
    found = [
        (program, ours)
        for program, rows in other_names().items()
        for theirs, ours, _ in rows
        if last in (span.partition("=")[0].rpartition(".")[2] for span in re.findall(r"`([^`]+)`", theirs))
    ]
    answers = list(dict.fromkeys(ours.replace("`", "") for _, ours in found))
    if not answers:
        return None, ""
    program = found[0][0]
    if answers == ["none"]:
        return None, f"{program}'s {last} has no counterpart here"
    keys = {re.split(r"[ ,]", answer)[0] for answer in answers}
    key = keys.pop() if len(keys) == 1 else None
    page = f"docs/from_{program.lower()}.md"
    return key, f"{program}'s {last} is {'; or '.join(answers)} ({page})"
