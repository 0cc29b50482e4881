"""The error tree: what a caller of llamarl may catch.

A mistake of the caller's own code is a ``ValueError``; a broken invariant of ours is an ``AssertionError``. Everything
else that can end or degrade a job is a ``LlamaRLError``, and its message says what, where, got, expected, what to do.
"""

from __future__ import annotations

__all__ = [
    "ChannelError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeadlineExceeded",
    "EventLogError",
    "ExecutorFailed",
    "GraphError",
    "LlamaRLError",
    "ModelError",
    "PlanError",
    "RunInterrupted",
    "TrainingDiverged",
    "WeightSyncError",
]


class LlamaRLError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is what the command line returns for it."""

    exit_code = 1


class ConfigError(LlamaRLError):
    """The recipe or an override is wrong. The message lists every mistake at once."""

    exit_code = 2


class DataError(LlamaRLError):
    """A data file, prompt or task is missing, empty or malformed."""

    exit_code = 2


class ModelError(LlamaRLError):
    """A model folder is missing, incomplete or of an architecture that is not supported."""

    exit_code = 2


class GraphError(LlamaRLError):
    """The dataflow graph would deadlock, grow without bound or leave an executor unconnected."""

    exit_code = 2


class PlanError(LlamaRLError):
    """No layout fits, or the question to the planner makes no sense."""

    exit_code = 2


class ChannelError(LlamaRLError):
    """A payload could not be sent or received whole."""


class WeightSyncError(LlamaRLError):
    """A weight version could not be proved by its checksums, or its source died."""


class CheckpointError(LlamaRLError):
    """A checkpoint is torn, altered or could not be written. The message names it and the last good one."""


class EventLogError(LlamaRLError):
    """A run cannot be repeated: its event log is missing, torn or too short, or the replay came to something else."""


class ExecutorFailed(LlamaRLError):
    """An executor raised, or its process died. The message carries the executor, rank, tick and cause."""


class DeadlineExceeded(LlamaRLError):
    """A wait ran out. The message says who waited for whom, for what, since when, and the limit."""

    exit_code = 3


class TrainingDiverged(LlamaRLError):
    """Too many steps in a row had a non-finite gradient."""

    exit_code = 4


class RunInterrupted(LlamaRLError):
    """The user asked the run to stop (Ctrl-C or SIGTERM)."""

    exit_code = 130
