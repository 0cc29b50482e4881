"""Math word problems from JSONL, in the format of GSM8K or of MATH; answers compared by ``math-verify``.

GSM8K: ``question``, and ``answer`` that ends in ``#### number``. MATH: ``problem``, and ``answer``, or a ``solution``
whose last ``\\boxed{...}`` is the answer. A response's answer is its last box, else what follows its last ``####``, else
its last number; it is right when it equals the reference as mathematics (``1/2``, ``0.5`` and ``\\frac12`` are one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamarl.data.items import TaskItem
from llamarl.environments.answers import extract_answer, last_boxed
from llamarl.environments.jsonl import JsonlSplits, text_field
from llamarl.errors import DataError
from llamarl.types import Prompt, Score

__all__ = ["MathTask", "math_item", "same_answer"]


def math_item(record: Mapping[str, Any], where: str) -> TaskItem:
    """One line of a GSM8K or MATH file.

    Raises:
        DataError: No question, or no answer in either format; names ``where``.
    """
    question = text_field(record, ("question", "problem"), where)
    if "answer" in record:
        answer = text_field(record, ("answer",), where)
        if "####" in answer:
            answer = answer.rpartition("####")[2].strip().replace(",", "")
            if not answer:
                raise DataError(f"{where}: field 'answer' ends in '####', expected '#### number'")
    else:
        boxed = last_boxed(text_field(record, ("solution",), where))
        if not boxed:
            raise DataError(f"{where}: no field 'answer', and field 'solution' has no complete \\boxed{{...}}")
        answer = boxed
    return TaskItem(question=question, answer=answer, where=where)


def same_answer(given: str, reference: str) -> bool:
    """True where two answers are equal as mathematics.

    The library's own alarms are off: they work in a main thread alone and turn a timeout into a wrong answer, while
    the reward pool's limit turns it into a failed sample.
    """
    from math_verify import parse, verify

    if given == reference:
        return True
    target = parse(f"\\boxed{{{reference}}}", parsing_timeout=None)
    answer = parse(f"\\boxed{{{given}}}", parsing_timeout=None)
    return bool(verify(target, answer, timeout_seconds=None))


class MathTask(JsonlSplits):
    """Single-turn: 1 for the right final answer, 0 for another or none."""

    name = "math"

    def __init__(self, train_file: str, eval_file: str, *, seed: int, eval_fraction: float) -> None:
        super().__init__(train_file, eval_file, math_item, seed=seed, eval_fraction=eval_fraction)

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        """Score the last turn against ``prompt.answer``; ``parts`` tells wrong answers from missing ones."""
        if prompt.answer is None:
            raise ValueError(f"prompt {prompt.index} has no reference answer; the math task cannot judge it")
        given = extract_answer(turns[-1], numeric=True)
        correct = given is not None and same_answer(given, prompt.answer)
        return Score(value=float(correct), parts={"correct": float(correct), "answered": float(given is not None)})
