"""A run of the command line to its end, left alone or under blows; what ends it is answered as a person would: by ``--resume``."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llamarl.errors import LlamaRLError
from llamarl.observability.metrics import METRICS_FILE
from llamarl.plural import plural
from tools.chaos.plan import Blow, Target, choose
from tools.chaos.processes import alive, strike_processes, targets, wait_for_end

__all__ = ["Struck", "StruckRun", "num_rows", "play", "play_struck"]

_POLL_S = 0.01
_LOOK_S = 0.5
"""Between two looks at which processes the run has."""
_LEAVE_S = 10.0
"""After a run's end: how long its processes may take to be gone."""
_TAIL = 2000


@dataclass(frozen=True, kw_only=True)
class Struck:
    blow: Blow
    victims: tuple[Target, ...]
    rows: int
    """Of metrics, that the run had at that moment."""
    how: str
    """What was done to them, in words."""

    def describe(self) -> str:
        names = ", ".join(target.name for target in self.victims) or "nobody (there was nobody left to strike)"
        return f"{self.how} {names} after {plural(self.rows, 'row')}"


@dataclass(kw_only=True)
class StruckRun:
    """What became of a run under blows."""

    seconds: float = 0.0
    struck: list[Struck] = field(default_factory=list)
    resumes: int = 0
    """After the controller was killed."""
    failures: list[str] = field(default_factory=list)
    """How the run ended although it should have gone on: the end of what it said; it was resumed after each."""
    left_over: frozenset[int] = frozenset()
    """Processes of it that were there after its end."""


def play(words: Sequence[str], log: Path, *, limit_s: float) -> float:
    """Run ``llamarl train`` with ``words`` to its end.

    Returns:
        Seconds.

    Raises:
        LlamaRLError: It failed, or took longer; carries the end of what it said.
    """
    began = time.monotonic()
    with _started(words, log) as process:
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise LlamaRLError(f"the undisturbed run is not done after {limit_s:g} s:\n{_tail(log)}") from None
    if process.returncode:
        raise LlamaRLError(f"the undisturbed run failed (exit status {process.returncode}):\n{_tail(log)}")
    return time.monotonic() - began


def play_struck(
    words: Sequence[str], run_dir: Path, log: Path, blows: Sequence[Blow], *, limit_s: float, most_failures: int = 3
) -> StruckRun:
    """Run ``llamarl train`` with ``words``, strike, and resume it where it ended, until it has ended well.

    Args:
        run_dir: Its folder.
        limit_s: Of all of it, from the first start.
        most_failures: Ends that should not have been, after which it is given up.
    """
    outcome, until = StruckRun(), time.monotonic() + limit_s
    began, ahead, seen = time.monotonic(), list(blows), set[int]()
    arguments = list(words)
    while True:
        with _started(arguments, log) as process:
            controller_struck = _strike_until_end(process, run_dir, ahead, outcome, until, seen)
            code = process.returncode
        if code == 0:
            break
        if controller_struck:
            outcome.resumes += 1
        else:
            outcome.failures.append(f"exit status {code}:\n{_tail(log)}")
        if time.monotonic() >= until or len(outcome.failures) > most_failures:
            outcome.failures.append(f"given up after {time.monotonic() - began:.0f} s")
            break
        wait_for_end(seen, _LEAVE_S)  # the folder's lock is free, but ranks may be on their way out
        if (run_dir / METRICS_FILE).is_file():
            arguments = ["--resume", str(run_dir)]
    outcome.seconds = time.monotonic() - began
    outcome.left_over = frozenset(wait_for_end(seen, _LEAVE_S))
    return outcome


def _strike_until_end(
    process: subprocess.Popen[bytes], run_dir: Path, ahead: list[Blow], outcome: StruckRun, until: float, seen: set[int]
) -> bool:
    """Until the process has ended; takes from ``ahead`` what has fallen. Whether the controller was struck."""
    reached: dict[int, float] = {}  # rows -> when there were as many
    struck, look_s = False, 0.0
    found, last = num_rows(run_dir), max((blow.rows for blow in ahead), default=0)
    while process.poll() is None:
        now = time.monotonic()
        if now >= look_s:  # those who come after the last blow are to be gone at the end too
            seen.update(target.pid for target in targets(process.pid))
            look_s = now + _LOOK_S
        if now >= until:
            process.kill()
            process.wait()
            return False
        rows = num_rows(run_dir)
        since = reached.setdefault(rows, now)
        for earlier in range(rows):
            reached.setdefault(earlier, since)
        after = ahead[0].rows_before(found, last) if ahead else 0
        if ahead and rows >= after and now >= reached[after] + ahead[0].delay_s:
            there = targets(process.pid)
            pids = {target.pid for target in there}
            seen |= pids
            if len(pids) > 1 or rows:  # its ranks are there: not at its start
                hit = _strike(ahead.pop(0), there, rows)
                outcome.struck.append(hit)
                struck = struck or any(target.name == "controller" for target in hit.victims)
        time.sleep(_POLL_S)
    return struck


def _strike(blow: Blow, there: Sequence[Target], rows: int) -> Struck:
    victims = choose(blow, there)
    return Struck(blow=blow, victims=victims, rows=rows, how=strike_processes(blow, victims))


def num_rows(run_dir: Path) -> int:
    """Whole rows of metrics that a run has written."""
    try:
        return (run_dir / METRICS_FILE).read_bytes().count(b"\n")
    except OSError:
        return 0


@contextlib.contextmanager
def _started(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``llamarl train`` in a process of its own; killed, and with it its ranks, where the caller leaves before its end."""
    with log.open("ab") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "llamarl.cli.main", "train", *words],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            if alive(process.pid):
                process.kill()
            process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_TAIL:]
