"""The error tree: what a caller of llamarl may catch.

A mistake of the caller's own code is a ``ValueError``; a broken invariant of ours is an ``AssertionError``. Everything
else that can end or degrade a job is a ``LlamaRLError``, and its message says what, where, got, expected, what to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

__all__ = [
    "ChannelError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeadlineExceeded",
    "EventLogError",
    "ExecutorFailed",
    "FileError",
    "GraphError",
    "LlamaRLError",
    "Mistake",
    "ModelError",
    "NothingTrained",
    "PlanError",
    "RecipeError",
    "RunFolderLost",
    "TOLD",
    "RunInterrupted",
    "RunStopped",
    "SourceGone",
    "StaleTokenError",
    "TrainingDiverged",
    "TransferError",
    "WeightSyncError",
]


class LlamaRLError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is what the command line returns for it."""

    exit_code = 1


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One thing that is wrong with a recipe, or with the command line. ``str`` of it is its line for the user."""

    key: str
    """At fault, dotted; in a check of one section relative to that section. Empty where no key is."""

    text: str
    """What follows the key in the line: "must be >= 1, got 0", or ": no folder models/x"."""

    others: tuple[str, ...] = ()
    """Keys besides ``key`` whose values it looked at: if one of them is wrong itself, this mistake may be none."""

    def __str__(self) -> str:
        return f"{self.key}{' ' * (bool(self.key) and self.text[:1] not in ':[')}{self.text}"


class RecipeError(LlamaRLError):
    """Something that a recipe asks for is wrong or not there.

    Args:
        mistakes: The same as data; without them, one that no key is known of.
    """

    exit_code = 2

    def __init__(self, message: str, *, mistakes: Sequence[Mistake] = ()) -> None:
        super().__init__(message)
        self.mistakes = tuple(mistakes) or (Mistake("", message),)

    @classmethod
    def at(cls, key: str, text: str, *others: str) -> Self:
        """An error that is one mistake; the arguments are those of ``Mistake``."""
        mistake = Mistake(key, text, others)
        return cls(str(mistake), mistakes=(mistake,))


class ConfigError(RecipeError):
    """The recipe or an override is wrong. The message lists every mistake at once."""

    @classmethod
    def for_now(cls, message: str) -> Self:
        """What refuses may pass by itself, as nodes that are gone or others hold: status 1, so that loops try again."""
        error = cls(message)
        error.exit_code = LlamaRLError.exit_code
        return error


class DataError(RecipeError):
    """A data file, prompt or task is missing, empty or malformed."""


class ModelError(RecipeError):
    """A model folder is missing, incomplete or of an architecture that is not supported."""


class FileError(LlamaRLError, ValueError):
    """A file cannot be read, or is not of the form that its kind has. The message begins with its name.

    Args:
        missing: There is no such file.
    """

    exit_code = 2

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class GraphError(LlamaRLError):
    """The dataflow graph would deadlock, grow without bound or leave an executor unconnected."""

    exit_code = 2


class PlanError(LlamaRLError):
    """No layout fits, or the question to the planner makes no sense."""

    exit_code = 2


class ChannelError(LlamaRLError):
    """A payload could not be sent or received whole."""


class SourceGone(ChannelError):
    """The process whose memory was to be read has ended, or its host."""


class WeightSyncError(ChannelError):
    """A weight version could not be proved by its checksums, or its source died."""


class CheckpointError(LlamaRLError):
    """A checkpoint is torn, altered or could not be written. The message names it and the last good one.

    Args:
        cause: What is wrong, without what to do; the message where it is not given.
        mistake: An executor's ``save`` does not do as it must: the next one would fail too.
    """

    def __init__(self, message: str, *, cause: str = "", mistake: bool = False) -> None:
        super().__init__(message)
        self.cause = cause or message
        self.mistake = mistake


class TransferError(LlamaRLError):
    """A file did not come whole from one host to another: refused, altered, no room, or the connection is gone.

    Args:
        missing: There is no such file.
    """

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class RunFolderLost(LlamaRLError):
    """The run's folder was moved, removed or started over while the run wrote into it. The message
    says what is left where."""


class EventLogError(LlamaRLError):
    """A run cannot be repeated: its event log is missing, torn or too short, or the replay came to something else."""


class ExecutorFailed(LlamaRLError):
    """An executor raised, or its process died. The message carries the executor, rank, tick and cause."""


class DeadlineExceeded(LlamaRLError):
    """A wait ran out. The message says who waited for whom, for what, since when, and the limit."""

    exit_code = 3


class StaleTokenError(LlamaRLError):
    """A token is older than the schedule allows, or of a policy version that does not exist.
    Nothing was trained on it."""


class RunStopped(LlamaRLError):
    """An executor asked for the run to end, and it ended with a checkpoint: training diverged, or rewards fail."""

    exit_code = 4


class NothingTrained(RunStopped):
    """The run reached its last tick, and no token of it ever trained, or no update was finite."""


class TrainingDiverged(RunStopped):
    """Too many steps in a row had a non-finite loss or gradient."""


TOLD = "the user was told"
"""Among the arguments of a KeyboardInterrupt whose run has said that it was stopped, and what is saved."""


class RunInterrupted(LlamaRLError):
    """The user asked the run to stop (Ctrl-C or SIGTERM)."""

    exit_code = 130
