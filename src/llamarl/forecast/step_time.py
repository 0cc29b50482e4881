"""How long a step takes: the maximum cycle mean of the job's dataflow graph.

A job is a graph of executors that fire once a tick; an edge with delay d hands tick k's sink the token of tick k - d.
In the steady state every executor fires once a period, and the period is

    T = max over cycles of (time along the cycle) / (delays along the cycle)

(Reiter 1968; Baccelli et al., "Synchronization and Linearity", 1992, chapter 2). An executor that
fires one tick at a time is a cycle through itself with delay 1. The job of docs/asynchrony.md has
one cycle more, the whole round, in which weights come back ``max_staleness + 1`` ticks later:

    T = max(T_gen, T_train, T_reward, (T_gen + T_reward + T_train + T_sync) / (max_staleness + 1))
"""

from __future__ import annotations

__all__ = ["step_period"]


def step_period(
    *, generator_s: float, reward_s: float, trainer_s: float, sync_s: float, max_staleness: int
) -> tuple[float, str]:
    """Seconds a tick in the steady state, and whose cycle sets them: a role, which then is never idle, or ``round``."""
    around_s = generator_s + reward_s + trainer_s + sync_s
    cycles = {
        "generator": generator_s,
        "trainer": trainer_s,
        "reward": reward_s,
        "round": around_s / (max_staleness + 1),
    }
    longest = max(cycles, key=lambda name: cycles[name])
    return cycles[longest], longest
