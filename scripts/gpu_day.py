"""Everything that one GPU must show, section by section with a limit of wall time each; results after each, as JSON.

    python scripts/gpu_day.py [SECTION ...] [--out FOLDER] [--device cpu]

A section is a command. What it printed lies in OUT/SECTION.txt, and OUT/results.json says of all so far whether they
held and how long they took, so that a day cut short still brings back what it has. With ``--device cpu`` each
section does its smallest piece of work there: no minute on a card is then lost to a typo.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
LLAMARL = [PYTHON, "-m", "llamarl"]
SHORT_JOB = ["train", "recipes/tiny.toml", "--run.num_ticks", "2", "--evaluation.every", "0"]
JOB = ["train", "recipes/tiny.toml", "--run.num_ticks", "20"]
SHAPES = ("decode", "train", "hand_over")


def sections(device: str, out: Path) -> dict[str, tuple[float, list[str]]]:
    """Name -> (most seconds, command)."""
    cuda = device != "cpu"
    tests = [PYTHON, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    shapes = [PYTHON, "benchmarks/one_gpu.py", "--device", device, "--models", str(out / "models")]
    shapes += ["--shape", "1.5b" if cuda else "tiny"]
    decode, train, hand_over = ([*shapes, what, "--json", str(out / f"{what}.json")] for what in SHAPES)
    decode_8b = [*decode, "--shape", "8b", "--ways", "auto", "fp8", "--points", "64x1024"]
    decode_8b[decode_8b.index("--json") + 1] = str(out / "decode_8b.json")
    if not cuda:
        decode_8b = [*decode, "--help"]
        decode += ["--ways", "auto", "--points", "2x8", "--repeats", "1"]
        train += ["--ways", "auto", "--prompts", "1", "--repeats", "1"]
    job = [*LLAMARL, *(JOB if cuda else SHORT_JOB), "--run.dir", str(out / "run")]
    job += [f"--{role}.device={device}" for role in ("generator", "trainer")]
    return {
        "doctor": (60, [*LLAMARL, "doctor", "--gpu", "--device", device]),
        "tests": (
            170,
            [*tests, "-n", str(min(16, os.cpu_count() or 8)), "--dist", "load", "--maxfail", "40"]
            if cuda
            else [*tests, "--collect-only"],
        ),
        "decode": (75, [*decode, "--points", "64x1024", "256x1024"] if cuda else decode),
        "decode_8b": (100, decode_8b),
        "train": (75, [*train, "--ways", "auto", "plain"] if cuda else train),
        "hand_over": (50, hand_over),
        "job": (70, job),
    }


def run_section(name: str, limit_s: float, command: Sequence[str], out: Path) -> dict[str, object]:
    """What became of a section; its processes are ended with it."""
    began = time.monotonic()
    with open(out / f"{name}.txt", "wb") as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {
        "held": status == 0,
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "command": list(command),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sections", nargs="*", help="of doctor, tests, decode, decode_8b, train, hand_over, job (default all)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results (default runs/gpu)")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script (default cuda)")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    known = sections(args.device, out)
    if unknown := [name for name in args.sections if name not in known]:
        parser.error(f"unknown section {unknown[0]!r}: {', '.join(known)}")
    results: dict[str, dict[str, object]] = {}
    for name in args.sections or known:
        results[name] = run_section(name, *known[name], out)
        (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"{'ok' if results[name]['held'] else 'no'}  {name:<12} {results[name]['seconds']} s", flush=True)
    return 0 if all(result["held"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
