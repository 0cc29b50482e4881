"""What deaths cost a run: ``python benchmarks/time_lost.py --json OUT`` in seconds a death, and
``python benchmarks/time_lost.py --struck 0.1 --ticks 60 --json OUT`` as the share of time that is training.

One run of the tiny recipe, in which generator, reward and trainer are killed (SIGKILL), each several times. ``recovery/NAME_lost_s`` of
the row says how long it took from the start of the lost work to the start of the same work done again; the bound beside it is worked
from the run's own rows: for generator and reward one tick of theirs and 5 s, for the trainer its ticks since the last checkpoint and
10 s.

With ``--struck`` runs without and with deaths take turns: in that share of the ticks one executor (generator, reward, trainer in turn) is
killed. Effective training time ratio: seconds of the ticks of a run in which nobody dies over those of one with deaths, both from the
end of the first tick to that of the last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import claim, write_report

from llamarl.observability.metrics import METRICS_FILE, read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from tools.chaos.processes import targets

VICTIMS = ("generator", "reward", "trainer")
SAVED_EVERY = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2, help="of each executor")
    parser.add_argument("--prompts", type=int, default=8, help="a tick")
    parser.add_argument("--struck", type=float, help="share of the ticks in which an executor dies")
    parser.add_argument("--ticks", type=int, default=60, help="with --struck: of each run")
    parser.add_argument("--rounds", type=int, default=2, help="with --struck: a run without and one with deaths each")
    parser.add_argument("--recipe", default="tiny", help="with --struck")
    parser.add_argument("--json", help="write the report here")
    args, more = parser.parse_known_args()
    if args.struck:
        effective(args, more)
        return
    order = VICTIMS * args.kills
    with tempfile.TemporaryDirectory() as temporary:
        rows = seconds_lost_run(Path(temporary) / "run", order, args.prompts)
    found = lost(rows)
    claims = []
    for name in VICTIMS:
        mine = [one for one in found if one["executor"] == name]
        if len(mine) < args.kills:
            raise SystemExit(f"{name} was brought up again {len(mine)} times of {args.kills}: one was killed too late")
        print(
            f"{name}: lost {[round(one['lost_s'], 2) for one in mine]} s, allowed {[round(one['allowed_s'], 2) for one in mine]}"
        )
        share = max(one["lost_s"] / one["allowed_s"] for one in mine)
        claims.append(claim(f"seconds lost by a death of {name} over what is allowed", share, 1.0, at_least=False))
    write_report(args.json, {"deaths": found, "rows": rows}, claims)


def effective(args: argparse.Namespace, more: list[str]) -> None:
    """Measure and print the effective training time ratio; ``more``: settings of the recipe."""
    every = round(1 / args.struck)
    order = tuple(VICTIMS[i % len(VICTIMS)] for i in range(round(args.ticks * args.struck)))
    settings = {"run.num_ticks": args.ticks, "evaluation.every": 0, "observability.console": '"none"'}
    settings["recovery.max_restarts"] = 10 * len(order) + 1
    rounds = []
    for _ in range(args.rounds):
        seconds = []
        for victims in ((), order):
            with tempfile.TemporaryDirectory() as temporary:
                settings["run.dir"] = json.dumps(str(Path(temporary) / "run"))
                rows = killed_run(Path(temporary) / "run", args.recipe, settings, victims, every=every, more=more)
            deaths = sum(f"recovery/{name}_lost_s" in row for row in rows for name in VICTIMS)
            if deaths < len(victims):
                raise SystemExit(f"of {len(victims)} deaths {deaths} struck: more ticks or fewer deaths are needed")
            seconds.append(sum(float(row["time/step_s"]) for row in rows[1:]))
        rounds.append({"quiet_s": seconds[0], "struck_s": seconds[1], "ratio": seconds[0] / seconds[1]})
        print(f"{args.ticks} ticks: {seconds[0]:.1f} s, with {len(order)} deaths {seconds[1]:.1f} s", flush=True)
    ratio = statistics.median(one["ratio"] for one in rounds)
    print(f"effective training time ratio {ratio:.3f}")
    write_report(args.json, {"rounds": rounds}, [claim("effective training time ratio", ratio, 0.8, at_least=True)])


def seconds_lost_run(run_dir: Path, order: tuple[str, ...], prompts: int) -> list[dict[str, Any]]:
    """Rows of a run of tiny in which one executor after the other is killed, three ticks apart."""
    settings = {
        "run.dir": json.dumps(str(run_dir)),
        "run.num_ticks": 3 * (len(order) + 2),
        "schedule.prompts_per_step": prompts,
        "evaluation.every": 0,
        "checkpoint.every": SAVED_EVERY,
        "observability.console": '"none"',
        "recovery.max_restarts": 10 * len(order),
    }
    return killed_run(run_dir, "tiny", settings, order, every=3)


def killed_run(
    run_dir: Path,
    recipe: str,
    settings: Mapping[str, object],
    order: tuple[str, ...],
    *,
    every: int,
    more: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Rows of a run in which the executors of ``order`` are killed, one each ``every`` ticks, from the second row on."""
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    run = subprocess.Popen([sys.executable, "-m", "llamarl.cli.main", "train", recipe, *words, *more])
    try:
        for number, name in enumerate(order):
            wait_for_rows(run, run_dir, 2 + every * number)
            for target in targets(run.pid):
                if target.name.partition("[")[0] == name:
                    os.kill(target.pid, signal.SIGKILL)
        if run.wait(timeout=3600):
            raise SystemExit(f"the run ended with status {run.returncode}")
    finally:
        run.kill()
    return [dict(row) for row in read_metrics(run_dir)]


def wait_for_rows(run: subprocess.Popen[bytes], run_dir: Path, number: int) -> None:
    until = time.monotonic() + 300
    while not ((run_dir / METRICS_FILE).is_file() and len(read_metrics(run_dir)) >= number):
        if time.monotonic() > until or run.poll() is not None:
            raise SystemExit(f"{number} rows did not come")
        time.sleep(0.05)


def lost(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each death: who, at which tick, the seconds lost, and those allowed."""
    found = []
    for row in rows:
        tick = int(row["step"])
        for name in VICTIMS:
            seconds = row.get(f"recovery/{name}_lost_s")
            if seconds is None:
                continue
            first, more_s = (tick // SAVED_EVERY * SAVED_EVERY, 10.0) if name == "trainer" else (tick, 5.0)
            own_s = sum(float(one[f"time/{name}_s"]) for one in rows[first : tick + 1])
            found.append({"executor": name, "tick": tick, "lost_s": seconds, "allowed_s": own_s + more_s})
    return found


if __name__ == "__main__":
    main()
