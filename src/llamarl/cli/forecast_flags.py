"""What ``llamarl plan`` and ``llamarl simulate`` both ask: the flags of the job and of the devices,
and what they mean."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.errors import PlanError
from llamarl.reading import user_path
from llamarl.settings.trainer import TWO_MOMENTS

if TYPE_CHECKING:
    from llamarl.config import RunConfig
    from llamarl.forecast.calibrate import Fit
    from llamarl.forecast.hardware import Hardware
    from llamarl.forecast.search import Options, Workload

__all__ = ["Question", "add_devices", "add_job", "ask", "options_of", "staleness_levels", "threads_of"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a command line asks."""

    work: Workload
    options: Options
    pools: list[tuple[Hardware, int]]
    """Devices of each kind."""
    model_path: str
    recipe: Path | None = None
    """That poses it, if one does."""
    config: RunConfig | None = None
    """That recipe, with its defaults and the command line's changes."""
    fits: list[Fit] = dataclasses.field(default_factory=list)
    """What runs measured of the devices."""
    threads: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"generator": 1, "trainer": 1})
    """CPU threads of a rank, as a run of the recipe would pin them."""
    notes: list[str] = dataclasses.field(default_factory=list)


def add_job(parser: argparse.ArgumentParser) -> Any:
    """Add the flags of the work of a step that no key of a recipe says; returns the group, for a verb's own ones."""
    job = parser.add_argument_group("the job (overrides what a recipe or run says)")
    job.add_argument("--model", help="bundled shape (Llama-3.1-8B, Qwen3-30B-A3B, ...), HF folder, or config.json")
    job.add_argument(
        "--prompt-tokens", type=int, help="tokens of a prompt (default: a run's; of a recipe 64, else 256)"
    )
    job.add_argument("--response-tokens", metavar="MEAN[:KIND[:k=v,...]]", help="see below (default 1024:lognormal)")
    return job


def add_devices(parser: argparse.ArgumentParser) -> Any:
    """Add the flags of the devices but for their number; returns the group."""
    devices = parser.add_argument_group("the devices")
    devices.add_argument(
        "--hardware", help="a100-sxm, a100-sxm-40gb, h100-sxm, h100-pcie, h100-nvl, h200-sxm, b200-sxm, b300-sxm, gb200-nvl72, "
        "gb300-nvl72, l40s, rtx-4090, rtx-5090, mi300x, mi325x, mi355x, this-machine (default)",
    )  # fmt: skip
    devices.add_argument(
        "--fit", type=Path, action="append", default=[], metavar="RUN",
        help="finished run that measured these devices; on CPU cores several, of other threads",
    )  # fmt: skip
    return devices


def staleness_levels(text: str) -> list[int]:
    """``--staleness 0,1,2``, ascending."""
    try:
        levels = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise PlanError(f"--staleness {text!r}: expected whole numbers joined by commas, for example 0,1,2,4") from None
    if levels[0] < 0:
        raise PlanError(f"--staleness must be >= 0 trainer ticks, got {levels[0]}; 0 is synchronous")
    return levels


def ask(args: argparse.Namespace, overrides: Sequence[str] = ()) -> Question:
    """The question that a source and flags pose.

    Raises:
        PlanError: It makes no sense.
    """
    from llamarl.forecast.lengths import parse_lengths
    from llamarl.forecast.model import find_model
    from llamarl.forecast.recipe import left_out
    from llamarl.forecast.search import Workload

    recipe, run_dir, config = _read_source(args, overrides)
    if config and not config.samples:
        raise PlanError(f"{args.source} trains on what is there already: a forecast knows jobs with a generator alone")
    model_path = args.model or (config.model.path if config else args.source)
    if model_path is None:
        raise PlanError("no model: give --model NAME_OR_FOLDER, a recipe, a run folder or a config.json")
    notes: list[str] = []
    pools = _pools(args, counted=config is None or args.verb == "plan")
    threads = threads_of(config) if config and pools[0][0].is_cpu else {"generator": 1, "trainer": 1}
    model = find_model(model_path)
    fits = _fits(args, run_dir, pools[0][0], model.name) if len(pools) == 1 else []
    if fits:
        pools = [(_fitted_to(fits, pools[0][0]), pools[0][1])]
        notes += [f"fitted: {fit.text()}" for fit in fits]
    lengths, prompt_tokens = _lengths(args, config, run_dir, notes)
    if config and (missing := left_out(config)):
        notes.append(f"not counted: {', '.join(missing)}")

    def pick(given: int | None, recipes: int | None, default: int) -> int:
        return given if given is not None else recipes if recipes is not None else default

    work = Workload(
        model=model,
        response=parse_lengths(args.response_tokens) if args.response_tokens else lengths,
        prompts_per_step=pick(args.prompts, config.schedule.prompts_per_step if config else None, 128),
        group_size=pick(args.group_size, config.generator.group_size if config else None, 16),
        prompt_tokens=pick(args.prompt_tokens, prompt_tokens, 64 if config else 256),
        reward_s=fits[0].reward_s if fits and run_dir else 0.0,
        moment_bytes=config.optimizer.moment_bytes if config else TWO_MOMENTS,
    )
    segments = pick(args.max_segments, config.generator.max_segments if config else None, 4)
    options = options_of(args, segments)
    if fits and not args.precision:
        options = dataclasses.replace(options, precisions=(fits[0].precision,))  # no other was measured
    if pools[0][0].is_cpu:
        options = dataclasses.replace(options, measured=tuple(fits))
    return Question(
        work=work,
        options=options,
        pools=pools,
        model_path=model_path,
        recipe=recipe,
        config=config,
        fits=fits,
        threads=threads,
        notes=notes,
    )


def options_of(args: argparse.Namespace, max_segments: int) -> Options:
    """What a search may use."""
    from llamarl.forecast.hardware import BYTES_PER_WEIGHT
    from llamarl.forecast.search import Options

    precisions = tuple(p.strip().lower() for p in args.precision.split(",")) if args.precision else ()
    if unknown := [p for p in precisions if p not in BYTES_PER_WEIGHT]:
        raise PlanError(f"--precision: unknown {', '.join(unknown)}; known are {', '.join(BYTES_PER_WEIGHT)}")
    if max_segments < 1:
        raise PlanError(f"--max-segments must be at least 1, got {max_segments}")
    return Options(precisions=precisions, max_segments=max_segments, oversubscription=float(min(2, max_segments)))


def _read_source(
    args: argparse.Namespace, overrides: Sequence[str]
) -> tuple[Path | None, Path | None, RunConfig | None]:
    """(recipe file, run folder, recipe with defaults) of the positional argument; None where it has none."""
    if not args.source:
        return None, None, None
    path = user_path(args.source, "the source")
    run_dir = path if (path / "config.toml").is_file() else None
    recipe = path / "config.toml" if run_dir else path
    if recipe.suffix != ".toml":
        return None, None, None
    from llamarl.config import load_config

    return recipe, run_dir, load_config(recipe, list(overrides))


def _pools(args: argparse.Namespace, *, counted: bool) -> list[tuple[Hardware, int]]:
    """``--hardware`` and ``--devices``.

    Args:
        counted: Named hardware needs a number; False: a recipe's layout says it.
    """
    from llamarl.forecast.hardware import find_hardware

    text = args.devices or ""
    if ":" in text:
        if given := [flag for flag, value in (("--hardware", args.hardware), ("--fit", args.fit)) if value]:
            raise PlanError(f"{', '.join(given)}: --devices names the kinds")
        pairs = [part.split(":", 1) for part in text.split(",")]
        if not all(len(pair) == 2 and pair[0].isdecimal() and int(pair[0]) for pair in pairs):
            raise PlanError(f"--devices {text!r}: expected numbers of kinds, such as 128:h100-sxm,128:a100-sxm")
        pools = [(find_hardware(kind), int(count)) for count, kind in pairs]
        names = [hardware.device.name for hardware, _ in pools]
        if len(set(names)) < len(names) or "this-machine" in names:
            raise PlanError(f"--devices {text!r}: name each kind once, and none of them this machine")
        return pools
    hardware = find_hardware(args.hardware or "this-machine")
    if text and not (text.isdecimal() and int(text)):
        raise PlanError(
            f"--devices {text!r}: expected a number of at least 1, or numbers of kinds: 128:h100-sxm,128:a100-sxm"
        )
    if counted and not text and not hardware.is_cpu:
        raise PlanError(f"how many {hardware.device.name}? give --devices N, for example --devices 8")
    return [(hardware, int(text) if text else hardware.device.devices_per_node)]


def threads_of(config: RunConfig) -> dict[str, int]:
    """CPU threads of each role's ranks as a run on this machine would pin them."""
    from llamarl.controller.graph import llamarl_graph
    from llamarl.roles import ROLES
    from llamarl.runtime.placement import here, place

    sections = {role.section: role.settings(config) for role in ROLES.values() if role.section}
    on_cpu = dataclasses.replace(
        config, **{name: dataclasses.replace(section, device="cpu") for name, section in sections.items()}
    )
    machine = here(cores=config.run.cores or None, cuda_devices=0)
    placed = place(llamarl_graph(on_cpu).executors, [machine])
    return {spec.name: spec.threads for spec in placed.executors if spec.name in ("generator", "trainer")}


def _fits(args: argparse.Namespace, run_dir: Path | None, hardware: Hardware, model: str) -> list[Fit]:
    """What finished runs measured of ``hardware``, as estimates where they ran another model; empty: none was named."""
    from llamarl.config import load_config
    from llamarl.forecast.calibrate import fit_run

    found: list[Fit] = []
    for named in args.fit or ([run_dir] if run_dir and (run_dir / "metrics.jsonl").is_file() else []):
        folder = user_path(str(named), "--fit")
        if not (folder / "config.toml").is_file():
            raise PlanError(f"--fit {folder}: is no run's folder, which has a config.toml")
        config = load_config(folder / "config.toml")
        on_gpu = config.trainer.device == "cuda"
        if on_gpu == hardware.is_cpu:
            how_many = " --devices N" if args.verb == "plan" else ""
            what = f"GPUs: say which, --hardware h100-sxm{how_many}" if on_gpu else "CPU cores: leave --hardware out"
            if args.fit or not args.hardware:  # else what is asked for is another machine than the run's
                raise PlanError(f"{folder} was made on {what}")
            return []
        threads = threads_of(config) if hardware.is_cpu else {"generator": 1, "trainer": 1}
        fit = fit_run(config, folder, hardware, threads)
        if fit.model != model:
            rough = fit.hardware.with_efficiency(estimates=("generator_scale", "trainer_scale"))
            fit = dataclasses.replace(fit, hardware=rough)
        found.append(fit)
    if len(found) > 1 and (on_gpu or len({fit.precision for fit in found}) > 1):
        raise PlanError("--fit: several runs may differ in threads on CPU cores, and in nothing else")
    return found


def _fitted_to(fits: Sequence[Fit], here: Hardware) -> Hardware:
    """The devices as the first run measured them, named after all runs."""
    first = fits[0].hardware
    title = first.device.title if len(fits) == 1 else f"{here.device.title}, fitted to {len(fits)} runs"
    return dataclasses.replace(first, device=dataclasses.replace(first.device, title=title))


def _lengths(
    args: argparse.Namespace, config: RunConfig | None, run_dir: Path | None, notes: list[str]
) -> tuple[Any, int | None]:
    """Response lengths and mean prompt tokens where the command line does not say them."""
    from llamarl.forecast.calibrate import lengths_of_run
    from llamarl.forecast.lengths import constant, parse_lengths

    if config is None:
        return parse_lengths("1024:lognormal"), None
    if run_dir and (found := lengths_of_run(run_dir)):
        notes.append(f"lengths measured in {run_dir / 'rollouts'}")
        return found
    limit = config.generator.sampling.max_new_tokens
    if not args.response_tokens:
        notes.append(
            f"every response is taken to reach max_new_tokens ({limit}); --response-tokens or a run says better"
        )
    return constant(limit), None
