"""Error rates of the ``math`` judge: every published reference answer in every wrapping, near misses and hedges.

    python benchmarks/math_judge.py

The wrappings, the near misses and the reference answers of GSM8K and MATH-500 are those of the tests
(``tests/unit/environments/math_*``): a fresh clone needs nothing else. A false negative is a right answer that is judged
wrong; a false positive a wrong one judged right.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "unit" / "environments"))

from math_answers import NEAR_MISSES, hedged, load_golds, wrapped  # the tests' own tables

from llamarl.environments.math import judge_answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--every", type=int, default=1, help="judge every n-th different reference answer only")
    parser.add_argument("--failures", type=int, default=0, help="print so many right answers that were judged wrong")
    arguments = parser.parse_args()
    started = time.perf_counter()
    judge_answer("\\boxed{2x}", "x + x")  # math-verify is imported here, and not in the slowest judgement
    judged: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    wrappings: set[str] = set()
    slowest_s, shown = 0.0, 0
    verdicts: dict[str, tuple[int, list[tuple[str, str]]]] = {}  # of one reference, however often the files hold it
    for name, golds in load_golds().items():
        for gold, count in list(golds.items())[:: arguments.every]:
            if gold not in verdicts:
                responses = list(wrapped(gold))
                wrong = []
                for wrapping, response in responses:
                    begun = time.perf_counter()
                    if judge_answer(response, gold).value != 1.0:
                        wrong.append((wrapping, response))
                    slowest_s = max(slowest_s, time.perf_counter() - begun)
                wrappings |= {wrapping for wrapping, _ in responses}
                verdicts[gold] = (len(responses), wrong)
                for _, response in wrong[: max(0, arguments.failures - shown)]:
                    shown += 1
                    print(f"{gold!r} in {response!r}", file=sys.stderr)
            num_responses, wrong = verdicts[gold]
            judged[name] += count * num_responses
            missed.update({f"{name}, {wrapping!r}": count for wrapping, _ in wrong})
    wrong_answers = NEAR_MISSES + [(gold, response) for response in hedged() for gold in ("12", "13")]
    accepted = [(gold, response) for gold, response in wrong_answers if judge_answer(response, gold).value == 1.0]
    report = {
        "right answers": dict(judged) | {"all": judged.total()},
        "different reference answers": len(verdicts),
        "wrappings": len(wrappings),
        "false negatives": missed.total(),
        "false negatives by set and wrapping": dict(missed),
        "near misses and hedges": len(wrong_answers),
        "false positives": len(accepted),
        "false positives are": accepted,
        "slowest judgement, s": round(slowest_s, 3),
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(
        json.dumps(report, indent=2)
        if arguments.json
        else "\n".join(f"{key}: {value}" for key, value in report.items())
    )


if __name__ == "__main__":
    main()
