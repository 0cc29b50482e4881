"""The trainer's own check of the bound on staleness: every token's version, before anything is computed.

The schedule, the weights edge and the generator's deadlines each keep a part of the promise that no
token is older than ``max_staleness + max_segments - 1`` versions (docs/asynchrony.md). Here it is
proved where it is used: a token that breaks it, or that names a version which does not exist yet,
ends the run on every rank with the same message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from llamarl.errors import StaleTokenError
from llamarl.types import Group

__all__ = ["check_token_versions"]

Ints = npt.NDArray[np.int64]


def check_token_versions(
    groups: Sequence[Group],
    *,
    trainer_version: int,
    max_staleness: int | None,
    rank: int = 0,
    num_ranks: int = 1,
    sum_over_ranks: Callable[[Ints], Ints] = lambda values: values,
) -> None:
    """Refuse a tick whose tokens break the bound, on all data-parallel ranks alike.

    Looked at is every token that the policy wrote, also of responses that will not train: a generator that broke its
    promise there is as broken. What another, frozen model sampled has no age.

    Args:
        groups: This rank's.
        trainer_version: Optimizer ticks done; staleness is this minus a token's version.
        max_staleness: No token may be older than so many versions; None: only versions that do not exist are refused.
        rank, num_ranks: This rank's place among the data-parallel ranks.
        sum_over_ranks: Adds an array up over them.

    Raises:
        StaleTokenError: Names the first such token (of the lowest rank that has one) and its sample, and both versions.
    """
    oldest = 0 if max_staleness is None else max(0, trainer_version - max_staleness)
    found = next(_outside(groups, oldest, trainer_version), None)
    everyone = np.zeros((num_ranks, 5), dtype=np.int64)
    if found is not None:
        everyone[rank] = (1, *found)
    for number, (broken, prompt, sample, token, version) in enumerate(sum_over_ranks(everyone).tolist()):
        if broken:
            where = f"trainer: tick {trainer_version}: response {prompt}/{sample}, token {token}"
            if num_ranks > 1:
                where += f" (data-parallel rank {number})"
            raise StaleTokenError(f"{where} {_fault(version, trainer_version, max_staleness)}")


def _outside(groups: Sequence[Group], oldest: int, newest: int) -> Iterator[tuple[int, int, int, int]]:
    """(prompt index, sample index, token index, version) of tokens of the policy outside [oldest, newest]."""
    for response in (r for group in groups for r in group.responses if not r.sampled_by):
        versions = response.policy_versions
        outside = response.loss_mask & ((versions < oldest) | (versions > newest))
        for token in np.flatnonzero(outside).tolist():
            yield response.prompt_index, response.sample_index, token, int(versions[token])


def _fault(version: int, trainer_version: int, max_staleness: int | None) -> str:
    advice = (
        "An engine or executor has broken the schedule's promise, which no setting does. The weights are those of version "
        f"{trainer_version}, checkpoints are untouched; report it with this run's config.toml"
    )
    if version < 0:
        return f"is to be trained but carries no policy version ({version}). {advice}"
    if version > trainer_version:
        return f"carries policy version {version}, which does not exist: the trainer holds version {trainer_version}. {advice}"
    return (
        f"was sampled by policy version {version}, {trainer_version - version} versions before the trainer's "
        f"{trainer_version}, but no token may be older than {max_staleness} (schedule.max_staleness, and what "
        f"generator.max_segments and dynamic_sampling.carry_ticks add). {advice}"
    )
