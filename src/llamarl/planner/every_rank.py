"""A plan's layout on every rank: bytes of parameters, gradients, optimizer and hand-over, counted from the model's own parameters.

    config.json ─▶ parameters ─▶ stage of each ─▶ a stage's ranks (fsdp x tp)  ──┐ slices that meet ─▶ bytes a rank
                              ─▶ stage of each ─▶ replicas x tp of a generator ──┘

Pure: shapes alone, nothing is allocated. The planner's memory is a formula; this is the sum over boxes that each rank would hold, with
the rows that FSDP2 leaves over, layers that do not divide over stages, and heads and norms that several ranks hold. A stage's
parameters are counted against a stage's ranks, so a thousand ranks take seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.errors import PlanError
from llamarl.planner.hardware import Hardware
from llamarl.planner.model_spec import ModelSpec
from llamarl.planner.rooflines import pulled_bytes
from llamarl.planner.search import Plan
from llamarl.planner.weight_traffic import MeshSide, format_bytes, report_transfer
from llamarl.weight_sync.layout import Shard, dtype_bytes
from llamarl.weight_sync.model_layouts import ModelParameters, fsdp_tp_placements, tp_placements
from llamarl.weight_sync.stage_layouts import holding_stages

__all__ = ["EveryRank", "count_every_rank"]

_STATE = {"parameters": 4, "gradients": 4, "optimizer": 8}
"""Bytes a number: float32 master weights and gradients, two float32 moments."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class EveryRank:
    """What each rank of a plan holds and moves. Trainer ranks count (pp, fsdp, cp, tp), generator ranks (replica, pp, cp, tp)."""

    model_bytes: int
    """Of one version, each parameter once."""
    trainer_mesh: Mapping[str, int]
    generator_mesh: Mapping[str, int]
    trainer: Mapping[str, Floats]
    """[trainer ranks] by part: ``parameters``, ``gradients``, ``optimizer``, ``version`` (one, as it is handed over), ``sent``."""
    generator: Mapping[str, Floats]
    """[generator ranks]: ``received``, which is what a rank holds of a version."""
    copied_bytes: Mapping[str, float]
    """By role: bytes of a version that more than one rank of a copy of the model holds, each further time."""
    forecast: Mapping[str, float]
    """The planner's, of the fullest rank: the trainer's state and ``received``."""
    num_copies: int
    """Slice copies of the whole hand-over."""
    trainer_ep: int = 1
    """Of the trainer's ``fsdp * cp`` ranks, neighbours that have different experts."""

    @property
    def whole_sums(self) -> Mapping[str, float]:
        """By role: bytes of a version over the ranks of one copy of the model, without those that are held again. The model's,
        unless a parameter was lost or counted twice."""
        replicas = self.generator_mesh["replica"] * self.generator_mesh.get("cp", 1)
        held = {
            "trainer": float(self.trainer["version"].sum()),
            "generator": float(self.generator["received"].sum()) / replicas,
        }
        return {role: held[role] - self.copied_bytes[role] for role in held}

    def state(self) -> Floats:
        """[trainer ranks] parameters, gradients and optimizer together."""
        return np.sum([self.trainer[name] for name in _STATE], axis=0)

    def text(self) -> str:
        """For people: the mean, the fullest and the emptiest rank of each."""
        rows: list[tuple[str, Floats, float | None]] = [
            ("trainer: parameters", self.trainer["parameters"], None),
            ("trainer: optimizer", self.trainer["optimizer"], None),
            ("trainer: all its state", self.state(), self.forecast["state"]),
            ("trainer: sends of a version", self.trainer["sent"], None),
            ("generator: receives and holds", self.generator["received"], self.forecast["received"]),
        ]
        spread = f", experts over {self.trainer_ep} of them," if self.trainer_ep > 1 else ""
        lines = [
            f"Every rank of {_named(self.trainer_mesh)}{spread} and {_named(self.generator_mesh)}, of {format_bytes(self.model_bytes)} a version:",
            "",
            f"{'bytes of a rank':<32}{'least':>11}{'mean':>11}{'most':>11}{'forecast':>11}",
        ]
        for name, held, forecast in rows:
            said = "" if forecast is None else format_bytes(forecast)
            line = "".join(f"{format_bytes(value):>11}" for value in (held.min(), held.mean(), held.max()))
            lines.append(f"{name:<32}{line}{said:>11}".rstrip())
        sums = self.whole_sums
        for role, whole in sums.items():
            again = f"{format_bytes(self.copied_bytes[role])} are held by more than one rank"
            lines.append(f"sum over one copy of the model, {role}: {format_bytes(whole)}; {again}")
        lines.append(
            f"hand-over: {format_bytes(float(self.trainer['sent'].sum()))} in {self.num_copies:,} slice copies"
        )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Plain values: all ranks."""
        return {
            "model_bytes": self.model_bytes,
            "trainer_mesh": dict(self.trainer_mesh),
            "generator_mesh": dict(self.generator_mesh),
            "trainer": {name: held.astype(int).tolist() for name, held in self.trainer.items()},
            "generator": {name: held.astype(int).tolist() for name, held in self.generator.items()},
            "copied_bytes": dict(self.copied_bytes),
            "whole_sums": dict(self.whole_sums),
            "forecast": dict(self.forecast),
            "num_copies": self.num_copies,
            "trainer_ep": self.trainer_ep,
        }


def _named(mesh: Mapping[str, int]) -> str:
    return f"{math.prod(mesh.values()):,} ranks ({' x '.join(f'{axis} {size}' for axis, size in mesh.items())})"


def count_every_rank(parameters: ModelParameters, plan: Plan, model: ModelSpec, hardware: Hardware) -> EveryRank:
    """Count ``plan`` on every rank. Data ranks are sharded alike, as llamarl's trainer shards them.

    Args:
        parameters: Of the model, in the type in which versions travel, with the vocabulary cut where the plan cuts it.

    Raises:
        PlanError: A layout does not fit the model.
    """
    t, g, replicas = plan.trainer.layout, plan.generator.layout, plan.generator.replicas
    model_bytes = sum(spec.nbytes for spec in parameters.values())
    parameters = parameters.unpacked()
    fsdp = t.data_ranks * t.cp  # parameters are cut over both
    generator_mesh = {"replica": replicas, "pp": g.pp, **({"cp": g.cp} if g.cp > 1 else {}), "tp": g.tp}
    held = [_stages(parameters, pp) for pp in (t.pp, g.pp)]
    spread = {name for name in parameters if t.ep > 1 and _is_expert(parameters, name, model)}
    found = []
    for names, mesh in (
        ([name for name in parameters if name not in spread], {"pp": t.pp, "fsdp": fsdp, "tp": t.tp}),
        (list(spread), {"pp": t.pp, "fsdp": fsdp // t.ep, "ep": t.ep, "tp": t.tp}),  # the same ranks
    ):
        some = parameters.with_specs(
            {name: parameters[name] for name in names},
            {name: parameters.tp_dims[name] for name in names if name in parameters.tp_dims},
        )
        cuts = fsdp_tp_placements(some)
        if "ep" in mesh:  # of what a tensor-parallel rank has, whole experts, whose first dimension FSDP2 cuts further
            cuts = {name: (*own[:-1], Shard("ep", 0), own[-1]) for name, own in cuts.items()}
        found.append(
            report_transfer(
                some,
                MeshSide(mesh=mesh, placements=cuts, stages=held[0]),
                MeshSide(mesh=generator_mesh, placements=tp_placements(some), stages=held[1]),
            )
        )
    version = np.sum([part.source_slot_bytes for part in found], axis=0)
    sent, received = (np.sum([getattr(p, n) for p in found], axis=0) for n in ("sent_bytes", "received_bytes"))
    numbers = version / dtype_bytes(next(iter(parameters.values())).dtype)
    return EveryRank(
        model_bytes=model_bytes,
        trainer_mesh={"pp": t.pp, "fsdp": t.data_ranks, **({"cp": t.cp} if t.cp > 1 else {}), "tp": t.tp},
        trainer_ep=t.ep,
        generator_mesh=generator_mesh,
        trainer={
            **{name: numbers * size for name, size in _STATE.items()},
            "version": version,
            "sent": sent,
        },
        generator={"received": received},
        copied_bytes={
            "trainer": _held_again(parameters, held[0], t.tp),
            "generator": _held_again(parameters, held[1], g.tp),
        },
        forecast={
            "state": plan.trainer.memory["parameters"] * sum(_STATE.values()) / _STATE["parameters"] * t.shards / fsdp,
            "received": pulled_bytes(hardware, model, g),
        },
        num_copies=sum(part.num_copies for part in found),
    )


def _is_expert(parameters: ModelParameters, name: str, model: ModelSpec) -> bool:
    """Whether it holds all routed experts of a layer, one after the other."""
    shape = parameters[name].shape
    return len(shape) == 3 and shape[0] == model.experts


def _stages(parameters: ModelParameters, pp: int) -> dict[str, tuple[int, ...]]:
    try:
        return holding_stages(parameters, pp)
    except ValueError as error:
        raise PlanError(str(error)) from error


def _held_again(parameters: ModelParameters, stages: Mapping[str, tuple[int, ...]], tp: int) -> float:
    """Bytes of one copy of the model that a tensor-parallel rank or a stage holds besides the first that does."""
    again = 0.0
    for name, spec in parameters.items():
        parts = min(tp, parameters.at_most.get(name, tp)) if name in parameters.tp_dims else 1
        again += spec.nbytes * (tp / parts * len(stages.get(name, (0,))) - 1)
    return again
