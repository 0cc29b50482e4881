"""A limit that many steps share, also where one of them is a wait for a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from llamarl.errors import DeadlineExceeded
from llamarl.running_time import running_s

__all__ = ["Clock", "deadline_clock", "wait_for_device"]

_POLL_S = (20e-6, 1e-3)  # first and longest pause between two looks at a device

Clock = Callable[[str], float]
"""Called with what is being done; seconds left, or DeadlineExceeded."""


def deadline_clock(deadline_s: float, who: str) -> Clock:
    """A clock that starts now, and stands still while this process is stopped."""
    started = running_s()

    def left(doing: str) -> float:
        waited = running_s() - started
        if waited > deadline_s:
            raise DeadlineExceeded(
                f"{who}: {waited:.1f} s have passed ({doing}), limit {deadline_s:g} s; "
                "raise the limit, or look at the source's process"
            )
        return deadline_s - waited

    return left


def wait_for_device(event: Any, clock: Clock, doing: str) -> None:
    """Return when the device has done what was queued before ``event``, a recorded ``torch.cuda.Event``, whose own wait
    has no limit.

    Raises:
        DeadlineExceeded: The clock ran out.
    """
    pause = _POLL_S[0]
    while not event.query():
        clock(doing)
        time.sleep(pause)
        pause = min(_POLL_S[1], 2 * pause)
