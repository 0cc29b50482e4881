"""Which schedule is fastest for a recipe on its cores: every staleness, with whole batches and partial rollouts, simulated.

    RecipeCalibration ─▶ candidates ─▶ simulate ─▶ ranking ─▶ the least stale of the fast ones

Threads and precision stay the recipe's own: only what was measured is proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamarl.config import RunConfig, to_plain, validate
from llamarl.planner.plan_report import table_lines
from llamarl.simulator.calibrate import RecipeCalibration
from llamarl.simulator.simulate import SimulationResult, simulate
from llamarl.simulator.sources import calibrated_scenario

__all__ = [
    "ScheduleForecast",
    "apply_settings",
    "candidates",
    "forecast_schedules",
    "recommend_schedule",
    "schedule_table",
]

Settings = Mapping[str, Any]
"""Dotted recipe key -> value."""

_WHOLE = {"generator.max_segments": 1, "generator.oversubscription": 1.0}
_PARTIAL = {"generator.max_segments": 2, "generator.oversubscription": 1.5}
_NEAR = 0.02


@dataclass(frozen=True, kw_only=True)
class ScheduleForecast:
    """A way to run the recipe, and what it is forecast to give."""

    name: str
    settings: Settings
    result: SimulationResult

    @property
    def token_staleness(self) -> int:
        """Most versions that a token may lag."""
        return int(self.settings["schedule.max_staleness"]) + int(self.settings["generator.max_segments"]) - 1


def candidates(config: RunConfig, staleness: Sequence[int], max_segments: int) -> dict[str, Settings]:
    """Name -> settings of each schedule: a synchronous one has whole batches only."""
    named: dict[str, Settings] = {}
    for level in staleness:
        apart = {"schedule.colocated": False} if config.schedule.colocated and level else {}
        at = {"schedule.max_staleness": level, **apart}
        named[f"staleness {level}" if level else "synchronous"] = {**at, **_WHOLE}
        if level and max_segments > 1:
            named[f"staleness {level}, partial rollouts"] = {**at, **_PARTIAL}
    return named


def apply_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """The recipe with these settings.

    Raises:
        ConfigError: No run could have them.
    """
    raw = to_plain(config)
    for key, value in settings.items():
        section, name = key.split(".")
        raw[section][name] = value
    return validate(raw)


def forecast_schedules(
    config: RunConfig,
    found: RecipeCalibration,
    *,
    staleness: Sequence[int] = (0, 1, 2),
    max_segments: int = 2,
    num_ticks: int = 60,
) -> list[ScheduleForecast]:
    """Every candidate simulated, fastest first.

    Args:
        max_segments: 1: no partial rollouts.
    """
    forecasts = []
    for name, settings in candidates(config, staleness, max_segments).items():
        scenario = calibrated_scenario(apply_settings(config, settings), found, num_ticks=num_ticks)
        forecasts.append(ScheduleForecast(name=name, settings=settings, result=simulate(scenario)))
    return sorted(forecasts, key=lambda forecast: forecast.result.step_s)


def recommend_schedule(forecasts: Sequence[ScheduleForecast]) -> ScheduleForecast:
    """The least staleness among those within 2% of the fastest."""
    fastest = min(forecast.result.step_s for forecast in forecasts)
    near = [forecast for forecast in forecasts if forecast.result.step_s <= fastest * (1.0 + _NEAR)]
    return min(near, key=lambda forecast: (forecast.token_staleness, forecast.result.step_s))


def schedule_table(forecasts: Sequence[ScheduleForecast], chosen: ScheduleForecast) -> str:
    """As text, the chosen one starred."""
    rows = [("schedule", "step", "idle gen", "idle train", "tokens/s")]
    rows += [
        (
            forecast.name + ("*" if forecast is chosen else ""),
            f"{forecast.result.step_s:.3g} s",
            f"{forecast.result.idle['generator']:.0%}",
            f"{forecast.result.idle['trainer']:.0%}",
            f"{forecast.result.tokens_per_s:,.0f}",
        )
        for forecast in forecasts
    ]
    lines = table_lines(rows)
    lines.append(f"* least staleness within 2% of the fastest: no token older than {chosen.token_staleness} versions")
    return "\n".join(lines)
