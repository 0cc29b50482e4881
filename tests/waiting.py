"""Until another thread or process has done something."""

import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(done: Callable[[], object], limit_s: float = 20.0, what: str = "what should come to pass") -> None:
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, f"waited {limit_s:g} s for {what}"
        time.sleep(0.01)
