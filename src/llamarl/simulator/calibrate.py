"""What a recipe costs on this machine: two short runs of it, and straight lines through what their metrics say.

    in turn   (staleness 0)  each role works alone      ─▶ costs of synchronous schedules
    together  (staleness 1)  roles work at the same time ─▶ costs of all others: how they slow each other is in them

The lines are those of ``fitted_costs.py``. The runs have whole batches, so that every response ends in its tick, and a learning rate next to nothing, so that lengths stay
those of the initial policy. What was measured is kept beside the machine's own calibration, by what decides the costs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from llamarl.config import RunConfig, to_plain, validate
from llamarl.controller.run import start_run
from llamarl.controller.standard_graph import llamarl_graph
from llamarl.errors import FileError, PlanError
from llamarl.mistakes import mistakes_of
from llamarl.planner.calibration_cache import calibration_path, machine_here, measured_elsewhere, write_whole
from llamarl.planner.lengths import grouped
from llamarl.plural import plural
from llamarl.reading import read_object
from llamarl.roles import ROLES, present_roles
from llamarl.runtime.placement import available_cores, place
from llamarl.simulator.fitted_costs import LEAST_TICKS, WARM_UP, FittedCosts, fit_runs, groups_of, measured_rows
from llamarl.strict import SAVED

__all__ = [
    "LARGE_JITTER",
    "RecipeCalibration",
    "calibrate_recipe",
    "find_calibration",
    "keep_calibration",
    "load_recipe_calibration",
    "recipe_calibration_path",
    "settled_threads",
]

_FORMAT = 2
_MAX_TICKS = 40
_MAX_GROUPS = 512
"""Measured groups that a kept calibration holds at most."""
LARGE_JITTER = 0.5
"""Above it what was measured is named as measured on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class RecipeCalibration:
    """What decides a recipe's step on this machine."""

    __pydantic_config__: ClassVar[ConfigDict] = SAVED

    cores: int
    in_turn: FittedCosts
    together: FittedCosts
    groups: tuple[tuple[int, ...], ...]
    """Response lengths, group by group."""

    def at(self, max_staleness: int) -> FittedCosts:
        """The costs that hold at a staleness."""
        return self.together if max_staleness else self.in_turn

    def describe(self) -> list[str]:
        """For people, one line a constant."""
        lines = [f"responses  {grouped(self.groups).label}; prompts {self.in_turn.prompt_tokens} tokens"]
        for name, found in (("in turn", self.in_turn), ("together", self.together)):
            t = found.trainer
            kinds = " or ".join(
                f"{g.tick_s * 1e3:.1f} ms a tick + {g.step_s * 1e3:.3g} ms a decode step + {g.sequence_s * 1e6:.3g} us a token"
                for g in found.of_kinds
            )
            lines.append(
                f"{name:<9}  generator {kinds} ({_spread_of(found.jitter['generator'])}); trainer "
                f"{t.tick_s * 1e3:.1f} ms a tick + {t.token_s * 1e6:.3g} us a token "
                f"({_spread_of(found.jitter['trainer'])}); reward {found.reward.tick_s * 1e3:.1f} ms a tick"
            )
        lines.append(f"hand-over  and messages {self.in_turn.round_s * 1e3:.1f} ms a synchronous round")
        return lines


def _spread_of(jitter: float) -> str:
    asked = ": was the machine idle? calibrate again" if jitter > LARGE_JITTER else ""
    return f"ticks differ by {jitter:.1%}{asked}"


# -- measuring --------------------------------------------------------------------------------------------------------


def calibrate_recipe(
    config: RunConfig, *, ticks: int = 10, enough_s: float = 8.0, log: Callable[[str], None] = lambda line: None
) -> RecipeCalibration:
    """Run the recipe's job for a few ticks in turn and together, and fit.

    Args:
        ticks: Of a run, at least 7.
        enough_s: Where the ticks of the first run do not last that long, it is made again with more: 40 at most.

    Raises:
        PlanError: Too few ticks.
        LlamaRLError: What ended a run.
    """
    if ticks < WARM_UP + LEAST_TICKS + 1:
        raise PlanError(f"a calibration needs at least {WARM_UP + LEAST_TICKS + 1} ticks a run, got {ticks}")
    with tempfile.TemporaryDirectory(prefix="llamarl-calibration-") as folder:

        def run(staleness: int, ticks: int) -> tuple[RunConfig, Path]:
            name = "together" if staleness else "in turn"
            log(f"{name}: {plural(ticks, 'tick')}")
            changed = _only_steps(config, staleness, ticks, Path(folder) / f"{staleness}-{ticks}")
            start_run(changed)
            return changed, Path(changed.run.dir)

        alone = run(0, ticks)
        tick_s = statistics.fmean(float(row["time/step_s"] or 0.0) for row in measured_rows(alone[1])[WARM_UP:])
        if (more := min(_MAX_TICKS, math.ceil(enough_s / max(tick_s, 1e-9)))) > ticks:
            ticks = more
            alone = run(0, ticks)
        together = run(1, ticks)
        return RecipeCalibration(
            cores=config.run.cores or available_cores(),
            in_turn=fit_runs([alone]),
            together=fit_runs([together]),
            groups=tuple(groups_of(alone[1])[:_MAX_GROUPS]),
        )


def _only_steps(config: RunConfig, staleness: int, ticks: int, folder: Path) -> RunConfig:
    """The recipe with whole batches at a staleness, without what a few ticks should not do: evaluate, save, learn."""
    raw = to_plain(config)
    raw["optimizer"] |= {"lr": 1e-12}
    raw["evaluation"] |= {"every": 0}
    raw["checkpoint"] |= {"every": 0, "at_end": False}
    raw["observability"] |= {"console": "none", "tensorboard": False, "trace": False, "rollouts_every": 1}
    raw["generator"] |= {"max_segments": 1, "oversubscription": 1.0}
    raw["run"] |= {"num_ticks": ticks, "dir": str(folder)}
    turns = config.schedule.colocated and staleness == 0
    raw["schedule"] |= {"max_staleness": staleness, "colocated": turns}
    return validate(raw)


# -- the file that keeps it -------------------------------------------------------------------------------------------


def settled_threads(config: RunConfig) -> dict[str, int]:
    """CPU threads of each role as a run on this machine would pin them."""
    sections = {role.section: role.settings(config) for role in ROLES.values() if role.section}
    on_cpu = dataclasses.replace(
        config, **{name: dataclasses.replace(section, device="cpu") for name, section in sections.items()}
    )
    settled = place(llamarl_graph(on_cpu).executors, cores=config.run.cores or None, cuda_devices=0)
    return {spec.name: spec.threads for spec in settled.executors}


def recipe_calibration_path(config: RunConfig, machine_file: Path | None = None) -> Path:
    """Where the calibration of a recipe lies: beside the machine's, by what decides its costs.

    Threads, cores and devices count as a run here would settle them, so that the configuration a run saved has its recipe's.
    """
    raw = to_plain(config)
    other = {"device", "threads", "max_segments", "oversubscription", "dp"}
    of_kind = {"dp", "share"}
    raw["generator"]["replicas"] = [
        {key: value for key, value in kind.items() if key not in of_kind} for kind in raw["generator"]["replicas"]
    ]
    own = ("generator", "trainer", "reference", "critic", "dynamic_sampling", "lora")
    judges = [role.name for role in present_roles(config) if role.name in ("reward_model", "judge")]
    decides = {
        **{section: {k: v for k, v in raw[section].items() if k not in other} for section in own},
        **{section: raw[section] for section in ("model", "task", "data", "algorithm")},
        **{name: {k: v for k, v in raw[name].items() if k not in other} for name in judges},
        "cores": config.run.cores or available_cores(), "threads": settled_threads(config),
        "runtime": raw["run"]["runtime"], "prompts_per_step": raw["schedule"]["prompts_per_step"],
        "colocated": raw["schedule"]["colocated"],
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:16]
    base = machine_file or calibration_path()
    return base.with_name(f"{base.stem}-recipe-{digest}.json")


def keep_calibration(path: Path, found: RecipeCalibration) -> None:
    """Write it whole or not at all.

    Raises:
        PlanError: The file cannot be written.
    """
    write_whole(path, json.dumps({"format": _FORMAT, "machine": machine_here(), **dataclasses.asdict(found)}))


def find_calibration(
    configs: Sequence[RunConfig], machine_file: Path | None = None, *, log: Callable[[str], None]
) -> RecipeCalibration | None:
    """What was measured for the first of the recipes that has a calibration; None: none has one.

    Args:
        machine_file: The machine's calibration file, beside which the recipe's lies. None: the default one, and what was
            measured on another machine is passed over.
        log: Gets a note of every file that was passed over.

    Raises:
        PlanError: The file is not a calibration of this version.
    """
    for path in dict.fromkeys(recipe_calibration_path(config, machine_file) for config in configs):
        if not path.is_file():
            continue
        if machine_file is None and (note := measured_elsewhere(path, "the recipe's calibration")):
            log(note)
            continue
        return load_recipe_calibration(path)
    return None


def load_recipe_calibration(path: Path) -> RecipeCalibration:
    """What ``keep_calibration`` wrote.

    Raises:
        PlanError: No such file, or it is not a calibration of this version.
    """
    try:
        record = read_object(path)
    except FileError as error:
        if error.missing:
            raise PlanError(
                f"calibration file {path} does not exist: make it with llamarl plan RECIPE --calibrate"
            ) from None
        raise PlanError(f"calibration file {error}: calibrate again") from error
    if record.pop("format", None) != _FORMAT:
        raise PlanError(f"calibration file {path} is of another version: calibrate again")
    record.pop("machine", None)
    try:
        found = TypeAdapter(RecipeCalibration).validate_python(record)
        found.describe()  # every value that is used
    except ValidationError as error:
        mistakes = "; ".join(str(mistake) for mistake in mistakes_of(error)[:3])
        raise PlanError(f"calibration file {path} is not usable ({mistakes}): calibrate again") from error
    except (PlanError, KeyError) as error:
        raise PlanError(f"calibration file {path} is not usable ({error}): calibrate again") from error
    return found
