"""One trial: the undisturbed run, the struck one, the comparison, in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llamarl.errors import ConfigError
from llamarl.observability.metrics import read_metrics
from llamarl.plural import plural
from tools.chaos.compare import differences
from tools.chaos.plan import plan_blows
from tools.chaos.runs import StruckRun, num_rows, play, play_struck

__all__ = ["Trial", "strike_and_compare", "try_recipe"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    recipe: str
    overrides: tuple[str, ...] = ()
    kills: int = 10
    hangs: int = 0
    seed: int = 0
    only: tuple[str, ...] = ()
    again: bool = False
    """Whether the undisturbed run is repeated first."""
    limit_s: float = 3600.0


def try_recipe(trial: Trial, folder: Path, tell: Callable[[str], None]) -> int:
    """Both runs below ``folder``.

    Returns:
        0 where the struck run ended by itself with the undisturbed one's bits and left nothing behind, else 1; 1, too, where
        nobody was struck, which shows nothing.

    Raises:
        LlamaRLError: The undisturbed run failed.
    """
    undisturbed = folder / "undisturbed"
    words = [trial.recipe, *trial.overrides]
    tell(f"undisturbed: llamarl train {' '.join(words)}")
    alone_s = play([*words, "--run.dir", str(undisturbed)], folder / "undisturbed.log", limit_s=trial.limit_s)
    tell(f"undisturbed: {plural(num_rows(undisturbed), 'tick')} in {alone_s:.1f} s")
    if trial.again:
        again = folder / "again"
        play([*words, "--run.dir", str(again)], folder / "again.log", limit_s=trial.limit_s)
        if unlike := differences(again, undisturbed):
            tell(f"undisturbed, a second time: differs ({', '.join(unlike)}): this recipe does not repeat itself")
            return 1
        tell("undisturbed, a second time: equal")
    outcome, unlike = strike_and_compare(trial, undisturbed, alone_s, folder / "struck", tell)
    tell("")
    tell(_verdict(outcome, unlike, alone_s, folder / "struck", wanted=trial.kills + trial.hangs))
    return int(bool(unlike or outcome.failures or outcome.left_over or not outcome.struck))


def strike_and_compare(
    trial: Trial,
    undisturbed: Path,
    alone_s: float,
    run_dir: Path,
    tell: Callable[[str], None],
) -> tuple[StruckRun, list[str]]:
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
    outcome = play_struck(
        words,
        run_dir,
        log,
        blows,
        limit_s=trial.limit_s,
        only=trial.only,
        tell=lambda line: tell(f"  {line}"),
    )
    return outcome, differences(run_dir, undisturbed)


def _verdict(outcome: StruckRun, unlike: list[str], alone_s: float, run_dir: Path, *, wanted: int) -> str:
    victims = [target for hit in outcome.struck for target in hit.victims]
    lines = [
        f"{plural(len(victims), 'process')} struck, {outcome.resumes} times resumed; {outcome.seconds:.1f} s instead of {alone_s:.1f} s"
    ]
    if len(victims) < wanted:
        lines.append(f"{wanted - len(victims)} were still to be struck: the run had ended, or nobody was left")
    lost = _lost(run_dir)
    if lost:
        lines.append("brought up again: " + ", ".join(f"{name} {count} times" for name, count in sorted(lost.items())))
    for failure in outcome.failures:
        lines.append(f"it did not go on by itself: {failure}")
    if outcome.left_over:
        lines.append(f"left over: processes {', '.join(map(str, sorted(outcome.left_over)))}")
    bits = "the bits agree: weights, rollouts and metrics are those of the undisturbed run"
    lines.append(bits if not unlike else "the bits differ: " + "; ".join(unlike))
    return "\n".join(lines)


def _lost(run_dir: Path) -> dict[str, int]:
    """Executor -> how often the run says it brought it up again; the count begins anew with each resume."""
    counts: dict[str, int] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        for key, value in json.loads(line).items():
            if key.startswith("recovery/") and key.endswith("_restarts") and value is not None:
                name = key.removeprefix("recovery/").removesuffix("_restarts")
                counts[name] = max(counts.get(name, 0), int(value))
    return counts
