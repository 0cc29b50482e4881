"""Worker processes that run a user's code, each under a time limit, and none of them trusted.

    put ─▶ [queue] ─▶ the worker that holds the job's home, else any free one ─▶ [answers] ─▶ take (by name)

Two kinds of job: judge samples (``pool``), answer one reply of an episode (``episode_pool``). A job
whose worker is over its time is failed and the worker replaced; one whose worker died is put again,
before all others, where that may not have been its own fault. Nothing happens here between calls:
``turn`` reads what has come and hands out what waits.

Workers are started by exec, not by fork, so a pool may live in a process with threads, CUDA or
actors. Each has a guard that ends it, and every process that it started, with the pool or with the
process that owns the pool (see ``process_tree``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
from collections import Counter, OrderedDict
from collections.abc import Hashable
from itertools import count
from typing import Any, ClassVar, Self

from llamarl.environments.messages import Answer, Answered, Ready, Refused, pack_request
from llamarl.environments.worker_process import START_TIMEOUT_S, Job, WorkerProcess
from llamarl.errors import DataError, DeadlineExceeded, ExecutorFailed
from llamarl.frames import BrokenFrame
from llamarl.running_time import running_s
from llamarl.settings.environments import RewardPoolConfig
from llamarl.types import Failure, FailureKind

__all__ = ["WorkerPool"]

_MAX_START_DEATHS = 3
"""Of replacements, one after the other in one place; the first worker of a place must start at once."""
_MAX_DEATHS = 3
"""Of workers at one job: one that takes all memory is killed each time."""

_log = logging.getLogger(__name__)


class WorkerPool:
    """Workers, their jobs, and the one loop that waits for them.

    The constructor returns when all workers are ready, so that wrong code fails here and not in the middle of a run.

    Args:
        hello: The first request to each worker: what it shall be.
        suspect: Whose code may be to blame where a worker does not start, for errors.
        needed: False starts no worker.

    Raises:
        DataError: A worker refuses; carries its cause.
        ExecutorFailed: A worker died while it started.
        DeadlineExceeded: A worker took longer than ``START_TIMEOUT_S`` to start.
    """

    title: ClassVar[str]
    """For errors: whose workers they are."""
    busy_with: ClassVar[str]
    """For errors: what took too long."""
    redoes_exits: ClassVar[bool]
    """Whether a job is put again also where its worker ended by itself; else only where somebody killed it."""

    def __init__(self, hello: Any, config: RewardPoolConfig, suspect: str, *, needed: bool = True) -> None:
        self._config = config
        self._hello = pack_request(hello)
        self._suspect = suspect
        self._numbers = count()
        # in order, as long as no worker has it; the first of a plain dict is looked for behind all that have left it
        self._queue: OrderedDict[Hashable, Job] = OrderedDict()
        self._answers: dict[Hashable, Answer] = {}
        self._deaths: Counter[Hashable] = Counter()
        self._homes: dict[Hashable, int] = {}  # what a worker holds live -> the worker
        self._released: dict[int, list[Hashable]] = {}  # worker -> what it may let go with its next job
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        self._closed = False
        self._was_ready = False
        self._start_deaths: Counter[int] = Counter()  # place of a worker -> how often in a row it died while it started
        self.num_replaced = 0
        """Workers killed or lost, and replaced, since the start."""
        try:
            for number in range(config.num_workers if needed else 0):
                self._workers.append(self._start(number))
            while not all(worker.ready for worker in self._workers):
                self.turn()
            self._was_ready = True
        except BaseException:
            self.close()
            raise

    def put(self, name: Hashable, request: Any, home: Hashable = None) -> None:
        """Queue a job.

        Args:
            home: The worker that gets it holds this live from then on, and gets all jobs with the same home.
        """
        self._queue[name] = Job(next(self._numbers), name, request, home)

    def accepts(self, job: Job, answer: Answer) -> bool:
        """Whether it is an answer to the job; else it is dropped."""
        raise NotImplementedError

    def is_over(self, answer: Answer) -> bool:
        """Whether the worker holds the job's home no more after this answer."""
        return False

    def limit_s(self, job: Job) -> float:
        """Seconds that a job may take."""
        return self._config.timeout_s

    @property
    def worker_pids(self) -> list[int]:
        """Ids of the processes that run the user's code, for supervision and tests; those that
        still start are left out."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def watch(self) -> None:
        """Give workers that still start their time from now on: nobody has looked at them since they were replaced."""
        for worker in self._workers:
            if not worker.ready:
                worker.deadline = running_s() + START_TIMEOUT_S

    def turn(self, end: float = math.inf) -> None:
        """Hand jobs to free workers, wait for the first event or deadline (``end`` at the latest),
        act on it, hand out again.

        Args:
            end: On the clock of ``running_s``; one that has passed does not wait.

        Raises:
            ExecutorFailed, DeadlineExceeded, DataError: A replacement worker did not start.
        """
        self._hand_out()
        watched = [worker for worker in self._workers if worker.job is not None or not worker.ready]
        nearest = min([end, *(worker.deadline for worker in watched)])
        moved: set[WorkerProcess] = set()
        for key, _ in self._selector.select(max(0.0, nearest - running_s())):
            worker = key.data
            if self._workers[worker.number] is not worker:
                continue  # replaced while this round's events were handled
            if key.fileobj is worker.control:
                if worker.has_ended():
                    self._lost(worker)
                continue
            self._read(worker)
            moved.add(worker)
        now = running_s()
        for worker in list(self._workers):
            if (worker.job is not None or not worker.ready) and now >= worker.deadline:
                if worker in moved and worker.job is not None and not worker.had_more_time:
                    # it had waited for this process, which had not looked: between two ticks minutes can pass
                    worker.had_more_time, worker.deadline = True, now + self._config.timeout_s
                else:
                    self._expired(worker)
        self._hand_out()

    def fail_all(self, kind: FailureKind, detail: str) -> None:
        """Fail every job, and replace the workers that are busy with one."""
        for worker in list(self._workers):
            if worker.job is not None:
                self._fail(worker, kind, detail)
        self._answers.update((name, Failure(kind=kind, detail=detail)) for name in self._queue)
        self._queue.clear()

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, number: int) -> WorkerProcess:
        worker = WorkerProcess(number, self._hello, self._config)
        for end in (worker.control, worker.jobs):
            self._selector.register(end, selectors.EVENT_READ, worker)
        return worker

    def _hand_out(self) -> None:
        for worker in list(self._workers):
            job = self._next_for(worker.number) if worker.ready and worker.job is None else None
            if job is None:
                continue
            if worker.died_idle():  # no job's fault
                self._replace(worker)
                continue
            del self._queue[job.name]
            limit_s = self.limit_s(job)
            if job.home is not None:
                self._homes[job.home] = worker.number
            request = pack_request((job.number, job.request, self._released.pop(worker.number, [])))
            worker.assign(job, request, limit_s)

    def _next_for(self, number: int) -> Job | None:
        """The first job that this worker may take: one whose home it holds, or nobody does."""
        return next((job for job in self._queue.values() if self._homes.get(job.home, number) == number), None)

    def _forget(self, worker: WorkerProcess) -> None:
        for end in (worker.jobs, worker.control):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)

    def _replace(self, worker: WorkerProcess) -> None:
        """Start another in its place; what it held is made again, wherever it is asked for next."""
        self._forget(worker)
        worker.stop()
        self.num_replaced += 1
        self._workers[worker.number] = self._start(worker.number)
        self._homes = {key: home for key, home in self._homes.items() if home != worker.number}
        self._released.pop(worker.number, None)

    def _read(self, worker: WorkerProcess) -> None:
        try:
            replies = worker.read()
        except EOFError:  # its guard tells how it ended
            self._selector.unregister(worker.jobs)
            return
        except BrokenFrame as error:
            if not worker.ready:
                raise self._did_not_start(worker, f"it sent what is no reply: {error}") from error
            self._fail(worker, "crash", f"the {self.title} worker sent what is no reply and was replaced: {error}")
            return
        for reply in replies:
            self._replied(worker, reply)

    def _replied(self, worker: WorkerProcess, reply: Ready | Refused | Answered) -> None:
        match reply:
            case Refused(cause):
                if not worker.ready:  # else nobody asked
                    raise DataError(cause)
            case Ready(pid):
                worker.ready, worker.pid = True, pid
                self._start_deaths.pop(worker.number, None)
            case Answered(number, answer, retire):
                job = worker.job
                if job is None or job.number != number or not self.accepts(job, answer):
                    _log.debug("%s pool: dropped a reply to job %d from worker %d", self.title, number, worker.number)
                    return
                worker.job = None
                self._deaths.pop(job.name, None)
                if self.is_over(answer):
                    self._homes.pop(job.home, None)
                self._answers[job.name] = answer
                if retire:
                    self._replace(worker)

    def _lost(self, worker: WorkerProcess) -> None:
        for reply in worker.read_rest():
            self._replied(worker, reply)
            if self._workers[worker.number] is not worker:
                return  # it had asked to be replaced
        cause = worker.stop()
        if worker.ready:
            self._fail(worker, "crash", f"the {self.title} worker {cause}")
            return
        self._start_deaths[worker.number] += 1
        if self._start_deaths[worker.number] >= _MAX_START_DEATHS or not (self._was_ready or worker.was_killed):
            raise self._did_not_start(worker, cause)
        self._replace(worker)  # one like it has started before, or somebody killed this one

    def _did_not_start(self, worker: WorkerProcess, cause: str) -> ExecutorFailed:
        self._forget(worker)
        return ExecutorFailed(f"{self.title} worker {worker.number} did not start{self._suspect}: {cause}")

    def _expired(self, worker: WorkerProcess) -> None:
        waited = running_s() - worker.started
        if not worker.ready:
            self._forget(worker)
            raise DeadlineExceeded(
                f"the {self.title} pool waited {waited:.1f} s for worker {worker.number} to start{self._suspect}, limit "
                f"{START_TIMEOUT_S:g} s: {worker.stop()}"
            )
        detail = f"{self.busy_with} took longer than timeout_s={self._config.timeout_s} s; its worker was replaced"
        self._fail(worker, "timeout", detail)

    def _fail(self, worker: WorkerProcess, kind: FailureKind, detail: str) -> None:
        """Fail what a worker is busy with, or put it again, and start another in its place."""
        job, worker.job = worker.job, None
        if job is not None and kind == "crash" and (self.redoes_exits or worker.was_killed):
            self._deaths[job.name] += 1
            if self._deaths[job.name] < _MAX_DEATHS:
                self._queue[job.name] = job
                self._queue.move_to_end(job.name, last=False)
                job = None
            else:
                first, *rest = detail.splitlines()
                detail = "\n".join([f"{first} ({_MAX_DEATHS} times in a row)", *rest])
        if job is not None:
            self._deaths.pop(job.name, None)
            self._answers[job.name] = Failure(kind=kind, detail=detail)
        self._replace(worker)
