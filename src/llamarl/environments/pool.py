"""The reward pool: worker processes that judge samples, each under a time limit, and none of them trusted.

    score(groups) ── one sample at a time ──▶ worker 0 ─┐
                 └─────────────────────────▶ worker 1 ─┴─▶ groups with an outcome on every response, in order

What can go wrong with user code, and what comes of it: an exception, a NaN or a non-number fails the sample; a sample over
its time has its worker killed and replaced; a worker that dies is replaced and its sample failed. A failed sample is a
typed ``Failure``, never a zero. A verdict depends on the sample alone, not on the worker or the moment that judged it.

Workers are started by exec, not by fork, so a pool may live in a process with threads, CUDA or actors; each is the leader
of its own process group, gets no Ctrl-C from the terminal, and dies with the parent (see ``worker``).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from llamarl.environments.config import TaskConfig
from llamarl.environments.worker import pack_message
from llamarl.errors import DataError, DeadlineExceeded, ExecutorFailed
from llamarl.running_time import running_s
from llamarl.types import Failure, Group, Prompt, Score

__all__ = ["RewardPool"]

_log = logging.getLogger(__name__)
_HEADER_BYTES = 8
_DETAIL_LINES = 8
_EXIT_WAIT_S = 10.0


class _Worker:
    """One process and the parent's ends of its pipes, never blocking."""

    def __init__(self, number: int, hello: bytes, startup_timeout_s: float) -> None:
        self.number = number
        self.ready = False
        self.exiting = False
        """The worker's end of the reply pipe is closed: it ends by itself."""
        self.job: int | None = None
        self._end: str | None = None
        self.outbox = memoryview(hello)
        self.inbox = bytearray()
        self.started = running_s()
        self.deadline = self.started + startup_timeout_s
        self._errors = tempfile.TemporaryFile()
        # Appending, so that truncating the file between samples also moves the worker's place in it.
        fcntl.fcntl(self._errors, fcntl.F_SETFL, fcntl.fcntl(self._errors, fcntl.F_GETFL) | os.O_APPEND)
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONHASHSEED": "0",
            "MPLBACKEND": "Agg",
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
        }
        # One pipe a worker: whom the kernel signals is a property of the pipe's open end, not of a process.
        lifeline, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "llamarl.environments.worker", str(lifeline)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=env,
                pass_fds=[lifeline],
                start_new_session=True,
                bufsize=0,
            )
        finally:
            os.close(lifeline)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdin.fileno(), False)
        os.set_blocking(self.stdout.fileno(), False)

    def assign(self, job: int, request: bytes, timeout_s: float) -> None:
        os.ftruncate(self._errors.fileno(), 0)
        self.job = job
        self.outbox = memoryview(request)
        self.started = running_s()
        self.deadline = self.started + timeout_s

    def write(self) -> None:
        """Send what the pipe takes. A broken pipe is left to ``read``, which sees the end of the worker."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self.outbox = self.outbox[os.write(self.stdin.fileno(), self.outbox) :]
            return
        if self.process.poll() is not None:
            self.outbox = memoryview(b"")

    def read(self) -> Any | None:
        """A whole reply, or None if there is none yet.

        Raises:
            EOFError: The worker closed its end.
        """
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EOFError
            self.inbox += chunk
        if len(self.inbox) < _HEADER_BYTES:
            return None
        end = _HEADER_BYTES + int.from_bytes(self.inbox[:_HEADER_BYTES], "little")
        if len(self.inbox) < end:
            return None
        reply = pickle.loads(self.inbox[_HEADER_BYTES:end])
        del self.inbox[:end]
        return reply

    def kill(self) -> str:
        """End the process and its children; return how it ended and what it last wrote to standard error. Safe twice."""
        if self._end is not None:
            return self._end
        if self.exiting:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_EXIT_WAIT_S)
        ended = self.process.poll()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_EXIT_WAIT_S)
        self._errors.seek(0)
        lines = self._errors.read(1 << 16).decode(errors="replace").strip().splitlines()
        for file in (self.stdin, self.stdout, self._errors):
            with contextlib.suppress(OSError):
                file.close()
        os.close(self._lifeline)
        if ended is None:
            cause = "killed"
        elif ended < 0:
            cause = f"ended by signal {-ended} ({signal.strsignal(-ended)})"
        else:
            cause = f"exited with status {ended}"
        self._end = "\n".join([cause, *lines[-_DETAIL_LINES:]])
        return self._end


class RewardPool:
    """Judges groups of responses in worker processes.

    The constructor returns when every worker has made the task, so a wrong task fails here and not in the middle of a run.

    Args:
        task_config: Task and pool settings.
        num_workers: Overrides ``task_config.pool.num_workers``.
        timeout_s: Overrides ``task_config.pool.timeout_s``.
        seed: The run's seed; workers make the same task from it as the prompt stream does.

    Raises:
        DataError: The task cannot be made; carries the worker's cause.
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
        pool = task_config.pool
        self._timeout_s = pool.timeout_s if timeout_s is None else timeout_s
        self._startup_timeout_s = pool.startup_timeout_s
        self._hello = pack_message((task_config, seed))
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._suspect = f" (it imports task.reward {task_config.reward!r})" if task_config.reward else ""
        self._closed = False
        self.num_replaced = 0
        """Workers killed or lost, and replaced, since the start."""
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
        """Process ids, for supervision and tests."""
        return [worker.process.pid for worker in self._workers]

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
        jobs: list[tuple[Prompt, tuple[str, ...]]] = []
        outcomes: dict[int, Score | Failure] = {}
        places: list[list[int | None]] = []
        for group in groups:
            row: list[int | None] = []
            for response in group.responses:
                if response.outcome is not None:
                    row.append(None)
                    continue
                row.append(len(jobs))
                if response.finish_reason in ("error", "cancelled"):
                    detail = f"generation ended with finish_reason {response.finish_reason!r}"
                    outcomes[len(jobs)] = Failure(kind="generation", detail=detail)
                jobs.append((group.prompt, (response.text,)))
            places.append(row)
        pending = deque(number for number in range(len(jobs)) if number not in outcomes)
        started = running_s()
        end = math.inf if limit_s is None else started + limit_s
        for worker in self._workers:
            if not worker.ready:  # replaced at the end of the last call; nobody has looked at it since
                worker.deadline = started + self._startup_timeout_s
        while len(outcomes) < len(jobs):
            if running_s() >= end:
                self._give_up(len(jobs), pending, outcomes, limit_s=limit_s)
                break
            self._wait(jobs, pending, outcomes, end)
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
            worker.kill()
        self._workers.clear()
        self._selector.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, number: int) -> _Worker:
        worker = _Worker(number, self._hello, self._startup_timeout_s)
        worker.write()  # at once, so that it starts while nobody waits for it
        self._selector.register(worker.stdout, selectors.EVENT_READ, worker)
        if worker.outbox:
            self._selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
        return worker

    def _forget(self, worker: _Worker) -> None:
        for pipe in (worker.stdin, worker.stdout):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(pipe)

    def _replace(self, worker: _Worker) -> str:
        self._forget(worker)
        detail = worker.kill()
        self.num_replaced += 1
        self._workers[worker.number] = self._start(worker.number)
        return detail

    def _wait(
        self,
        jobs: Sequence[tuple[Prompt, tuple[str, ...]]],
        pending: deque[int],
        outcomes: dict[int, Score | Failure],
        end: float = math.inf,
    ) -> None:
        """Hand samples to idle workers, then wait for the first event or deadline (``end`` at the latest) and act on it."""
        for worker in list(self._workers):
            if worker.ready and worker.job is None and pending:
                if worker.process.poll() is not None:  # it died idle: no sample's fault
                    self._replace(worker)
                    continue
                number = pending.popleft()
                worker.assign(number, pack_message(jobs[number]), self._timeout_s)
                self._selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
        watched = [worker for worker in self._workers if worker.job is not None or not worker.ready]
        nearest = min(end, *(worker.deadline for worker in watched))
        for key, _ in self._selector.select(max(0.0, nearest - running_s())):
            worker = key.data
            if self._workers[worker.number] is not worker:
                continue  # replaced while this round's events were handled
            if key.fileobj is worker.stdin:
                worker.write()
                if not worker.outbox:
                    self._selector.unregister(worker.stdin)
                continue
            try:
                reply = worker.read()
            except EOFError:
                worker.exiting = True
                self._lost(worker, outcomes)
                continue
            if reply is not None:
                self._replied(worker, reply, outcomes)
        now = running_s()
        for worker in list(self._workers):
            if (worker.job is not None or not worker.ready) and now >= worker.deadline:
                self._expired(worker, outcomes)

    def _give_up(
        self, num_jobs: int, pending: deque[int], outcomes: dict[int, Score | Failure], *, limit_s: float | None
    ) -> None:
        """Fail what has no verdict, so that a judge that hangs on every sample cannot hold up the tick for ever."""
        left = num_jobs - len(outcomes)
        detail = (
            f"{left} of {num_jobs} samples had no verdict after {limit_s:.1f} s, and were failed so that the tick keeps its "
            f"deadline (deadlines.step_s): raise task.pool.num_workers ({len(self._workers)}) or deadlines.step_s, or lower "
            f"task.pool.timeout_s ({self._timeout_s})"
        )
        _log.warning("reward pool: %s", detail)
        for worker in list(self._workers):
            if worker.job is not None:
                outcomes[worker.job] = Failure(kind="timeout", detail=detail)
                self._replace(worker)
        outcomes.update((number, Failure(kind="timeout", detail=detail)) for number in pending)
        pending.clear()

    def _replied(self, worker: _Worker, reply: tuple[str, Any], outcomes: dict[int, Score | Failure]) -> None:
        kind, value = reply
        if kind == "ready":
            worker.ready = True
        elif kind == "refused":
            raise DataError(value)
        else:
            assert worker.job is not None
            outcomes[worker.job] = value if kind == "score" else Failure(kind=kind, detail=value)  # type: ignore[arg-type]
            worker.job = None

    def _lost(self, worker: _Worker, outcomes: dict[int, Score | Failure]) -> None:
        if not worker.ready:
            self._forget(worker)
            raise ExecutorFailed(f"reward worker {worker.number} did not start{self._suspect}: {worker.kill()}")
        job = worker.job
        detail = self._replace(worker)
        if job is not None:
            outcomes[job] = Failure(kind="crash", detail=f"the reward worker {detail}")

    def _expired(self, worker: _Worker, outcomes: dict[int, Score | Failure]) -> None:
        waited = running_s() - worker.started
        if not worker.ready:
            self._forget(worker)
            raise DeadlineExceeded(
                f"the reward pool waited {waited:.1f} s for worker {worker.number} to start{self._suspect}, limit "
                f"task.pool.startup_timeout_s={self._startup_timeout_s}: {worker.kill()}"
            )
        job = worker.job
        assert job is not None
        self._replace(worker)
        outcomes[job] = Failure(
            kind="timeout", detail=f"judging took longer than timeout_s={self._timeout_s} s; its worker was replaced"
        )
