"""The room stays small: what forecasts a run is lighter than what runs it."""

from __future__ import annotations

from pathlib import Path

import llamarl

ROOT = Path(llamarl.__file__).parent


def lines_of(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_the_forecast_has_at_most_5000_lines_and_is_lighter_than_engine_and_trainer_with_its_verbs() -> None:
    verbs = [ROOT / "cli" / f"{name}.py" for name in ("plan", "simulate", "forecast_flags")]
    room = lines_of(*(ROOT / "forecast").rglob("*.py"))
    assert room <= 5_000
    assert room + lines_of(*verbs) < lines_of(*(ROOT / "engine").rglob("*.py"), *(ROOT / "trainer").rglob("*.py"))
