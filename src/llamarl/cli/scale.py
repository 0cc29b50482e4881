"""``llamarl scale``: another number of generator replicas while a run goes on."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Gives the generator of a run that goes on another number of replicas, between two of its ticks. The bits stay the same: that
needs generator.shards, of which each replica decodes its share, so no more replicas than shards (docs/survival.md). Over hosts those that come go where
--on generator says, or to a spare host with room, and nobody else moves (docs/hosts.md).

  llamarl scale runs/tiny generator=4            returns when it took effect, and says from which tick on
  llamarl scale runs/tiny generator=1 --wait 60  gives up after a minute"""


def add_parser(verbs: Any, full: bool = True) -> None:
    parser = verbs.add_parser(
        "scale",
        help="another number of generator replicas while a run goes on",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    if not full:
        return
    parser.add_argument("run_dir", metavar="RUN", help="folder of a run that goes on")
    parser.add_argument("change", metavar="generator=N", help="the replicas that it shall have (generator.dp)")
    parser.add_argument(
        "--wait", metavar="S", type=float, default=600.0, help="longest wait for the tick at work to end (default: 600)"
    )


def run(args: argparse.Namespace) -> int:
    """Ask, and wait for the answer. Raises ConfigError for what is refused, and where nobody
    carries the run out (any more)."""
    from llamarl.api.run import Run
    from llamarl.controller.run_folder import who_holds
    from llamarl.controller.scaling import (
        answer_to,
        ask,
        of_hosts,
        uneven,
        why_not_replicas,
        why_not_scale,
        withdraw,
    )
    from llamarl.errors import ConfigError
    from llamarl.plural import plural

    executor, _, number = args.change.partition("=")
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"expected generator=N, with N replicas, got {args.change!r}")
    run = Run(args.run_dir)
    run_dir, config, replicas = run.dir, run.config, int(number)
    if why := why_not_scale(config, executor) or why_not_replicas(config, replicas):
        raise ConfigError(why)
    later = f"to go on with it so: llamarl train --resume {run_dir} --generator.dp {number}"
    if who_holds(run_dir) == "":
        raise ConfigError(f"nobody carries out the run in {run_dir}: it has ended, or was stopped; {later}")
    request = ask(run_dir, executor, replicas)
    print("asked; it takes effect when the tick at work has ended", file=sys.stderr)
    if note := uneven(config, replicas):
        print(note, file=sys.stderr)
    until = time.monotonic() + args.wait
    ended = False
    try:
        while not ended and answer_to(run_dir, request) is None and time.monotonic() < until:
            ended = who_holds(run_dir) == ""
            time.sleep(0.0 if ended else 0.1)
    finally:
        withdraw(run_dir, request)
    answer = answer_to(run_dir, request)
    if answer is None and ended:
        raise ConfigError(f"the run in {run_dir} ended before it took the request, which is withdrawn; {later}")
    if answer is None:
        raise ConfigError(
            f"nobody took the request within {args.wait:g} s, and it is withdrawn. If the run has stopped: llamarl train --resume "
            f"{run_dir} --generator.dp {number}"
        )
    if answer.refused:
        raise ConfigError(answer.refused)
    print(f"{executor}: {plural(replicas, 'replica')} from tick {answer.tick} on{of_hosts(answer)}")
    return 0
