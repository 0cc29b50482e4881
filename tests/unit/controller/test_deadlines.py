"""Who speaks first where a rank hangs: the controller, which knows where each rank is, before a rank that waits for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamarl.config import load_config
from llamarl.controller import run_parts
from llamarl.controller.config import DeadlineConfig
from llamarl.controller.run import start_run

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "tiny.toml"


@pytest.mark.parametrize(("setup_s", "step_s"), [(600.0, 1800.0), (600.0, 2.0), (1.0, 2.0)])
def test_a_collective_outlasts_every_limit_of_the_controller(setup_s: float, step_s: float) -> None:
    deadlines = DeadlineConfig(setup_s=setup_s, step_s=step_s)
    assert min(deadlines.collective_s - setup_s, deadlines.collective_s - step_s) == 30.0


def test_a_run_gives_its_ranks_the_limit_that_its_deadlines_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made(Exception):
        """The runtime would be made."""

    def make_runtime(name: str, **how: Any) -> None:
        raise Made(name, how["collective_timeout_s"])

    monkeypatch.setattr(run_parts, "make_runtime", make_runtime)
    words = ["--run.dir", str(tmp_path / "run"), "--run.runtime", "inline", "--deadlines.step_s", "5000"]
    with pytest.raises(Made) as made:
        start_run(load_config(RECIPE, [*words, "--run.cores", "2"]))
    assert made.value.args == ("inline", 5030.0)
