"""``llamarl train``: run a recipe, or go on with a run that was stopped."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Runs generator, reward and trainer at once, each in its own process, as a recipe says.

  llamarl train recipes/tiny.toml
  llamarl train recipes/tiny.toml --schedule.max_staleness 0 --run.dir runs/synchronous
  llamarl train recipes/tiny.toml --resume runs/tiny        go on from the last good checkpoint, bit for bit
  llamarl train recipes/tiny.toml --schedule.weights latest in-flight weight updates; decisions go to events.jsonl
  llamarl train --replay runs/tiny                          repeat such a run from its event log, bit for bit
  llamarl train recipes/tiny.toml --dry-run                 print the configuration, graph and placement; run nothing

The run folder holds config.toml, metrics.jsonl, rollouts/, trace.json (ui.perfetto.dev), tensorboard/, checkpoints/ and
model/ (a Hugging Face folder of the final policy)."""


def add_parser(verbs: Any, full: bool = True) -> None:
    parser = verbs.add_parser(
        "train",
        help="train a policy as a recipe says",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipe", nargs="?", help="TOML file; every key can be overridden: --section.key VALUE. Not with --replay"
    )
    parser.add_argument("--resume", metavar="RUN_DIR", help="go on with this run from its last good checkpoint")
    parser.add_argument(
        "--replay",
        metavar="RUN_DIR",
        help="repeat this run bit for bit from its configuration and event log, into RUN_DIR-replay or --run.dir",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and run nothing")
    if full:
        from llamarl.config import field_help

        parser.epilog = "every key of a recipe:\n" + field_help()
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    from llamarl.config import load_config
    from llamarl.controller.preflight import find_missing
    from llamarl.errors import ConfigError

    overrides = list(args.overrides)
    if args.replay:
        return _replay(args, overrides)
    if args.recipe is None:
        taken = [word for word in overrides if word.endswith(".toml")]
        hint = f"; {taken[0].replace('=', ' took ', 1)} for its value" if taken else ""
        raise ConfigError(f"which recipe? llamarl train RECIPE.toml, or --replay RUN_DIR{hint}")
    if args.resume:
        overrides += ["--run.dir", json.dumps(str(args.resume), ensure_ascii=False)]
    config = load_config(args.recipe, overrides, [find_missing])
    # Absolute, because executors in other processes must find the same files.
    from llamarl.controller.training import plan_run, resume_run, start_run

    if args.dry_run:
        if args.resume and not (Path(args.resume).expanduser() / "config.toml").is_file():
            raise ConfigError(f"--resume: {args.resume} holds no run (no config.toml)")
        print(plan_run(config))
        return 0
    if args.resume:
        resume_run(config)
    else:
        start_run(config)
    return 0


def _replay(args: argparse.Namespace, overrides: list[str]) -> int:

    from llamarl.config import load_config
    from llamarl.controller.preflight import find_missing
    from llamarl.controller.replay import replay_folder
    from llamarl.controller.training import plan_run, replay_run
    from llamarl.errors import ConfigError

    for other, name in ((args.recipe, f"the recipe {args.recipe}"), (args.resume, "--resume")):
        if other:
            raise ConfigError(f"--replay takes the run's own configuration and log: leave {name} out")
    source = Path(args.replay).expanduser().resolve()
    if not (source / "config.toml").is_file():
        raise ConfigError(f"--replay: {source} holds no run (no config.toml)")
    into = ["--run.dir", json.dumps(replay_folder(source), ensure_ascii=False)]
    config = load_config(source / "config.toml", [*into, *overrides], [find_missing])
    if args.dry_run:
        print(plan_run(config))
        return 0
    replay_run(config, source)
    return 0
