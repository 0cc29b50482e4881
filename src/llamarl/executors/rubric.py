"""What a judge is asked, and the number in what it says. Pure.

rubric with {question}, {response}, {answer} ─▶ text ─▶ the judge's words ─▶ the last number that the pattern finds
                                                                         ─▶ between 0 and 1
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from llamarl.executors.conversations import transcript
from llamarl.types import Prompt, Response

__all__ = ["fill", "score_in"]

_PLACES = re.compile(r"\{(question|response|answer)\}")


def fill(rubric: str, prompt: Prompt, response: Response) -> str:
    """The rubric with an item's question, the response and the reference answer in their places.

    All places are filled at once: braces in a response are words, and put nothing else in.
    """
    parts = {"question": _question(prompt), "response": transcript(response), "answer": prompt.answer or ""}
    return _PLACES.sub(lambda place: parts[place[1]], rubric)


def _question(prompt: Prompt) -> str:
    """The question; of a conversation, its turns, each after who said it."""
    messages = prompt.metadata.get("messages")
    if not messages:
        return prompt.question or prompt.text
    if len(messages) == 1:
        return str(messages[0].get("content") or "")
    return "\n\n".join(f"{message.get('role')}: {message.get('content') or ''}" for message in messages)


def score_in(text: str, pattern: str, score_range: Sequence[float]) -> float | None:
    """What ``text`` says as a share of the range; None where it names no number, or one outside."""
    found = re.findall(pattern, text)
    if not found:
        return None
    low, high = score_range
    try:
        number = float(found[-1])
    except ValueError:
        return None
    return (number - low) / (high - low) if low <= number <= high else None
