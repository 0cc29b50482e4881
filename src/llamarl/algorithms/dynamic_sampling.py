"""Dynamic sampling (DAPO, arXiv:2503.14476): train on groups with a signal, refilled within the staleness bound. Pure.

    judged at tick k ──has_signal──▶ first num_wanted in prompt order ─▶ trained at tick k
                                     the rest ─┐                          ▲ where these are too few, oldest first
                                               └─▶ spares of tick k + 1 ──┘   (dropped once they would pass the bound)

DAPO goes on sampling until its batch is full. That makes the end of a step depend on rewards; here the number of groups
generated a tick is fixed, so the dataflow graph keeps its delays and its proofs, and a tick may come out short instead.
Every decision is a function of this tick's groups and of the spares, never of time: same seed, same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.algorithms.advantages import shaped_reward
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.types import Group, Response, Score

__all__ = ["Selection", "has_signal", "oldest_version", "rewards_differ", "select_groups"]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What one tick trains on, and what it leaves for the next."""

    chosen: tuple[Group, ...]
    """At most ``num_wanted``, in prompt order."""
    spares: tuple[Group, ...]
    """Groups with a signal that may still train at the next tick, in prompt order."""
    dropped: tuple[Group, ...]
    """Groups that will never train: those without a signal, then those that expired."""
    num_no_signal: int
    """Groups of this tick that can move nothing; dropped."""
    num_refilled: int
    """Of the chosen, those that were spares of an earlier tick."""
    num_expired: int
    """Groups with a signal that would pass the staleness bound by waiting for another tick; dropped."""


def has_signal(group: Group, config: AlgorithmConfig) -> bool:
    """Whether a group baseline leaves the group any gradient.

    Two rewards must differ, what length and repetitions add included, and some response must train: not failed, with a trained
    token, and not cut at the length limit where ``train_truncated`` is False. Compared exactly: no rounding of a mean.
    """
    scored = [r for r in group.responses if isinstance(r.outcome, Score)]
    return rewards_differ(group, config) and any(_trains(r, config) for r in scored)


def rewards_differ(group: Group, config: AlgorithmConfig) -> bool:
    """Whether two of the group's rewards do, what length and repetitions add included; compared exactly."""
    return len({shaped_reward(r, config) for r in group.responses if isinstance(r.outcome, Score)}) > 1


def oldest_version(group: Group) -> int | None:
    """Oldest policy version that wrote a token of the group; None where no version wrote any."""
    written = [int(v) for r in group.responses if not r.sampled_by for v in r.policy_versions if v >= 0]
    return min(written, default=None)


def select_groups(
    fresh: Sequence[Group],
    spares: Sequence[Group],
    config: AlgorithmConfig,
    *,
    tick: int,
    num_wanted: int,
    max_staleness: int,
) -> Selection:
    """Choose the groups of one tick.

    Fresh groups go first, so that spares never make a full batch older than it must be; spares fill
    what is missing, oldest first, because those expire first.

    Args:
        fresh: Groups judged at this tick, in any order.
        spares: ``spares`` of the tick before.
        tick: The trainer's tick that will consume the choice; it starts from version ``tick``.
        num_wanted: Groups of a full batch.
        max_staleness: No token may be older than so many versions when it is trained.
    """
    signals = [(g, has_signal(g, config)) for g in fresh]
    good = sorted((g for g, has in signals if has), key=_prompt_index)
    waiting = sorted(spares, key=lambda g: (_age(g, tick) * -1, g.prompt.index))
    old = sum(_age(g, tick) > max_staleness for g in waiting)  # of a fork, whose bound may be lower
    chosen, extra = good[:num_wanted], good[num_wanted:]
    refill = waiting[old : old + num_wanted - len(chosen)]
    left = [*waiting[:old], *waiting[old + len(refill) :], *extra]
    kept = [g for g in left if _age(g, tick + 1) <= max_staleness]
    expired = [g for g in left if _age(g, tick + 1) > max_staleness]
    return Selection(
        chosen=tuple(sorted([*chosen, *refill], key=_prompt_index)),
        spares=tuple(sorted(kept, key=_prompt_index)),
        dropped=(*(g for g, has in signals if not has), *expired),
        num_no_signal=len(fresh) - len(good),
        num_refilled=len(refill),
        num_expired=len(expired),
    )


def _trains(response: Response, config: AlgorithmConfig) -> bool:
    truncated = response.finish_reason == "length" and not config.train_truncated
    return bool(response.loss_mask.any()) and not truncated


def _age(group: Group, tick: int) -> int:
    """Staleness of the group's oldest token if it trains at ``tick``."""
    oldest = oldest_version(group)
    return 0 if oldest is None else tick - oldest


def _prompt_index(group: Group) -> int:
    return group.prompt.index
