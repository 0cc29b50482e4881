"""What ``llamarl plan RECIPE`` says of this machine's cores: splits of them, forecast from the recipe's own executors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl.config import RunConfig, load_config
from llamarl.planner.lengths import grouped
from llamarl.planner.recipe import RecipeQuestion
from llamarl.simulator.calibration import calibrate_recipe
from llamarl.simulator.finals import measurements_decide, propose_split
from llamarl.simulator.kept_calibration import (
    RecipeCalibration,
    finals_key,
    find_calibration,
    keep_calibration,
    recipe_calibration_path,
)
from llamarl.simulator.report import result_to_dict
from llamarl.simulator.run_finals import run_finals
from llamarl.simulator.splits import Allowed, Split, apply, forecast_splits, split_table, variants_of

__all__ = ["MeasuredSplits", "measure_splits"]


@dataclass(frozen=True, kw_only=True)
class MeasuredSplits:
    """A recipe's calibration and what follows from it."""

    config: RunConfig
    calibration: RecipeCalibration
    splits: list[Split]
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value of what the command line asks for instead of the recipe's batch."""

    @property
    def chosen(self) -> Split:
        return propose_split(self.splits, self.calibration.finals, self.config.generator.quantization)

    def question(self, asked: RecipeQuestion) -> RecipeQuestion:
        """The recipe's question with the lengths that were measured; what the plan leaves out is still named."""
        _, mark, left_out = asked.note.partition("; not in the plan: ")
        return dataclasses.replace(
            asked,
            response=grouped(self.calibration.groups),
            prompt_tokens=self.calibration.prompt_tokens,
            note=f"measured while calibrating, under the initial policy{mark}{left_out}",
        )

    def text(self) -> str:
        cores = self.calibration.cores
        head = (
            f"\nThe {cores} cores of this machine, forecast from this recipe's own executors at work. The table above knows rooflines "
            "alone and\ncounts prompt tokens too: where they differ, this one holds, and --recipe writes its starred split.\n"
        )
        return "\n".join(
            [head, split_table(self.splits, self.chosen, self.calibration.finals), "", *self.calibration.describe()]
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "recommended": self.chosen.name,
            "calibration": dataclasses.asdict(dataclasses.replace(self.calibration, groups=())),
            "splits": [
                {"name": split.name, "settings": dict(split.settings), **result_to_dict(split.result)}
                for split in self.splits
            ],
        }

    def recipe(self) -> tuple[dict[str, Any], str]:
        """(settings of the recommended split by section, the recipe's first lines)."""
        nested: dict[str, Any] = {}
        for key, value in {**self.changes, **self.chosen.settings}.items():
            *sections, name = key.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        chosen, finals = self.chosen, self.calibration.finals
        header = (
            f"Written by llamarl plan: {chosen.name}, {self.calibration.cores} cores.\n"
            f"Forecast: {chosen.result.step_s:.4g} s a step, from measured costs."
        )
        if chosen.name in finals:
            header += f"\nMeasured: {finals[chosen.name]:.4g} s a step, in turns with the near splits."
        return nested, header


def measure_splits(
    recipe: Path,
    kept: Path | None,
    *,
    changes: Mapping[str, Any] | None = None,
    measure: bool,
    variants: bool,
    allowed: Allowed | None = None,
    reward_s: float | None = None,
    log: Callable[[str], None],
) -> MeasuredSplits | None:
    """Calibrate with the recipe, or take what an earlier calibration kept; None if there is none.

    Args:
        kept: The machine's calibration file, beside which the recipe's lies; None: the default one.
        changes: Dotted key -> value of what the command line asks for instead of the recipe's batch. Kept costs are those of the
            recipe itself where the changed one has not been measured.
        measure: Calibrate now.
        allowed: What the proposal may use; None: all that was measured.
        variants: Also with other threads and precisions than the recipe's; then the near splits run against each other.
        reward_s: Seconds of the rewards of a step; None: as measured. What is kept is as measured.
    """
    written = load_config(recipe)
    config = apply(written, changes or {})
    if measure:
        from llamarl.runtime.placement import available_cores

        more = variants_of(config, config.run.cores or available_cores()) if variants else []
        found = calibrate_recipe(config, variants=more, log=log)
        path = recipe_calibration_path(config, kept)
        keep_calibration(path, found)
        log(f"kept in {path}")
        if variants and reward_s is None:
            finals = run_finals(config, forecast_splits(config, found, allowed or Allowed()), log=log)
            found = dataclasses.replace(found, finals=finals, finals_of=finals_key(config))
            keep_calibration(path, found)
        elif variants:
            log("the forecasts decide: with --reward-s, splits that ran against each other would have other rewards")
    elif (earlier := find_calibration((config, written), kept, log=log)) is not None:
        found = earlier
    else:
        return None
    if found.finals_of != finals_key(config):
        found = dataclasses.replace(found, finals={})  # other jobs ran
    if reward_s is not None:
        found = dataclasses.replace(found, reward_s=reward_s, finals={})
    splits = forecast_splits(config, found, allowed or Allowed())
    if found.finals and not measurements_decide(splits, found.finals, config.generator.quantization):
        log("the forecasts decide: the best of them is not among the splits that ran against each other")
        found = dataclasses.replace(found, finals={})
    return MeasuredSplits(config=config, calibration=found, splits=splits, changes=changes or {})
