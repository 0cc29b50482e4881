"""A sink (``observability.sinks``) that holds a run up: each row waits while the file ``hold`` lies beside the run's folder.

A run on a quick machine ends before a test has killed it. One that is held up at a row does not: ``hold_at`` writes which.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["HOLD_AT", "Hold", "hold_at", "let_go"]

HOLD_AT = {"observability.sinks": f'["{__file__}:Hold"]'}
_LIMIT_S = 120.0


def hold_at(run_dir: Path, row: int) -> None:
    """The run in ``run_dir``, which has ``HOLD_AT`` among its settings, is held up when it has written its ``row``-th row."""
    _mark(run_dir).write_text(str(row))


def let_go(run_dir: Path) -> None:
    _mark(run_dir).unlink()


class Hold:
    def __init__(self, run_dir: Path, config: Mapping[str, Any], resume_after_tick: int | None) -> None:
        self._mark = _mark(Path(run_dir))

    def write(self, row: Mapping[str, Any]) -> None:
        end = time.monotonic() + _LIMIT_S
        while self._mark.is_file() and row["step"] + 1 >= int(self._mark.read_text()) and time.monotonic() < end:
            time.sleep(0.02)

    def close(self) -> None:
        pass


def _mark(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.hold")
