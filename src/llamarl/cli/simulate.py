"""``llamarl simulate``: run a job's schedule on a virtual clock, with lengths, times and failures that vary."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from llamarl.cli.forecast_flags import add_devices, add_job, ask, staleness_levels
from llamarl.errors import PlanError
from llamarl.reading import shipped_or_path

if TYPE_CHECKING:
    from llamarl.forecast.hardware import Hardware
    from llamarl.forecast.scenario import Scenario

__all__ = ["add_arguments", "run"]

_DESCRIPTION = """\
Runs the real controller and the real dataflow graph on a virtual clock, with executors that only take time, and tells for
each staleness: time a step (beside the theory's), idle shares, tokens/s, staleness of the trained tokens.

What is simulated:
  recipe.toml            the recipe's own layout by rooflines, on --hardware or on this machine; --section.key VALUE as in
                         llamarl train changes a setting
  a run's folder         the same with the constants, lengths and jitter that the run measured"""

_EPILOG = """\
examples:
  llamarl simulate tiny --staleness 0,1,2 --trainer.fsdp 2
  llamarl simulate runs/tiny --staleness 0,1,2
  llamarl simulate plan.toml --model Llama-3.1-70B --hardware h100 --response-tokens 4096:lognormal \\
      --prompt-tokens 256 --jitter 0.1 --mtbf-hours 50000     plan.toml: of llamarl plan --recipe

Response lengths as in llamarl plan --help. docs/forecast.md says what the model leaves out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    # what is asked of plan alone: a recipe says its own
    of_plan = dict.fromkeys(("devices", "prompts", "group_size", "precision", "max_segments"))
    parser.set_defaults(run=run, overrides=(), **of_plan)
    parser.add_argument("source", nargs="?", type=shipped_or_path, help="recipe (its name or TOML file) or run folder")
    add_job(parser)
    add_devices(parser)
    how = parser.add_argument_group("the schedule")
    how.add_argument("--staleness", help="max_staleness values (default: the recipe's or run's)")
    how.add_argument("--ticks", type=int, help="trainer ticks (default: the recipe's)")
    how.add_argument("--seed", type=int, help="of lengths, jitter and failures (default: the recipe's, else 0)")
    vary = parser.add_argument_group("what varies besides lengths")
    vary.add_argument(
        "--jitter",
        metavar="GENERATOR[,TRAINER]",
        help="log-normal sigma of each tick's time (default: as measured, else 0)",
    )
    vary.add_argument("--mtbf-hours", type=float, help="mean time between failures of one device; the job restarts")
    vary.add_argument("--restart-s", type=float, help="from a failure to the next tick (default 300)")
    vary.add_argument("--checkpoint-every", type=int, help="ticks between checkpoints (default 20)")


def run(args: argparse.Namespace) -> int:
    """Simulate and print. Raises PlanError or ConfigError (exit code 2) for a question that makes no sense."""
    from llamarl.forecast.report import results_text
    from llamarl.forecast.simulate import simulate

    found, hardware, notes = _scenarios(args)
    scenarios = [_varied(scenario, args) for scenario in found]
    results = [simulate(scenario) for scenario in scenarios]
    print(results_text(results, hardware))
    for line in notes:
        print(f"note: {line}")
    return 0


def _scenarios(args: argparse.Namespace) -> tuple[list[Scenario], Hardware, list[str]]:
    """What is simulated at each staleness, the hardware that its times rest on, and what to say of it."""
    from llamarl.forecast.scenario import scenario_from_recipe

    question = ask(args, args.overrides) if args.source else None
    if question is None or (config := question.config) is None:
        raise PlanError("nothing to simulate: give a recipe or a run folder (llamarl plan --recipe writes one)")
    ((hardware, _),) = question.pools
    levels = staleness_levels(args.staleness or str(config.schedule.max_staleness))
    schedules = [dataclasses.replace(config.schedule, max_staleness=level) for level in levels]
    changed = [dataclasses.replace(config, schedule=schedule) for schedule in schedules]
    if len(question.fits) > 1:
        raise PlanError("--fit: one run measures what is simulated; plan compares several")
    fit = question.fits[0] if question.fits else None
    found = [scenario_from_recipe(one, question.work, hardware, question.threads, fit) for one in changed]
    asked, played = question.work.prompts_per_step, found[0].prompts_per_step
    if played != asked:
        each = played // found[0].replicas
        question.notes.append(f"{played} prompts a tick where {asked} are asked for: each replica is given {each}")
    return found, hardware, question.notes


def _varied(scenario: Scenario, args: argparse.Namespace) -> Scenario:
    """The scenario with ticks, seed and everything that varies, as the command line says."""
    from llamarl.forecast.scenario import Failures, Variation

    own = scenario.variation
    jitters = (own.generator_jitter, own.trainer_jitter) if args.jitter is None else _jitters(args.jitter)
    changes: dict[str, Any] = {
        "seed": scenario.seed if args.seed is None else args.seed,
        "variation": Variation(generator_jitter=jitters[0], trainer_jitter=jitters[1]),
        "num_ticks": scenario.num_ticks if args.ticks is None else args.ticks,
    }
    of_failures = {"restart_s": args.restart_s, "checkpoint_every": args.checkpoint_every}
    given = {name: value for name, value in of_failures.items() if value is not None}
    if args.mtbf_hours is not None:
        changes["failures"] = Failures(device_mtbf_hours=args.mtbf_hours, **given)
    elif given:
        raise PlanError("--restart-s and --checkpoint-every tell of failures: give --mtbf-hours too")
    return dataclasses.replace(scenario, **changes)


def _jitters(text: str) -> tuple[float, float]:
    """Of the generator, and of the trainer where a second number is given."""
    try:
        generator, _, trainer = text.partition(",")
        return float(generator), float(trainer or 0.0)
    except ValueError:
        raise PlanError(f"--jitter {text!r}: expected 1 to 2 numbers joined by ','") from None
