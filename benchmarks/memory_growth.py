"""Does a long run's memory grow? ``python benchmarks/memory_growth.py --ticks 3000 --json OUT``

Runs ``recipes/tiny.toml`` for many ticks and looks at the private memory of every process of the job (``/proc/PID/smaps_rollup``:
what it does not share; Linux). A process's growth is the slope of a straight line through its later half, by the median of all
slopes between pairs of looks (Theil and Sen), so that single peaks do not count. The bar: 0.01 MB a tick.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from harness import claim, write_report

ROOT = Path(__file__).resolve().parents[1]
_BAR_MB_A_TICK = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--ticks", type=int, default=3000)
    parser.add_argument("--every-s", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="recipe override")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        looks = watch(Path(folder) / "run", args.ticks, args.every_s, dict(args.set))
    rows = {name: growth(points, args.ticks) for name, points in looks.items() if len(points) > 8}
    print(f"{'process':<28}{'looks':>7}{'half way':>12}{'at the end':>12}{'a tick':>14}")
    for name, row in sorted(rows.items()):
        print(
            f"{name:<28}{row['looks']:>7}{row['middle_mb']:>9.1f} MB{row['end_mb']:>9.1f} MB{row['slope_mb'] * 1e3:>11.2f} kB"
        )
    worst = max((row["slope_mb"] for row in rows.values()), default=float("inf"))
    claims = [claim("largest growth of a process, MB a tick", worst, _BAR_MB_A_TICK, at_least=False)]
    write_report(args.json, {"ticks": args.ticks, "processes": rows}, claims)


def watch(run_dir: Path, ticks: int, every_s: float, settings: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Process -> (ticks done, private megabytes) of every look."""
    quiet = {"observability.console": '"none"', "run.num_ticks": ticks, "run.dir": json.dumps(str(run_dir)), **settings}
    words = [word for key, value in quiet.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "llamarl.cli.main", "train", str(ROOT / "recipes" / "tiny.toml"), *words]
    job = subprocess.Popen(command, cwd=ROOT)
    looks: dict[str, list[tuple[int, float]]] = {}
    shown = 0
    while job.poll() is None:
        time.sleep(every_s)
        done = rows_written(run_dir / "metrics.jsonl")
        for name, megabytes in private_memory(job.pid).items():
            looks.setdefault(name, []).append((done, megabytes))
        if done >= shown + max(1, ticks // 20):
            shown = done
            now = ", ".join(f"{name} {points[-1][1]:.0f}" for name, points in looks.items() if points[-1][1] > 50.0)
            print(f"{done:>6} of {ticks} ticks; MB: {now}", file=sys.stderr, flush=True)
    if job.returncode:
        raise SystemExit(f"the run ended with status {job.returncode}")
    return looks


def private_memory(pid: int) -> dict[str, float]:
    """Name and pid -> megabytes that only it holds, of a process and all that it started."""
    found = {}
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return {}
    for process in processes:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            kilobytes = sum(int(line.split()[1]) for line in rollup.split("\n") if line.startswith("Private_"))
            found[f"{kind_of(process.cmdline())} {process.pid}"] = kilobytes / 1e3
        except (OSError, psutil.Error):
            continue  # it has ended
    return found


def kind_of(words: list[str]) -> str:
    """``llamarl.cli.main`` and so on: the module that a process runs."""
    return words[words.index("-m") + 1].removeprefix("llamarl.") if "-m" in words else "process"


def rows_written(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def growth(points: list[tuple[int, float]], ticks: int) -> dict[str, float]:
    """Of one process: how much more it holds each tick, over the later half of the run."""
    later = [point for point in points if ticks // 2 <= point[0] < ticks]
    step = max(1, len(later) // 200)  # at most some 20,000 pairs
    later = later[::step]
    slopes = [(b - a) / (j - i) for n, (i, a) in enumerate(later) for j, b in later[n + 1 :] if j > i]
    slope = statistics.median(slopes) if slopes else 0.0
    half = statistics.median(mb for _, mb in later[: max(1, len(later) // 10)]) if later else 0.0
    end = statistics.median(mb for _, mb in later[-max(1, len(later) // 10) :]) if later else 0.0
    return {"looks": len(points), "middle_mb": half, "end_mb": end, "slope_mb": slope}


if __name__ == "__main__":
    main()
