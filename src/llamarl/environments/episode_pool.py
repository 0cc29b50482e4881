"""The pool of environments beside a generator: asks go in, answers come out, and who waits for whom
is the caller's affair.

A worker holds many live episodes and answers one ask at a time, so ``task.pool.num_workers`` slow
tools run at once. An episode stays with the worker that has it; where that died, also in the middle
of an answer, it is played again by another. So no answer depends on which worker gave it, nor on
when: an answer is a function of its ask.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from llamarl.data.items import Split, TaskItem
from llamarl.data.prompts import Opened
from llamarl.environments.episode import Observation, Step
from llamarl.environments.episodes import Ask, Play, digest_of, words_of
from llamarl.environments.messages import Answer as AnyAnswer
from llamarl.environments.worker_pool import WorkerPool
from llamarl.environments.worker_process import Job
from llamarl.running_time import running_s
from llamarl.settings.environments import TaskConfig
from llamarl.types import Failure, Opening, Prompt, Score

__all__ = ["Answer", "Environments", "EpisodeItems", "EpisodeOpener", "EpisodePool"]

Answer = Observation | Step | Failure

_CLOSE_S = 5.0
"""For environments to close, when their pool is closed."""


class Environments(Protocol):
    """Whoever answers asks: ``EpisodePool``, whose methods these are, or one that hears another rank's."""

    def begin(self, limit_s: float) -> None: ...
    def ask(self, ask: Ask) -> None: ...
    def poll(self) -> None: ...
    def answered(self, ask: Ask) -> bool: ...
    def wait(self, ask: Ask) -> Answer: ...
    def wait_any(self, asks: Sequence[Ask]) -> None: ...
    def agree(self, arrived: Sequence[bool]) -> Sequence[bool]: ...
    def release(self, key: tuple[Any, ...]) -> None: ...
    def close(self) -> None: ...


class EpisodePool(WorkerPool):
    """Environments in worker processes.

    Args:
        task_config: Which environment, and the pool's settings. ``pool.timeout_s`` is what one reset or step may take;
            an episode that is played again has as much for each of its replies.

    Raises:
        DataError: The environment cannot be imported; carries the worker's cause.
        ExecutorFailed, DeadlineExceeded: As ``WorkerPool``.
    """

    title = "environment"
    busy_with = "the environment"
    redoes_exits = True

    def __init__(self, task_config: TaskConfig) -> None:
        suspect = f" (it imports task.environment {task_config.environment!r})"
        self._end = math.inf
        self._late = (
            "no answer in the time of a tick (nine tenths of deadlines.step_s): see what the environment waits for, raise "
            f"task.pool.num_workers ({task_config.pool.num_workers}) or deadlines.step_s, or lower task.pool.timeout_s "
            f"({task_config.pool.timeout_s})"
        )
        super().__init__(("play", task_config, 0), task_config.pool, suspect)

    def begin(self, limit_s: float) -> None:
        """A tick begins: what has no answer after so many seconds fails, so that one in which every answer is slow keeps
        its deadline, and is told of."""
        self._end = running_s() + limit_s

    def ask(self, ask: Ask) -> None:
        """Put a question, unless it has been put; returns at once."""
        name = _name(ask)
        busy = any(worker.job is not None and worker.job.name == name for worker in self._workers)
        if busy or name in self._answers or name in self._queue:
            return
        if running_s() < self._end:
            self.put(name, ask, ask.key if ask.replies else None)
            self.poll()
        else:
            self.release(ask.key)
            self._answers[name] = Failure(kind="timeout", detail=self._late)

    def poll(self) -> None:
        """Read what has come and hand out what waits, without waiting."""
        if self._queue or any(worker.job is not None for worker in self._workers):
            self.turn(0.0)

    def answered(self, ask: Ask) -> bool:
        """Whether ``wait`` would return at once."""
        return _name(ask) in self._answers

    def wait(self, ask: Ask) -> Answer:
        """The answer to a question that was put; it is then forgotten here.

        Waits at most ``timeout_s`` for each ask that its worker has before it.

        Raises:
            ExecutorFailed, DeadlineExceeded, DataError: A replacement worker did not start.
        """
        self.ask(ask)
        self.wait_any([ask])
        answer = self._answers.pop(_name(ask))
        if isinstance(answer, Failure) and answer.kind != "environment":
            return Failure(kind="environment", detail=f"{answer.kind}: {answer.detail}")
        assert not isinstance(answer, tuple), answer
        return answer

    def wait_any(self, asks: Sequence[Ask]) -> None:
        """Return when one of these has its answer."""
        if not any(map(self.answered, asks)):
            self.watch()
        while not any(map(self.answered, asks)):
            if running_s() < self._end:
                self.turn(self._end)
            else:
                self.fail_all("timeout", self._late)

    def agree(self, arrived: Sequence[bool]) -> Sequence[bool]:
        """Which of some replies have arrived, as all who play with them see it."""
        return arrived

    def release(self, key: tuple[Any, ...]) -> None:
        """An episode will not be asked about again, though it is not over."""
        home = self._homes.pop(key, None)
        if home is not None:
            self._released.setdefault(home, []).append(key)

    def close(self) -> None:
        """End all workers. Those that wait close their episodes first, in a few seconds."""
        waiting = [worker for worker in self._workers if worker.ready and worker.job is None]
        for worker in waiting:
            worker.begin_end()
        until = running_s() + _CLOSE_S
        while running_s() < until and not all([worker.has_ended() for worker in waiting]):
            time.sleep(0.005)
        super().close()

    def accepts(self, job: Job, answer: AnyAnswer) -> bool:
        return not isinstance(answer, tuple)

    def limit_s(self, job: Job) -> float:
        return self._config.timeout_s * (1 if job.home in self._homes else max(1, len(job.request.replies)))

    def is_over(self, answer: AnyAnswer) -> bool:
        return isinstance(answer, Failure) or (isinstance(answer, Step) and answer.done)


def _name(ask: Ask) -> Hashable:
    """Of one question; the next one about the same episode has another."""
    return ask.key, len(ask.replies)


class EpisodeOpener:
    """Opens the episodes of one task in a pool.

    Args:
        label: Of the task, where there are several.
    """

    def __init__(self, pool: Environments, config: TaskConfig, label: str = "") -> None:
        self._pool = pool
        self._config = config
        self._label = label

    def ask(self, item: TaskItem, seed: int) -> None:
        self._pool.ask(self._ask(item, seed))

    def open(self, item: TaskItem, seed: int) -> Opened:
        """Waits for the first observation. Where there is none, the opening says why, and the
        question is the item's."""
        said = self._pool.wait(self._ask(item, seed))
        opening = Opening(
            seed=seed,
            max_turns=self._config.max_turns,
            max_turn_tokens=self._config.max_turn_tokens,
            digest=digest_of(said) if isinstance(said, Observation) else "",
            question=item.question,
            failure=said.detail if isinstance(said, Failure) else "",
        )
        if isinstance(said, Observation):
            return Opened(question=words_of(said), messages=said.messages, tools=said.tools, opening=opening)
        return Opened(question=item.question or "(no episode)", messages=(), tools=(), opening=opening)

    def _ask(self, item: TaskItem, seed: int) -> Ask:
        item = TaskItem(question=item.question, answer=item.answer, metadata=item.metadata, messages=item.messages)
        return Ask(
            key=("open", self._label, seed, item.question, str(item.metadata)),
            play=Play(task=self._label, item=item, seed=seed),
        )


class EpisodeItems:
    """Items without words, one an episode, without end: all that an episode is follows from its seed."""

    name = "episodes"

    def num_items(self, split: Split) -> int | None:
        return None

    def item(self, split: Split, index: int) -> TaskItem:
        return TaskItem(question="", metadata={"index": index})

    def respond(self, prompt: Prompt, turns: object) -> Score:
        raise NotImplementedError("episodes are judged by their environment, or by task.reward")
