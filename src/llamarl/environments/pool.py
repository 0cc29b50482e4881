"""The reward pool: worker processes that judge samples, each under a time limit, and none of them trusted.

    score(groups) ── one sample at a time ──▶ worker 0 ─┐
                 └─────────────────────────▶ worker 1 ─┴─▶ groups with an outcome on every response, in order

What can go wrong with user code, and what comes of it: an exception, a NaN or a non-number fails the sample; a sample over
its time has its worker killed and replaced; a worker that dies is replaced and its sample failed. A failed sample is a
typed ``Failure``, never a zero. A verdict depends on the sample alone, not on the worker or the moment that judged it:
every reply names the job that it answers, and is dropped where that is not the one the worker has.

Workers are started by exec, not by fork, so a pool may live in a process with threads, CUDA or actors. Each has a guardian
that ends it, and every process that it started, with the pool or with the process that owns the pool (see ``guardian``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from types import TracebackType

from llamarl.environments.config import TaskConfig, TaskSection
from llamarl.environments.messages import BrokenReply, Ready, Refused, Verdicts, pack_request
from llamarl.environments.patches import refuse_patches
from llamarl.environments.worker_env import unset_names
from llamarl.environments.worker_process import Job, WorkerProcess
from llamarl.errors import DataError, DeadlineExceeded, ExecutorFailed
from llamarl.running_time import running_s
from llamarl.types import Failure, FailureKind, Group, Prompt, Score

__all__ = ["RewardPool", "split_into_batches"]

Sample = tuple[Prompt, tuple[str, ...], list[int]]
"""What a worker judges: prompt, the policy's words, and their tokens."""

_log = logging.getLogger(__name__)


def split_into_batches(groups: Sequence[Sequence[int]], size: int) -> list[tuple[int, ...]]:
    """The samples of groups in batches of at most ``size``, in order; a group is divided only if it is larger.

    Which samples are judged together so depends on the groups alone, not on which worker is free.
    """
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    for group in groups:
        if batch and len(batch) + len(group) > size:
            batches.append(tuple(batch))
            batch = []
        batch += group
        while len(batch) > size:
            batches.append(tuple(batch[:size]))
            del batch[:size]
    return [*batches, tuple(batch)] if batch else batches


class RewardPool:
    """Judges groups of responses in worker processes.

    The constructor returns when every worker has made the task, so a wrong task fails here and not in the middle of a run.

    Args:
        task_config: Task and pool settings.
        num_workers: Overrides ``task_config.pool.num_workers``.
        timeout_s: Overrides ``task_config.pool.timeout_s``.
        seed: The run's seed; workers make the same task from it as the prompt stream does.

    Raises:
        DataError: The task cannot be made; carries the worker's cause. Or this process patched the package's judges, which
            its workers would not see.
        ExecutorFailed: A worker died while it started.
        DeadlineExceeded: A worker took longer than ``startup_timeout_s`` to start.
    """

    def __init__(
        self,
        task_config: TaskConfig,
        num_workers: int | None = None,
        timeout_s: float | None = None,
        seed: int = 0,
    ) -> None:
        refuse_patches()
        pool = task_config.pool
        self._timeout_s = pool.timeout_s if timeout_s is None else timeout_s
        self._startup_timeout_s = pool.startup_timeout_s
        self._config = pool
        tasks = task_config.tasks if isinstance(task_config, TaskSection) else {}
        self._batch_sizes = {label: task.reward_batch_size or 1 for label, task in tasks.items()}
        self._batch_size = task_config.reward_batch_size or 1
        self._hello = pack_request((task_config, seed))
        self._job_numbers = count()
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        parts = [part for task in (task_config, *tasks.values()) for part in task.judges]
        judges = ", ".join(repr(part.function) for part in parts)
        self._suspect = f" (it imports task.reward {judges})" if judges else ""
        self._closed = False
        self.num_replaced = 0
        """Workers killed or lost, and replaced, since the start."""
        if unset := unset_names(os.environ, pool.pass_env):
            _log.warning("task.pool.pass_env: not set here, and so not in the reward workers: %s", ", ".join(unset))
        try:
            for number in range(pool.num_workers if num_workers is None else num_workers):
                self._workers.append(self._start(number))
            while not all(worker.ready for worker in self._workers):
                self._wait([], deque(), {})
        except BaseException:
            self.close()
            raise

    @property
    def worker_pids(self) -> list[int]:
        """Ids of the processes that judge, for supervision and tests; those that are still starting are left out."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    def score(self, groups: Sequence[Group], *, limit_s: float | None = None) -> list[Group]:
        """The same groups in the same order, every response with a ``Score`` or a ``Failure``.

        A response that already has an outcome keeps it; one whose generation ended in ``error`` or ``cancelled`` is
        failed without being judged. Waits at most ``timeout_s`` a sample, plus the start of replaced workers.

        Args:
            limit_s: Seconds that all of them may take together; those without a verdict by then are failed (``timeout``).

        Raises:
            ExecutorFailed, DeadlineExceeded, DataError: A replacement worker did not start.
        """
        if self._closed:
            raise ValueError("the reward pool is closed")
        samples: list[Sample] = []
        outcomes: dict[int, Score | Failure] = {}
        to_judge: list[list[int]] = []
        places: list[list[int | None]] = []
        for group in groups:
            row: list[int | None] = []
            to_judge.append([])
            for response in group.responses:
                if response.outcome is not None:
                    row.append(None)
                    continue
                row.append(len(samples))
                if response.finish_reason in ("error", "cancelled"):
                    detail = f"generation ended with finish_reason {response.finish_reason!r}"
                    outcomes[len(samples)] = Failure(kind="generation", detail=detail)
                else:
                    to_judge[-1].append(len(samples))
                samples.append((group.prompt, (response.text,), response.tokens.tolist()))
            places.append(row)
        pending: deque[tuple[int, ...]] = deque()
        for label in dict.fromkeys(group.prompt.task if self._batch_sizes else "" for group in groups):
            of_task = [row for row, group in zip(to_judge, groups, strict=True) if label in ("", group.prompt.task)]
            pending.extend(split_into_batches(of_task, self._batch_sizes.get(label, self._batch_size)))
        started = running_s()
        end = math.inf if limit_s is None else started + limit_s
        for worker in self._workers:
            if not worker.ready:  # replaced at the end of the last call; nobody has looked at it since
                worker.deadline = started + self._startup_timeout_s
        while len(outcomes) < len(samples):
            if running_s() >= end:
                self._give_up(len(samples), pending, outcomes, limit_s=limit_s)
                break
            self._wait(samples, pending, outcomes, end)
        scored = []
        for group, row in zip(groups, places, strict=True):
            responses = tuple(
                response if place is None else replace(response, outcome=outcomes[place])
                for response, place in zip(group.responses, row, strict=True)
            )
            scored.append(replace(group, responses=responses))
        return scored

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

    def __enter__(self) -> RewardPool:
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

    def _replace(self, worker: WorkerProcess) -> str:
        self._forget(worker)
        detail = worker.stop()
        self.num_replaced += 1
        self._workers[worker.number] = self._start(worker.number)
        return detail

    def _wait(
        self,
        samples: Sequence[Sample],
        pending: deque[tuple[int, ...]],
        outcomes: dict[int, Score | Failure],
        end: float = math.inf,
    ) -> None:
        """Hand jobs to idle workers, then wait for the first event or deadline (``end`` at the latest) and act on it."""
        for worker in list(self._workers):
            if worker.ready and worker.job is None and pending:
                if worker.died_idle():  # no sample's fault
                    self._replace(worker)
                    continue
                job = Job(next(self._job_numbers), pending.popleft())
                request = pack_request((job.number, [samples[sample] for sample in job.samples]))
                worker.assign(job, request, self._timeout_s)
                self._watch_jobs(worker)
        watched = [worker for worker in self._workers if worker.job is not None or not worker.ready]
        nearest = min([end, *(worker.deadline for worker in watched)])
        for key, events in self._selector.select(max(0.0, nearest - running_s())):
            worker = key.data
            if self._workers[worker.number] is not worker:
                continue  # replaced while this round's events were handled
            if key.fileobj is worker.control:
                if worker.has_ended():
                    self._lost(worker, outcomes)
                continue
            if events & selectors.EVENT_WRITE:
                worker.write()
                if not worker.outbox:
                    self._watch_jobs(worker)
            if events & selectors.EVENT_READ:
                self._read(worker, outcomes)
        now = running_s()
        for worker in list(self._workers):
            if (worker.job is not None or not worker.ready) and now >= worker.deadline:
                self._expired(worker, outcomes)

    def _read(self, worker: WorkerProcess, outcomes: dict[int, Score | Failure]) -> None:
        try:
            replies = worker.read()
        except EOFError:  # its guardian reports how it ended
            self._selector.unregister(worker.jobs)
            return
        except BrokenReply as error:
            if not worker.ready:
                raise self._did_not_start(worker, f"it sent what is no reply: {error}") from error
            self._fail(worker, "crash", f"the reward worker sent what is no reply and was replaced: {error}", outcomes)
            self._replace(worker)
            return
        for reply in replies:
            self._replied(worker, reply, outcomes)

    def _replied(
        self, worker: WorkerProcess, reply: Ready | Refused | Verdicts, outcomes: dict[int, Score | Failure]
    ) -> None:
        match reply:
            case Refused(cause):
                if worker.ready:
                    return  # nobody asked
                raise DataError(cause)
            case Ready(pid):
                worker.ready, worker.pid = True, pid
            case Verdicts(number, verdicts, retire):
                job = worker.job
                if job is None or job.number != number or len(verdicts) != len(job.samples):
                    _log.debug("reward pool: dropped verdicts of job %d from worker %d", number, worker.number)
                    return
                outcomes.update(zip(job.samples, verdicts, strict=True))
                worker.job = None
                if retire:
                    self._replace(worker)

    def _give_up(
        self,
        num_samples: int,
        pending: deque[tuple[int, ...]],
        outcomes: dict[int, Score | Failure],
        *,
        limit_s: float | None,
    ) -> None:
        """Fail what has no verdict, so that a judge that hangs on every sample cannot hold up the tick for ever."""
        left = num_samples - len(outcomes)
        detail = (
            f"{left} of {num_samples} samples had no verdict after {limit_s:.1f} s, and were failed so that the tick keeps its "
            f"deadline (deadlines.step_s): raise task.pool.num_workers ({len(self._workers)}) or deadlines.step_s, or lower "
            f"task.pool.timeout_s ({self._timeout_s})"
        )
        _log.warning("reward pool: %s", detail)
        for worker in list(self._workers):
            if worker.job is not None:
                self._fail(worker, "timeout", detail, outcomes)
                self._replace(worker)
        outcomes.update((sample, Failure(kind="timeout", detail=detail)) for batch in pending for sample in batch)
        pending.clear()

    def _lost(self, worker: WorkerProcess, outcomes: dict[int, Score | Failure]) -> None:
        for reply in worker.read_rest():
            self._replied(worker, reply, outcomes)
            if self._workers[worker.number] is not worker:
                return  # it had asked to be replaced
        if not worker.ready:
            raise self._did_not_start(worker, worker.stop())
        self._fail(worker, "crash", f"the reward worker {worker.stop()}", outcomes)
        self._replace(worker)

    def _did_not_start(self, worker: WorkerProcess, cause: str) -> ExecutorFailed:
        self._forget(worker)
        return ExecutorFailed(f"reward worker {worker.number} did not start{self._suspect}: {cause}")

    def _expired(self, worker: WorkerProcess, outcomes: dict[int, Score | Failure]) -> None:
        waited = running_s() - worker.started
        if not worker.ready:
            self._forget(worker)
            raise DeadlineExceeded(
                f"the reward pool waited {waited:.1f} s for worker {worker.number} to start{self._suspect}, limit "
                f"task.pool.startup_timeout_s={self._startup_timeout_s}: {worker.stop()}"
            )
        detail = f"judging took longer than timeout_s={self._timeout_s} s; its worker was replaced"
        self._fail(worker, "timeout", detail, outcomes)
        self._replace(worker)

    def _fail(
        self, worker: WorkerProcess, kind: FailureKind, detail: str, outcomes: dict[int, Score | Failure]
    ) -> None:
        """Fail what the worker was judging, if anything."""
        if worker.job is not None:
            outcomes.update((sample, Failure(kind=kind, detail=detail)) for sample in worker.job.samples)
            worker.job = None
