"""Math word problems, in the format of GSM8K or of MATH; answers compared by ``math-verify``.

GSM8K: ``question``, and ``answer`` that ends in ``#### number``. MATH: ``problem``, and ``answer``, or a ``solution``
whose last ``\\boxed{...}`` is the answer. ``answers.final_answers`` finds the answer in a response; it is right when it
equals the reference as mathematics (``1/2``, ``0.5`` and ``\\frac12`` are one).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llamarl.data.items import ItemSource, Split, TaskItem
from llamarl.environments.answers import final_answers, last_boxed, tidy
from llamarl.environments.items import TableItems, question_of, text_field, with_verl_answer
from llamarl.environments.math_equivalence import check_reference, equals_reference, is_words, why_unreadable
from llamarl.errors import DataError
from llamarl.settings.environments import TaskConfig
from llamarl.types import Prompt, Score

__all__ = ["MathTask", "check_references", "judge_answer", "math_item"]

_BARE_BOX = re.compile(r"\\boxed\s+([-+]?\d+(?:\.\d+)?|[A-Za-z])(?=[.\s]*(?:\$|\\[\])]|$))")
"""Of a number or letter with which its formula ends: so it stands in some solutions of MATH's training set."""
MAX_BOXES = 8
"""Different ones that a response may hold; each must equal the reference, so more only cost time."""


def math_item(record: Mapping[str, Any], where: str) -> TaskItem:
    """One record in the format of GSM8K or MATH. The other fields become the item's metadata, for a
    judge of the user's own.

    Raises:
        DataError: No question, or no answer in either format; names ``where``.
    """
    question, messages = question_of(record, where)
    record = with_verl_answer(record)
    if "answer" in record:
        answer = text_field(record, ("answer",), where, trim=True)
        if "####" in answer:
            answer = answer.rpartition("####")[2].strip().replace(",", "")
            if not answer:
                raise DataError(f"{where}: field 'answer' ends in '####', expected '#### number'")
    else:
        boxed = last_boxed(_BARE_BOX.sub(r"\\boxed{\1}", text_field(record, ("solution",), where)))
        if not boxed:
            raise DataError(f"{where}: no field 'answer', and field 'solution' has no complete \\boxed{{...}}")
        answer = boxed
    try:
        check_reference(answer)
    except ValueError as error:
        raise DataError(
            f"{where}: answer {answer!r:.80} cannot be judged ({error}); expected a number, an expression or a few words: "
            "fix or remove the line"
        ) from error
    known = ("question", "problem", "prompt", "messages", "answer")
    metadata = {key: value for key, value in record.items() if key not in known}
    return TaskItem(question=question, answer=answer, metadata=metadata, messages=messages, where=where)


def check_references(task: ItemSource) -> None:
    """Read every reference answer once with ``math-verify``, some milliseconds for one that is no plain number.

    Raises:
        DataError: One cannot be read: whatever a policy answered would be wrong. Names up to 40 lines.
    """
    places: dict[str, str] = {}
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        for index in range(task.num_items(split) or 0):
            item = task.item(split, index)
            if item.answer is not None:
                places.setdefault(item.answer, item.where)
    unread = [
        f"{where}: answer {answer!r:.80}: {why}" for answer, where in places.items() if (why := why_unreadable(answer))
    ]
    if unread:
        more = f"\n... and {len(unread) - 40} more" if len(unread) > 40 else ""
        raise DataError(
            "\n".join(unread[:40])
            + f"{more}\nno answer could equal such a reference: fix or remove the lines, or give a judge "
            "of your own (task.reward)"
        )


def judge_answer(response: str, reference: str) -> Score:
    """1 where the final answer of a response equals the reference; ``parts`` tells wrong answers from missing ones.

    Raises:
        ValueError: The reference cannot be read; no response can be judged by it.
    """
    given = final_answers(tidy(response), words=is_words(reference))
    correct = 0 < len(given) <= MAX_BOXES and all(equals_reference(answer, reference) for answer in given)
    return Score(value=float(correct), parts={"correct": float(correct), "answered": float(bool(given))})


class MathTask(TableItems):
    """Single-turn: 1 for the right final answer, 0 for another, for none, and for one beyond the judge's limits."""

    name = "math"

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        super().__init__(config, math_item, seed=seed)

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        """Score the last turn against ``prompt.answer``; ``parts`` tells wrong answers from missing ones."""
        if prompt.answer is None:
            raise ValueError(f"prompt {prompt.index} has no reference answer; the math task cannot judge it")
        return judge_answer(turns[-1], prompt.answer)
