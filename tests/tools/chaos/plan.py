"""When a run is struck, and how: a pure function of a seed. Who is struck follows from who is there at that moment."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Blow", "Target", "choose", "plan_blows"]

Kind = Literal["kill", "hang"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A process of the run."""

    name: str
    """``controller``, ``environments`` or a rank's, such as ``generator`` or ``trainer[1]``."""
    pid: int = 0


@dataclass(frozen=True, kw_only=True)
class Blow:
    """SIGKILL or SIGSTOP to one process, or to two at once."""

    kind: Kind
    rows: int
    """The run has this many rows of metrics when the clock of the blow starts."""
    delay_s: float
    draws: tuple[float, ...]
    """One a victim, in [0, 1): its place among those that may be struck."""

    def rows_before(self, found: int, last: int) -> int:
        """Count the rows that a run has written when the clock of this blow starts.

        A process that was just resumed finds the rows of earlier ones, and at its start there is little but itself to strike. So every
        second blow waits for a row of its own, and falls in mid-run.

        Args:
            found: Rows that the process found when it started.
            last: The latest row after which any blow falls: the run has ticks beyond it.
        """
        at_start = self.draws[0] * 16 % 1 < 0.5
        return self.rows if at_start or found > last else max(self.rows, found + 1)

    def describe(self) -> str:
        what = {"kill": "SIGKILL", "hang": "SIGSTOP"}[self.kind]
        return f"{what} {self.delay_s:.2f} s after row {self.rows}"


def plan_blows(
    *, num_ticks: int, tick_s: float, kills: int, hangs: int, seed: int, pairs: float = 0.1
) -> tuple[Blow, ...]:
    """Blows spread evenly over a run, in the order in which they fall.

    Args:
        num_ticks: Of the run. None falls after the last but one, so that each meets a run at work.
        tick_s: Seconds between two rows of the undisturbed run: the delay after a row is drawn from twice that, so that moments fall
            anywhere in a tick.
        kills: Processes that are killed, altogether.
        hangs: Processes that are stopped, altogether.
        pairs: Share of blows that strike two processes at once.
    """
    rng = random.Random(seed)
    blows: list[Blow] = []
    totals: tuple[tuple[Kind, int], ...] = (("kill", kills), ("hang", hangs))
    for kind, total in totals:
        left = total
        while left > 0:
            victims = 2 if left > 1 and rng.random() < pairs else 1
            left -= victims
            blows.append(
                Blow(
                    kind=kind,
                    rows=rng.randrange(max(1, num_ticks - 1)),
                    delay_s=rng.uniform(0.0, 2 * tick_s),
                    draws=tuple(rng.random() for _ in range(victims)),
                )
            )
    return tuple(sorted(blows, key=lambda blow: (blow.rows, blow.delay_s)))


def choose(blow: Blow, there: Sequence[Target]) -> tuple[Target, ...]:
    """The victims among ``there``, all of them different; fewer where there are fewer.

    A process that hangs is a rank: one of environments is killed by its pool's own deadline, and a controller that is stopped is
    nobody's to restart.
    """
    left = sorted(there, key=lambda one: (one.name, one.pid))
    if blow.kind == "hang":
        left = [target for target in left if target.name not in ("controller", "environments")]
    chosen = []
    for draw in blow.draws[: len(left)]:
        chosen.append(left.pop(int(draw * len(left))))
    return tuple(chosen)
