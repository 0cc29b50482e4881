"""What the hand-over of a named model will move, hold and take, before any device is there. Pure: no tensors.

    config.json ─▶ parameters, or adapters beside them ─▶ cuts of both sides ─▶ bytes a rank, bytes a link, copies, memory, least time

The time is a bound: the busiest rank's bytes over its own link. Latency, and switches that many ranks share, come on top.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from llamarl.errors import PlanError
from llamarl.planner.weight_traffic import (
    LinkReport,
    MeshSide,
    SyncReport,
    format_bytes,
    report_links,
    report_transfer,
)
from llamarl.plural import plural
from llamarl.weight_sync.adapter_layouts import adapter_parameters, adapter_stages
from llamarl.weight_sync.model_layouts import ModelParameters, fsdp_tp_placements, name_pattern, tp_placements
from llamarl.weight_sync.stage_layouts import holding_stages

__all__ = [
    "MAX_RANKS",
    "Link",
    "SyncForecast",
    "SyncQuestion",
    "WholeParameters",
    "forecast_sync",
]

MAX_RANKS = 1 << 16
"""Of one side, that are counted: a moment's work, and more than any cluster has."""


_SHOWN_SHARE = 0.01
"""Kinds of uncut parameters that are named hold at least this share of their bytes."""
_UNKNOWN = "not cut"


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one rank sends or receives in a second, each way."""

    bytes_per_s: float
    latency_s: float
    origin: str
    """In words, for the reader: which hardware, which share of its peak."""


@dataclass(frozen=True, kw_only=True)
class SyncQuestion:
    """One hand-over: a model, two layouts, what travels."""

    model: str
    trainer_fsdp: int
    trainer_tp: int
    generator_tp: int
    generator_replicas: int
    trainer_cp: int = 1
    """Context-parallel ranks, over which FSDP cuts too."""
    trainer_pp: int = 1
    generator_pp: int = 1
    versions: int = 2
    """Held at once by the trainer: the capacity of the weights edge, max_staleness + 1 in the standard job."""
    dtype: str = "bfloat16"
    adapter_rank: int = 0
    """Of the adapters that are handed over alone (``lora.hand_over``), in float32; 0: parameters are."""
    adapter_targets: tuple[str, ...] = ()
    """Names of the layers that have one."""

    def __post_init__(self) -> None:
        if self.versions < 1:
            raise PlanError(f"versions must be >= 1, got {self.versions}")
        for side in ("trainer", "generator"):
            for axis, size in self.axes(side).items():
                if size < 1:
                    raise PlanError(f"{side}_{axis} must be >= 1, got {size}")
            ranks = self.num_ranks(side)
            if ranks > MAX_RANKS:
                sizes = " x ".join(f"{axis} {size:,}" for axis, size in self.axes(side).items() if size > 1)
                raise PlanError(f"the {side} has {sizes} = {ranks:,} ranks; at most {MAX_RANKS:,} are counted")

    def axes(self, side: str) -> dict[str, int]:
        """Axis -> size of ``trainer`` or ``generator``."""
        names = {"trainer": ("pp", "fsdp", "cp", "tp"), "generator": ("tp", "pp", "replicas")}[side]
        return {name: getattr(self, f"{side}_{name}") for name in names}

    def num_ranks(self, side: str) -> int:
        return math.prod(self.axes(side).values())


@dataclass(frozen=True, kw_only=True)
class WholeParameters:
    """Parameters of one kind that tensor parallelism does not cut."""

    name: str
    """With ``*`` for the numbers of layers and experts."""
    count: int
    nbytes: int
    """Of all of them."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class SyncForecast:
    """The answer."""

    question: SyncQuestion
    num_parameters: int
    uncut_bytes: int
    """Of parameters that the generator's tensor parallelism does not cut: each of its ranks receives them whole."""
    whole: tuple[WholeParameters, ...]
    """These parameters by kind, largest first, with the reason."""
    report: SyncReport
    links: LinkReport
    link: Link | None
    least_s: float | None
    """Busiest rank's bytes over its link, and one latency; None without a link."""

    def text(self) -> str:
        """A page for people."""
        q, r = self.question, self.report
        stages = f"pp {q.trainer_pp} x " if q.trainer_pp > 1 else ""
        context = f" x cp {q.trainer_cp}" if q.trainer_cp > 1 else ""
        trainer = f"{stages}fsdp {q.trainer_fsdp}{context} x tp {q.trainer_tp}"
        stages = f" x pp {q.generator_pp}" if q.generator_pp > 1 else ""
        generator = f"tp {q.generator_tp}{stages} x {plural(q.generator_replicas, 'replica')}"
        width = max(len(trainer), len(generator))
        alone = f"adapters of rank {q.adapter_rank} alone, " if q.adapter_rank else ""
        lines = [
            f"{q.model}: {alone}{self.num_parameters:,} parameters, one version is {format_bytes(r.model_bytes)} in {q.dtype}",
            f"  trainer    {trainer:<{width}}  {plural(len(r.sent_bytes), 'rank')}",
            f"  generator  {generator:<{width}}  {plural(len(r.received_bytes), 'rank')}",
            "",
            f"  {'bytes of one version':<30}{'mean':>12}{'most':>12}",
            _row("sent by a trainer rank", r.sent_bytes.mean(), r.sent_bytes.max()),
            _row("received by a generator rank", r.received_bytes.mean(), r.received_bytes.max()),
            _row("over one link (rank to rank)", self.links.mean_bytes, self.links.max_bytes),
            "",
            f"  links in use    {self.links.num_links:,}",
            f"  slice copies    {r.num_copies:,}, {r.num_copies / len(r.received_bytes):,.0f} for each generator rank",
            f"  trainer memory  {format_bytes(q.versions * r.source_slot_bytes.max())} a rank: "
            f"{plural(q.versions, 'version')} of its own shards",
        ]
        if q.generator_tp > 1 and self.uncut_bytes:
            share = self.uncut_bytes / r.model_bytes
            lines.append(
                f"  not cut by tp   {format_bytes(self.uncut_bytes)} ({share:.1%} of the model): every generator rank "
                "receives it whole"
            )
            shown = [kind for kind in self.whole if kind.nbytes >= _SHOWN_SHARE * self.uncut_bytes]
            lines += [f"    {format_bytes(k.nbytes):<12}  {k.name} ({k.reason})" for k in shown]
            rest = self.uncut_bytes - sum(kind.nbytes for kind in shown)
            if rest:
                lines.append(f"    {format_bytes(rest):<12}  {plural(len(self.whole) - len(shown), 'smaller kind')}")
        if self.link is not None and self.least_s is not None:
            busiest = max(r.sent_bytes.max(), r.received_bytes.max())
            lines.append(
                f"  time            {self.least_s:.3g} s at least: {format_bytes(busiest)} of the busiest rank at "
                f"{format_bytes(self.link.bytes_per_s)}/s ({self.link.origin})"
            )
        if r.sent_bytes.max() > 1.5 * r.received_bytes.max():
            lines.append(
                "  The trainer's side binds: it sends every replica its own copy. More trainer ranks, fewer replicas "
                "or fewer bytes a number shorten it."
            )
        return "\n".join(lines)

    def values(self) -> dict[str, Any]:
        """Plain values for JSON; bytes and seconds."""
        r = self.report
        return {
            "question": asdict(self.question),
            "num_parameters": self.num_parameters,
            "model_bytes": r.model_bytes,
            "uncut_bytes": self.uncut_bytes,
            "whole": [asdict(kind) for kind in self.whole],
            "trainer_ranks": len(r.sent_bytes),
            "generator_ranks": len(r.received_bytes),
            "sent_bytes_per_rank": {"mean": float(r.sent_bytes.mean()), "max": float(r.sent_bytes.max())},
            "received_bytes_per_rank": {"mean": float(r.received_bytes.mean()), "max": float(r.received_bytes.max())},
            "bytes_per_link": {"mean": self.links.mean_bytes, "max": self.links.max_bytes},
            "num_links": self.links.num_links,
            "num_copies": r.num_copies,
            "trainer_slot_bytes_per_rank": float(self.question.versions * r.source_slot_bytes.max()),
            "link": asdict(self.link) if self.link is not None else None,
            "least_s": self.least_s,
        }


def forecast_sync(parameters: ModelParameters, question: SyncQuestion, link: Link | None = None) -> SyncForecast:
    """Answer ``question`` for a model's parameters.

    Args:
        parameters: Of the model, also where its adapters travel alone.

    Raises:
        PlanError: A tensor-parallel size does not fit the model, or there are fewer layers than stages.
    """
    _check_tensor_parallel(parameters, question)
    model = parameters.unpacked()
    if question.adapter_rank:
        parameters = adapter_parameters(parameters, rank=question.adapter_rank, targets=question.adapter_targets)
    count = parameters.num_elements
    whole = _whole(parameters)
    parameters = parameters.unpacked()
    stages = {"trainer": question.trainer_pp, "generator": question.generator_pp}
    held = {side: _stages(model, pp, side) for side, pp in stages.items()}
    if question.adapter_rank:
        held = {side: adapter_stages(holding, parameters) for side, holding in held.items()}
    source = MeshSide(
        mesh={
            "pp": question.trainer_pp,
            "fsdp": question.trainer_fsdp * question.trainer_cp,
            "tp": question.trainer_tp,
        },
        placements=fsdp_tp_placements(parameters),
        stages=held["trainer"],
    )
    sink = MeshSide(
        mesh={"replica": question.generator_replicas, "pp": question.generator_pp, "tp": question.generator_tp},
        placements=tp_placements(parameters),
        stages=held["generator"],
    )
    report = report_transfer(parameters, source, sink)
    least = None
    if link is not None:
        least = max(report.sent_bytes.max(), report.received_bytes.max()) / link.bytes_per_s + link.latency_s
    return SyncForecast(
        question=question,
        num_parameters=count,
        uncut_bytes=sum(kind.nbytes for kind in whole),
        whole=whole,
        report=report,
        links=report_links(parameters, source, sink),
        link=link,
        least_s=None if least is None else float(least),
    )


def _stages(parameters: ModelParameters, pp: int, side: str) -> dict[str, tuple[int, ...]]:
    try:
        return holding_stages(parameters, pp)
    except ValueError as error:
        raise PlanError(f"--{side} pp={pp}: {error}") from error


def _check_tensor_parallel(parameters: ModelParameters, question: SyncQuestion) -> None:
    sizes = parameters.tp_sizes
    for side, tp in (("trainer", question.trainer_tp), ("generator", question.generator_tp)):
        if sizes is None or tp in sizes:
            continue
        if sizes == (1,):
            raise PlanError(
                f"--{side} tp={tp}: {question.model} has no tensor-parallel plan in transformers, or a single head; the size "
                f"that fits: 1. Raise {'fsdp' if side == 'trainer' else 'replicas'} instead"
            )
        raise PlanError(
            f"--{side} tp={tp} cuts an attention head of {question.model} in two; sizes that fit: "
            f"{', '.join(map(str, sizes))}"
        )


def _whole(parameters: ModelParameters) -> tuple[WholeParameters, ...]:
    kinds: dict[tuple[str, str], list[int]] = {}
    for name, spec in parameters.items():
        if name not in parameters.tp_dims:
            key = (name_pattern(name), parameters.whole.get(name, _UNKNOWN))
            kinds.setdefault(key, []).append(spec.nbytes)
    found = [WholeParameters(name=n, count=len(b), nbytes=sum(b), reason=reason) for (n, reason), b in kinds.items()]
    return tuple(sorted(found, key=lambda kind: (-kind.nbytes, kind.name)))


def _row(label: str, mean: float, most: float) -> str:
    return f"  {label:<30}{format_bytes(mean):>12}{format_bytes(most):>12}"
