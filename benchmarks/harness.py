"""What every benchmark shares: the JSON it writes, medians with spread, alternating runs.

The file holds machine, versions, command, results and claims; each claim has the value measured, the bar and whether it
was reached. A benchmark exits 0 when it could measure, whatever the claims say.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["claim", "core_seconds", "join_ranks", "paired_ratio", "run_ranks", "spread", "write_report"]

_PACKAGES = ("llamarl", "torch", "transformers", "numpy")


def claim(text: str, value: float, bar: float, *, at_least: bool = True) -> dict[str, Any]:
    """One claim: reached if ``value`` >= ``bar`` (or <= with ``at_least`` False)."""
    return {"claim": text, "value": value, "bar": bar, "ok": value >= bar if at_least else value <= bar}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and the values themselves."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": list(values)}


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Ours by theirs, round by round: what a machine's drift changes from round to round falls out.

    Args:
        ours: One time per round.
        theirs: The other's, of the same rounds.

    Returns:
        ``median`` of the rounds' ratios, and ``low`` and ``high``: the order statistics that hold the true median with at least 95%
        probability, whatever the distribution (sign test). With fewer than six rounds nothing does: they are then 0 and infinity.
    """
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    n, rank, below = len(ratios), 0, 0.5 ** len(ratios)
    while below <= 0.025:  # probability that at most ``rank`` of n fair coins fall on one side
        rank += 1
        below += math.comb(n, rank) * 0.5**n
    low, high = (ratios[rank - 1], ratios[n - rank]) if rank else (0.0, math.inf)
    return {"median": statistics.median(ratios), "low": low, "high": high}


def machine() -> dict[str, Any]:
    """What ran it: processor, cores this process may use, memory, CUDA devices if torch sees any."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Installed versions of what matters to a number."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_report(path: str | None, results: dict[str, Any], claims: Sequence[dict[str, Any]]) -> None:
    """Print the claims; write everything to ``path`` if given."""
    for entry in claims:
        print(
            f"{'reached' if entry['ok'] else 'MISSED '}  {entry['claim']}: {entry['value']:.4g} (bar {entry['bar']:.4g})"
        )
    if path:
        report = {
            "machine": machine(),
            "versions": versions(),
            "command": " ".join(["python", *sys.argv]),
            "results": results,
            "claims": list(claims),
        }
        Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def run_ranks(
    target: Callable[..., Any],
    num_ranks: int,
    folder: str,
    *arguments: Any,
    preload: Sequence[str],
    timeout_s: float = 300.0,
) -> list[Any]:
    """Run ``target(rank, num_ranks, folder, *arguments)`` in a process a rank; returns what each wrote to ``folder/RANK.json``.

    Args:
        preload: Modules that the fork server imports once for all.

    Raises:
        SystemExit: A rank failed, or took longer than ``timeout_s``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    ranks = [context.Process(target=target, args=(rank, num_ranks, folder, *arguments)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    for rank, process in enumerate(ranks):
        process.join(timeout=timeout_s)
        if process.exitcode != 0:
            for other in ranks:
                other.kill()
            raise SystemExit(f"rank {rank} of {num_ranks} {arguments} ended with {process.exitcode}")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_ranks)]


def join_ranks(rank: int, num_ranks: int, folder: str, timeout_s: float = 300.0) -> None:
    """Join the gloo group of ``run_ranks``, with one thread a rank."""
    import torch.distributed as dist
    from torch import set_num_threads

    set_num_threads(1)
    if num_ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )


def core_seconds() -> tuple[float, float]:
    """(at work, in all) of the cores of this machine since it began, in seconds."""
    with open("/proc/stat") as file:
        user, nice, system, idle, iowait, *others = (int(word) for word in file.readline().split()[1:])
    tick = os.sysconf("SC_CLK_TCK")
    busy = user + nice + system + sum(others[:2])
    return busy / tick, (busy + idle + iowait) / tick
