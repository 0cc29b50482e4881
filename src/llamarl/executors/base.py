"""What an executor is: one role of a job, on its own ranks, with its own devices, parallelism and precision.

The controller never sees payloads. Around every executor stands the same thin shell (``runtime/worker.py``):

    order (tick, handles) ─▶ shell pulls the inputs ─▶ executor.step ─▶ shell publishes the outputs ─▶ report (handles)

so a test can drive one executor alone, with plain values and no channel, process or controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Executor", "ExecutorContext", "ExecutorSpec", "StepResult"]


@dataclass(frozen=True, kw_only=True)
class ExecutorSpec:
    """How to make one executor. Picklable: it travels to the processes that will hold it."""

    name: str
    factory: str
    """Import path ``package.module:callable``; called as ``factory(config, context)`` in each of its processes."""
    config: Any = None
    """Whatever the factory takes; picklable."""
    num_ranks: int = 1
    threads: int = 1
    """CPU threads of each rank. Bits depend on it, so a run pins it."""
    device: str = "cpu"
    """``cpu``, ``cuda:N``, a comma-separated list with one a rank (``cuda:2,cuda:3``), or ``cuda``: placement chooses."""
    process_group: str = ""
    """Backend of ``torch.distributed`` that each rank has joined before the factory is called: ``gloo``, ``nccl``,
    ``cpu:gloo,cuda:nccl``; empty for none. In processes of their own, RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in any case."""


@dataclass(frozen=True, kw_only=True)
class ExecutorContext:
    """Where an executor finds itself."""

    name: str
    rank: int
    num_ranks: int
    device: str
    run_dir: Path | None
    seed: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one firing made."""

    outputs: Mapping[str, Any] = field(default_factory=dict)
    """One payload a channel that leaves this executor, by channel name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metric key -> value; see docs/metrics.md. Rank 0's are kept."""
    spans: tuple[tuple[str, float, float], ...] = ()
    """(label, start, end) on ``time.monotonic``, for the trace: what the step spent its time on."""
    stop: str = ""
    """Why the job should end soon, with a checkpoint; empty to go on. Rank 0's is kept."""


class Executor(Protocol):
    """One role of a job.

    Life: ``factory`` -> ``setup`` (or ``setup`` then ``load``) -> ``initial_token`` for each delayed out-edge ->
    ``step`` once a tick -> ``save`` after a tick, when asked -> ``close`` once, also after a failure.
    All methods of one rank run on one thread. Executors never call each other.
    """

    name: str

    def setup(self) -> None:
        """Build models and pools. May take long; has a deadline of its own."""
        ...

    def initial_token(self, channel: str, source_tick: int) -> Any:
        """Payload that stands for the token made at ``source_tick`` on a delayed channel.

        Asked at start for the ticks ``first_tick - delay .. first_tick - 1``; negative ticks exist before the run began
        (weights: version 0). After ``load`` the earlier ticks are real, and the payload must be the one made then.
        """
        ...

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        """Fire once. Consumes one payload of every in-channel, makes one for every out-channel."""
        ...

    def save(self, folder: Path, tick: int) -> Future[None] | None:
        """Write the state after ``tick`` into an existing, empty folder of this rank's own.

        Returns:
            None when it is written, or a future if it is being written beside the ticks that follow.
        """
        ...

    def load(self, folder: Path, tick: int) -> None:
        """Restore what ``save`` wrote, so that tick + 1 gives the same bits as if never interrupted."""
        ...

    def close(self) -> None:
        """Release processes, files and memory. Called more than once at worst."""
        ...
