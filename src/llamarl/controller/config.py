"""The job's schedule and its deadlines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from llamarl.errors import Mistake
from llamarl.import_path import why_no_name
from llamarl.strict import NO_BITS, STRICT, refuse

__all__ = ["DeadlineConfig", "RecoveryConfig", "ScheduleConfig"]


def _transport(name: str) -> str:
    if why := why_no_name(name, ("auto", "shared_memory", "cuda_ipc", "tcp"), "my_transport.py:Name"):
        raise ValueError(why)
    return name


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScheduleConfig:
    prompts_per_step: PositiveInt = 16
    """Prompt groups consumed by one trainer tick, over all data-parallel ranks."""

    max_staleness: NonNegativeInt = 1
    """Delay of the weights edge less one, in trainer ticks; 0 runs synchronously, 1 is LlamaRL's schedule."""

    weights: Literal["exact", "latest"] = "exact"
    """Which version makes batch k. "exact": always version max(0, k - max_staleness), so a run
    repeats bit for bit. "latest": the newest there is, swapped in between decode steps; no trained
    token is older than max_staleness. Such a run depends on timing; its decisions go to
    events.jsonl, from which ``llamarl train --replay RUN_DIR`` repeats it."""

    colocated: Annotated[bool, NO_BITS] = False
    """Generator and trainer share their devices and take turns: the one that waits gives its memory
    back (the generator its weights and KV cache, the trainer on GPUs everything, to host memory).
    Needs max_staleness 0, where they never work at the same time; the bits are those of the same
    run without it. With ``threads`` 0 each gets all cores that are left."""

    transport: Annotated[str, AfterValidator(_transport), NO_BITS] = "auto"
    """What carries weight versions. "auto" chooses by where the ranks are and says so at the start:
    "cuda_ipc" between GPUs of one host in processes of their own, "tcp" between hosts, else
    "shared_memory". Or your own as package.module:Name or path/to/file.py:Name, a
    ``llamarl.transports.base.Transport``."""


_COLLECTIVE_MORE_S = 30.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeadlineConfig:
    """Every wait has a limit; when it runs out, the error names who waited for whom and since when."""

    setup_s: Annotated[PositiveFloat, NO_BITS] = 600.0
    """Seconds until every executor stands ready (model loaded, pools up)."""

    step_s: Annotated[PositiveFloat, NO_BITS] = 1800.0
    """Seconds one executor may spend on one tick. One that takes longer hangs: it is ended and
    brought up again, as far as recovery allows it. Judges get nine tenths of it for all samples of
    a tick; in an evaluation what sampling leaves of these, so that a short one loses verdicts there
    (eval/failed)."""

    disk_s: Annotated[NonNegativeFloat, NO_BITS] = 600.0
    """Seconds for which the run waits for a disk that refuses its records (metrics, rollouts,
    events, verdicts): full, read-only or out of reach. Then it ends, since a run whose records are
    lost must not go on. 0: at once."""

    @property
    def collective_s(self) -> float:
        """Seconds for which a rank waits for others of its executor in a collective: a little
        longer than the controller waits for the executor, since that tells where each rank is and
        may bring the executor up again, and a rank's own error does neither."""
        return max(self.setup_s, self.step_s) + _COLLECTIVE_MORE_S


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RecoveryConfig:
    """What happens when a process dies in the middle of a run (docs/survival.md)."""

    max_restarts: Annotated[NonNegativeInt, NO_BITS] = 8
    """Executors that are brought up again within an hour before a death ends the run; the tick that
    was lost is done again, to the same bits (trainer and critic repeat those since their last
    checkpoint). 0: every death ends the run."""

    straggler_multiple: Annotated[NonNegativeFloat, NO_BITS] = 0.0
    """A rank whose tick takes longer than so many times the median of its executor's last ticks,
    and 10 s at least, is ended, and the tick done again as after any death, to the same bits. 0:
    none is. Not trainer and critic, which would repeat earlier ticks."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[Mistake]:
        if self.straggler_multiple and self.straggler_multiple <= 1.0:
            yield Mistake("straggler_multiple", f"must be 0 or more than 1, got {self.straggler_multiple:g}")
        if self.straggler_multiple and not self.max_restarts:
            yield Mistake("straggler_multiple", "needs max_restarts >= 1: without, no state is held", ("max_restarts",))
