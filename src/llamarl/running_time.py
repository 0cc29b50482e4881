"""A clock for deadlines that stands still while this process is stopped (Ctrl-Z, SIGSTOP, a paused container).

A deadline asks whether something takes too long, and a process that could not run has not waited. No kernel tells how long it was
stopped, so a thread looks at the clock twice a second: a silence of more than two seconds is taken for a stop. Native code that
holds the interpreter for that long looks the same, and makes a deadline later by as much.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

__all__ = ["RunningTime", "running_s"]

_BEAT_S = 0.5
_LONGEST_S = 2.0


class RunningTime:
    """Seconds that pass while somebody asks at least every two seconds; a longer silence does not count.

    Args:
        clock: Seconds that only grow, ``time.monotonic`` if they come from the machine.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = clock()
        self._silent = 0.0

    def __call__(self) -> float:
        """Seconds, on the scale of ``clock`` until the first silence; may be asked from any thread."""
        with self._lock:
            now = self._clock()
            if now - self._last > _LONGEST_S:
                self._silent += now - self._last
            self._last = now
            return now - self._silent


_time = RunningTime(time.monotonic)
_beating = False


def running_s() -> float:
    """``time.monotonic`` less the time for which this process was stopped; only differences mean something."""
    global _beating
    if not _beating:  # two threads that ask first at once may start two: harmless
        _beating = True
        threading.Thread(target=_beat, name="llamarl-running-time", daemon=True).start()
    return _time()


def _beat() -> None:
    while True:
        time.sleep(_BEAT_S)
        _time()


def _forked() -> None:
    """Threads do not live on in a fork, and its lock may be held for ever."""
    global _beating, _time
    _beating, _time = False, RunningTime(time.monotonic)


os.register_at_fork(after_in_child=_forked)
