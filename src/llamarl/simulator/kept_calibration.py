"""What a recipe's calibration holds, and the file that keeps it for later plans."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamarl.config import RunConfig, to_plain
from llamarl.controller.job import llamarl_graph
from llamarl.errors import PlanError
from llamarl.planner.kept_hardware import calibration_path, machine_here, measured_elsewhere, write_whole
from llamarl.planner.lengths import grouped
from llamarl.runtime.placement import available_cores, place
from llamarl.simulator.costs import LinearGeneratorCost, TrainerCost

__all__ = [
    "RecipeCalibration",
    "RoleCosts",
    "finals_key",
    "find_calibration",
    "keep_calibration",
    "kept_calibration",
    "recipe_calibration_path",
    "settled_threads",
]

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class RoleCosts:
    """A role's constants at one thread count (and precision), and how far they are from what was measured."""

    cost: LinearGeneratorCost | TrainerCost
    jitter: float
    """Standard deviation of the logarithm of (measured tick / fitted tick)."""
    ticks: int


@dataclass(frozen=True, kw_only=True)
class RecipeCalibration:
    """What decides a recipe's step on this machine."""

    cores: int
    generators: Mapping[str, RoleCosts]
    """``THREADS:QUANTIZATION`` -> decode and prefill as straight lines, and the tick's overhead."""
    trainers: Mapping[str, RoleCosts]
    """``THREADS`` -> a tick's overhead and seconds a batch token: shared prompts and skipped samples are in it."""
    reward_s: float
    round_s: float
    """Seconds of a synchronous round that belong to no executor's tick: messages and hand-over."""
    slowdowns: Mapping[str, Mapping[str, float]]
    """``GENERATOR_THREADS+TRAINER_THREADS`` -> role -> how many times as long it takes beside the other."""
    groups: tuple[tuple[int, ...], ...]
    """Response lengths, group by group."""
    prompt_tokens: int
    finals: Mapping[str, float] = field(default_factory=dict)
    """Name of a split -> seconds a step, of the splits that ran against each other (``run_finals.py``)."""
    finals_of: str = ""
    """``finals_key`` of the recipe whose splits these are."""

    def describe(self) -> list[str]:
        """For people, one line a constant."""
        lengths = grouped(self.groups)
        lines = [f"responses  {lengths.label}; prompts {self.prompt_tokens} tokens"]
        for name, found in self.generators.items():
            g = found.cost
            assert isinstance(g, LinearGeneratorCost)
            lines.append(
                f"generator  threads:precision {name}: tick {g.tick_s * 1e3:.1f} ms, decode step {g.step_s * 1e3:.3g} ms + "
                f"{g.sequence_s * 1e6:.3g} us a sequence + {g.cache_token_s * 1e9:.3g} ns a cached token, prompt token "
                f"{g.prefill_token_s * 1e6:.3g} us ({_differ(found.jitter)})"
            )
        for name, found in self.trainers.items():
            t = found.cost
            assert isinstance(t, TrainerCost)
            lines.append(
                f"trainer    threads {name}: tick {t.tick_s * 1e3:.1f} ms + {t.token_s * 1e6:.3g} us a token of the batch "
                f"({_differ(found.jitter)})"
            )
        lines.append(
            f"reward     {self.reward_s * 1e3:.1f} ms a tick; messages and hand-over {self.round_s * 1e3:.1f} ms"
        )
        for name, factors in self.slowdowns.items():
            both = ", ".join(f"{role} takes {factor:.2f} times as long" for role, factor in factors.items())
            lines.append(f"together   threads {name}: {both}")
        return lines


_NOISE = 0.5


def _differ(jitter: float) -> str:
    asked = ": was the machine idle? calibrate again" if jitter > _NOISE else ""
    return f"ticks differ by {jitter:.1%}{asked}"


def settled_threads(config: RunConfig) -> dict[str, int]:
    """CPU threads of each role as a run on this machine would pin them."""
    roles = ("generator", "trainer", "evaluation", "reference", "critic")
    on_cpu = dataclasses.replace(
        config, **{role: dataclasses.replace(getattr(config, role), device="cpu") for role in roles}
    )
    settled = place(llamarl_graph(on_cpu).executors, cores=config.run.cores or None, cuda_devices=0)
    return {spec.name: spec.threads for spec in settled.executors}


def recipe_calibration_path(config: RunConfig, kept: Path | None = None) -> Path:
    """Where the calibration of a recipe lies: beside the machine's, by what decides its costs.

    Threads, cores and devices count as a run here would settle them, so that the configuration a run saved has its recipe's.
    """
    base = kept or calibration_path()
    return base.with_name(f"{base.stem}-recipe-{_digest(_decides(config))}.json")


def finals_key(config: RunConfig) -> str:
    """Tells recipes apart whose splits take another time when they run against each other."""
    raw = to_plain(config)
    schedule = {key: value for key, value in raw["schedule"].items() if key not in ("max_staleness", "colocated")}
    return _digest({**_decides(config), "schedule": schedule, "replicas": config.generator.dp})


def _decides(config: RunConfig) -> dict[str, Any]:
    """What decides the costs of a recipe's roles."""
    raw = to_plain(config)
    other = {"device", "threads", "max_segments", "oversubscription", "dp"}
    decides = ("generator", "trainer", "reference", "critic", "dynamic_sampling", "lora")
    return {
        **{section: {k: v for k, v in raw[section].items() if k not in other} for section in decides},
        "model": raw["model"], "task": raw["task"], "data": raw["data"], "algorithm": raw["algorithm"],
        "cores": config.run.cores or available_cores(), "threads": settled_threads(config),
        "runtime": raw["run"]["runtime"], "prompts_per_step": raw["schedule"]["prompts_per_step"],
        "colocated": raw["schedule"]["colocated"],
    }  # fmt: skip


def _digest(what: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


def keep_calibration(path: Path, found: RecipeCalibration) -> None:
    """Write it whole or not at all.

    Raises:
        PlanError: The file cannot be written.
    """
    write_whole(path, json.dumps({"format": _FORMAT, "machine": machine_here(), **dataclasses.asdict(found)}))


def find_calibration(
    configs: Sequence[RunConfig], kept: Path | None = None, *, log: Callable[[str], None]
) -> RecipeCalibration | None:
    """What was measured for the first of the recipes that has a calibration; None: none has one.

    Args:
        kept: The machine's calibration file, beside which the recipe's lies. None: the default one, and what was measured on
            another machine is passed over.
        log: Gets a note of every file that was passed over.

    Raises:
        PlanError: The file is not a calibration of this version.
    """
    for path in dict.fromkeys(recipe_calibration_path(config, kept) for config in configs):
        if not path.is_file():
            continue
        if kept is None and (note := measured_elsewhere(path, "the recipe's calibration")):
            log(note)
            continue
        return kept_calibration(path)
    return None


def kept_calibration(path: Path) -> RecipeCalibration:
    """What ``keep_calibration`` wrote.

    Raises:
        PlanError: No such file, or it is not a calibration of this version.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.pop("format") != _FORMAT:
            raise PlanError(f"calibration file {path} is of another version: calibrate again")
        record.pop("machine", None)
        kinds: dict[str, Callable[..., LinearGeneratorCost | TrainerCost]] = {
            "generators": LinearGeneratorCost,
            "trainers": TrainerCost,
        }
        for role, kind in kinds.items():
            record[role] = {
                key: RoleCosts(cost=kind(**value["cost"]), jitter=value["jitter"], ticks=value["ticks"])
                for key, value in record[role].items()
            }
        record["groups"] = tuple(tuple(group) for group in record["groups"])
        return RecipeCalibration(**record)
    except FileNotFoundError:
        raise PlanError(
            f"calibration file {path} does not exist: make it with llamarl plan RECIPE --calibrate"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"calibration file {path} is not usable ({error!r}): calibrate again") from error
