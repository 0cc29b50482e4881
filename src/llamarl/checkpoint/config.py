"""When a run is checkpointed and how many checkpoints it keeps."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from llamarl.strict import STRICT

__all__ = ["CheckpointConfig"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Checkpoints of the whole job, in ``RUN/checkpoints``."""

    every: int = 0
    """Trainer ticks from one checkpoint to the next. 0 takes none before the end. A killed run repeats at most this many."""

    keep: int = 3
    """Newest checkpoints kept; older ones are removed once a newer one is proved. 0 keeps all."""

    at_end: bool = True
    """Also take one after the last tick, so that the run can be prolonged."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"checkpoint.every must be >= 0 ticks (0 = only at the end), got {self.every}")
        if self.keep < 0:
            raise ValueError(f"checkpoint.keep must be >= 0 checkpoints (0 = all), got {self.keep}")

    def is_due(self, tick: int, num_ticks: int) -> bool:
        """Whether the state after ``tick`` (from 0) is saved in a run of ``num_ticks`` ticks.

        With ``every = 10`` that is after ticks 9, 19, 29 ..: after 10, 20, 30 updates of the policy.
        """
        if tick == num_ticks - 1 and self.at_end:
            return True
        return self.every > 0 and (tick + 1) % self.every == 0
