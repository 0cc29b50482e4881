"""What ``llamarl plan RECIPE`` says of this machine's cores: schedules, forecast from what the recipe's own run measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl.config import RunConfig, load_config
from llamarl.planner.calibration_cache import calibration_path, save_calibration
from llamarl.planner.hardware import Hardware
from llamarl.planner.lengths import grouped
from llamarl.planner.recipe import RecipeQuestion
from llamarl.simulator.calibrate import (
    RecipeCalibration,
    calibrate_recipe,
    find_calibration,
    keep_calibration,
    recipe_calibration_path,
)
from llamarl.simulator.measured_machine import machine_of_run
from llamarl.simulator.schedules import (
    ScheduleForecast,
    apply_settings,
    forecast_schedules,
    recommend_schedule,
    schedule_table,
)
from llamarl.simulator.simulation_report import result_to_dict
from llamarl.simulator.tick_costs import RewardCost

__all__ = ["MeasuredSchedules", "calibrate", "schedules_of"]


@dataclass(frozen=True, kw_only=True)
class MeasuredSchedules:
    """A recipe's calibration and what follows from it."""

    calibration: RecipeCalibration
    forecasts: list[ScheduleForecast]
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value of what the command line asks for instead of the recipe's batch."""

    @property
    def chosen(self) -> ScheduleForecast:
        return recommend_schedule(self.forecasts)

    def question(self, asked: RecipeQuestion) -> RecipeQuestion:
        """The recipe's question with the lengths that were measured; what the plan leaves out is still named."""
        _, mark, left_out = asked.note.partition("; not in the plan: ")
        return dataclasses.replace(
            asked,
            response=grouped(self.calibration.groups),
            prompt_tokens=self.calibration.in_turn.prompt_tokens,
            note=f"measured while calibrating, under the initial policy{mark}{left_out}",
        )

    def text(self) -> str:
        cores = self.calibration.cores
        head = (
            f"\nThe {cores} core{'s' * (cores != 1)} of this machine at this recipe's threads, forecast from short runs of it. "
            "The table above knows rooflines\nalone and counts prompt tokens too: where they differ, this one holds, and "
            "--recipe writes its starred schedule.\n"
        )
        return "\n".join([head, schedule_table(self.forecasts, self.chosen), "", *self.calibration.describe()])

    def as_json(self) -> dict[str, Any]:
        return {
            "recommended": self.chosen.name,
            "calibration": dataclasses.asdict(dataclasses.replace(self.calibration, groups=())),
            "schedules": [
                {"name": forecast.name, "settings": dict(forecast.settings), **result_to_dict(forecast.result)}
                for forecast in self.forecasts
            ],
        }

    def recipe(self) -> tuple[dict[str, Any], str]:
        """(settings of the recommended schedule by section, the recipe's first lines)."""
        nested: dict[str, Any] = {}
        for key, value in {**self.changes, **self.chosen.settings}.items():
            section, name = key.split(".")
            nested.setdefault(section, {})[name] = value
        chosen, cores = self.chosen, self.calibration.cores
        header = (
            f"Written by llamarl plan: {chosen.name}, {cores} core{'s' * (cores != 1)}.\n"
            f"Forecast: {chosen.result.step_s:.4g} s a step, from measured costs."
        )
        return nested, header


def calibrate(
    recipe: Path, machine_file: Path | None, *, changes: Mapping[str, Any], log: Callable[[str], None]
) -> Hardware:
    """Short runs of a recipe: keep what they cost, and the machine that this makes for plans of any model.

    Args:
        machine_file: Where the machine is kept; None: the default file. The recipe's costs lie beside it.
        changes: Dotted key -> value of what the command line asks for instead of the recipe's batch.
    """
    config = apply_settings(load_config(recipe), changes)
    found = calibrate_recipe(config, log=log)
    hardware = machine_of_run(config, found)
    keep_calibration(recipe_calibration_path(config, machine_file), found)
    path = machine_file or calibration_path()
    save_calibration(path, hardware, config.model.path)
    log(f"kept in {path}")
    return hardware


def schedules_of(
    recipe: Path,
    machine_file: Path | None,
    *,
    changes: Mapping[str, Any] | None = None,
    staleness: Sequence[int] = (0, 1, 2),
    max_segments: int = 2,
    reward_s: float | None = None,
    log: Callable[[str], None],
) -> MeasuredSchedules | None:
    """Forecasts from what a calibration with the recipe kept; None if there is none.

    Args:
        machine_file: The machine's calibration file, beside which the recipe's lies; None: the default one.
        changes: Dotted key -> value of what the command line asks for instead of the recipe's batch. Kept costs are those of the
            recipe itself where the changed one has not been measured.
        reward_s: Seconds of the rewards of a step; None: as measured. What is kept is as measured.
    """
    written = load_config(recipe)
    config: RunConfig = apply_settings(written, changes or {})
    found = find_calibration((config, written), machine_file, log=log)
    if found is None:
        return None
    if reward_s is not None:
        given = RewardCost(tick_s=reward_s)
        found = dataclasses.replace(
            found,
            in_turn=dataclasses.replace(found.in_turn, reward=given),
            together=dataclasses.replace(found.together, reward=given),
        )
    forecasts = forecast_schedules(config, found, staleness=staleness, max_segments=max_segments)
    return MeasuredSchedules(calibration=found, forecasts=forecasts, changes=changes or {})
