"""One trial: the struck run, and its comparison with the undisturbed one."""

from dataclasses import dataclass
from pathlib import Path

from llamarl.errors import ConfigError
from llamarl.observability.metrics import read_metrics
from tools.chaos.compare import differences
from tools.chaos.plan import plan_blows
from tools.chaos.runs import StruckRun, play_struck

__all__ = ["Trial", "strike_and_compare"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    recipe: str
    overrides: tuple[str, ...] = ()
    kills: int = 10
    hangs: int = 0
    seed: int = 0
    limit_s: float = 3600.0


def strike_and_compare(trial: Trial, undisturbed: Path, alone_s: float, run_dir: Path) -> tuple[StruckRun, list[str]]:
    """The struck run in ``run_dir``, which is new, and what of it differs from the run in ``undisturbed``, which took ``alone_s``."""
    rows = read_metrics(undisturbed)
    if not rows:
        raise ConfigError(f"{undisturbed} has no row of metrics: run.num_ticks is 0?")
    tick_s = max(0.05, sum(float(row.get("time/step_s") or 0.0) for row in rows) / len(rows))
    blows = plan_blows(num_ticks=len(rows), tick_s=tick_s, kills=trial.kills, hangs=trial.hangs, seed=trial.seed)
    struck = trial.kills + trial.hangs
    words = [trial.recipe, *trial.overrides, "--run.dir", str(run_dir)]
    words += ["--recovery.max_restarts", str(10 * struck)]
    if trial.hangs:
        words += ["--deadlines.step_s", f"{max(20.0, 20 * tick_s):.0f}"]
        words += ["--deadlines.setup_s", f"{max(30.0, 2 * alone_s):.0f}"]
    log = run_dir.with_name(run_dir.name + ".log")
    outcome = play_struck(words, run_dir, log, blows, limit_s=trial.limit_s)
    return outcome, differences(run_dir, undisturbed)
