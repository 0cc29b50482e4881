"""``llamarl plan``: how to split devices, and how long a step will take, before the money is spent."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.cli.forecast_flags import Question, add_devices, add_job, ask, staleness_levels
from llamarl.reading import shipped_or_path

if TYPE_CHECKING:
    from llamarl.forecast.search import Options, Plan

__all__ = ["add_arguments", "run"]

_DESCRIPTION = """\
Tells, for a model, a number of devices and a batch, the best layout of two systems and how long a step takes:

  synchronous    generator and trainer take turns on all devices, each in its own layout; staleness 0
  asynchronous   each on its own devices; the generator may lag that many versions

For each: split, parallel sizes, precision, memory by part with a margin of 10 %, time by part, share of device time
spent waiting, and what binds. The plan marked * has the least staleness within 2% of the fastest. A ~ stands before
every time that rests on a constant nobody measured."""

_EPILOG = """\
examples:
  llamarl plan --model Llama-3.1-70B --devices 256 --hardware h100-sxm --response-tokens 4096:lognormal
  llamarl plan --model path/to/hf-folder --devices 8 --hardware a100 --recipe plan.toml
  llamarl plan --model Llama-3.1-70B --devices 128:h100-sxm,128:a100-80gb --recipe plan.toml
  llamarl plan tiny                              what this machine will make of a recipe, by assumed rates
  llamarl plan runs/tiny                         the same by the constants that a finished run measured
  llamarl plan --model SmolLM2-135M --fit runs/tiny      another job by the constants of that run
  llamarl plan runs/tiny --fit runs/tiny --fit runs/wide     by two runs of this machine, of other threads

response lengths:
  512                            every response has 512 tokens
  4096:lognormal                 mean 4096, sigma 0.6, cut at 4 times the mean
  4096:lognormal:sigma=0.9,limit=16384
A run's folder in place of a recipe, or --fit RUN, gives the lengths that it had.

Times come from rooflines: work / (peak x efficiency) + latency. Peaks and efficiencies, each with its source, are in
src/llamarl/forecast/hardware.toml; docs/forecast.md says what the model leaves out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.set_defaults(run=run)
    parser.add_argument(
        "source",
        nargs="?",
        type=shipped_or_path,
        help="recipe (its name or TOML file), run folder, or Hugging Face config.json / folder",
    )
    job = add_job(parser)
    job.add_argument("--prompts", type=int, help="prompt groups a step (default 128)")
    job.add_argument("--group-size", type=int, help="responses a prompt (default 16)")
    add_devices(parser).add_argument(
        "--devices",
        help="how many (default for this-machine: its cores); or of several kinds: 128:h100-sxm,128:a100-80gb",
    )
    how = parser.add_argument_group("the search")
    how.add_argument("--staleness", help="max_staleness values to plan for (default 0,1,2,4)")
    how.add_argument("--precision", help="generator precisions to try, e.g. bf16,fp8 (default: all the device has)")
    how.add_argument(
        "--max-segments", type=int, help="versions a response may span; 1: no partial rollouts (default 4)"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--recipe", type=Path, metavar="OUT.toml", help="write the recipe of the plan marked *")


def run(args: argparse.Namespace) -> int:
    """Plan and print. Raises PlanError (exit code 2) for a question that makes no sense or has no answer."""
    from llamarl.forecast.recipe import NEEDS_FOLDER, model_folder, refuse_to_replace
    from llamarl.forecast.report import plan_title, plans_text
    from llamarl.forecast.search import over_kinds, recommend, search_all

    if args.recipe:
        refuse_to_replace(args.recipe)
    question = ask(args)
    work, options, levels = question.work, question.options, staleness_levels(args.staleness or "0,1,2,4")
    if len(question.pools) > 1:
        plans = over_kinds(question.pools, work, options, levels)
    else:
        ((hardware, devices),) = question.pools
        plans = search_all(hardware, work, options, devices, levels)
    chosen = recommend(plans)
    if args.recipe:
        _write(args.recipe, chosen, question, options)
    kinds = " + ".join(f"{devices} x {hardware.device.title}" for hardware, devices in question.pools)
    print(plans_text(plans, chosen, work, kinds if len(question.pools) > 1 else ""))
    if work.model.unsupported:
        print(f"  not yet    llamarl train does not run this model: {work.model.unsupported}")
    for line in question.notes:
        print(f"  note       {line}")
    if args.recipe:
        if model_folder(question.model_path) is None:
            print(f"  to do      {NEEDS_FOLDER.format(shape=question.model_path)}")
        print(f"  wrote      {args.recipe}: {plan_title(chosen)}, the plan marked *")
    return 0


def _write(path: Path, plan: Plan, question: Question, options: Options) -> None:
    from llamarl.forecast.recipe import write_recipe

    config: dict[str, Any] = {}
    if question.recipe:
        from llamarl.config import read_settings

        config = read_settings(question.recipe)
    for name in ("dir", "mirror"):  # the new recipe's runs go to folders of their own
        config.get("run", {}).pop(name, None)
    write_recipe(
        path,
        plan,
        question.work,
        model_path=question.model_path,
        oversubscription=options.oversubscription,
        config=config,
        title=f"{plan.devices} x {plan.hardware.device.title}, forecast {plan.step_s:.4g} s a step.",
    )
