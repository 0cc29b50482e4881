"""Every executor in the controller's own process, one rank each, no concurrency: for debuggers, tests and machines
where processes cannot be started.

``fire`` queues an order and ``wait`` runs the oldest one to its end, so the order of execution is a
function of the order of firing. Two limits follow from sharing one process:

- **A deadline cannot pre-empt.** The step runs to its end first; if it took longer than the deadline, ``wait`` then raises
  ``DeadlineExceeded``. A step that hangs hangs the program: run it under ``local`` to have it ended.
- **Environment variables come too late** if torch is loaded already; the thread count is pinned by calls before each order
  instead. The settings found at ``start`` are put back by ``close``.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from llamarl.determinism import LOOPBACK
from llamarl.errors import ConfigError, DeadlineExceeded
from llamarl.running_time import running_s
from llamarl.runtime.base import JobStart, News, Order, Report, SetupReport
from llamarl.runtime.rank_plans import combine_reports, combine_setups, executor_failed, plan_workers
from llamarl.runtime.worker import CHANNEL_FACTORY, Worker, capture

__all__ = ["InlineRuntime"]

_T = TypeVar("_T")


class InlineRuntime:
    """The Protocol of ``runtime/base.py`` without processes."""

    def __init__(self, *, channel_factory: str = CHANNEL_FACTORY) -> None:
        self._channel_factory = channel_factory
        self._workers: dict[str, Worker] = {}
        self._orders: deque[Order] = deque()
        self._restore: Callable[[], None] = lambda: None

    def start(self, job: JobStart) -> Mapping[str, SetupReport]:
        """Bring the executors up one after another, in the order given."""
        assert not self._workers, "start is called once"
        for spec in job.executors:
            if spec.num_ranks != 1:
                raise ConfigError(
                    f"runtime 'inline' holds one rank an executor, {spec.name!r} asks for {spec.num_ranks}: "
                    "use runtime 'local' or one rank"
                )
        plans = plan_workers(job, collective_timeout_s=job.deadline_s, channel_factory=self._channel_factory)
        self._restore = _process_settings()
        os.environ |= LOOPBACK
        began = self.now()
        reports = {}
        for name, (plan,) in plans.items():
            worker = self._workers[name] = Worker(plan)
            reports[name] = combine_setups(name, [self._guard(name, "setup", worker.setup)])
            if self.now() - began > job.deadline_s:
                raise DeadlineExceeded(
                    f"controller waited {self.now() - began:.1f} s for setup, limit {job.deadline_s:g} s; the last was {name!r} "
                    "(runtime 'inline' cannot stop a step midway)"
                )
        return reports

    def counted(self) -> Sequence[Report]:
        """Nothing: no journal is kept."""
        return ()

    def fire(self, order: Order) -> None:
        """Queue ``order``; ``wait`` runs it."""
        assert order.executor in self._workers, order.executor
        self._orders.append(order)

    def tell(self, news: News) -> None:
        """Reaches an order that is still queued: none is ever under way here."""
        self._workers[news.executor].tell(news)

    def wait(self, limit_s: float) -> Report:
        """Run the oldest order."""
        assert self._orders, "wait without an order out: it could never end"
        order = self._orders.popleft()
        worker = self._workers[order.executor]
        worker.pin()  # the executor before may have another thread count
        began = self.now()
        report = self._guard(order.executor, f"tick {order.tick}", lambda: worker.run(order))
        took = self.now() - began
        if took > limit_s:
            raise DeadlineExceeded(
                f"controller waited {took:.1f} s for {order.executor!r} to finish tick {order.tick}, "
                f"limit {limit_s:g} s (runtime 'inline' cannot stop a step midway; it has ended since)"
            )
        return combine_reports(order.executor, [report], controller_bytes=0)

    def now(self) -> float:
        """``running_s``: deadlines do not count the time for which this process was stopped."""
        return running_s()

    def close(self) -> None:
        """Close the executors in reverse order."""
        workers, self._workers = self._workers, {}
        self._orders.clear()
        for worker in reversed(workers.values()):
            for trouble in worker.close():
                print(trouble, file=sys.stderr)
        self._restore()
        self._restore = lambda: None

    def _guard(self, executor: str, doing: str, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except Exception as error:
            raise executor_failed([capture(executor, 0, doing, error)]) from error


def _process_settings() -> Callable[[], None]:
    """A function that puts the environment of process groups and the settings of torch back as they are now."""
    found = {name: os.environ.get(name) for name in LOOPBACK}
    restore_torch = _torch_settings()

    def restore() -> None:
        for name, value in found.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        restore_torch()

    return restore


def _torch_settings() -> Callable[[], None]:
    torch = sys.modules.get("torch")
    if torch is None:
        return lambda: None
    threads = torch.get_num_threads()
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory

    def restore() -> None:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill

    return restore
