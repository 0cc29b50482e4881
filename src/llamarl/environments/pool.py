"""The reward pool: worker processes that judge samples, each under a time limit, and none of them trusted.

    score(groups) ── one sample at a time ──▶ worker 0 ─┐
                 └─────────────────────────▶ worker 1 ─┴─▶ groups with an outcome on every response, in order

What can go wrong with user code, and what comes of it: an exception, a NaN or a non-number fails
the sample; a sample over its time has its worker killed and replaced; a worker that dies is
replaced and its sample failed, or judged again where SIGKILL or SIGINT ended it, which may have come from
outside. A failed sample is a typed ``Failure``, never a zero. A verdict depends on the sample
alone, not on the worker or the moment that judged it: every reply names the job that it answers,
and is dropped where that is not the one the worker has.

Of an episode with an environment (``episodes``) the reward is the sum of its turns'; functions of
the user's own judge its last reply, and their value is added. Where there are none, no worker is
started for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from llamarl.environments.episodes import episode_score
from llamarl.environments.messages import Answer
from llamarl.environments.worker_pool import WorkerPool
from llamarl.environments.worker_process import Job
from llamarl.running_time import running_s
from llamarl.settings.environments import TaskConfig, label_in
from llamarl.types import Failure, Group, Prompt, Response, Score

__all__ = ["RewardPool", "split_into_batches"]

_Sample = tuple[Prompt, tuple[str, ...], npt.NDArray[np.int32]]
"""What a worker judges: prompt, the policy's words, and their tokens, as the response has them: a tick's are many, and
most judges read none."""

_Place = tuple[int, int]
"""Of a sample: its group, and where in it."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


def split_into_batches(groups: Sequence[Sequence[T]], size: int) -> list[tuple[T, ...]]:
    """The samples of groups in batches of at most ``size``, in order; a group is divided only if it is larger.

    Which samples are judged together so depends on the groups alone, not on which worker is free.
    """
    batches: list[tuple[T, ...]] = []
    batch: list[T] = []
    for group in groups:
        if batch and len(batch) + len(group) > size:
            batches.append(tuple(batch))
            batch = []
        batch += group
        while len(batch) > size:
            batches.append(tuple(batch[:size]))
            del batch[:size]
    return [*batches, tuple(batch)] if batch else batches


class RewardPool(WorkerPool):
    """Judges groups of responses in worker processes.

    Args:
        task_config: Task and pool settings.
        seed: The run's seed; workers make the same task from it as the prompt stream does.

    Raises:
        DataError: The task cannot be made; carries the worker's cause.
        ExecutorFailed: A worker died while it started.
        DeadlineExceeded: A worker took longer than ``START_TIMEOUT_S`` to start.
    """

    title = "reward"
    busy_with = "judging"
    redoes_exits = False

    def __init__(self, task_config: TaskConfig, seed: int = 0) -> None:
        self._tasks = task_config.by_label
        judges = ", ".join(repr(part.function) for task in self._tasks.values() for part in task.judges)
        needed = any(not task.environment or task.judges for task in self._tasks.values())
        suspect = f" (it imports task.reward {judges})" if judges else ""
        super().__init__(("judge", task_config, seed), task_config.pool, suspect, needed=needed)

    def score(self, groups: Sequence[Group], *, limit_s: float | None = None) -> list[Group]:
        """The same groups in the same order, every response with a ``Score`` or a ``Failure``.

        A response that already has an outcome keeps it; one whose generation ended in ``error`` is
        failed without being judged. Waits at most ``timeout_s`` a sample, plus the start of replaced workers.

        Args:
            limit_s: Seconds that all of them may take together; those without a verdict by then are
                failed (``timeout``).

        Raises:
            ExecutorFailed, DeadlineExceeded, DataError: A replacement worker did not start.
        """
        if self._closed:
            raise ValueError("the reward pool is closed")
        outcomes: dict[_Place, Score | Failure] = {}
        to_judge: dict[str, list[list[_Place]]] = {}  # task -> of each group what a worker judges
        for number, group in enumerate(groups):
            row: list[_Place] = []
            label = label_in(self._tasks, group.prompt.task)
            for place, response in enumerate(group.responses):
                if response.outcome is not None:
                    outcomes[number, place] = response.outcome
                elif response.finish_reason == "error":
                    detail = f"generation ended with finish_reason {response.finish_reason!r}"
                    outcomes[number, place] = Failure(kind="generation", detail=detail)
                elif response.turns and not self._tasks[label].judges:
                    outcomes[number, place] = episode_score(response.turns)
                else:
                    row.append((number, place))
            to_judge.setdefault(label, []).append(row)
        batches: list[tuple[_Place, ...]] = []
        for label, rows in to_judge.items():
            batches += split_into_batches(rows, self._tasks[label].reward_batch_size or 1)
        self._judge(
            {batch: [_sample(groups[n].prompt, groups[n].responses[i]) for n, i in batch] for batch in batches}, limit_s
        )
        for batch in batches:
            answer = self._answers.pop(batch)
            verdicts = answer if isinstance(answer, tuple) else [cast(Failure, answer)] * len(batch)
            for (n, i), verdict in zip(batch, verdicts, strict=True):
                outcomes[n, i] = _with_turns(groups[n].responses[i], verdict)
        return [
            replace(
                group,
                responses=tuple(
                    replace(response, outcome=outcomes[n, i]) for i, response in enumerate(group.responses)
                ),
            )
            for n, group in enumerate(groups)
        ]

    def accepts(self, job: Job, answer: Answer) -> bool:
        return isinstance(answer, tuple) and len(answer) == len(job.request)

    def _judge(self, jobs: Mapping[tuple[_Place, ...], Sequence[_Sample]], limit_s: float | None) -> None:
        """Have every batch answered."""
        self._queue.clear()
        self._answers.clear()
        self._deaths.clear()
        for batch, samples in jobs.items():
            self.put(batch, samples)
        end = math.inf if limit_s is None else running_s() + limit_s
        self.watch()
        while len(self._answers) < len(jobs):
            if running_s() >= end:  # a judge that hangs on every sample must not hold up the tick for ever
                left = sum(len(batch) for batch in jobs if batch not in self._answers)
                detail = (
                    f"{left} of {sum(map(len, jobs))} samples had no verdict after {limit_s:.1f} s, and were failed so that the "
                    f"tick keeps its deadline (deadlines.step_s): raise task.pool.num_workers ({len(self._workers)}) or "
                    f"deadlines.step_s, or lower task.pool.timeout_s ({self._config.timeout_s})"
                )
                _log.warning("reward pool: %s", detail)
                self.fail_all("timeout", detail)
                return
            self.turn(end)


def _with_turns(response: Response, verdict: Score | Failure) -> Score | Failure:
    """A judge's verdict, and of an episode what the environment gave on the way."""
    if not response.turns or isinstance(verdict, Failure):
        return verdict
    own = episode_score(response.turns)
    names = dict.fromkeys([*own.parts, *verdict.parts])
    parts = {name: own.parts.get(name, 0.0) + verdict.parts.get(name, 0.0) for name in names}
    return Score(value=own.value + verdict.value, parts=parts)


def _sample(prompt: Prompt, response: Response) -> _Sample:
    """What a worker gets of a response: of an episode all its turns, the last of which is judged."""
    if not response.turns:
        return prompt, (response.text,), response.tokens
    told = [{"reply": turn.reply, "observation": turn.observation, "reward": turn.reward} for turn in response.turns]
    last = response.turns[-1]
    prompt = replace(prompt, metadata={**prompt.metadata, "turns": told})
    return prompt, tuple(turn.reply for turn in response.turns), response.tokens[last.start : last.end]
