"""``llamarl train --supervise``: the run as a child of this process, which resumes it when it dies.

this process ── llamarl train ... ──▶ child: controller      ends well, is refused, stopped by its user, diverges: the same
     ▲                                  │                    dies of a signal, or fails with progress since the last time:
     └──────── its end ◀────────────────┘                    llamarl train --resume RUN, as often as recovery allows
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Attempts", "supervise"]

_FINAL = (0, 2, 4, 130)
"""Exit codes after which nothing is tried again: done, refused, not worth having, stopped by the user (docs/when_it_stops.md)."""


@dataclass
class Attempts:
    """Whether a run that has ended is resumed. Pure.

    Args:
        max_restarts: Most resumes within ``window_s``.
    """

    max_restarts: int
    window_s: float
    _at_s: list[float] = field(default_factory=list)
    _failed_at: int = -1
    """How far the run was when it last failed by itself."""

    def why_not(self, code: int, progress: int, now_s: float) -> str:
        """Why a run that has ended is left so; empty: it is resumed, and that is counted.

        Args:
            code: Exit code, or minus the signal that ended the controller.
            progress: Ticks of which the metrics hold a row.
        """
        if code in _FINAL:
            return "it has ended for good"
        if code > 0 and progress <= self._failed_at:
            return "it failed again without a further tick: it would fail a third time"
        recent = [at_s for at_s in self._at_s if now_s - at_s <= self.window_s]
        if len(recent) >= self.max_restarts:
            return f"it was resumed recovery.max_restarts = {self.max_restarts} times within {self.window_s:g} s"
        if code > 0:
            self._failed_at = progress
        self._at_s = [*recent, now_s]
        return ""


def supervise(
    words: Sequence[str], overrides: Sequence[str], run_dir: Path, *, max_restarts: int, window_s: float
) -> int:
    """Carry out ``llamarl train`` until it has ended for good; its exit code, 128 + n for signal n.

    Args:
        words: Of the first attempt; later ones resume ``run_dir``.
        overrides: Of each attempt.
        run_dir: Where the run will lie.
    """
    attempts = Attempts(max_restarts, window_s)
    stopped = _Stopped()
    while True:
        code = stopped.wait(_start([*words, *overrides]))
        if stopped.asked:
            return 130
        why = attempts.why_not(code, _progress(run_dir), time.monotonic())
        ended = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        if why:
            if code not in _FINAL:
                print(f"llamarl train --supervise: the controller ended with {ended}, and {why}", file=sys.stderr)
            return code if code >= 0 else 128 - code
        print(f"llamarl train --supervise: the controller ended with {ended}; the run is resumed", file=sys.stderr)
        if (run_dir / "config.toml").is_file():
            words = ["--resume", str(run_dir)]


def _progress(run_dir: Path) -> int:
    """Rows of its metrics."""
    try:
        return (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """The child ends with this process, however that ends: two of them would want one folder."""
    code = (
        "import sys; from llamarl.process_tree import end_with_parent; from llamarl.cli.main import command; "
        f"end_with_parent({os.getpid()}); sys.exit(command())"
    )
    return subprocess.Popen([sys.executable, "-P", "-c", code, "train", *words])


class _Stopped:
    """Signals for this process, passed on to its child. Ctrl-C in a terminal reaches the child by itself."""

    def __init__(self) -> None:
        self.asked = False
        self._child: subprocess.Popen[bytes] | None = None
        signal.signal(signal.SIGINT, self._note)
        signal.signal(signal.SIGTERM, self._pass_on)

    def wait(self, child: subprocess.Popen[bytes]) -> int:
        """The child's end."""
        self._child = child
        if self.asked:
            child.terminate()
        return child.wait()

    def _note(self, number: int, frame: object) -> None:
        self.asked = True

    def _pass_on(self, number: int, frame: object) -> None:
        self.asked = True
        if self._child is not None:
            self._child.terminate()
