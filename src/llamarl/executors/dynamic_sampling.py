"""The state of dynamic sampling between ticks: groups with a signal that wait to fill a later batch.

It lives in the reward executor, the one place that sees every group of a tick before they are
scattered over the trainer's ranks, and goes into that executor's checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamarl.algorithms.dynamic_sampling import select_groups
from llamarl.channels.plain_values import from_bytes, to_bytes
from llamarl.channels.samples import Limits, check_group
from llamarl.errors import CheckpointError
from llamarl.observability.ledger import scored_tokens
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.types import Group

__all__ = ["DynamicSampler"]

_FILE = "spare_groups"


class DynamicSampler:
    """Chooses each tick's groups and remembers the spare ones."""

    def __init__(self, algorithm: AlgorithmConfig, *, num_wanted: int, max_staleness: int) -> None:
        """
        Args:
            num_wanted: Groups of a full batch: ``schedule.prompts_per_step``.
            max_staleness: The run's bound on the age of a trained token, in versions.
        """
        self._algorithm = algorithm
        self._num_wanted = num_wanted
        self._max_staleness = max_staleness
        self.spares: tuple[Group, ...] = ()
        """Groups with a signal that may still train."""

    def select(self, groups: Sequence[Group], tick: int) -> tuple[list[Group], dict[str, float]]:
        """This tick's batch, and its ``groups/*`` metrics; docs/algorithms/dynamic_sampling.md explains each."""
        selection = select_groups(
            groups,
            self.spares,
            self._algorithm,
            tick=tick,
            num_wanted=self._num_wanted,
            max_staleness=self._max_staleness,
        )
        self.spares = selection.spares
        metrics = {
            "groups/generated": len(groups),
            "groups/no_signal": selection.num_no_signal,
            "groups/trained": len(selection.chosen),
            "groups/refilled": selection.num_refilled,
            "groups/spare": len(selection.spares),
            "groups/expired": selection.num_expired,
            "groups/short": self._num_wanted - len(selection.chosen),
            "tokens/dropped": scored_tokens(selection.dropped),
            "tokens/spare": scored_tokens(selection.spares),
        }
        return list(selection.chosen), {key: float(value) for key, value in metrics.items()}

    def save(self, folder: Path) -> None:
        (folder / _FILE).write_bytes(to_bytes(self.spares))

    def load(self, folder: Path, tick: int, limits: Limits) -> None:
        """What was saved.

        Raises:
            CheckpointError: It is not there, or holds something else than groups.
        """
        try:
            self.take(from_bytes(memoryview((folder / _FILE).read_bytes())), tick, limits)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / _FILE} holds no spare groups of this version: {error}") from error

    def take(self, spares: Any, tick: int, limits: Limits) -> None:
        """Go on with what another sampler had as ``spares`` after ``tick``.

        Raises:
            ValueError: They are none.
        """
        if not isinstance(spares, tuple) or not all(isinstance(group, Group) for group in spares):
            raise ValueError("the spare groups are no groups")
        for group in spares:
            check_group(group, tick, limits)
        self.spares = spares
