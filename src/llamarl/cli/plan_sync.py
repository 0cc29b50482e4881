"""``llamarl plan-sync``: what a hand-over of the weights will move, hold and take, from a model's config alone."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
from typing import TYPE_CHECKING, Any

from llamarl.errors import PlanError
from llamarl.reading import user_path
from llamarl.shipped import shipped_or_path

if TYPE_CHECKING:
    from llamarl.config import RunConfig
    from llamarl.planner.sync_forecast import Link

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Tells, for a model and the layouts of trainer and generator, what one hand-over of the weights moves: bytes of each rank
and of each link, number of slice copies, memory that the trainer holds for it, and the least time it takes. No weight is
loaded or downloaded: shapes come from the model's config, cuts from its own tensor-parallel plan.

  trainer    fsdp F x tp T        each parameter cut over T ranks, and what is left over F ranks, row by row
  generator  tp T x R replicas    each of R replicas holds the whole model, cut over T ranks; each pulls its own slices
  pp P on either side             its layers over P stages; cp C of a trainer counts as C times as many rows' ranks

Nothing is gathered: a trainer rank sends each generator rank exactly the part that both hold. Of a recipe with
lora.hand_over = "adapter" the adapters alone."""

_EPILOG = """\
examples:
  llamarl plan-sync Llama-3.1-405B --trainer fsdp=64,tp=8 --generator tp=16,replicas=32 --hardware h100-sxm
  llamarl plan-sync Llama-3.1-405B --trainer pp=14,fsdp=4,tp=8 --generator tp=16,replicas=32
  llamarl plan-sync path/to/config.json --trainer fsdp=4 --generator tp=2,replicas=2 --link-gb-per-s 25
  llamarl plan-sync Qwen3-8B --trainer fsdp=8 --generator replicas=8 --json
  llamarl plan-sync tiny                               layouts, type and staleness as that recipe says

Where tp is above the number of key-value heads, neighbouring ranks hold the same head. Layouts are planned even where llamarl
train refuses them: its own tp must divide the intermediate size too.
The time is a bound: the bytes of the busiest rank over its own link, with the link at the share of its peak that transfers
reach. On one node the link between devices counts, else each device's part of the network. docs/weight_sync.md shows the
plan on an example and how the hand-over works."""

_DTYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "fp32": "float32",
    "float32": "float32",
}  # fmt: skip
_SIDES = {
    "trainer": {"fsdp": "fsdp", "dp": "fsdp", "tp": "tp", "pp": "pp", "cp": "cp"},
    "generator": {"tp": "tp", "pp": "pp", "replicas": "replicas", "replica": "replicas", "dp": "replicas"},
}


def add_parser(subparsers: Any, full: bool = True) -> None:
    parser = subparsers.add_parser(
        "plan-sync",
        help="bytes, memory and least time of a weight hand-over between two layouts",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    if not full:
        return
    parser.add_argument(
        "model",
        type=shipped_or_path,
        help="bundled shape (Llama-3.1-8B, ...), HF folder, config.json, run folder, or recipe (its name or TOML file)",
    )
    parser.add_argument(
        "--trainer", metavar="fsdp=F,tp=T", help="layout of the trainer; also pp, cp (default: fsdp=1,tp=1)"
    )
    parser.add_argument(
        "--generator", metavar="tp=T,replicas=R", help="of the generator; also pp (default: tp=1,replicas=1)"
    )
    parser.add_argument("--dtype", help="type in which weights travel: bf16 (default), fp16, fp32")
    parser.add_argument("--max-staleness", type=int, help="the trainer holds this + 1 versions (default 1)")
    parser.add_argument(
        "--whole-vocabulary",
        action="store_true",
        help="tp leaves embedding and output layer whole (llamarl cuts them, the models' own plans do not)",
    )
    parser.add_argument("--hardware", help="a100-sxm, h100-sxm, h200-sxm, b200-sxm, mi300x: adds the time")
    parser.add_argument("--link-gb-per-s", type=float, help="GB/s of one rank, each way, in place of --hardware")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Plan and print. Raises PlanError (exit code 2) for a question that makes no sense."""
    from llamarl.models.precision import BFLOAT16_PAYS_FROM
    from llamarl.planner.model_spec import find_config
    from llamarl.planner.sync_forecast import SyncQuestion, forecast_sync
    from llamarl.weight_sync.model_layouts import model_parameters

    recipe = _recipe(args.model)
    name, config = find_config(recipe.model.path if recipe is not None else args.model)
    trainer = parse_layout("trainer", args.trainer) if args.trainer is not None else {}
    generator = parse_layout("generator", args.generator) if args.generator is not None else {}
    staleness = 1
    dtype, adapters = "bfloat16", tuple[str, ...]()
    if recipe is not None:
        if recipe.generator.replicas and not {"tp", "replicas"} <= generator.keys():
            raise PlanError("generator.replicas names several kinds: say one of them, --generator tp=T,replicas=R")
        of_recipe = recipe.trainer
        trainer = {"fsdp": of_recipe.fsdp, "cp": of_recipe.cp, "tp": of_recipe.tp, "pp": of_recipe.pp} | trainer
        generator = {
            "tp": recipe.generator.tp,
            "pp": recipe.generator.pp,
            "replicas": recipe.generator.dp * recipe.generator.cp,
        } | generator
        staleness = recipe.schedule.max_staleness
        dtype = recipe.generator.served_dtype
        if dtype == "auto":
            size = model_parameters(config, dtype="float32").num_elements
            dtype = "bfloat16" if size >= BFLOAT16_PAYS_FROM else "float32"
        if recipe.lora.rank and recipe.lora.hand_over == "adapter":
            if args.dtype is not None:
                raise PlanError(
                    f"--dtype {args.dtype}: adapters alone travel (lora.hand_over), in float32: leave it out"
                )
            dtype, adapters = "float32", _adapted(recipe, config)
    if args.max_staleness is not None:
        staleness = args.max_staleness
    if staleness < 0:
        raise PlanError(f"--max-staleness must be >= 0 trainer ticks, got {staleness}")
    question = SyncQuestion(
        model=name,
        trainer_fsdp=trainer.get("fsdp", 1),
        trainer_tp=trainer.get("tp", 1),
        generator_tp=generator.get("tp", 1),
        generator_replicas=generator.get("replicas", 1),
        trainer_cp=trainer.get("cp", 1),
        trainer_pp=trainer.get("pp", 1),
        generator_pp=generator.get("pp", 1),
        versions=staleness + 1,
        dtype=_one_of("--dtype", args.dtype, _DTYPES) if args.dtype is not None else dtype,
        adapter_rank=recipe.lora.rank if recipe is not None and adapters else 0,
        adapter_targets=adapters,
    )
    parameters = model_parameters(config, dtype=question.dtype, cut_vocabulary=not args.whole_vocabulary)
    answer = forecast_sync(parameters, question, _link(args, question))
    print(json.dumps(answer.values(), indent=1) if args.json else answer.text())
    return 0


def parse_layout(side: str, text: str) -> dict[str, int]:
    """``"fsdp=64,tp=8"`` (or ``"fsdp 64 x tp 8"``) as {"fsdp": 64, "tp": 8}.

    Raises:
        PlanError: An axis that the side does not have (the nearest is named), one given twice, or no size.
    """
    known, result = _SIDES[side], dict[str, int]()
    example = "fsdp=64,tp=8" if side == "trainer" else "tp=16,replicas=32"
    for part in re.split(r",|\bx\b", text):
        match = re.fullmatch(r"\s*([A-Za-z_]+)\s*[= ]\s*(\d+)\s*", part)
        if match is None:
            raise PlanError(f"--{side} {text!r}: {part.strip()!r} is no axis with a size; write for example {example}")
        axis, size = match.group(1).lower(), int(match.group(2))
        if axis not in known:
            near = difflib.get_close_matches(axis, known, n=1, cutoff=0.3)
            hint = f"did you mean {known[near[0]]!r}? " if near else ""
            *some, last = dict.fromkeys(known.values())
            raise PlanError(
                f"--{side} {text!r}: the {side} has no axis {axis!r}; {hint}it has "
                f"{', '.join(some)} and {last}, for example {example}"
            )
        if known[axis] in result:
            raise PlanError(f"--{side} {text!r}: {known[axis]} is given twice")
        if size < 1:
            raise PlanError(f"--{side} {text!r}: {axis} must be >= 1, got {size}")
        result[known[axis]] = size
    return result


def _recipe(model: str) -> RunConfig | None:
    path = user_path(model, "the model")
    if (path / "config.toml").is_file():  # a run's folder
        path = path / "config.toml"
    if path.suffix != ".toml":
        return None
    from llamarl.config import load_config

    return load_config(path)


def _adapted(recipe: RunConfig, model: dict[str, Any]) -> tuple[str, ...]:
    """Names of the layers that have an adapter, of a model with this ``config.json``.

    Raises:
        PlanError: The model has no such layer.
    """
    from llamarl.models.decoder import adaptable_layers
    from llamarl.weight_sync.model_layouts import described

    layers = adaptable_layers(described(model))
    if unknown := sorted(set(recipe.lora.targets) - set(layers)):
        raise PlanError(f"lora.targets: {', '.join(unknown)} may have no adapter, but {', '.join(layers)} may")
    if not layers:
        raise PlanError(f"lora.rank is {recipe.lora.rank}, but the model has no linear layer inside: set it to 0")
    return tuple(recipe.lora.targets) or layers


def _one_of(flag: str, value: str, known: dict[str, str]) -> str:
    if value.lower() in known:
        return known[value.lower()]
    near = difflib.get_close_matches(value.lower(), known, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise PlanError(f"{flag} {value!r} is unknown; {hint}known are {', '.join(known)}")


def _link(args: argparse.Namespace, question: Any) -> Link | None:
    from llamarl.planner.sync_forecast import Link

    if args.link_gb_per_s is not None:
        if args.hardware is not None:
            raise PlanError("give --hardware or --link-gb-per-s, not both")
        if not 0 < args.link_gb_per_s < math.inf:
            raise PlanError(f"--link-gb-per-s must be above 0, got {args.link_gb_per_s}")
        return Link(bytes_per_s=args.link_gb_per_s * 1e9, latency_s=0.0, origin="--link-gb-per-s")
    if args.hardware is None:
        return None
    from llamarl.planner.hardware import find_hardware

    hardware = find_hardware(args.hardware)
    ranks = question.num_ranks("trainer") + question.num_ranks("generator")
    device, efficiency = hardware.device, hardware.efficiency
    one_node = ranks <= device.devices_per_node
    peak = device.intra_node_bytes_per_s if one_node else device.inter_node_bytes_per_s
    where = "the link between devices of one node" if one_node else "a device's part of the network"
    return Link(
        bytes_per_s=peak * efficiency.link,
        latency_s=efficiency.intra_node_latency_s if one_node else efficiency.inter_node_latency_s,
        origin=f"{where}, {device.title}: {peak / 1e9:g} GB/s x {efficiency.link:g}",
    )
