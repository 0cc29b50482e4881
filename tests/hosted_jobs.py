"""Short jobs of the tiny model over hosts, by the command line, and what must not be left of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from namespace_hosts import NamespaceHost

__all__ = ["SMALL", "begin", "left_on", "train", "train_words", "wait_for_none_left"]

SMALL = (
    *("--run.num_ticks", "4", "--checkpoint.every", "2", "--evaluation.every", "2", "--evaluation.num_prompts", "8"),
    *("--schedule.prompts_per_step", "4", "--generator.sampling.max_new_tokens", "24"),
)
FOR_EVER = ("--run.num_ticks", "100000", "--checkpoint.every", "100000")
LIMIT_S = 280.0
GONE_S = 10.0


def train_words(run_dir: Path, *words: str, hosts: Sequence[NamespaceHost] = (), key: Path | None = None) -> list[str]:
    """A command: on this machine, or over hosts whose workers run."""
    over = ["--hosts", ",".join(host.at for host in hosts), "--hosts.key", str(key)] if hosts else []
    return [sys.executable, "-m", "llamarl.cli.main", "train", *words, "--run.dir", str(run_dir), *over]


def train(
    run_dir: Path, *words: str, hosts: Sequence[NamespaceHost] = (), key: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """To its end, which must be a good one."""
    command = train_words(run_dir, *words, hosts=hosts, key=key)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def begin(command: Sequence[str], run_dir: Path) -> subprocess.Popen[str]:
    """A long job that has done its first tick."""
    controller = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120.0
    while not ((run_dir / "metrics.jsonl").is_file() and (run_dir / "metrics.jsonl").read_text()):
        assert controller.poll() is None and time.monotonic() < until, controller.communicate(timeout=5)[1]
        time.sleep(0.1)
    return controller


def wait_for_none_left(hosts: Sequence[NamespaceHost], *, workers: bool = False, limit_s: float = GONE_S) -> float:
    """No rank on any host, and no file in /tmp or /dev/shm of theirs; the seconds that it took.

    Args:
        workers: No ``llamarl worker`` either.
    """
    began = time.monotonic()
    while left := {host.name: found for host in hosts if (found := left_on(host, workers=workers))}:
        assert time.monotonic() - began < limit_s, left
        time.sleep(0.1)
    return time.monotonic() - began


def left_on(host: NamespaceHost, *, workers: bool = False) -> list[str]:
    """Processes and files of jobs that are on a host now.

    Args:
        workers: Whether ``llamarl worker`` counts among them.
    """
    marks = ("llamarl.runtime", "llamarl worker", "llamarl.cli.main") if workers else ("llamarl.runtime",)
    running = [words for words in host.commands().values() if any(mark in words for mark in marks)]
    kept = (
        "/tmp/cache/llamarl/worker/",
        "/tmp/.cache/llamarl/worker/",
    )  # what was sent, for the next job (docs/hosts.md)
    return running + [path for path in host.files() if not path.startswith(kept)]
