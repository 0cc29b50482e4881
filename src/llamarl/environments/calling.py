"""How a user's reward function is called: found out from its signature, once, before anything is judged.

    reward(prompt, response, answer) -> float                by position, whatever the parameters are called
    reward(response, metadata) -> float                      by name: any of prompt, response, answer, metadata
    reward(prompts, responses, answers) -> list of float     a batch (task.reward_batch_size > 0); also by name
    reward(completions, **columns) -> list of float          TRL's: known by completions or completion_ids, with any batch size

``metadata`` is only ever passed by name, to a function that has such a parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llamarl.errors import DataError

__all__ = ["Caller", "CompletionsCaller", "how_to_call"]

Caller = Callable[[Any, Any, Any, Any], Any]
"""Takes prompt, response, answer and metadata, or a list of each."""

_ONE = ("prompt", "response", "answer")
_MANY = ("prompts", "responses", "answers")


class CompletionsCaller:
    """A function of TRL's kind: ``reward(completions, **columns) -> list``, whose None is for a sample that it does not apply to.

    It gets lists by name, of those that it has parameters for (``**kwargs`` is all): ``prompts``, ``completions``,
    ``completion_ids``, ``answer`` and the other columns of the data. Where questions are conversations (``messages``), a prompt
    is its messages and a completion a list of one message of the assistant; else both are text.
    """

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature, shown: str) -> None:
        self._function = function
        self._shown = shown
        kinds = signature.parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in kinds)
        self._names = [p.name for p in kinds if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._needed = [p.name for p in kinds if p.name in self._names and p.default is p.empty]

    def __call__(self, prompt: Any, response: Any, answer: Any, metadata: Any) -> Any:
        """One sample."""
        (value,) = self.judge([prompt], [response], [answer], [metadata], [[]])
        return value

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


def how_to_call(function: Callable[..., Any], path: str, *, batch_size: int) -> Caller:
    """A function of (prompt, response, answer, metadata) that passes on what ``function`` takes.

    Args:
        path: Its import path, for errors.
        batch_size: ``task.reward_batch_size``; 0 is one sample a call.

    Raises:
        DataError: It cannot be called so: other parameters, too few, for one sample and not for a batch, or ``async``.
    """
    names = _MANY if batch_size else _ONE
    try:
        own = inspect.signature(function, follow_wrapped=False)
        told = inspect.signature(function)  # of what a decorator that uses functools.wraps has wrapped
    except (TypeError, ValueError):  # code in C without a signature: calling it is the only way to know
        return lambda prompt, response, answer, metadata: function(prompt, response, answer)
    shown = f"task.reward {path!r}: {getattr(function, '__name__', type(function).__name__)}{told}"
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        raise DataError(f"{shown} is async: write a plain function (it may call asyncio.run)")
    if {"completions", "completion_ids"} & set(told.parameters):
        return CompletionsCaller(function, told, shown)
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
    if _fits((own, told), names, extra):
        return lambda *values: function(*values[:3], **dict.fromkeys(extra, values[3]))
    raise DataError(
        f"{shown} cannot be called: it gets ({', '.join(names)}) in this order, or those of ({', '.join(names)}, metadata) "
        f"that it has parameters named after; give its other parameters defaults"
    )


def _fits(signatures: Sequence[inspect.Signature], positional: Sequence[str], named: Sequence[str]) -> bool:
    try:
        for signature in signatures:
            signature.bind(*positional, **dict.fromkeys(named))
    except TypeError:
        return False
    return True
