"""A user's own reward function, by import path, over the items of a table or over any bundled task's questions.

``reward(prompt, response, answer) -> float``: the prompt's text, the response's text, the reference
answer or None; ``how_to_call`` says what else it may take. A finite real number (or a bool) is a score;
a ``llamarl.types.Score`` is one with named parts. Anything else, and any exception, fails the
sample.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.data.items import Split, TaskItem
from llamarl.environments.base import Task
from llamarl.environments.items import TableItems, question_item
from llamarl.environments.tools import waited_for
from llamarl.errors import DataError
from llamarl.import_path import check, import_user, signature_of
from llamarl.settings.environments import RewardPart, TaskConfig
from llamarl.types import Prompt, Score

__all__ = [
    "Caller",
    "CompletionsCaller",
    "FunctionTask",
    "NotANumber",
    "QuestionsTask",
    "RewardFailed",
    "Tokens",
    "as_score",
    "finite",
    "how_to_call",
]

Tokens = Sequence[int] | npt.NDArray[np.int32]
"""Of a response."""
_ONE = ("prompt", "response", "answer")
_MANY = ("prompts", "responses", "answers")


class CompletionsCaller:
    """A function of TRL's kind: ``reward(completions, **columns) -> list``, whose None is for a
    sample that it does not apply to.

    It gets lists by name, of those that it has parameters for (``**kwargs`` is all): ``prompts``,
    ``completions``, ``completion_ids``, ``answer`` and the other columns of the data. Where
    questions are conversations (``messages``), a prompt is its messages and a completion a list of
    one message of the assistant; else both are text.
    """

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature, shown: str) -> None:
        self._function = function
        self._shown = shown
        kinds = signature.parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in kinds)
        self._names = [p.name for p in kinds if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._needed = [p.name for p in kinds if p.name in self._names and p.default is p.empty]

    def judge(
        self,
        prompts: list[str],
        responses: list[str],
        answers: list[str | None],
        metadata: list[dict[str, Any]],
        tokens: list[list[int]],
    ) -> Any:
        """What it returns for samples.

        Raises:
            TypeError: It has a parameter for a column that the data does not have.
        """
        talks = [of.pop("messages", None) for of in metadata]
        columns: dict[str, list[Any]] = {"answer": list(answers)}
        for name in dict.fromkeys(name for of in metadata for name in of):
            columns[name] = [of.get(name) for of in metadata]
        columns["prompts"] = [talk or prompt for talk, prompt in zip(talks, prompts, strict=True)]
        columns["completions"] = [
            [{"role": "assistant", "content": response}] if talk else response
            for talk, response in zip(talks, responses, strict=True)
        ]
        columns["completion_ids"] = tokens
        if missing := [name for name in self._needed if name not in columns]:
            raise TypeError(f"{self._shown} needs {missing[0]!r}, but there are only {', '.join(sorted(columns))}")
        return self._function(**{k: v for k, v in columns.items() if self._takes_all or k in self._names})


Caller = Callable[[Any, Any, Any, Any], Any] | CompletionsCaller
"""Takes prompt, response, answer and metadata, or a list of each."""


def how_to_call(function: Callable[..., Any], path: str, *, batch_size: int) -> Caller:
    """A function of (prompt, response, answer, metadata) that passes on what ``function``, also an async one, takes.

    Args:
        path: Its import path, for errors.
        batch_size: ``task.reward_batch_size``; 0 is one sample a call.

    Raises:
        DataError: It cannot be called so: other parameters, too few, or for one sample and not for a batch.
    """
    names = _MANY if batch_size else _ONE
    try:
        own = signature_of(function, follow_wrapped=False)
        told = signature_of(function)  # of what a decorator that uses functools.wraps has wrapped
    except (TypeError, ValueError):  # code in C without a signature: calling it is the only way to know
        return lambda prompt, response, answer, metadata: function(prompt, response, answer)
    shown = f"task.reward {path!r}: {getattr(function, '__name__', type(function).__name__)}{told}"
    if {"completions", "completion_ids"} & set(told.parameters):
        return CompletionsCaller(function, told, shown)
    if {"solution_str", "ground_truth"} <= set(told.parameters):
        return _as_verl_calls(function, own, told, shown, batch_size)
    if set(told.parameters) & set(_ONE if batch_size else _MANY) and not set(told.parameters) & set(names):
        raise DataError(
            f"{shown} judges one sample a call, as task.reward_batch_size = {batch_size} passes lists: take "
            f"({', '.join(_MANY)}), or set it to 0"
            if batch_size
            else f"{shown} takes lists, as task.reward_batch_size = 0 passes one sample a call: set it to the number of "
            f"samples of a batch, or take ({', '.join(_ONE)})"
        )
    by_name = [name for name in (*names, "metadata") if name in told.parameters]
    if by_name and _fits((own, told), (), by_name):
        return lambda *values: function(
            **{k: v for k, v in zip((*names, "metadata"), values, strict=True) if k in by_name}
        )
    extra = ["metadata"] if "metadata" in told.parameters else []
    known, placed = {*_ONE, *_MANY, "metadata"}, zip(told.parameters, names, strict=False)
    elsewhere = any(name in known and name != given for name, given in placed)  # which would get another's value
    if not elsewhere and _fits((own, told), names, extra):
        return lambda *values: function(*values[:3], **dict.fromkeys(extra, values[3]))
    raise DataError(
        f"{shown} cannot be called: it gets ({', '.join(names)}) in this order, or those of ({', '.join(names)}, metadata) "
        f"that it has parameters named after; give its other parameters defaults"
    )


_OF_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


def _as_verl_calls(
    function: Callable[..., Any], own: inspect.Signature, told: inspect.Signature, shown: str, batch_size: int
) -> Caller:
    """A function of verl's kind: ``compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict``,
    called by name; of a dict ``score`` is the reward, and its other numbers are parts."""
    names = [name for name in _OF_VERL if name in told.parameters]
    if batch_size or not _fits((own, told), (), names):
        why = "judges one sample a call: set task.reward_batch_size to 0" if batch_size else "needs other parameters"
        raise DataError(f"{shown} is called with {', '.join(_OF_VERL)}, as verl does, and {why}")

    def call(prompt: Any, response: Any, answer: Any, metadata: Any) -> Any:
        of_verl = metadata.get("reward_model")  # where what is no text was left
        truth = of_verl.get("ground_truth") if answer is None and isinstance(of_verl, Mapping) else answer
        values = (metadata.get("data_source"), response, truth, metadata.get("extra_info") or {})
        value = waited_for(function(**{k: v for k, v in zip(_OF_VERL, values, strict=True) if k in names}))
        if not isinstance(value, Mapping) or "score" not in value:
            return value
        numeric: dict[str, Any] = {
            k: v for k, v in value.items() if k != "score" and isinstance(v, numbers.Real | np.bool_)
        }
        return Score(value=value["score"], parts=numeric)

    return call


def _fits(signatures: Sequence[inspect.Signature], positional: Sequence[str], named: Sequence[str]) -> bool:
    try:
        for signature in signatures:
            signature.bind(*positional, **dict.fromkeys(named))
    except TypeError:
        return False
    return True


class NotANumber(ValueError):
    """A reward that is no finite real number."""


class RewardFailed(RuntimeError):
    """One of several reward functions raised."""


_NONE_APPLIES = NotANumber(
    "no reward: every reward function returned None, which is for samples that it does not apply to"
)


def as_score(value: object) -> Score:
    """What a reward function returned, as a score; an error in its place is raised.

    Raises:
        NotANumber: It is NaN, infinite, or no real number at all.
    """
    if isinstance(value, NotANumber):
        raise value
    if isinstance(value, Score):
        if nameless := [name for name in value.parts if not isinstance(name, str)]:
            raise NotANumber(f"reward part {nameless[0]!r} must be named by text")
        parts = {name: finite(f"reward part {name!r}", number) for name, number in value.parts.items()}
        return Score(value=finite("reward", value.value), parts=parts)
    return Score(value=finite("reward", value))


def finite(what: str, value: object) -> float:
    """A number, or an array or tensor of no dimensions, as a float. Raises: NotANumber."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real | np.bool_):
        shown = str(value)[:80] if not isinstance(value, Score) else "Score"
        raise NotANumber(f"{what} is {type(value).__name__} {shown!r}, expected a number: return float(...)")
    try:
        number = float(value)
    except OverflowError as error:
        raise NotANumber(f"{what} is too large for a float, expected a finite number") from error
    if not math.isfinite(number):
        raise NotANumber(f"{what} is {number}, expected a finite number")
    return number


class QuestionsTask(TableItems):
    """Questions of a table without a judge of their own."""

    name = "function"

    def __init__(self, config: TaskConfig, *, seed: int) -> None:
        super().__init__(config, question_item, seed=seed)

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        raise NotImplementedError("questions of a table have no judge: set task.reward")


class FunctionTask:
    """Another task's questions, judged by functions of the user's own. Single-turn.

    Made everywhere, but only where it judges are the user's modules imported: see ``llamarl.import_path``.

    Args:
        judges: What is added up. The value of a single one without a name is the score itself, with
            the parts that it has.
        batch_size: ``task.reward_batch_size``; above 0 the functions judge lists.

    Raises:
        DataError: There is no such module or function, as far as can be told without running it.
    """

    def __init__(self, items: Task, judges: Sequence[RewardPart], batch_size: int = 0) -> None:
        self._items = items
        self._judges = tuple(judges)
        self._batch_size = batch_size
        self._calls: list[Caller] = []
        for judge in self._judges:
            check(judge.function, self._key(judge))

    def prepare(self) -> None:
        """Import the user's modules, which runs them.

        Raises:
            DataError: One cannot be imported, has no such function, or the function takes other arguments.
        """
        self._calls = [
            how_to_call(import_user(judge.function, self._key(judge)), judge.function, batch_size=self._batch_size)
            for judge in self._judges
        ]

    @property
    def name(self) -> str:
        return self._items.name

    def num_items(self, split: Split) -> int | None:
        return self._items.num_items(split)

    def item(self, split: Split, index: int) -> TaskItem:
        return self._items.item(split, index)

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        """What the functions return, checked and added up.

        Raises:
            NotANumber: A function returned no finite number. Whatever one raises passes through.
        """
        (value,) = self.respond_to_batch([(prompt, turns, ())])
        return as_score(value)

    def respond_to_batch(self, episodes: Sequence[tuple[Prompt, Sequence[str], Tokens]]) -> list[object]:
        """A value for each sample (prompt, the policy's words, their tokens), not yet checked.

        Raises:
            NotANumber: A function returned no list, or one of another length.
            RewardFailed: One of several raised; says which. What a single one raises passes through.
        """
        if not self._calls:
            self.prepare()
        if len(self._judges) == 1 and not self._judges[0].name:
            (call,) = self._calls
            values = self._values(call, episodes)
            skips = isinstance(call, CompletionsCaller)
            return [_NONE_APPLIES if value is None and skips else value for value in values]
        columns = []
        for judge, call in zip(self._judges, self._calls, strict=True):
            try:
                columns.append(self._values(call, episodes))
            except NotANumber as error:
                raise NotANumber(f"reward {judge.part!r}: {error}") from error
            except MemoryError as error:  # known by its type: the worker is replaced
                raise MemoryError(f"reward {judge.part!r}: {error}") from error
            except Exception as error:  # the user's code may raise anything
                words = f"{judge.part!r}: {type(error).__name__}: {error}"
                raise RewardFailed(words).with_traceback(error.__traceback__) from error
        return [self._sum(row) for row in zip(*columns, strict=True)]

    def _key(self, judge: RewardPart) -> str:
        single = len(self._judges) == 1 and not judge.name
        return "task.reward" if single else f"task.rewards.{judge.part}"

    def _values(self, call: Caller, episodes: Sequence[tuple[Prompt, Sequence[str], Tokens]]) -> list[object]:
        """What one function returns, one value a sample."""
        if not self._batch_size and not isinstance(call, CompletionsCaller):
            return [waited_for(call(p.text, turns[-1], p.answer, dict(p.metadata))) for p, turns, _ in episodes]
        prompts = [prompt for prompt, _, _ in episodes]
        metadata = [dict(prompt.metadata) for prompt in prompts]
        responses, answers = [turns[-1] for _, turns, _ in episodes], [prompt.answer for prompt in prompts]
        texts = [prompt.text for prompt in prompts]
        if isinstance(call, CompletionsCaller):
            ids = [np.asarray(tokens, np.int64).tolist() for _, _, tokens in episodes]
            values = waited_for(call.judge(texts, responses, answers, metadata, ids))
        else:
            values = waited_for(call(texts, responses, answers, metadata))
        if hasattr(values, "tolist"):  # arrays and tensors
            values = values.tolist()
        if isinstance(values, (str, bytes, Mapping, Score)) or not isinstance(values, Iterable):
            raise NotANumber(
                f"the reward of a batch is {type(values).__name__}, expected a list of {len(prompts)} numbers"
            )
        values = list(values)
        if len(values) != len(prompts):
            raise NotANumber(
                f"the reward of a batch has {len(values)} values for {len(prompts)} samples, expected one each"
            )
        return values

    def _sum(self, row: Sequence[object]) -> Score | NotANumber:
        """Of one sample's values, those left out that do not apply."""
        total, parts = 0.0, {}
        for judge, call, value in zip(self._judges, self._calls, row, strict=True):
            if value is None and isinstance(call, CompletionsCaller):
                continue
            try:
                score = as_score(value)
            except NotANumber as error:
                return NotANumber(f"reward {judge.part!r}: {error}")
            total += judge.weight * score.value
            parts[judge.part] = score.value
            parts |= {f"{judge.part}/{name}": number for name, number in score.parts.items()}
        return Score(value=total, parts=parts) if parts else _NONE_APPLIES
