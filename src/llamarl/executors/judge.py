"""The judge: a language model reads each response under a rubric, and the number that it names becomes part of the reward.

In: ``rated``, or ``completions``; out: ``judged``. Two kinds:

    path   a frozen model on this executor's own engine: greedy unless told otherwise, the same bits in every run
    url    a server that speaks OpenAI's protocol: threads, attempts, deadlines; what it says need not repeat, so what it said is
           kept (``executors/verdict_log.py``) and a tick that is done again asks nobody twice

No verdict is ever a zero: a judge that cannot be reached, runs out of time or names no score fails the sample with that cause.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llamarl.checkpoint.run_identity import RunIdentity
from llamarl.executors.asking import EngineJudge, Question, ServerJudge, Verdict
from llamarl.executors.base import BaseExecutor, Stateless, StepResult
from llamarl.executors.chat_client import ChatClient
from llamarl.executors.config import JudgeConfig
from llamarl.executors.judging import to_judge, with_score
from llamarl.executors.reward import JUDGING_SHARE
from llamarl.executors.rubric import fill
from llamarl.executors.verdict_log import VerdictLog
from llamarl.observability.writing import Patience
from llamarl.running_time import running_s
from llamarl.types import Failure, Group, Response

__all__ = ["JudgeExecutor"]


class JudgeExecutor(Stateless, BaseExecutor):
    """Section ``judge``. A further one, ``[executors.NAME]``, has that section in its ``settings``."""

    @property
    def may_have_twin(self) -> bool:
        """A server is asked once, and may say something else the second time."""
        return bool(self.settings.path)

    def setup(self) -> None:
        self.settings = self.config.judge
        self._log: VerdictLog | None = None
        self.judge: EngineJudge | ServerJudge
        if self.settings.path:
            self.judge = EngineJudge(self.settings, device=self.context.device)
            return
        key = os.environ.get(self.settings.api_key_env, "") if self.settings.api_key_env else ""
        self.judge = ServerJudge(self.settings, ChatClient(self.settings.url, self.settings.model, api_key=key))
        if self.context.run_dir is not None:
            self._folder = RunIdentity.of(self.context.run_dir)
            file = self.context.run_dir / "verdicts" / f"{self.name}-{self.context.rank}.jsonl"
            self._log = VerdictLog(
                file, asked_of=_what_decides(self.settings), patience=Patience(self.config.deadlines.disk_s)
            )

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        until_s = running_s() + JUDGING_SHARE * self.config.deadlines.step_s
        groups: list[Group] = self.items_of(inputs)
        questions = [
            Question(
                text=fill(self.settings.rubric, group.prompt, response),
                seed_parts=(self.config.run.seed, group.prompt.index, response.sample_index),
            )
            for group in groups
            for response in group.responses
            if to_judge(response)
        ]
        verdicts = self._ask(questions, until_s=until_s)
        found = iter(verdicts)
        judged = [
            dataclasses.replace(
                group,
                responses=tuple(self._judged(r, next(found)) if to_judge(r) else r for r in group.responses),
            )
            for group in groups
        ]
        return StepResult(
            outputs=self.outputs_of(judged),
            metrics=self.own_keys(_metrics(verdicts)),
            spans=(("judge", started, time.monotonic()),),
        )

    def _ask(self, questions: Sequence[Question], *, until_s: float) -> list[Verdict]:
        """Verdicts in order; those that an interrupted run has got already are taken from its log."""
        if self._log is None:
            return self.judge.ask(questions, until_s=until_s)
        kept = [self._log.get(question) for question in questions]
        new = [question for question, verdict in zip(questions, kept, strict=True) if verdict is None]
        asked = iter(self.judge.ask(new, until_s=until_s))
        verdicts = [next(asked) if verdict is None else verdict for verdict in kept]
        self._folder.check()
        self._log.keep(
            (question, verdict)
            for question, verdict, before in zip(questions, verdicts, kept, strict=True)
            if before is None
        )
        return verdicts

    def _judged(self, response: Response, verdict: Verdict) -> Response:
        if verdict.score is None:
            detail = f"{self.settings.name}: {verdict.cause}"
            failure = Failure(kind="timeout" if verdict.timed_out else "judge", detail=detail)
            return dataclasses.replace(response, outcome=failure)
        return with_score(response, verdict.score, name=self.settings.name, weight=self.settings.weight)

    def close(self) -> None:
        self.__dict__.pop("judge", None)


def _what_decides(settings: JudgeConfig) -> list[Any]:
    """Besides the words of a question, what a verdict hangs on."""
    return [
        settings.url,
        settings.model,
        settings.temperature,
        settings.max_new_tokens,
        settings.score_pattern,
        list(settings.score_range),
    ]


def _metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    totals = Counter[str]()
    for verdict in verdicts:
        totals["judge/num_requests"] += verdict.requests
        totals["judge/num_retries"] += max(0, verdict.requests - 1)
        totals["judge/num_prompt_tokens"] += verdict.prompt_tokens
        totals["judge/num_completion_tokens"] += verdict.completion_tokens
    failed = sum(verdict.score is None for verdict in verdicts)
    names = ("num_requests", "num_retries", "num_prompt_tokens", "num_completion_tokens")
    costs = {f"judge/{name}": float(totals[f"judge/{name}"]) for name in names}
    return {"judge/num_scored": float(len(verdicts) - failed), "judge/num_failed": float(failed), **costs}
