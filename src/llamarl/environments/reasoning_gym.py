"""Any dataset of ``reasoning_gym`` by name, scored by the dataset's own ``score_answer``.

The library makes item i of seed s from ``s + i`` alone, so neighbouring seeds share almost all
items: train and eval differ here by the question's hash (see ``base.draw_item``), not by a seed.
Nine datasets evaluate an answer as Python: only one that is a list, or arithmetic, reaches them.
The judge makes the entry again from its number instead of carrying it through the run, and checks
that it got the same question.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any

from llamarl.data.items import Split, TaskItem
from llamarl.environments.answers import AnswerFrom, extract_answer, is_number
from llamarl.environments.base import draw_item
from llamarl.errors import DataError
from llamarl.types import Prompt, Score

__all__ = ["EVALUATING", "ReasoningGymTask"]

_EXPONENT = re.compile(r"\s*(?:\d{1,2}|[A-Za-z]|\(\s*-?\s*\d{1,2}(?:\s*/\s*\d{1,2})?\s*\))")
_FUNCTIONS = frozenset("sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt pi Abs".split())


_POWER = r"\s*(?:\*\s*\*|\^)"
_EXP = r"(?:exp|sinh|cosh|tanh)\s*\("


def _exponents(answer: str) -> list[str]:
    """What the exponential functions of an answer are applied to; without its end where a bracket is left open."""
    found = []
    for function in re.finditer(_EXP, answer):
        depth, end = 1, function.end()
        while depth and end < len(answer):
            depth += {"(": 1, ")": -1}.get(answer[end], 0)
            end += 1
        found.append(answer[function.end() : end])
    return found


def _num_terms(text: str) -> int:
    """At most how many terms the bracket has that a text ends in."""
    depth, begin = 0, len(text)
    while begin > 0 and (depth or begin == len(text)):
        begin -= 1
        depth += {")": 1, "(": -1}.get(text[begin], 0)
    return 1 + len(re.findall(r"[+-]", text[begin:]))


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
    """Whether it holds numbers, operators, letters and functions of mathematics alone, and no power that takes long."""
    if not re.fullmatch(r"[\w\s.+\-*/^()]*", answer) or re.search(r"\.\s*[^\W\d]|_", answer):
        return False
    of_brackets = num_terms = 1
    for power in re.finditer(_POWER, answer):
        exponent = _EXPONENT.match(answer, power.end())
        if exponent is None or re.match(r"[\w.(]|\s*(?:\*\s*\*|\^)", answer[exponent.end() :]):
            return False  # as 9**9**9, which takes for ever
        if answer[: power.start()].rstrip().endswith(")"):
            times = max(1, int((re.findall(r"\d+", exponent.group()) or ["12"])[0]))
            of_brackets *= times
            num_terms *= math.comb(times + _num_terms(answer[: power.start()].rstrip()) - 1, min(times, 99))
    of_numbers = len(re.findall(rf"\d{_POWER}", answer))
    if (
        of_brackets > 12
        or num_terms > 2000
        or of_numbers > 4
        or len(answer) > 2000
        or re.search(r"\d{16}|\d[eE][+-]?\d{3}", answer)
    ):
        return False
    for part in _exponents(answer):  # as sin(exp(9**9)), which is computed to a billion digits
        if len(re.findall(r"\d", part)) > 4 or re.search(rf"{_EXP}|[\d)]{_POWER}|\d[eE]", part):
            return False
    names = re.findall(r"(?<!\w)[^\W\d]\w*", answer)
    return all(name in _FUNCTIONS or re.fullmatch("[A-Za-z]", name) for name in names)


EVALUATING: Mapping[str, Callable[[str], bool]] = {
    **dict.fromkeys(("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"), _is_list),
    **dict.fromkeys(
        ("countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"),
        _is_arithmetic,
    ),
}
"""Datasets whose ``score_answer`` calls ``eval`` or sympy's ``parse_expr`` -> which answers it may see."""


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

    def __init__(
        self,
        dataset: str,
        options: Mapping[str, Any],
        *,
        seed: int,
        eval_fraction: float,
        answer_from: AnswerFrom = "auto",
    ) -> None:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        _guard_datasets()
        self.name = f"reasoning_gym:{dataset}"
        if dataset not in DATASETS:
            near = difflib.get_close_matches(dataset, DATASETS, n=3) or sorted(DATASETS)[:5]
            raise DataError.at("task.name", f": reasoning_gym has no dataset {dataset!r}; nearest: {', '.join(near)}")
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
        self._answer_from: AnswerFrom = answer_from

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
        given = extract_answer(reply, self._answer_from, numeric=numeric)
        try:
            value = float(self._dataset.score_answer(given, entry))
        except Exception:
            self._dataset.score_answer(entry["answer"], entry)  # raises too, where it is not the reply's fault
            value = 0.0
        return Score(value=value, parts={"correct": float(value >= 1.0), "answered": float(given is not None)})
