"""Worker processes that run a user's code, each under a time limit, and none of them trusted.

    next_job ─▶ worker 0 ─┐                       what a kind of pool decides: which job a free worker gets,
             ─▶ worker 1 ─┴─▶ on_reply, on_failed   and what comes of a reply, or of a worker that died or hung

Workers are started by exec, not by fork, so a pool may live in a process with threads, CUDA or actors. Each has a guardian
that ends it, and every process that it started, with the pool or with the process that owns the pool (see ``guardian``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
from abc import ABC, abstractmethod
from itertools import count
from types import TracebackType
from typing import ClassVar, Self

from llamarl.environments.config import RewardPoolConfig
from llamarl.environments.messages import Answered, BrokenReply, Ready, Refused, Verdicts
from llamarl.environments.worker_env import unset_names
from llamarl.environments.worker_process import Job, WorkerProcess
from llamarl.errors import DataError, DeadlineExceeded, ExecutorFailed
from llamarl.running_time import running_s
from llamarl.types import FailureKind

__all__ = ["WorkerPool"]

_MAX_START_DEATHS = 3
"""Of replacements, one after the other in one place; the first worker of a place must start at once."""

_log = logging.getLogger(__name__)


class WorkerPool(ABC):
    """Workers, and the one loop that waits for them.

    Args:
        hello: The first request to each worker: what it shall be.
        suspect: Whose code may be to blame where a worker does not start, for errors.

    Raises:
        DataError: A worker refuses; carries its cause.
    """

    title: ClassVar[str]
    """For errors: whose workers they are."""
    busy_with: ClassVar[str]
    """For errors: what took too long."""

    def __init__(self, hello: bytes, config: RewardPoolConfig, *, timeout_s: float | None, suspect: str = "") -> None:
        self._timeout_s = config.timeout_s if timeout_s is None else timeout_s
        self._config = config
        self._hello = hello
        self._suspect = suspect
        self._job_numbers = count()
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        self._closed = False
        self._was_ready = False
        self._start_deaths: dict[int, int] = {}  # place of a worker -> how often in a row it died while it started
        self.num_replaced = 0
        """Workers killed or lost, and replaced, since the start."""
        if unset := unset_names(os.environ, config.pass_env):
            _log.warning(
                "task.pool.pass_env: not set here, and so not in the %s workers: %s", self.title, ", ".join(unset)
            )

    @abstractmethod
    def has_job(self, worker: WorkerProcess) -> bool:
        """Whether there is something for a free worker to do."""

    @abstractmethod
    def next_job(self, worker: WorkerProcess) -> tuple[Job, bytes]:
        """What it does next, and the request that says so."""

    @abstractmethod
    def on_reply(self, worker: WorkerProcess, reply: Verdicts | Answered) -> bool:
        """Take a reply to the worker's job; False where it is none, and is dropped."""

    @abstractmethod
    def on_failed(self, worker: WorkerProcess, job: Job, kind: FailureKind, detail: str) -> None:
        """A job will have no reply."""

    def on_replaced(self, worker: WorkerProcess) -> None:  # noqa: B027
        """A worker is gone, with what it held; another has its number."""

    @property
    def worker_pids(self) -> list[int]:
        """Ids of the processes that run the user's code, for supervision and tests; those that still start are left out."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def start(self, num_workers: int) -> None:
        """Start workers and return when all are ready, so that wrong code fails here and not in the middle of a run.

        Raises:
            DataError: A worker refuses; carries its cause.
            ExecutorFailed: A worker died while it started.
            DeadlineExceeded: A worker took longer than ``startup_timeout_s`` to start.
        """
        try:
            for number in range(num_workers):
                self._workers.append(self._start(number))
            while not all(worker.ready for worker in self._workers):
                self.turn()
            self._was_ready = True
        except BaseException:
            self.close()
            raise

    def watch(self) -> None:
        """Give workers that still start their time from now on: nobody has looked at them since they were replaced."""
        for worker in self._workers:
            if not worker.ready:
                worker.deadline = running_s() + self._config.startup_timeout_s

    def turn(self, end: float = math.inf) -> None:
        """Hand jobs to free workers, wait for the first event or deadline (``end`` at the latest), act on it, hand out again.

        Args:
            end: On the clock of ``running_s``; one that has passed does not wait.

        Raises:
            ExecutorFailed, DeadlineExceeded, DataError: A replacement worker did not start.
        """
        self._hand_out()
        watched = [worker for worker in self._workers if worker.job is not None or not worker.ready]
        nearest = min([end, *(worker.deadline for worker in watched)])
        moved: set[WorkerProcess] = set()
        for key, events in self._selector.select(max(0.0, nearest - running_s())):
            worker = key.data
            if self._workers[worker.number] is not worker:
                continue  # replaced while this round's events were handled
            if key.fileobj is worker.control:
                if worker.has_ended():
                    self._lost(worker)
                continue
            if events & selectors.EVENT_WRITE:
                worker.write()
                if not worker.outbox:
                    self._watch_jobs(worker)
            if events & selectors.EVENT_READ:
                self._read(worker)
            moved.add(worker)
        now = running_s()
        for worker in list(self._workers):
            if (worker.job is not None or not worker.ready) and now >= worker.deadline:
                if worker in moved and worker.job is not None and not worker.had_more_time:
                    # it had waited for this process, which had not looked: between two ticks minutes can pass
                    worker.had_more_time, worker.deadline = True, now + self._timeout_s
                else:
                    self._expired(worker)
        self._hand_out()

    def fail_and_replace(self, worker: WorkerProcess, kind: FailureKind, detail: str) -> None:
        """Fail what a worker is busy with, and start another in its place."""
        self._fail(worker, kind, detail)
        self._replace(worker)

    def close(self) -> None:
        """End all workers. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            self._forget(worker)
            worker.begin_stop()
        for worker in self._workers:
            worker.stop()
        self._workers.clear()
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, number: int) -> WorkerProcess:
        worker = WorkerProcess(number, self._hello, self._config)
        worker.write()  # at once, so that it starts while nobody waits for it
        self._selector.register(worker.control, selectors.EVENT_READ, worker)
        self._watch_jobs(worker)
        return worker

    def _hand_out(self) -> None:
        for worker in list(self._workers):
            if not worker.ready or worker.job is not None or not self.has_job(worker):
                continue
            if worker.died_idle():  # no job's fault
                self._replace(worker)
                continue
            job, request = self.next_job(worker)
            worker.assign(job, request, self._timeout_s)
            worker.write()  # at once: nobody may turn to it for a while
            self._watch_jobs(worker)

    def _watch_jobs(self, worker: WorkerProcess) -> None:
        """Look for replies, and for room where there is something to send."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outbox else 0)
        try:
            self._selector.modify(worker.jobs, events, worker)
        except KeyError:
            self._selector.register(worker.jobs, events, worker)

    def _forget(self, worker: WorkerProcess) -> None:
        for end in (worker.jobs, worker.control):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)

    def _replace(self, worker: WorkerProcess) -> None:
        self._forget(worker)
        worker.stop()
        self.num_replaced += 1
        self._workers[worker.number] = self._start(worker.number)
        self.on_replaced(worker)

    def _read(self, worker: WorkerProcess) -> None:
        try:
            replies = worker.read()
        except EOFError:  # its guardian reports how it ended
            self._selector.unregister(worker.jobs)
            return
        except BrokenReply as error:
            if not worker.ready:
                raise self._did_not_start(worker, f"it sent what is no reply: {error}") from error
            detail = f"the {self.title} worker sent what is no reply and was replaced: {error}"
            self.fail_and_replace(worker, "crash", detail)
            return
        for reply in replies:
            self._replied(worker, reply)

    def _replied(self, worker: WorkerProcess, reply: Ready | Refused | Verdicts | Answered) -> None:
        match reply:
            case Refused(cause):
                if worker.ready:
                    return  # nobody asked
                raise DataError(cause)
            case Ready(pid):
                worker.ready, worker.pid = True, pid
                self._start_deaths.pop(worker.number, None)
            case Verdicts() | Answered():
                if worker.job is None or worker.job.number != reply.job or not self.on_reply(worker, reply):
                    _log.debug(
                        "%s pool: dropped the reply to job %d from worker %d", self.title, reply.job, worker.number
                    )
                    return
                worker.job = None
                if reply.retire:
                    self._replace(worker)

    def _lost(self, worker: WorkerProcess) -> None:
        for reply in worker.read_rest():
            self._replied(worker, reply)
            if self._workers[worker.number] is not worker:
                return  # it had asked to be replaced
        if not worker.ready:
            deaths = self._start_deaths[worker.number] = self._start_deaths.get(worker.number, 0) + 1
            cause = worker.stop()
            if deaths >= _MAX_START_DEATHS or not (self._was_ready or worker.was_killed):
                raise self._did_not_start(worker, cause)
            self._replace(worker)  # one like it has started before, or somebody killed this one
            return
        self.fail_and_replace(worker, "crash", f"the {self.title} worker {worker.stop()}")

    def _did_not_start(self, worker: WorkerProcess, cause: str) -> ExecutorFailed:
        self._forget(worker)
        return ExecutorFailed(f"{self.title} worker {worker.number} did not start{self._suspect}: {cause}")

    def _expired(self, worker: WorkerProcess) -> None:
        waited = running_s() - worker.started
        if not worker.ready:
            self._forget(worker)
            raise DeadlineExceeded(
                f"the {self.title} pool waited {waited:.1f} s for worker {worker.number} to start{self._suspect}, limit "
                f"task.pool.startup_timeout_s={self._config.startup_timeout_s}: {worker.stop()}"
            )
        detail = f"{self.busy_with} took longer than timeout_s={self._timeout_s} s; its worker was replaced"
        self.fail_and_replace(worker, "timeout", detail)

    def _fail(self, worker: WorkerProcess, kind: FailureKind, detail: str) -> None:
        if worker.job is not None:
            job, worker.job = worker.job, None
            self.on_failed(worker, job, kind, detail)
