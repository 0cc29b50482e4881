"""Whether two runs are one: model, rollouts and every number that is no time, byte for byte."""

import json
from pathlib import Path
from typing import Any

from tools.chaos.compare import differences

from llamarl.observability.keys import is_timing_key

__all__ = ["assert_same_run", "contents", "rows", "untimed"]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Of ``metrics.jsonl``."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    """The same without what a clock decides."""
    return [{key: value for key, value in row.items() if not is_timing_key(key)} for row in rows(run_dir)]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_run(one: Path, other: Path) -> None:
    assert not differences(one, other)
    assert contents(one / "rollouts") or "samples/delivered" not in rows(one)[0]
