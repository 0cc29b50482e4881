"""``llamarl train``: run a recipe, or go on with a run that was stopped."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llamarl.reading import user_path

if TYPE_CHECKING:
    from llamarl.config import RunConfig

__all__ = ["add_arguments", "launch", "run"]

_OFF = (0.1, 2.0)
"""Of a forecast by assumed rates, what runs took: bundled:tiny about its half, SmolLM2-135M a seventh, others beside it twice."""

_DESCRIPTION = """\
Runs generator, reward and trainer at once, each in its own process, as a recipe says.

  llamarl train tiny                                       a recipe that ships with llamarl, or a TOML file of your own
  llamarl train tiny --schedule.max_staleness 0 --run.dir runs/synchronous
  llamarl train --resume runs/tiny                          go on from the newest checkpoint, bit for bit
  llamarl train --resume runs/tiny --run.num_ticks 200      the same, and longer
  llamarl train --resume runs/tiny --fork runs/slower --optimizer.lr 1e-5
                                                            a new run from that checkpoint, with other settings
  llamarl train tiny --schedule.weights latest --run.dir runs/latest
                                                            in-flight weight updates; decisions go to events.jsonl
  llamarl train --replay runs/latest                        repeat such a run from its event log, bit for bit
  llamarl train tiny --dry-run                              print the configuration, graph and placement; run nothing

The run folder holds config.toml, metrics.jsonl, rollouts/, trace.json (ui.perfetto.dev), tensorboard/, checkpoints/ and
model/ (a Hugging Face folder of the final policy)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument(
        "recipe",
        nargs="?",
        help="TOML file, or the name of a recipe that ships with llamarl (llamarl recipes); every key can be overridden: --section.key VALUE. Not needed with --resume, not taken by --replay",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN_DIR",
        help="go on with this run from its newest checkpoint, under its own configuration; what RECIPE or overrides set "
        "besides must change no bit. The address of a mirror (s3://..) is brought to --run.dir first",
    )
    parser.add_argument(
        "--fork",
        metavar="NEW_RUN_DIR",
        help="with --resume: leave that run as it is and start a new one from its checkpoint, in which other settings may differ",
    )
    parser.add_argument(
        "--replay",
        metavar="RUN_DIR",
        help="repeat this run bit for bit from its configuration and event log, into RUN_DIR-replay or --run.dir; status 1 where bits differ",
    )
    parser.add_argument(
        "--cluster",
        metavar="auto|HOST:PORT",
        help="run on the nodes of a Ray cluster, of which this machine is one: auto finds it, HOST:PORT is its head; "
        "my_cluster.py:Mine://ADDRESS is a kind of your own (docs/hosts.md); here takes a run back to this machine",
    )
    parser.add_argument(
        "--on",
        metavar="EXECUTOR=a,b",
        action="append",
        default=[],
        help="with --cluster: which nodes an executor gets (also by place: 0-2; here: this one); may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--every-key", action="store_true", help="with --dry-run: print keys at their defaults too")
    from llamarl.config import section_help

    parser.epilog = textwrap.fill(
        f"Keys of a recipe, by section: {section_help()}. llamarl --help optimizer explains those of a section, "
        f"llamarl --help WORD those that hold a word, llamarl --help keys all of them.",
        width=100,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from llamarl.config import load_config
    from llamarl.controller.preflight import find_missing
    from llamarl.errors import ConfigError

    overrides = list(args.overrides)
    hosts = _hosts(args, overrides)
    if args.fork and not args.resume:
        raise ConfigError("--fork needs --resume RUN_DIR: the run whose checkpoint the new one begins with")
    if args.replay:
        return _replay(args, overrides, hosts)
    if args.resume:
        return _resume(args, overrides, hosts)
    if args.recipe is None:
        taken = [word for word in overrides if word.endswith(".toml")]
        hint = f"; {taken[0].replace('=', ' took ', 1)} for its value" if taken else ""
        raise ConfigError(
            "which recipe? llamarl train RECIPE.toml, --resume RUN_DIR or --replay RUN_DIR; llamarl new FOLDER writes one to "
            f"change, llamarl recipes lists those that come along{hint}"
        )
    config = load_config(args.recipe, [*overrides, *hosts], [find_missing])
    launch(config, dry_run=args.dry_run, every_key=args.every_key)
    return 0


def launch(config: RunConfig, *, dry_run: bool, every_key: bool) -> None:
    """Start a new run, or print what it would be."""
    from llamarl.controller.prepare import plan_run, start_fork_servers

    if not dry_run:
        start_fork_servers(config)
    from llamarl.controller.run import start_run
    from llamarl.controller.settle import with_num_ticks

    if dry_run:
        config = with_num_ticks(config)
        print(plan_run(config, every_key=every_key))
        print(f"\n# forecast\n{_forecast(config)}")
    else:
        start_run(config)


def _forecast(config: RunConfig) -> str:
    """Between what and what the run's time lies, by assumed rates; else why nobody knows."""
    from llamarl.cli.forecast_flags import threads_of
    from llamarl.errors import LlamaRLError
    from llamarl.forecast.hardware import this_machine
    from llamarl.forecast.lengths import constant
    from llamarl.forecast.model import find_model
    from llamarl.forecast.recipe import left_out
    from llamarl.forecast.scenario import scenario_from_recipe
    from llamarl.forecast.search import Workload
    from llamarl.forecast.simulate import simulate
    from llamarl.models.folders import resolve_model_path
    from llamarl.observability.text import duration
    from llamarl.runtime.placement import may_have_gpus

    limit = config.generator.sampling.max_new_tokens
    if not config.samples or config.hosts.wanted or may_have_gpus():
        return "none: llamarl plan knows jobs of generator and trainer, and rates of GPUs by --hardware"
    try:
        work = Workload(
            model=find_model(resolve_model_path(config.model.path, weights=False)),
            response=constant(limit),
            prompts_per_step=config.schedule.prompts_per_step,
            group_size=config.generator.group_size,
            prompt_tokens=64,
        )
        found = scenario_from_recipe(config, work, this_machine(), threads_of(config))
        step_s = simulate(dataclasses.replace(found, num_ticks=20)).step_s
    except LlamaRLError as error:
        return f"none: {error}"
    missing = f", not counting {', '.join(left_out(config))}" if left_out(config) else ""
    in_all = " and ".join(duration(times * step_s * config.run.num_ticks) for times in _OFF)
    return (
        f"between {in_all} for {config.run.num_ticks} ticks whose responses reach {limit} tokens{missing}: nobody has measured "
        "this machine.\nThe first rows of a run foretell it better (left); llamarl plan RUN foretells jobs by one that has ended"
    )


def _hosts(args: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """What --cluster and --on set, as overrides."""
    from llamarl.errors import ConfigError
    from llamarl.settings.job import host_settings

    if args.cluster is not None and not args.cluster.strip():  # such as a variable of the shell that is not set
        raise ConfigError("--cluster names no cluster; --cluster here runs on this machine alone")
    if args.cluster and any(word.startswith(("--hosts.on", "--hosts.cluster")) for word in overrides):
        raise ConfigError("--cluster and --hosts.* say the same in two ways: put executors on nodes by --on NAME=NODES")
    try:
        given = host_settings(args.cluster, args.on)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if given.get("cluster"):
        from llamarl.config import validate
        from llamarl.runtime.hosts.cluster import find_cluster

        validate({"hosts": {"cluster": given["cluster"]}})
        kind, address = find_cluster(given["cluster"])
        kind.check_access(address)  # a wrong token is told before imports that take seconds
    if "cluster" in given:  # another cluster: what the recipe puts on nodes of its own is forgotten
        tables = ", ".join(f"{json.dumps(name)} = {json.dumps(names)}" for name, names in given["on"].items())
        return [f"--hosts.cluster={json.dumps(given['cluster'])}", f"--hosts.on={{{tables}}}"]
    return [f"--hosts.on.{name}={json.dumps(names)}" for name, names in given.get("on", {}).items()]


def _resume(args: argparse.Namespace, overrides: list[str], hosts: list[str]) -> int:
    from llamarl.config import read_settings
    from llamarl.controller.begun import begun_config
    from llamarl.controller.prepare import start_fork_servers
    from llamarl.controller.run_folder import refuse_if_held

    given = read_settings(args.recipe, [*overrides, *hosts])
    if args.fork:
        given.setdefault("run", {}).setdefault("mirror", "")  # that of the source is another run's
    if "://" in args.resume:
        args.resume, what_came = _download(args.resume, given, dry_run=args.dry_run)
        print(what_came, file=sys.stderr)
        if args.dry_run:
            return 0
    if not args.fork and not args.dry_run:
        refuse_if_held(user_path(args.resume, "--resume"))  # before imports that take seconds
    source = user_path(args.resume, "--resume")
    config = begun_config(source, given)
    if not args.dry_run:
        start_fork_servers(config)
    from llamarl.controller.fork import fork_run, plan_fork
    from llamarl.controller.resume import plan_resume, resume_run

    if args.fork:
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(args.fork)))
    if args.dry_run:
        every = args.every_key
        print(plan_fork(config, source, every_key=every) if args.fork else plan_resume(config, every_key=every))
    elif args.fork:
        fork_run(config, source)
    else:
        resume_run(config)
    return 0


def _download(url: str, given: dict[str, Any], *, dry_run: bool) -> tuple[str, str]:
    """Bring a run here from its mirror, into run.dir or runs/NAME, and have it go on there; the
    folder, and what came."""
    from llamarl.checkpoint.mirror import restore

    run = given.setdefault("run", {})
    run.setdefault("mirror", url)
    folder = user_path(run.get("dir", f"runs/{url.rstrip('/').rpartition('/')[2]}"), "run.dir")
    return str(folder), restore(url, folder.resolve(), dry_run=dry_run)


def _replay(args: argparse.Namespace, overrides: list[str], hosts: list[str]) -> int:
    from llamarl.api.run import Run
    from llamarl.config import load_config, read_settings
    from llamarl.controller.begun import refuse_code_of_a_run
    from llamarl.controller.preflight import find_missing
    from llamarl.controller.prepare import start_fork_servers
    from llamarl.errors import ConfigError

    for other, name in ((args.recipe, f"the recipe {args.recipe}"), (args.resume, "--resume")):
        if other:
            raise ConfigError(f"--replay takes the run's own configuration and log: leave {name} out")
    source = Run(args.replay).dir
    into = ["--run.dir", json.dumps(f"{source}-replay", ensure_ascii=False)]
    words = [*into, "--run.mirror=", *overrides, *hosts]
    refuse_code_of_a_run(load_config(source / "config.toml", words), source, read_settings(None, overrides))
    config = load_config(source / "config.toml", words, [find_missing])
    if not args.dry_run:
        start_fork_servers(config)
    from llamarl.controller.replay import plan_replay, replay_run

    if args.dry_run:
        print(plan_replay(config, source, every_key=args.every_key))
        return 0
    return 0 if replay_run(config, source) else 1
