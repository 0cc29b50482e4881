"""Seconds a step of one asynchronous job under several settings, in turn, in one run.

    python benchmarks/job_settings.py --model models/smollm2 --rounds 5 \\
        --case "one thread" trainer.threads=1 \\
        --case "two, spinning" trainer.threads=2 GOMP_SPINCOUNT=300000 \\
        --case "two" trainer.threads=2

Each case is a name and what it changes: keys of the recipe, or variables of the environment (in capitals: ``PYTHONPATH`` of
another checkout's ``src`` times that one). A key without a value is left out. The job is that of ``benchmarks/end_to_end.py``: 8 prompts, 8 responses of at most 64 tokens each. Ratios are against the first case, round by round.
"""

from __future__ import annotations

import argparse
from typing import Any

from end_to_end import run_llamarl
from harness import core_seconds, paired_ratio, spread, write_report

SIZES = {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--case", action="append", nargs="+", required=True, metavar="NAME KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed steps a round, after two of warm-up")
    parser.add_argument("--json", help="write the report here")
    args = parser.parse_args()
    cases = {name: dict(word.split("=", 1) for word in words) for name, *words in args.case}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for number in range(args.rounds):
        for name, changes in cases.items():
            environment = {key: value for key, value in changes.items() if key.isupper()}
            settings = {key: value for key, value in changes.items() if not key.isupper()}
            before = core_seconds()
            run = run_llamarl(args.model, SIZES, args.steps, settings=settings, environment=environment)
            busy, all_cores = (after - began for after, began in zip(core_seconds(), before, strict=True))
            run["step_median_s"] = spread(run["step_s"])["median"]
            run["busy"] = busy / all_cores
            found[name].append(run)
            print(
                f"round {number + 1}, {name}: {run['step_median_s']:.2f} s a step, generator {_mean(run, 'time/generator_s'):.2f}, "
                f"trainer {_mean(run, 'time/trainer_s'):.2f}, cores idle {run['idle']:.1%} of these steps, busy {run['busy']:.0%} of the whole run",
                flush=True,
            )
    first, *others = cases
    times = {name: [run["step_median_s"] for run in runs] for name, runs in found.items()}
    ratios = {name: paired_ratio(times[name], times[first]) for name in others}
    for name, runs in found.items():
        every = spread([seconds for run in runs for seconds in run["step_s"]])
        idle = spread([run["idle"] for run in runs])
        print(
            f"{name}: median of {sum(len(run['step_s']) for run in runs)} steps {every['median']:.2f} s, cores idle {idle['median']:.1%}"
        )
    for name, ratio in ratios.items():
        print(f"{name} against {first}: {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})")
    if args.json:
        write_report(
            args.json,
            {"cases": cases, "step_s": {n: spread(t) for n, t in times.items()}, "ratios": ratios, "runs": found},
            [],
        )


def _mean(run: dict[str, Any], key: str) -> float:
    return sum(run[key]) / len(run[key])


if __name__ == "__main__":
    main()
