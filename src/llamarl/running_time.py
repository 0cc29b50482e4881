"""A clock for deadlines that stands still while this process is stopped (SIGSTOP, Ctrl-Z, a paused container).

A deadline asks whether something takes too long, and a process that could not run has not waited.
No kernel tells how long it was stopped, so a thread looks at the clock twice a second: a silence of
more than two seconds is taken for a stop. Native code that holds the interpreter for that long
looks the same, and makes a deadline later by as much.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

__all__ = ["RunningTime", "running_s", "wait_for"]

_BEAT_S = 0.5
_LONGEST_S = 2.0


class RunningTime:
    """Seconds that pass while somebody asks at least every two seconds; a longer silence does not count.

    Args:
        clock: Seconds that only grow, ``time.monotonic`` if they come from the machine.
        silent_s: Of silence so far.
    """

    def __init__(self, clock: Callable[[], float], silent_s: float = 0.0) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = clock()
        self.silent_s = silent_s

    def __call__(self) -> float:
        """Seconds, on the scale of ``clock`` until the first silence; may be asked from any thread."""
        with self._lock:
            now = self._clock()
            if now - self._last > _LONGEST_S:
                self.silent_s += now - self._last
            self._last = now
            return now - self.silent_s


_time = RunningTime(time.monotonic)
_beating = False


def running_s() -> float:
    """``time.monotonic`` less the time for which this process was stopped; only differences mean something."""
    global _beating
    if not _beating:  # two threads that ask first at once may start two: harmless
        threading.Thread(target=_beat, name="llamarl-running-time", daemon=True).start()
        _beating = True
    return _time()


def wait_for(done: Callable[[float], bool], limit_s: float) -> bool:
    """Whether ``done`` became true within ``limit_s`` of running time.

    Args:
        done: Waits at most as many seconds as it is given; by a clock of its own, which may have
            gone on while this process was stopped: then it is asked again.
    """
    until = running_s() + limit_s
    while True:
        left_s = until - running_s()
        if done(max(0.0, left_s)):
            return True
        if left_s <= 0.0:
            return False


def _beat() -> None:
    while True:
        time.sleep(_BEAT_S)
        _time()


def _forked() -> None:
    """Threads do not live on in a fork, and its lock may be held for ever."""
    global _beating, _time
    _beating, _time = False, RunningTime(time.monotonic, _time.silent_s)


os.register_at_fork(after_in_child=_forked)
