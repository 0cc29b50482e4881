"""What a death costs a run, in seconds: ``python benchmarks/time_lost.py --json OUT``.

One run of the tiny recipe, in which generator, reward and trainer are killed (SIGKILL), each several times. ``recovery/NAME_lost_s`` of
the row says how long it took from the start of the lost work to the start of the same work done again; the bound beside it is worked
from the run's own rows: for generator and reward one tick of theirs and 5 s, for the trainer its ticks since the last checkpoint and
10 s.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
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
    parser.add_argument("--json", help="write the report here")
    args = parser.parse_args()
    order = VICTIMS * args.kills
    with tempfile.TemporaryDirectory() as temporary:
        rows = killed_run(Path(temporary) / "run", order, args.prompts)
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


def killed_run(run_dir: Path, order: tuple[str, ...], prompts: int) -> list[dict[str, Any]]:
    """Rows of a run in which one executor after the other is killed, three ticks apart."""
    settings = {
        "run.dir": json.dumps(str(run_dir)),
        "run.num_ticks": 3 * (len(order) + 2),
        "schedule.prompts_per_step": prompts,
        "evaluation.every": 0,
        "checkpoint.every": SAVED_EVERY,
        "observability.console": '"none"',
        "recovery.max_restarts": 10 * len(order),
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    run = subprocess.Popen([sys.executable, "-m", "llamarl.cli.main", "train", "tiny", *words])
    try:
        for number, name in enumerate(order):
            wait_for_rows(run, run_dir, 2 + 3 * number)
            for target in targets(run.pid):
                if target.name.partition("[")[0] == name:
                    os.kill(target.pid, signal.SIGKILL)
        if run.wait(timeout=600):
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
