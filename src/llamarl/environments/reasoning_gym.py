"""Any dataset of ``reasoning_gym`` by name, scored by the dataset's own ``score_answer``.

The library makes item i of seed s from ``s + i`` alone, so neighbouring seeds share almost all
items: train and eval differ here by the question's hash (see ``base.draw_item``), not by a seed.
Nine datasets evaluate an answer as Python: only one that is a list, or arithmetic, reaches six of
them; three take any expression of sympy's, and are refused.
The judge makes the entry again from its number instead of carrying it through the run, and checks
that it got the same question.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any

from llamarl.data.items import Split, TaskItem, draw_item
from llamarl.environments.answers import extract_answer, is_number
from llamarl.errors import DataError
from llamarl.types import Prompt, Score

__all__ = ["EVALUATING", "REFUSED", "ReasoningGymTask"]


def _strings(options: Any) -> Iterator[str]:
    if isinstance(options, str):
        yield options
    elif isinstance(options, Mapping):
        yield from _strings([*options.keys(), *options.values()])
    elif isinstance(options, Sequence):
        for option in options:
            yield from _strings(option)


def _is_list(answer: str) -> bool:
    """Whether it is a literal, or capitals and numbers alone: nothing is called, looked up or assigned."""
    if re.fullmatch(r"[A-Z\d\s_-]*", answer):
        return True  # no name that anything has: "oracle_answer" would be looked up
    try:
        ast.literal_eval(answer)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _is_arithmetic(answer: str) -> bool:
    """Whether it holds numbers, brackets and + - * / alone: no name, and no power, which may take for ever."""
    return len(answer) <= 300 and re.fullmatch(r"[\d\s.+\-*/()]*", answer) is not None and "**" not in answer


EVALUATING: Mapping[str, Callable[[str], bool]] = {
    **dict.fromkeys(("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"), _is_list),
    **dict.fromkeys(("countdown", "puzzle24"), _is_arithmetic),
}
"""Datasets whose ``score_answer`` calls ``eval`` or sympy's ``parse_expr`` -> which answers it may see."""

REFUSED = ("simple_integration", "intermediate_integration", "polynomial_multiplication")
"""Datasets whose answers are expressions of any form, which sympy evaluates as Python."""


@lru_cache(maxsize=1)
def _guard_datasets() -> None:
    """Let the classes of ``EVALUATING`` see no other answers, wherever they are used (``composite``)."""
    from reasoning_gym.factory import DATASETS

    for name, is_harmless in EVALUATING.items():
        DATASETS[name][0].score_answer = _guarded(DATASETS[name][0].score_answer, is_harmless)


def _guarded(score: Callable[..., float], is_harmless: Callable[[str], bool]) -> Callable[..., float]:
    @wraps(score)
    def score_answer(self: Any, answer: Any, entry: Any) -> float:
        return score(self, answer if isinstance(answer, str) and is_harmless(answer) else None, entry)

    return score_answer


class ReasoningGymTask:
    """Endless items of one dataset. Single-turn; the score is the dataset's, mostly 0 to 1 with partial credit."""

    def __init__(self, dataset: str, options: Mapping[str, Any], *, seed: int, eval_fraction: float) -> None:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        _guard_datasets()
        self.name = f"reasoning_gym:{dataset}"
        if dataset not in DATASETS:
            near = difflib.get_close_matches(dataset, DATASETS, n=3) or sorted(DATASETS)[:5]
            raise DataError.at("task.name", f": reasoning_gym has no dataset {dataset!r}; nearest: {', '.join(near)}")
        if refused := {dataset, *_strings(options)}.intersection(REFUSED):
            raise DataError.at("task.name", f": {refused.pop()} evaluates answers as Python, which could run anything")
        if "seed" in options:
            raise DataError.at("task.options", ": leave out 'seed'; questions follow run.seed")
        for text in _strings(options):
            # some datasets evaluate what they made of it, or open a file of the name
            if re.search(r"[()\[\]{}\\'\"]|\.\.|/.|./", text):
                raise DataError.at("task.options", f": {text!r:.60} has brackets, quotes or a path in it: words alone")
        try:
            self._dataset = reasoning_gym.create_dataset(dataset, seed=0, **options)
            self._entry = lru_cache(maxsize=1024)(self._make_entry)
            self._entry(0)  # an option of the wrong type may only be found out by making a question
        except Exception as error:  # each dataset checks its options in its own way, or not at all
            raise DataError.at(
                "task.options",
                f": reasoning_gym dataset {dataset!r} refuses {dict(options)}: {type(error).__name__}: {error}",
            ) from error
        self._seed = seed
        self._eval_fraction = eval_fraction

    def num_items(self, split: Split) -> int | None:
        return None

    def item(self, split: Split, index: int) -> TaskItem:
        return draw_item(self._make, split, index, seed=self._seed, eval_fraction=self._eval_fraction, name=self.name)

    def _make(self, number: int) -> tuple[str, TaskItem]:
        entry = self._entry(number)
        question = str(entry["question"])
        answer = entry["answer"]
        item = TaskItem(
            question=question,
            answer=None if answer is None else str(answer),
            metadata={"entry": number, "question": question},
        )
        return question, item

    def _make_entry(self, number: int) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = self._dataset[number]
        except IndexError:  # the few datasets that prepare all their items in advance
            entry = self._dataset[number % len(self._dataset)]
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise DataError.at("task.name", f": {self.name} cannot make question {number}: {cause}") from error
        return entry

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        """The dataset's own score of the answer found in the last turn; see ``judge``."""
        return self.judge(turns[-1], prompt.metadata)

    def judge(self, reply: str, metadata: Mapping[str, Any]) -> Score:
        """The dataset's own score of the answer found in a reply; see ``answers.extract_answer``.

        ``parts["correct"]`` is 1 where the score is full.

        Args:
            metadata: Of the item.

        Raises:
            ValueError: The dataset made another question of the same number: it is not reproducible across processes.
        """
        entry = self._entry(int(metadata["entry"]))
        if entry["question"] != metadata["question"]:
            raise ValueError(
                f"{self.name} is not reproducible: entry {metadata['entry']} was "
                f"{metadata['question'][:80]!r} and is {entry['question'][:80]!r}"
            )
        numeric = entry["answer"] is not None and is_number(str(entry["answer"]))
        given = extract_answer(reply, numeric=numeric)
        try:
            value = float(self._dataset.score_answer(given, entry))
        except Exception:
            self._dataset.score_answer(entry["answer"], entry)  # raises too, where it is not the reply's fault
            value = 0.0
        return Score(value=value, parts={"correct": float(value >= 1.0), "answered": float(given is not None)})
