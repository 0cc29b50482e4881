"""A slow network, on a clock of its own."""

from typing import Any

import pytest

from llamarl.transports import deadline
from llamarl.weight_sync.slot import RemoteSlot


def slow_reads(monkeypatch: pytest.MonkeyPatch, block_s: float) -> list[float]:
    """Have each block of weights take so many seconds; returns the time, in a list of one."""
    now = [0.0]
    read = RemoteSlot.read

    def slow(*args: Any, **kwargs: Any) -> None:
        now[0] += block_s
        read(*args, **kwargs)

    monkeypatch.setattr(RemoteSlot, "read", slow)
    monkeypatch.setattr(deadline, "running_s", lambda: now[0])
    return now
