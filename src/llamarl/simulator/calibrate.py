"""What a recipe costs on this machine: two short runs of it, and straight lines through what their metrics say.

    in turn   (staleness 0)  each role works alone      ─▶ costs of synchronous schedules
    together  (staleness 1)  roles work at the same time ─▶ costs of all others: how they slow each other is in them

A generator's tick is ``tick_s + step_s * decode steps + sequence_s * tokens``, a trainer's ``tick_s + token_s * tokens``. The
runs have whole batches, so that every response ends in its tick, and a learning rate next to nothing, so that lengths stay
those of the initial policy. What was measured is kept beside the machine's own calibration, by what decides the costs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from llamarl.config import RunConfig, to_plain, validate
from llamarl.controller.run import start_run
from llamarl.controller.standard_graph import llamarl_graph
from llamarl.errors import FileError, LlamaRLError, PlanError
from llamarl.mistakes import mistakes_of
from llamarl.observability.metrics import read_metrics
from llamarl.planner.calibration_cache import calibration_path, machine_here, measured_elsewhere, write_whole
from llamarl.planner.lengths import grouped
from llamarl.plural import plural
from llamarl.reading import parse_json, read_lines, read_object
from llamarl.roles import ROLES, present_roles
from llamarl.runtime.placement import available_cores, place
from llamarl.simulator.tick_costs import LinearGeneratorCost, RewardCost, TrainerCost
from llamarl.strict import SAVED

__all__ = [
    "LARGE_JITTER",
    "FittedCosts",
    "RecipeCalibration",
    "calibrate_recipe",
    "find_calibration",
    "fit_runs",
    "keep_calibration",
    "load_recipe_calibration",
    "recipe_calibration_path",
    "refuse_unlike",
    "settled_threads",
]

_FORMAT = 2
_MOST_TICKS = 1_000_000
_WARM_UP = 2
"""First ticks of a run that a fit leaves out."""
_LEAST_TICKS = 4
_MAX_TICKS = 40
_MAX_GROUPS = 512
"""Measured groups that a kept calibration holds at most."""
LARGE_JITTER = 0.5
"""Above it what was measured is named as measured on a busy machine."""

Rows = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class FittedCosts:
    """What runs on this machine measured, as straight lines."""

    generator: LinearGeneratorCost
    trainer: TrainerCost
    reward: RewardCost
    round_s: float
    """Seconds of a synchronous round that are no executor's tick: messages, hand-over. 0 where no run was synchronous."""
    prompt_tokens: int
    num_ticks: int
    """Measured ticks that went into the fit."""
    errors: Mapping[str, float]
    """Role -> median relative error of the fitted line over those ticks."""
    jitter: Mapping[str, float]
    """Role -> standard deviation of the logarithm of (measured tick / fitted tick)."""


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
            g, t = found.generator, found.trainer
            lines.append(
                f"{name:<9}  generator {g.tick_s * 1e3:.1f} ms a tick + {g.step_s * 1e3:.3g} ms a decode step + "
                f"{g.sequence_s * 1e6:.3g} us a token ({_spread_of(found.jitter['generator'])}); trainer "
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
        PlanError: Too few ticks, or unlike replicas.
        LlamaRLError: What ended a run.
    """
    refuse_unlike(config)
    if ticks < _WARM_UP + _LEAST_TICKS + 1:
        raise PlanError(f"a calibration needs at least {_WARM_UP + _LEAST_TICKS + 1} ticks a run, got {ticks}")
    with tempfile.TemporaryDirectory(prefix="llamarl-calibration-") as folder:

        def run(staleness: int, ticks: int) -> tuple[RunConfig, Path]:
            name = "together" if staleness else "in turn"
            log(f"{name}: {plural(ticks, 'tick')}")
            changed = _only_steps(config, staleness, ticks, Path(folder) / f"{staleness}-{ticks}")
            start_run(changed)
            return changed, Path(changed.run.dir)

        alone = run(0, ticks)
        tick_s = statistics.fmean(float(row["time/step_s"] or 0.0) for row in _metrics(alone[1])[_WARM_UP:])
        if (more := min(_MAX_TICKS, math.ceil(enough_s / max(tick_s, 1e-9)))) > ticks:
            ticks = more
            alone = run(0, ticks)
        together = run(1, ticks)
        return RecipeCalibration(
            cores=config.run.cores or available_cores(),
            in_turn=fit_runs([alone]),
            together=fit_runs([together]),
            groups=tuple(_groups(alone[1])[:_MAX_GROUPS]),
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
    raw["schedule"] |= {"max_staleness": staleness, "colocated": turns, "parts": 1}
    return validate(raw)


def fit_runs(runs: Sequence[tuple[RunConfig, Path]]) -> FittedCosts:
    """Costs from the metrics and rollouts of measured runs.

    Steps are those of the longest response (or of the slots' schedule), so the runs must finish every response in its tick.
    Two runs of different batch sizes tell the terms apart; from one run only their sum is well known.

    Raises:
        PlanError: A run has partial rollouts, too few ticks, or rollouts were not kept.
    """
    rows_g: list[tuple[float, float, float]] = []
    rows_t: list[tuple[float, float]] = []
    seconds: dict[str, list[float]] = {"generator": [], "trainer": [], "reward": []}
    round_s: list[float] = []
    prompts: list[int] = []
    for config, folder in runs:
        refuse_unlike(config)
        if config.generator.max_segments != 1:
            raise PlanError(
                f"{folder}: a fit needs a run that finishes every response in its tick, and this one has "
                f"generator.max_segments {config.generator.max_segments}: simulate its recipe with the lengths that it measured, "
                f"llamarl simulate {folder / 'config.toml'} --response-tokens file:{folder / 'rollouts'}, or run it with "
                "--generator.max_segments 1 --generator.oversubscription 1.0"
            )
        for row in _metrics(folder)[_WARM_UP:]:
            file = _rollouts_of(folder, int(row.get("step") or 0))
            if not file.is_file():
                continue
            lengths, prompt_tokens = _tick_lengths(file)
            rows_g.append((1.0, _decode_steps(lengths, config), float(lengths.sum()) / config.generator.dp))
            rows_t.append((1.0, float(lengths.sum() + prompt_tokens.sum())))
            for role, found in seconds.items():
                found.append(float(row.get(f"time/{role}_s") or 0.0))
            prompts.extend(prompt_tokens.tolist())
            if config.schedule.max_staleness == 0:
                ticks = sum(found[-1] for found in seconds.values())
                round_s.append(max(0.0, float(row.get("time/step_s") or 0.0) - ticks))
    if len(rows_g) < _LEAST_TICKS:
        raise PlanError(
            f"a fit needs at least {_LEAST_TICKS} ticks after {_WARM_UP} of warm-up with their rollouts, got {len(rows_g)} in "
            f"{', '.join(str(folder) for _, folder in runs)}: let the runs last longer"
        )
    g = non_negative_line(np.array(rows_g), np.array(seconds["generator"]))
    t = non_negative_line(np.array(rows_t), np.array(seconds["trainer"]))
    logs = {
        role: np.log(np.maximum(seconds[role], 1e-9) / np.maximum(np.array(rows) @ np.array(line), 1e-9))
        for role, rows, line in (("generator", rows_g, g), ("trainer", rows_t, t))
    }
    return FittedCosts(
        generator=LinearGeneratorCost(tick_s=g[0], step_s=g[1], sequence_s=g[2]),
        trainer=TrainerCost(tick_s=t[0], token_s=t[1]),
        reward=RewardCost(tick_s=float(np.median(seconds["reward"]))),
        round_s=float(np.median(round_s)) if round_s else 0.0,
        prompt_tokens=max(1, round(float(np.mean(prompts)))),
        num_ticks=len(rows_g),
        errors={role: float(np.median(np.abs(np.expm1(-found)))) for role, found in logs.items()},
        jitter={role: float(found.std()) for role, found in logs.items()},
    )


def non_negative_line(rows: Rows, seconds: Rows) -> list[float]:
    """Coefficients >= 0 of least relative error: of all subsets of columns, the best that has none below 0."""
    weight = 1.0 / np.maximum(seconds, 1e-9)
    best: tuple[float, list[float]] = (math.inf, [0.0] * rows.shape[1])
    for mask in range(1, 1 << rows.shape[1]):
        used = [i for i in range(rows.shape[1]) if mask >> i & 1]
        found, *_ = np.linalg.lstsq(rows[:, used] * weight[:, None], seconds * weight, rcond=None)
        if (found < 0).any():
            continue
        error = float((((rows[:, used] @ found) * weight - 1.0) ** 2).sum())
        if error < best[0]:
            full = np.zeros(rows.shape[1])
            full[used] = found
            best = (error, full.tolist())
    return best[1]


def _metrics(folder: Path) -> list[dict[str, float | int | None]]:
    try:
        return [row for row in read_metrics(folder) if _is_measured(row)]
    except LlamaRLError as error:
        raise PlanError(f"{folder} is no finished run: {error}") from None


def _is_measured(row: Mapping[str, float | int | None]) -> bool:
    """Whether a row has its tick and the times that a fit takes logarithms of."""
    times = (row.get("time/generator_s"), row.get("time/trainer_s"))
    return 0 <= (row.get("step") or 0) < _MOST_TICKS and all(seconds is not None and seconds > 0 for seconds in times)


def _rollouts_of(folder: Path, tick: int) -> Path:
    return folder / "rollouts" / f"tick_{tick:06d}.jsonl"


def _records(file: Path) -> list[dict[str, Any]]:
    """Samples of a tick, with the keys that are looked at here."""
    records = []
    for where, line in read_lines(file):
        record = parse_json(line, where, big_integers=True, lone_surrogates=True)
        if not isinstance(record, dict) or not all(
            isinstance(record.get(k), list) for k in ("tokens", "prompt_tokens")
        ):
            raise PlanError(f"{where} is not a sample with tokens and prompt_tokens")
        records.append(record)
    if not records:
        raise PlanError(f"{file} is empty, expected one sample a line")
    return records


def _tick_lengths(file: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(response, prompt) tokens of each sample of a tick."""
    records = _records(file)
    return (
        np.array([len(record["tokens"]) for record in records], dtype=np.int64),
        np.array([len(record["prompt_tokens"]) for record in records], dtype=np.int64),
    )


def _groups(folder: Path) -> list[tuple[int, ...]]:
    """Response lengths by group, over all ticks."""
    found: dict[tuple[str, int], list[int]] = {}
    for file in sorted((folder / "rollouts").glob("tick_*.jsonl")):
        for record in _records(file):
            found.setdefault((file.name, record["prompt_index"]), []).append(max(1, len(record["tokens"])))
    return [tuple(lengths) for lengths in found.values()]


def _decode_steps(lengths: npt.NDArray[np.int64], config: RunConfig) -> float:
    """Decode steps of the slowest replica: the longest response, or more where slots are fewer than responses."""
    share = math.ceil(len(lengths) / config.generator.dp)
    waves = lengths.sum() / config.generator.dp / config.generator.engine.max_sequences
    return float(max(lengths.max(), waves) if share > config.generator.engine.max_sequences else lengths.max())


# -- the file that keeps it -------------------------------------------------------------------------------------------


def refuse_unlike(config: RunConfig) -> None:
    """Raises PlanError for a recipe with ``generator.replicas``: forecasts of recipes and runs know replicas that are alike."""
    if config.generator.replicas:
        raise PlanError(
            "generator.replicas names replicas of several kinds, and recipes are forecast with alike ones: leave them out here "
            "(dp, tp), or plan for devices of several kinds with llamarl plan --devices 128:h100-sxm,128:a100-80gb"
        )


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
