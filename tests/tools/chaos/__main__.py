"""``python -m tools.chaos``: a recipe twice, once left alone and once under random deaths and hangs; do the bits agree?"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llamarl.config import load_config
from llamarl.controller.preflight import find_missing, find_without_effect
from llamarl.errors import ConfigError, LlamaRLError
from llamarl.roles import present_roles
from tools.chaos.trial import Trial, try_recipe

_DESCRIPTION = """\
Runs a recipe twice on this machine: once undisturbed, once while its processes are killed (SIGKILL) and stopped (SIGSTOP) at random
moments: ranks, environments, the controller; two at a time now and then. What dies is brought up again by the run itself, a controller
by --resume. Then the two are compared: weights, rollouts and metrics (times apart), byte for byte.

  python -m tools.chaos tiny --kills 10                     ten deaths in one run of the bundled recipe
  python -m tools.chaos my.toml --kills 20 --hangs 5        hangs too: each is taken for dead at deadlines.step_s
  python -m tools.chaos tiny --only generator,reward        nobody else is struck
  python -m tools.chaos tiny --run.num_ticks 12 --seed 7    keys of the recipe as for llamarl train; other moments

Exit status 0: every bit is the undisturbed run's, and nothing of the runs is left. 1: not so, or nobody was struck. 2: bad input. A recipe whose rewards are random, or that
reads the clock, differs from itself undisturbed: --again finds out. docs/survival.md says what is computed after a death, and why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and try; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="name of a bundled recipe, or a file")
    parser.add_argument("--kills", type=int, default=10, help="processes that are killed (default 10)")
    parser.add_argument("--hangs", type=int, default=0, help="ranks that are stopped for good (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims (default 0)")
    parser.add_argument(
        "--only",
        default="",
        metavar="a,b",
        help="strike these alone: executors by name (generator, reward, trainer, ...), controller, environments",
    )
    parser.add_argument("--again", action="store_true", help="first run it undisturbed a second time, and compare")
    parser.add_argument(
        "--keep", metavar="DIR", default="", help="keep both runs and their output here (default: a temporary folder)"
    )
    parser.add_argument(
        "--limit", type=float, default=3600.0, metavar="S", help="seconds each run may take (default 3600)"
    )
    args, args.overrides = parser.parse_known_args(argv)
    try:
        return run(args)
    except LlamaRLError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return error.exit_code


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError for bad input, LlamaRLError where the undisturbed run fails."""
    for name in ("kills", "hangs"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name} must be 0 or more, got {getattr(args, name)}")
    if not args.kills + args.hangs:
        raise ConfigError("--kills 0 and --hangs 0: nobody would be struck")
    if not args.limit > 0:
        raise ConfigError(f"--limit must be above 0 s, got {args.limit:g}")
    only = tuple(name for name in args.only.split(",") if name)
    _check(args.recipe, args.overrides, only)
    if not sys.platform.startswith("linux"):
        raise ConfigError("a run's processes are found in /proc: Linux only")
    if any(word.startswith("--run.dir") for word in args.overrides):
        raise ConfigError("run.dir: the runs get folders of their own; --keep DIR says where")
    trial = Trial(
        recipe=args.recipe,
        overrides=tuple(args.overrides),
        kills=args.kills,
        hangs=args.hangs,
        seed=args.seed,
        only=only,
        again=args.again,
        limit_s=args.limit,
    )

    def tell(line: str) -> None:
        print(line, flush=True)

    if args.keep:
        folder = Path(args.keep).absolute()
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"--keep: {folder} is not empty")
        folder.mkdir(parents=True, exist_ok=True)
        return try_recipe(trial, folder, tell)
    with tempfile.TemporaryDirectory(prefix="llamarl-chaos-") as name:
        return try_recipe(trial, Path(name), tell)


def _check(recipe: str, overrides: Sequence[str], only: Sequence[str]) -> None:
    """Raises ConfigError for a recipe that cannot be read, or a name that is nobody's in its job."""
    config = load_config(recipe, overrides, [find_missing, find_without_effect])
    names = [*(role.name for role in present_roles(config)), "controller", "environments"]
    if unknown := [name for name in only if name not in names]:
        raise ConfigError(f"--only: {', '.join(map(repr, unknown))}: this job has {', '.join(names)}")


if __name__ == "__main__":
    sys.exit(main())
