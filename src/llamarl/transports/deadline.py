"""A limit that many steps share, also where one of them is a wait for a device."""

from __future__ import annotations

import time
from typing import Any

from llamarl.errors import DeadlineExceeded
from llamarl.running_time import running_s

__all__ = ["Clock", "wait_for_device"]

_POLL_S = (20e-6, 1e-3)  # first and longest pause between two looks at a device


class Clock:
    """Starts when it is made, and stands still while this process is stopped."""

    def __init__(self, deadline_s: float, who: str) -> None:
        self._deadline_s, self._who = deadline_s, who
        self._started = running_s()

    def __call__(self, doing: str) -> float:
        """Seconds left.

        Raises:
            DeadlineExceeded: None are; says what was being done.
        """
        waited = running_s() - self._started
        if waited > self._deadline_s:
            raise DeadlineExceeded(
                f"{self._who}: {waited:.1f} s have passed ({doing}), limit {self._deadline_s:g} s; "
                "look at the source's process and the network"
            )
        return self._deadline_s - waited

    def restart(self) -> None:
        """Give what is yet to come the whole time: something has come, however slow the way is."""
        self._started = running_s()


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
