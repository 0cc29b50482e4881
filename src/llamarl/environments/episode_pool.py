"""The pool of environments beside a generator: asks go in, answers come out, and who waits for whom is the caller's affair.

    ask ─▶ [asked] ─▶ the worker that holds the live episode, else any free one ─▶ [answered] ─▶ wait (by key)

A worker holds many live episodes and answers one ask at a time, so ``task.pool.num_workers`` slow tools run at once. An
episode stays with the worker that has it; where that died, also in the middle of an answer, it is played again by another. So no answer depends on which
worker gave it, nor on when: an answer is a function of its ask.

Nothing happens here between calls: ``poll`` reads what has come and hands out what waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from llamarl.environments.config import TaskConfig
from llamarl.environments.episode import Observation, Step
from llamarl.environments.episodes import Ask
from llamarl.environments.messages import Answered, Verdicts, pack_request
from llamarl.environments.worker_pool import WorkerPool
from llamarl.environments.worker_process import Job, WorkerProcess
from llamarl.types import Failure, FailureKind

__all__ = ["Answer", "Environments", "EpisodePool"]

Answer = Observation | Step | Failure

_MAX_DEATHS = 3
"""Workers that may die while they answer one question; then it is its fault."""


class Environments(Protocol):
    """Whoever answers asks: ``EpisodePool``, whose methods these are, or one that hears another rank's."""

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
        task_config: Which environment, and the pool's settings.
        num_workers: Overrides ``task_config.pool.num_workers``.
        timeout_s: Overrides ``task_config.pool.timeout_s``: what one reset or step may take, and of an episode that is played
            again all of them together.

    Raises:
        DataError: The environment cannot be imported; carries the worker's cause.
        ExecutorFailed, DeadlineExceeded: As ``WorkerPool.start``.
    """

    title = "environment"
    busy_with = "the environment"

    def __init__(
        self, task_config: TaskConfig, *, num_workers: int | None = None, timeout_s: float | None = None
    ) -> None:
        super().__init__(
            pack_request(("play", task_config, 0)),
            task_config.pool,
            timeout_s=timeout_s,
            suspect=f" (it imports task.environment {task_config.environment!r})",
        )
        self._asked: dict[Hashable, Ask] = {}  # in order, as long as no worker has it
        self._at_work: dict[int, Ask] = {}  # job number -> ask
        self._answers: dict[Hashable, Answer] = {}
        self._deaths: dict[Hashable, int] = {}  # question -> workers that died of it
        self._homes: dict[Hashable, int] = {}  # episode -> worker that holds it live
        self._released: dict[int, list[tuple[Any, ...]]] = {}  # worker -> episodes to close with its next job
        self.start(task_config.pool.num_workers if num_workers is None else num_workers)

    def ask(self, ask: Ask) -> None:
        """Put a question, unless it has been put; returns at once."""
        name = _name(ask)
        if (
            name not in self._answers
            and name not in self._asked
            and all(_name(a) != name for a in self._at_work.values())
        ):
            self._asked[name] = ask
            self.poll()

    def poll(self) -> None:
        """Read what has come and hand out what waits, without waiting."""
        if self._asked or self._at_work:
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
        name = _name(ask)
        self.ask(ask)
        if name not in self._answers:
            self.watch()
        while name not in self._answers:
            self.turn()
        return self._answers.pop(name)

    def agree(self, arrived: Sequence[bool]) -> Sequence[bool]:
        """Which of some replies have arrived, as all who play with them see it."""
        return arrived

    def wait_any(self, asks: Sequence[Ask]) -> None:
        """Return when one of these has its answer."""
        self.watch()
        while not any(self.answered(ask) for ask in asks):
            self.turn()

    def release(self, key: tuple[Any, ...]) -> None:
        """An episode will not be asked about again, though it is not over."""
        home = self._homes.pop(key, None)
        if home is not None:
            self._released.setdefault(home, []).append(key)

    def has_job(self, worker: WorkerProcess) -> bool:
        return self._next_for(worker.number) is not None

    def next_job(self, worker: WorkerProcess) -> tuple[Job, bytes]:
        name = self._next_for(worker.number)
        ask = self._asked.pop(name)
        job = Job(next(self._job_numbers))
        self._at_work[job.number] = ask
        if ask.replies:
            self._homes[ask.key] = worker.number
        return job, pack_request((job.number, (ask, self._released.pop(worker.number, []))))

    def on_reply(self, worker: WorkerProcess, reply: Verdicts | Answered) -> bool:
        assert worker.job is not None
        if not isinstance(reply, Answered):
            return False
        ask = self._at_work.pop(worker.job.number)
        if isinstance(reply.answer, Failure) or (isinstance(reply.answer, Step) and reply.answer.done):
            self._homes.pop(ask.key, None)  # the worker has closed it
        self._deaths.pop(_name(ask), None)
        self._answers[_name(ask)] = reply.answer
        return True

    def on_failed(self, worker: WorkerProcess, job: Job, kind: FailureKind, detail: str) -> None:
        """A worker that died may have been killed from outside: its question is put again, before all others."""
        ask = self._at_work.pop(job.number)
        name = _name(ask)
        if kind == "crash":
            self._deaths[name] = self._deaths.get(name, 0) + 1
            if self._deaths[name] < _MAX_DEATHS:
                self._asked = {name: ask, **self._asked}
                return
            detail = f"{detail} (it did so {_MAX_DEATHS} times)"
        self._deaths.pop(name, None)
        self._answers[name] = Failure(kind="environment", detail=f"{kind}: {detail}")

    def on_replaced(self, worker: WorkerProcess) -> None:
        """What it held is played again, wherever it is asked for next."""
        self._homes = {key: home for key, home in self._homes.items() if home != worker.number}
        self._released.pop(worker.number, None)

    def _next_for(self, number: int) -> Any:
        """The first ask that this worker may take: of an episode that it holds, or that nobody does."""
        return next((name for name, ask in self._asked.items() if self._homes.get(ask.key, number) == number), None)


def _name(ask: Ask) -> Hashable:
    """Of one question; the next one about the same episode has another."""
    return ask.key, len(ask.replies)
