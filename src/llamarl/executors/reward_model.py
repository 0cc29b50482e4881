"""The reward model executor: a frozen classifier's score of every response, on ranks of its own.

In: ``completions``; out: ``rated``. Its score, weighted, becomes part of each response's verdict,
which the reward executor adds to the task's own reward (``executors/judging.py``). The model never
changes, so there is no state: what it writes is a function of the responses alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from llamarl.executors.base import BaseExecutor, Stateless, StepResult
from llamarl.executors.conversations import Rendered, TextFor
from llamarl.executors.judging import to_judge, with_score
from llamarl.models.loading import load_tokenizer
from llamarl.trainer.reward_scoring import RewardScorer
from llamarl.types import Failure, Group, Response

__all__ = ["RewardModelExecutor"]

_Read = Rendered | Failure | None


class RewardModelExecutor(Stateless, BaseExecutor):
    """Section ``reward_model``. A further one, ``[executors.NAME]``, has that section in its ``settings``; each of its
    ``ranks`` then holds the whole model and scores its share of the groups."""

    def setup(self) -> None:
        self.settings = self.config.reward_model
        self.scorer = RewardScorer(
            self.settings.path,
            fsdp=self.settings.fsdp,
            tp=self.settings.tp,
            dtype=getattr(torch, self.settings.dtype),
            max_tokens=self.settings.max_tokens_per_microbatch,
            device=self.context.device,
        )
        self.text_for = TextFor(load_tokenizer(self.settings.path), self.settings.template)
        self._limit = self.scorer.context_length or 1 << 60

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        groups: list[Group] = self.items_of(inputs)
        read, texts = self._render(groups)
        rendered = time.monotonic()
        found = self._score(texts)
        if (
            not self.scorer.layout.is_data_leader
        ):  # those that share a model hold the same groups: one of them sends and counts
            spans = (("render", started, rendered), ("rate", rendered, time.monotonic()))
            return StepResult(outputs=self.outputs_of([]), spans=spans)
        rated = self._with_scores(groups, read, found)
        finished = time.monotonic()
        spans = (("render", started, rendered), ("rate", rendered, finished))
        new = [r.outcome is not None for g in rated for r in g.responses]
        old = [r.outcome is not None for g in groups for r in g.responses]
        metrics = {
            "reward_model/num_scored": float(len(found)),
            "reward_model/num_tokens": float(sum(len(text.tokens) for row in texts for text in row)),
            "reward_model/num_failed": float(sum(new) - sum(old)),
        }
        return StepResult(outputs=self.outputs_of(rated), metrics=self.own_keys(metrics), spans=spans)

    def rate(self, groups: Sequence[Group]) -> list[Group]:
        """The same with this model's score in each response's verdict, outside of a job, on one rank."""
        read, texts = self._render(groups)
        return self._with_scores(groups, read, self._score(texts))

    def _render(self, groups: Sequence[Group]) -> tuple[list[list[_Read]], list[list[Rendered]]]:
        """What the model is given of each response, and what of that are texts."""
        read = [[self._read(group, response) for response in group.responses] for group in groups]
        return read, [[one for one in row if isinstance(one, Rendered)] for row in read]

    def _score(self, texts: Sequence[Sequence[Rendered]]) -> Sequence[float]:
        types = [[text.types for text in row] for row in texts] if any(t.types for row in texts for t in row) else []
        return self.scorer.score([[text.tokens for text in row] for row in texts], types)

    def _with_scores(
        self, groups: Sequence[Group], read: Sequence[Sequence[_Read]], found: Sequence[float]
    ) -> list[Group]:
        scores = iter(found)
        return [
            dataclasses.replace(
                group, responses=tuple(self._rated(r, one, scores) for r, one in zip(group.responses, row, strict=True))
            )
            for group, row in zip(groups, read, strict=True)
        ]

    def _read(self, group: Group, response: Response) -> _Read:
        """What the model is given of a response; a failure where it cannot be; None where it is not asked."""
        if not to_judge(response):
            return None
        name = self.settings.name
        try:
            text = self.text_for(group.prompt, response)
        except Exception as error:  # a template is a program of the model's author, and its input is the policy's words
            detail = f"{name}: its template refused the conversation: {type(error).__name__}: {error}"
            return Failure(kind="judge", detail=detail[:1000])
        if not text.tokens:
            return Failure(kind="judge", detail=f"{name}: question and response give no token")
        if len(text.tokens) <= self._limit:
            return text
        # the same words for each, so that they are counted together
        return Failure(kind="judge", detail=f"{name}: longer than the {self._limit} tokens that it reads")

    def _rated(self, response: Response, read: _Read, scores: Iterator[float]) -> Response:
        if read is None:
            return response
        if isinstance(read, Failure):
            return dataclasses.replace(response, outcome=read)
        return with_score(response, next(scores), name=self.settings.name, weight=self.settings.weight)

    def close(self) -> None:
        self.__dict__.pop("scorer", None)
