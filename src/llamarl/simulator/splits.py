"""Which split of a machine's cores is fastest for a recipe: every schedule and thread count that was calibrated, simulated.

    RecipeCalibration ─▶ candidates (staleness, partial rollouts, threads, precision, concurrency) ─▶ simulate ─▶ ranking

What is not measured is not proposed: a thread count or precision comes from a variant of the calibration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamarl.config import RunConfig, to_plain, validate
from llamarl.errors import PlanError
from llamarl.simulator.calibration import calibrated_scenario
from llamarl.simulator.kept_calibration import RecipeCalibration, settled_threads
from llamarl.simulator.simulate import SimulationResult, simulate

__all__ = [
    "PRECISION_GAIN",
    "Allowed",
    "Split",
    "apply",
    "candidates",
    "forecast_splits",
    "least_stale",
    "recommend_split",
    "split_table",
    "variants_of",
]

Settings = Mapping[str, Any]
"""Dotted recipe key -> value."""

PRECISION_GAIN = 0.15
"""Another precision than the recipe's costs accuracy, and forecasts may be off by about this much: it has to be faster by more."""

_WHOLE = {"generator.max_segments": 1, "generator.oversubscription": 1.0}
_PARTIAL = {"generator.max_segments": 2, "generator.oversubscription": 1.5}


@dataclass(frozen=True, kw_only=True)
class Split:
    """A way to use the cores, and what it is forecast to give."""

    name: str
    settings: Settings
    result: SimulationResult

    @property
    def token_staleness(self) -> int:
        """Most versions that a token may lag."""
        return int(self.settings["schedule.max_staleness"]) + int(self.settings["generator.max_segments"]) - 1


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What a proposal may use."""

    staleness: Sequence[int] = (0, 1, 2)
    """Values of ``schedule.max_staleness``."""
    precisions: Sequence[str] = ()
    """Values of ``generator.quantization``; empty: all that were measured."""
    max_segments: int = 2
    """1: no partial rollouts."""


def variants_of(config: RunConfig, cores: int) -> list[tuple[int, str, int]]:
    """What a calibration measures beside the recipe's own threads and precision, to compare splits of ``cores``."""
    threads = settled_threads(config)
    quantization = config.generator.quantization
    other = "int8" if quantization == "none" else "none"
    found = [(1, quantization, 1), (cores, quantization, cores), (threads["generator"], other, threads["trainer"])]
    return list(dict.fromkeys(found))


def candidates(config: RunConfig, found: RecipeCalibration, allowed: Allowed) -> dict[str, Settings]:
    """Name -> settings of every allowed split that the calibration can forecast.

    Raises:
        PlanError: There is none.
    """
    named: dict[str, Settings] = {}
    precision = config.generator.quantization
    apart = {"schedule.colocated": False} if config.schedule.colocated else {}
    for generator in found.generators:
        generator_threads, quantization = generator.split(":")
        if allowed.precisions and quantization not in allowed.precisions:
            continue
        for trainer_threads in found.trainers:
            threads = f"threads {generator_threads}+{trainer_threads}"
            label = threads if quantization == precision else f"{threads}, {quantization}"
            base = {
                "generator.threads": int(generator_threads),
                "generator.quantization": quantization,
                "trainer.threads": int(trainer_threads),
            }
            for staleness in allowed.staleness:
                if staleness == 0:
                    named[f"synchronous, {label}"] = {**base, "schedule.max_staleness": 0, **_WHOLE}
                    continue
                at = {**base, "schedule.max_staleness": staleness, **apart}
                named[f"staleness {staleness}, {label}"] = {**at, **_WHOLE}
                if allowed.max_segments > 1:
                    named[f"staleness {staleness}, partial, {label}"] = {**at, **_PARTIAL}
    if not named:
        raise PlanError(
            f"nothing that was measured generates in {', '.join(allowed.precisions)} (measured: {', '.join(found.generators)}, as "
            "threads:precision): add --calibrate --splits, or leave --precision out"
        )
    return named


def apply(config: RunConfig, settings: Settings) -> RunConfig:
    """The recipe with these settings.

    Raises:
        ConfigError: No run could have them.
    """
    raw = to_plain(config)
    for key, value in settings.items():
        *sections, name = key.split(".")
        place = raw
        for section in sections:
            place = place[section]
        place[name] = value
    return validate(raw)


def forecast_splits(
    config: RunConfig, found: RecipeCalibration, allowed: Allowed | None = None, *, num_ticks: int = 60
) -> list[Split]:
    """Every candidate simulated, fastest first; the fastest of each precision also with half its concurrency.

    Raises:
        PlanError: Nothing that was measured is allowed.
    """
    named = candidates(config, found, allowed or Allowed())
    splits = [_forecast(name, config, found, settings, num_ticks) for name, settings in named.items()]
    for precision in dict.fromkeys(split.settings["generator.quantization"] for split in splits):
        own = [split for split in splits if split.settings["generator.quantization"] == precision]
        best = min(own, key=lambda split: split.result.step_s)
        if (half := _concurrency(config, best.settings) // 2) < 1:
            continue
        settings = {**best.settings, "generator.engine.max_sequences": half}
        splits.append(_forecast(f"{best.name}, {half} at once", config, found, settings, num_ticks))
    return sorted(splits, key=lambda split: split.result.step_s)


def _concurrency(config: RunConfig, settings: Settings) -> int:
    """Most sequences that decode at once in one replica."""
    groups = int(config.schedule.prompts_per_step * settings["generator.oversubscription"])
    share = groups // config.generator.dp * config.generator.group_size
    return min(config.generator.engine.max_sequences, share)


def _forecast(name: str, config: RunConfig, found: RecipeCalibration, settings: Settings, num_ticks: int) -> Split:
    scenario = calibrated_scenario(apply(config, settings), found)
    return Split(name=name, settings=settings, result=simulate(dataclasses.replace(scenario, num_ticks=num_ticks)))


def recommend_split(splits: Sequence[Split], precision: str, *, tolerance: float = 0.02) -> Split:
    """The least staleness among those within ``tolerance`` of the fastest.

    Args:
        precision: The recipe's ``generator.quantization``. Another one is proposed only if it is faster by more than ``PRECISION_GAIN``.
    """
    return least_stale(splits, {split.name: split.result.step_s for split in splits}, precision, tolerance=tolerance)


def least_stale(
    splits: Sequence[Split],
    step_s: Mapping[str, float],
    precision: str,
    *,
    tolerance: float,
) -> Split:
    """``recommend_split`` by other seconds a step than those forecast.

    Args:
        step_s: Name -> seconds, of every split.
    """
    own = [split for split in splits if split.settings["generator.quantization"] == precision]
    fastest = min(step_s[split.name] for split in splits)
    if own and min(step_s[split.name] for split in own) <= fastest * (1.0 + PRECISION_GAIN):
        splits, fastest = own, min(step_s[split.name] for split in own)
    near = [split for split in splits if step_s[split.name] <= fastest * (1.0 + tolerance)]
    return min(near, key=lambda split: (split.token_staleness, step_s[split.name]))


def split_table(
    splits: Sequence[Split], chosen: Split, measured_s: Mapping[str, float] | None = None, most: int = 12
) -> str:
    """The fastest ``most`` splits as text, and the chosen one in any case.

    Args:
        measured_s: Name -> seconds a step of those that ran against each other.
    """
    measured_s = measured_s or {}
    shown = [split for i, split in enumerate(splits) if i < most or split is chosen]
    rows = [("split of the cores", "step", "measured", "idle gen", "idle train", "tokens/s")]
    rows += [
        (
            split.name + ("*" if split is chosen else ""),
            f"{split.result.step_s:.3g} s",
            f"{measured_s[split.name]:.3g} s" if split.name in measured_s else "",
            f"{split.result.idle['generator']:.0%}",
            f"{split.result.idle['trainer']:.0%}",
            f"{split.result.tokens_per_s:,.0f}",
        )
        for split in shown
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    if len(shown) < len(splits):
        lines.append(f"... and {len(splits) - len(shown)} slower ones")
    near = "2% of the fastest"
    if measured_s:
        lines.append("measured: seconds a step of those that ran against each other, in turns, without evaluations")
        near = "1% of the fastest measured"
    lines.append(
        f"* least staleness within {near} (in another precision only for more than {PRECISION_GAIN:.0%}): "
        f"no token older than {chosen.token_staleness} versions"
    )
    return "\n".join(lines)
