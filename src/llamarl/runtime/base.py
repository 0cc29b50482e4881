"""The Protocol behind which every runtime stands: start executors, fire them, wait for whoever finishes next.

``local`` runs executors in processes of their own, ``inline`` in the controller's process, and the
simulator on a virtual clock. The controller's loop is the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from llamarl.channels.base import ChannelSpec, Handle
from llamarl.checkpoint.snapshot import FileRecord
from llamarl.errors import DeadlineExceeded, ExecutorFailed
from llamarl.executors.base import ExecutorSpec

__all__ = [
    "Death", "JobStart", "News", "Order", "Overdue", "ProcessesDied", "Report", "Runtime", "SetupReport",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Order:
    """Fire executor ``executor`` for ``tick``."""

    executor: str
    tick: int
    inputs: Mapping[str, tuple[Handle, ...]] = field(default_factory=dict)
    """In-channel name -> one handle a source rank."""
    later: Mapping[str, Mapping[int, tuple[Handle, ...]]] = field(default_factory=dict)
    """``latest`` in-channel name -> source tick -> handles, for the tokens on the edge that follow the one in ``inputs``."""
    save_to: Path | None = None
    """If set, each rank saves its state after this tick into ``save_to / executor / rank_N``."""
    saves: tuple[int, ...] = ()
    """Ticks from this one on whose states are saved while what this one makes may still lie on a delayed edge."""
    flush_saves: bool = False
    """The last tick: wait for background checkpoint writes before reporting, because no later
    report will tell of them."""


@dataclass(frozen=True, kw_only=True)
class News:
    """A token has come onto ``channel`` while its sink works, which may take it at once (a
    ``latest`` channel) or have it come."""

    executor: str
    """The sink."""
    channel: str
    source_tick: int
    handles: tuple[Handle, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Executor ``executor`` has finished ``tick`` on all its ranks."""

    executor: str
    tick: int
    outputs: Mapping[str, tuple[Handle, ...]] = field(default_factory=dict)
    """Out-channel name -> one handle a source rank."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of all ranks, each key reduced as docs/metric_keys.md says."""
    started_s: float = 0.0
    """When the first rank began, on the runtime's clock."""
    finished_s: float = 0.0
    spans: tuple[tuple[str, float, float], ...] = ()
    stop: str = ""
    """Why the executor asks for the job to end with a checkpoint; empty to go on."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Of all ranks; see ``StepResult.failures``."""
    events: tuple[Mapping[str, Any], ...] = ()
    """Of all ranks, in rank order; see ``StepResult.events``."""
    saving: tuple[int, ...] = ()
    """Ticks whose saved state is still being written; that of every other tick up to this one is written."""
    saved: Mapping[int, Mapping[int, tuple[FileRecord, ...]]] = field(default_factory=dict)
    """Ticks whose saved state is written since the last report -> rank -> its files of it, relative to the checkpoint."""
    unsaved: Mapping[int, str] = field(default_factory=dict)
    """Ticks whose state a rank could not write, as was found since the last report -> which rank, and why."""
    files: Mapping[int, tuple[FileRecord, ...]] = field(default_factory=dict)
    """Rank -> what it wrote elsewhere in the run's folder; ranks that wrote nothing are left out."""
    journal: tuple[Handle, ...] = ()
    """One a rank: where the state after this tick lies; None where a rank keeps none."""
    at_start: bool = False
    """Nothing was done: these are tokens that lay on delayed edges where the executor's present
    processes began, made again."""
    incarnation: int = 0
    """Of the executor's processes that did it."""
    controller_bytes: int = 0
    """Bytes of order and report as they passed through the controller (0 where nothing is serialized)."""


@dataclass(frozen=True, kw_only=True)
class SetupReport:
    """An executor stands ready."""

    executor: str
    initial_tokens: Mapping[str, Mapping[int, tuple[Handle, ...]]] = field(default_factory=dict)
    """Out-channel name -> source tick -> handles, for the ``delay`` tokens that lie on the edge at start."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """A process of an executor has ended by itself. An exception in an executor is none: it would come again."""

    executor: str
    incarnation: int
    """Of the executor: how often it had been brought up anew before."""
    doing: str
    """What the process was at: ``setup``, ``tick 3``, ``between two ticks``."""
    cause: str
    """In words: the signal, or the exit code."""
    rank: int = 0
    from_outside: bool = False
    """By a signal that processes do not send to themselves (SIGKILL, SIGTERM), or stopped by one (SIGSTOP)."""


class ProcessesDied(ExecutorFailed):
    """Processes ended by themselves, and no executor raised. Ends the run unless somebody brings them up again."""

    def __init__(self, message: str, deaths: tuple[Death, ...], readers: tuple[str, ...] = ()) -> None:
        """
        Args:
            readers: Executors that raised because they were reading memory that went.
        """
        super().__init__(message)
        self.deaths = deaths
        self.readers = readers


class Overdue(DeadlineExceeded):
    """An executor has not answered to an order in time."""

    def __init__(self, message: str, death: Death) -> None:
        """
        Args:
            death: What to say of it, where it is ended and brought up again.
        """
        super().__init__(message)
        self.death = death


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """What a runtime brings up."""

    executors: Sequence[ExecutorSpec]
    channels: Sequence[ChannelSpec]
    run_dir: Path | None = None
    seed: int = 0
    first_tick: int = 0
    load_from: Path | None = None
    """Each rank loads ``load_from / executor / rank_N``."""
    deadline_s: float
    """For all executors to stand ready."""


class Runtime(Protocol):
    """Starts executors and carries orders to them and reports back. Every wait has a deadline."""

    def start(self, job: JobStart) -> Mapping[str, SetupReport]:
        """Bring all executors up, in parallel.

        Raises:
            ExecutorFailed: One raised or died; the message carries its cause, once.
            DeadlineExceeded: One was not ready in time; the message names which.
        """
        ...

    def counted(self) -> Sequence[Report]:
        """After ``start``: what had counted since ``load_from`` when an earlier controller died, in
        order; the job goes on after it."""
        ...

    def fire(self, order: Order) -> None:
        """Send an order; returns at once (``inline`` may run it when ``wait`` is called)."""
        ...

    def tell(self, news: News) -> None:
        """Let a busy executor know; returns at once. Asked for ``latest`` channels, and for weights
        that travel between hosts. One that has just finished ignores it."""
        ...

    def wait(self, limit_s: float) -> Report:
        """The next report of any executor.

        Raises:
            ExecutorFailed: An executor raised, or a process of it died.
            DeadlineExceeded: An order has been out for ``limit_s``; the message names it, and where its executor is.
        """
        ...

    def now(self) -> float:
        """Seconds on the clock of this runtime (that of deadlines, or virtual); only differences mean something."""
        ...

    def close(self) -> None:
        """Close every executor and leave no process behind, within a bounded time. Safe after a failure; idempotent."""
        ...
