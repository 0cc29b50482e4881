"""What ``llamarl plan`` and ``llamarl simulate`` ask alike: the flags of the job and of the devices, and what they mean."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.cli.plan_hosts import is_inventory
from llamarl.errors import PlanError

if TYPE_CHECKING:
    from llamarl.planner.choices import Options, Workload
    from llamarl.planner.hardware import Hardware
    from llamarl.planner.recipe import RecipeQuestion

__all__ = [
    "add_devices",
    "add_job",
    "device_count",
    "devices_asked",
    "hardware_of",
    "options_of",
    "refuse_flags",
    "reward_seconds",
    "staleness_levels",
    "workload_of",
]


def add_job(parser: argparse.ArgumentParser, of: str) -> Any:
    """Flags of the work of a step; returns the group, for a verb's own ones.

    Args:
        of: What the flags override, in words.
    """
    job = parser.add_argument_group(f"the job (overrides what {of} says)")
    job.add_argument("--model", help="bundled shape (Llama-3.1-8B, Qwen3-30B-A3B, ...), HF folder, or config.json")
    job.add_argument("--prompts", type=int, help="prompt groups a step (default 128)")
    job.add_argument("--group-size", type=int, help="responses a prompt (default 16)")
    job.add_argument("--prompt-tokens", type=int, help="tokens of a prompt (default 256)")
    job.add_argument("--response-tokens", metavar="MEAN[:KIND[:k=v,...]]", help="see below (default 1024:lognormal)")
    job.add_argument("--reward-s", type=float, help="seconds the rewards of a step take (default 0)")
    return job


def add_devices(parser: argparse.ArgumentParser, *, kinds: bool = False) -> Any:
    """Flags of the devices; returns the group.

    Args:
        kinds: ``--devices`` may name several kinds.
    """
    devices = parser.add_argument_group("the devices")
    devices.add_argument("--hardware", help="a100-sxm, h100-sxm, h200-sxm, b200-sxm, mi300x, this-machine (default)")
    many = (
        '; or of several kinds: 128:h100-sxm,128:a100-80gb; or a file with a table [hosts], a = "8:h100-sxm"; or inventory: what '
        "the workers on --hosts tell"
        if kinds
        else ""
    )
    devices.add_argument(
        "--devices",
        type=devices_asked if kinds else int,
        help=f"how many (default for this-machine: its cores or GPUs){many}",
    )
    devices.add_argument(
        "--calibration", type=Path, help="calibration file (default ~/.cache/llamarl/calibration.json)"
    )
    return devices


def hardware_of(name: str | None, calibration: Path | None) -> Hardware:
    """Named hardware; for this machine a calibration that was measured here, where one is kept, or the one asked for.

    Raises:
        PlanError: The name is unknown, or the calibration asked for is not there.
    """
    from llamarl.planner.calibration_cache import calibration_path, load_calibration, measured_elsewhere
    from llamarl.planner.hardware import find_hardware

    if name and find_hardware(name).device.name != "this-machine":
        if calibration:
            raise PlanError(
                f"--calibration {calibration} is of a machine that was measured: leave --hardware {name} out"
            )
        return find_hardware(name)
    path = calibration or calibration_path()
    if not calibration and not path.is_file():
        return find_hardware("this-machine")
    if not calibration and (note := measured_elsewhere(path, "the calibration")):
        to_stderr(note)
        return find_hardware("this-machine")
    return load_calibration(path)


def to_stderr(line: str) -> None:
    """A word beside the answer, at once."""
    print(line, file=sys.stderr, flush=True)


def device_count(given: int | None, hardware: Hardware) -> int:
    """``--devices``, or all of this machine's.

    Raises:
        PlanError: Named hardware without a number.
    """
    if given is not None:
        return given
    if hardware.device.name != "this-machine":
        raise PlanError(f"how many {hardware.device.name}? give --devices N, for example --devices 8")
    return hardware.device.devices_per_node


def devices_asked(text: str) -> int | str:
    """Of ``--devices``: a number, or numbers of named kinds (``parse_pools``), or where to learn them (``plan_hosts``)."""
    if ":" in text or is_inventory(text):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor numbers of kinds, such as 128:h100-sxm,128:a100-sxm"
        ) from None


def refuse_flags(args: argparse.Namespace, *flags: str, because: str) -> None:
    """For what would otherwise be ignored.

    Raises:
        PlanError: One of the flags was given; it names them.
    """
    if given := [flag for flag in flags if getattr(args, flag.removeprefix("--").replace("-", "_")) is not None]:
        raise PlanError(f"{', '.join(given)}: {because}")


def reward_seconds(args: argparse.Namespace) -> float | None:
    """``--reward-s``; None: not given.

    Raises:
        PlanError: No time.
    """
    given: float | None = args.reward_s
    if given is not None and not 0 <= given < math.inf:
        raise PlanError(f"--reward-s: reward_s must be >= 0 seconds, got {given}")
    return given


def workload_of(
    args: argparse.Namespace, model: str, question: RecipeQuestion | None, *, reference_model: bool = False
) -> Workload:
    """The work of a step: what the flags of ``add_job`` say, else the recipe, else the defaults."""
    from llamarl.planner.choices import Workload
    from llamarl.planner.lengths import parse_lengths
    from llamarl.planner.model_spec import find_model

    if args.response_tokens:
        response = parse_lengths(args.response_tokens)
    else:
        response = question.response if question else parse_lengths("1024:lognormal")

    def pick(given: int | None, recipe: int | None, default: int) -> int:
        return given if given is not None else recipe if recipe is not None else default

    return Workload(
        model=find_model(model),
        response=response,
        prompts_per_step=pick(args.prompts, question.prompts_per_step if question else None, 128),
        group_size=pick(args.group_size, question.group_size if question else None, 16),
        prompt_tokens=pick(args.prompt_tokens, question.prompt_tokens if question else None, 64 if question else 256),
        reward_s=reward_seconds(args) or 0.0,
        reference_model=reference_model,
    )


def options_of(
    precision: str | None,
    max_segments: int,
    *,
    max_pipeline: int = 1,
    runnable: bool = True,
    share_prompts: bool | None = None,
) -> Options:
    """What a search may use.

    Args:
        share_prompts: ``trainer.share_prompts`` of the recipe; None: as is faster.
        precision: ``--precision``: generator precisions joined by commas; None: all the device has.
        runnable: Layouts that llamarl runs; False: those of a plan that was made where none of them fits.
    """
    from llamarl.planner.choices import Options
    from llamarl.planner.hardware import BYTES_PER_WEIGHT

    precisions = tuple(p.strip().lower() for p in precision.split(",")) if precision else ()
    if unknown := [p for p in precisions if p not in BYTES_PER_WEIGHT]:
        raise PlanError(f"--precision: unknown {', '.join(unknown)}; known are {', '.join(BYTES_PER_WEIGHT)}")
    if max_segments < 1:
        raise PlanError(f"--max-segments must be at least 1 (no partial rollouts), got {max_segments}")
    if max_pipeline < 1:
        raise PlanError(f"--max-pipeline must be at least 1, got {max_pipeline}")
    return Options(
        precisions=precisions,
        max_segments=max_segments,
        oversubscription=float(min(2, max_segments)),
        max_pipeline=max_pipeline,
        runnable=runnable,
        share_prompts=share_prompts,
        common_max_pipeline=max_pipeline,
    )


def staleness_levels(text: str) -> list[int]:
    """``--staleness 0,1,2``, ascending."""
    try:
        levels = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise PlanError(f"--staleness {text!r}: expected whole numbers joined by commas, for example 0,1,2,4") from None
    if levels[0] < 0:
        raise PlanError(f"--staleness must be >= 0 trainer ticks, got {levels[0]}; 0 is synchronous")
    return levels
