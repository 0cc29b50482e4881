"""Error rates of the ``math`` judge: every reference answer in every wrapping, and a table of near misses.

    python benchmarks/math_judge.py --data ../shared/data --json

``--data`` holds ``gsm8k/train.jsonl``, ``gsm8k/test.jsonl`` and ``math/math500.jsonl`` (GSM8K and MATH-500 as published).
A false negative is a right answer in a common wrapping that is judged wrong; a false positive a wrong one judged right.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "unit" / "environments"))

from math_answers import NEAR_MISSES, load_golds, wrapped  # the tests' own tables

from llamarl.environments.math import judge_answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent.parent.parent / "shared" / "data")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--every", type=int, default=1, help="judge every n-th reference answer only")
    parser.add_argument("--failures", type=int, default=0, help="print so many right answers that were judged wrong")
    arguments = parser.parse_args()
    started = time.perf_counter()
    judged: Counter[tuple[str, str]] = Counter()
    missed: Counter[tuple[str, str]] = Counter()
    judge_answer("\\boxed{2x}", "x + x")  # math-verify is imported here, and not in the slowest judgement
    slowest_s, shown = 0.0, 0
    verdicts: dict[str, list[tuple[str, str, bool]]] = {}  # of one reference, however often the files hold it
    for name, golds in load_golds(arguments.data).items():
        for gold in golds[:: arguments.every]:
            if gold not in verdicts:
                verdicts[gold] = []
                for wrapping, response in wrapped(gold):
                    begun = time.perf_counter()
                    right = judge_answer(response, gold).value == 1.0
                    slowest_s = max(slowest_s, time.perf_counter() - begun)
                    verdicts[gold].append((wrapping, response, right))
            for wrapping, response, right in verdicts[gold]:
                judged[name, wrapping] += 1
                if not right:
                    missed[name, wrapping] += 1
                    if shown < arguments.failures:
                        shown += 1
                        print(f"{name}, {wrapping}: {gold!r} in {response!r}", file=sys.stderr)
    accepted = [(gold, response) for gold, response in NEAR_MISSES if judge_answer(response, gold).value == 1.0]
    report = {
        "right answers": sum(judged.values()),
        "false negatives": sum(missed.values()),
        "false negatives by set and wrapping": {
            f"{name}, {wrapping}": n for (name, wrapping), n in sorted(missed.items())
        },
        "wrappings": len({wrapping for _, wrapping in judged}),
        "reference answers": {
            name: max(n for (other, _), n in judged.items() if other == name)
            for name in sorted({name for name, _ in judged})
        },
        "near misses": len(NEAR_MISSES),
        "false positives": len(accepted),
        "slowest judgement, s": round(slowest_s, 3),
        "seconds": round(time.perf_counter() - started, 1),
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        for key, value in report.items():
            print(f"{key}: {value}")
        for gold, response in accepted:
            print(f"judged right: {response!r} for {gold!r}")


if __name__ == "__main__":
    main()
