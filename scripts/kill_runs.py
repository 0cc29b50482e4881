"""Kills processes of runs of several kinds at random moments and compares what becomes of them:

    python scripts/kill_runs.py --kills 1000                       # hours
    python scripts/kill_runs.py --kills 20 --cases exact critic    # minutes
    python scripts/kill_runs.py --hangs 100                        # SIGSTOP instead
    python scripts/kill_runs.py --kills 10 --recipe my.toml        # of your own job, as it stands

Each case is a small job. It is run once undisturbed; then, until enough processes have been killed, run again with a few kills at
seeded moments: ranks, environments, the controller, now and then two at once. Each run must end by itself (a killed controller is
started again by ``--resume``), leave no process behind, and be equal to the undisturbed one: weights, rollouts and metrics without
times, byte for byte. Under the latest weights no two runs are equal; there the killed run is replayed from its own log, and the replay
must be equal to it. Exits 1 where a run fails in any of these. One line a run, and with ``--json`` a file of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from tools.chaos.compare import differences  # noqa: E402
from tools.chaos.runs import play  # noqa: E402
from tools.chaos.trial import Trial, strike_and_compare  # noqa: E402

_LIMIT_S = 1800.0
_IN_VAIN = 10
"""Runs one after the other that end before anybody was struck: then no further one is begun."""

SMALL: Mapping[str, Any] = {
    "run.num_ticks": 10,
    "schedule.prompts_per_step": 4,
    "generator.group_size": 4,
    "generator.threads": 1,
    "trainer.threads": 1,
    "checkpoint.every": 3,
    "evaluation.every": 4,
    "evaluation.num_prompts": 8,
    "observability.console": '"plain"',
    "observability.tensorboard": "false",
    "observability.trace": "false",
}
WHOLE = {"generator.max_segments": 1, "generator.oversubscription": 1.0}
PARTIAL = {"generator.max_segments": 2, "generator.oversubscription": 1.5}


@dataclass(frozen=True, kw_only=True)
class Case:
    recipe: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    size: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    repeats: bool = True
    """Whether two undisturbed runs are equal."""

    def words(self) -> tuple[str, ...]:
        return tuple(f"--{key}={value}" for key, value in {**self.size, **self.changes}.items())


CASES: Mapping[str, Case] = {
    "exact": Case(recipe="tiny", changes=WHOLE | {"schedule.max_staleness": 2}),
    "partial": Case(recipe="tiny", changes=PARTIAL),
    "latest": Case(recipe="tiny", changes=PARTIAL | {"schedule.weights": '"latest"'}, repeats=False),
    "meshes": Case(
        recipe="tiny",
        changes=PARTIAL
        | {"generator.dp": 2, "generator.tp": 2, "trainer.fsdp": 2, "trainer.tp": 2}
        | {"evaluation.every": 0, "run.cores": 8, "run.num_ticks": 6},
    ),
    "shards": Case(recipe="tiny", changes=PARTIAL | {"generator.dp": 2, "generator.shards": 4, "run.cores": 4}),
    "critic": Case(recipe="ppo_critic", changes=PARTIAL),
    "judge": Case(recipe=str(ROOT / "examples/executors/judge_model.toml")),
    "episodes": Case(
        recipe="tiny",
        changes=PARTIAL
        | {
            "task.name": '"episodes"',
            "task.environment": json.dumps(f"{ROOT / 'tests' / 'small_environments.py'}:Till"),
            "task.environment_options": "{ calls = 10 }",
            "task.max_turns": 12,
            "task.max_turn_tokens": 4,
            "task.pool.num_workers": 2,
            "generator.sampling.max_new_tokens": 180,
            "evaluation.every": 0,
        },
    ),
}


def strike(
    case: Case, undisturbed: Path, alone_s: float, folder: Path, *, kills: int, hangs: int, seed: int
) -> dict[str, Any]:
    """One run under blows: what it was, in plain data."""
    trial = Trial(recipe=case.recipe, overrides=case.words(), kills=kills, hangs=hangs, seed=seed, limit_s=_LIMIT_S)
    outcome, unlike = strike_and_compare(trial, undisturbed, alone_s, folder / "struck")
    if not case.repeats:
        replayed = folder / "replayed"
        words = ["--replay", str(folder / "struck"), "--run.dir", str(replayed)]
        play(words, folder / "replayed.log", limit_s=_LIMIT_S)
        unlike = differences(replayed, folder / "struck")
    return {
        "struck": [hit.describe() for hit in outcome.struck],
        "victims": sum(len(hit.victims) for hit in outcome.struck),
        "resumes": outcome.resumes,
        "seconds": round(outcome.seconds, 1),
        "failures": outcome.failures,
        "left_over": sorted(outcome.left_over),
        "differences": unlike,
    }


def still_to_strike(left: Mapping[str, int], victims: int) -> dict[str, int]:
    """What is left of each kind after a run in which so many were struck, of the first kind first: a run may end before all were."""
    after = {}
    for kind, count in left.items():
        after[kind] = max(0, count - victims)
        victims -= count - after[kind]
    return after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kills", type=int, default=0, help="processes to kill, over all runs (default 20 without --hangs)"
    )
    parser.add_argument("--hangs", type=int, default=0, help="ranks to stop, over all runs")
    parser.add_argument("--a-run", type=int, default=5, metavar="N", help="of them in each run (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--recipe", help="in place of the cases: name of a bundled recipe, or a file")
    parser.add_argument("--json", metavar="FILE", type=Path, help="append each run to this file, a line of JSON each")
    parser.add_argument(
        "--until", type=float, metavar="S", default=float("inf"), help="begin no run after this many seconds"
    )
    args = parser.parse_args()
    kills = args.kills or (0 if args.hangs else 20)
    cases = {"own": Case(recipe=args.recipe, size={})} if args.recipe else {name: CASES[name] for name in args.cases}
    left, began = {"kills": kills, "hangs": args.hangs}, time.monotonic()
    struck = bad = in_vain = 0
    with tempfile.TemporaryDirectory(prefix="kill-runs-") as name:
        folder, undisturbed, alone_s = Path(name), {}, {}
        for number, case_name in enumerate(itertools.cycle(cases)):
            if not any(left.values()) or time.monotonic() - began > args.until or in_vain == _IN_VAIN:
                break
            case = cases[case_name]
            if case_name not in undisturbed:
                undisturbed[case_name] = folder / f"undisturbed_{case_name}"
                words = [case.recipe, *case.words(), "--run.dir", str(undisturbed[case_name])]
                alone_s[case_name] = play(words, folder / f"undisturbed_{case_name}.log", limit_s=_LIMIT_S)
            now = {kind: min(count, args.a_run) for kind, count in left.items()}
            with tempfile.TemporaryDirectory(dir=folder) as run:
                result = strike(
                    case, undisturbed[case_name], alone_s[case_name], Path(run), **now, seed=args.seed + number
                )
            struck += result["victims"]
            in_vain = 0 if result["victims"] else in_vain + 1
            left = still_to_strike(left, result["victims"])
            failed = bool(result["failures"] or result["left_over"] or result["differences"])
            bad += failed
            result = {"case": case_name, "seed": args.seed + number, **result}
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(result) + "\n")
            words_of = "; ".join([*result["failures"], *map(str, result["left_over"]), *result["differences"]])
            print(
                f"{case_name:9} seed {result['seed']:4}: {result['victims']} struck, {result['resumes']} resumed, "
                f"{result['seconds']:5.1f} s: {words_of if failed else 'equal'}",
                flush=True,
            )
    print(f"{struck} struck in {number} runs, {bad} of the runs with a difference, a failure or something left over")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
