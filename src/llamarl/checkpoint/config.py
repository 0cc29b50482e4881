"""When a run is checkpointed and how many checkpoints it keeps."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.dataclasses import dataclass

from llamarl.strict import STRICT, refuse

__all__ = ["CheckpointConfig"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Checkpoints of the whole job, in ``RUN/checkpoints``."""

    every: int = 0
    """Trainer ticks from one checkpoint to the next. 0 takes none before the end. A killed run repeats at most this many, and
    those that passed while the last one was still being written."""

    keep: int = 3
    """Newest checkpoints kept; older ones are removed once a newer one is proved. 0 keeps all."""

    at_end: bool = True
    """Also take one after the last tick, so that the run can be prolonged."""

    background: bool = True
    """Write the trainer's state beside the training: its tick waits only for a copy in host memory (12 bytes a parameter,
    and 4 for each version on the weights edge), and a checkpoint counts once all of it is written and proved. False waits."""

    reshard: bool = False
    """Let a run go on with another ``trainer.fsdp``, ``tp`` or ``threads`` than its checkpoint: to rounding, no longer bit
    for bit."""

    other_platform: bool = False
    """Let a run go on where library versions or the kind of processor differ from its checkpoint's: to rounding, no longer
    bit for bit."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if self.every < 0:
            yield f"checkpoint.every must be >= 0 ticks (0 = only at the end), got {self.every}"
        if self.keep < 0:
            yield f"checkpoint.keep must be >= 0 checkpoints (0 = all), got {self.keep}"

    def is_due(self, tick: int, num_ticks: int) -> bool:
        """Whether the state after ``tick`` (from 0) is saved in a run of ``num_ticks`` ticks.

        With ``every = 10`` that is after ticks 9, 19, 29 ..: after 10, 20, 30 updates of the policy.
        """
        if tick == num_ticks - 1 and self.at_end:
            return True
        return self.every > 0 and (tick + 1) % self.every == 0
