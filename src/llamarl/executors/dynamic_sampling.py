"""The state of dynamic sampling between ticks: groups with a signal that wait to fill a later batch.

It lives in the reward executor, the one place that sees every group of a tick before they are
scattered over the trainer's ranks, and goes into that executor's checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.algorithms.config import AlgorithmConfig
from llamarl.algorithms.dynamic_sampling import select_groups
from llamarl.observability.ledger import scored_tokens
from llamarl.types import Failure, Group, Opening, Prompt, Response, Score, Turn

__all__ = ["DynamicSampler"]

_FILE = "spare_groups.json"


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
        self._spares: tuple[Group, ...] = ()

    def select(self, groups: Sequence[Group], tick: int) -> tuple[list[Group], dict[str, float]]:
        """This tick's batch, and its ``groups/*`` metrics; docs/algorithms/dynamic_sampling.md explains each."""
        selection = select_groups(
            groups,
            self._spares,
            self._algorithm,
            tick=tick,
            num_wanted=self._num_wanted,
            max_staleness=self._max_staleness,
        )
        self._spares = selection.spares
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
        (folder / _FILE).write_text(json.dumps(self.to_plain()), encoding="utf-8")

    def load(self, folder: Path) -> None:
        self.take_plain(json.loads((folder / _FILE).read_text(encoding="utf-8")))

    def to_plain(self) -> list[Any]:
        """The spare groups, as JSON holds them: exact."""
        return [_plain(group) for group in self._spares]

    def take_plain(self, records: Sequence[Any]) -> None:
        """What ``to_plain`` gave."""
        self._spares = tuple(_group(record) for record in records)


def _plain(value: Any) -> Any:
    """JSON of a record. Exact: Python writes the shortest decimal that reads back to a float's bits, and NaN as NaN."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "values": value.tolist()}
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _group(record: Mapping[str, Any]) -> Group:
    return Group(
        prompt=Prompt(**_fields(record["prompt"])),
        responses=tuple(Response(**_fields(response)) for response in record["responses"]),
        prompt_experts=_array(record.get("prompt_experts")),
    )


def _fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a ``Prompt`` or ``Response``."""
    fields = {name: _array(value) for name, value in record.items()}
    if fields.get("opening") is not None:
        fields["opening"] = Opening(**fields["opening"])
    if "turns" in fields:
        fields["turns"] = tuple(Turn(**turn) for turn in fields["turns"])
    if "outcome" in fields:
        outcome = fields["outcome"]
        fields["outcome"] = None if outcome is None else Failure(**outcome) if "kind" in outcome else Score(**outcome)
    return fields


def _array(value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"dtype", "values"}:
        return np.array(value["values"], dtype=value["dtype"])
    return value
