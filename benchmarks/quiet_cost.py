"""What recovery costs a run in which nothing dies: ``python benchmarks/quiet_cost.py --json OUT``.

Runs of one asynchronous job with ``recovery.max_restarts`` 8 and 0, in turn (A B A B), on a model of SmolLM2-135M's shape with random
weights. Both compute the same bits, so tick k of one run is paired with tick k of the next. A hundredth of a tick is less than what
other work on the machine changes, so the cost is counted, too: in the ranks the spans ``journal``; in the controller the holding of
tokens and states, the noting of reports and the thread that writes them; on the disk the bytes of ``RUN/journal``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import claim, paired_ratio, spread, write_report
from tokenizers import Tokenizer, models, pre_tokenizers
from train_step import random_smollm2
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
WARM_UP, LEFT_OUT = 2, 1
"""Ticks at the beginning, and at the end, where the generator is idle already."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder; default: SmolLM2-135M's shape, random weights")
    parser.add_argument("--rounds", type=int, default=3, help="A B rounds")
    parser.add_argument("--ticks", type=int, default=8, help="timed ticks a run")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument(
        "--also", nargs="*", default=[], metavar="REPORT", help="count the runs of earlier reports, too"
    )
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--controller", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.controller:
        sys.exit(count_controller(Path(args.controller[0]), args.controller[1:]))
    found: dict[int, list[dict[str, Any]]] = {8: [], 0: []}
    for report in args.also:
        for restarts, runs in json.loads(Path(report).read_text())["results"]["runs"].items():
            found[int(restarts)] += runs
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(args.model) if args.model else with_words(random_smollm2(Path(temporary) / "model"))
        for number in range(args.rounds):
            for restarts, runs in found.items():
                runs.append(run(Path(temporary) / f"run_{restarts}_{number}", model, restarts, args))
                step = spread(runs[-1]["step_s"])
                print(f"round {number + 1}, max_restarts {restarts}: {step['median']:.3f} s a tick", flush=True)
    on, off = ([s for one in found[restarts] for s in one["step_s"]] for restarts in (8, 0))
    ratio = paired_ratio(on, off)
    best = {
        restarts: sum(map(min, zip(*(one["step_s"] for one in runs), strict=True))) for restarts, runs in found.items()
    }
    noise = spread([sum(one["step_s"]) for one in found[0]])
    in_ranks = spread([s for one in found[8] for s in one["journal_s"]])
    in_controller = spread([one["controller_s_a_tick"] for one in found[8]])
    share = (in_ranks["median"] + in_controller["median"]) / spread(off)["median"]
    print(
        f"with recovery against without, tick by tick: {ratio['median']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})"
    )
    print(f"the same of each tick's best round: {best[8] / best[0]:.4f}")
    print(f"runs without it among themselves, longest against shortest: {noise['max'] / noise['min']:.4f}")
    print(
        f"counted: {1000 * in_ranks['median']:.2f} ms a tick in the ranks, {1000 * in_controller['median']:.2f} in the controller"
    )
    write_report(
        args.json,
        {
            "with_s": spread(on),
            "without_s": spread(off),
            "ratio": ratio,
            "ratio_of_best": best[8] / best[0],
            "noise": noise,
            "journal_span_s": in_ranks,
            "controller_s_a_tick": in_controller,
            "runs": {str(restarts): runs for restarts, runs in found.items()},
        },
        [
            claim("what is counted over a tick", share, 0.01, at_least=False),
            claim("each tick's best round with recovery over without", best[8] / best[0], 1.01, at_least=False),
            claim(
                "MB of journal a tick", max(one["journal_bytes_a_tick"] for one in found[8]) / 1e6, 2.0, at_least=False
            ),
        ],
    )


def count_controller(out: Path, words: list[str]) -> int:
    """``llamarl`` with what recovery adds to its controller under a clock; the sum goes to ``out``, in seconds."""
    from llamarl.cli.main import main as llamarl
    from llamarl.runtime.tick_log import TickLog

    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.thread_time() - began

        return call

    for name in ("take", "append", "_write", "_remove"):
        setattr(TickLog, name, timed(getattr(TickLog, name)))
    status = llamarl(words)
    out.write_text(json.dumps(spent[0]))
    return status


def with_words(folder: Path) -> Path:
    """A tokenizer for a model that has none: a word for each of its tokens."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, 49152)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="w3"
    ).save_pretrained(folder)
    return folder


def run(run_dir: Path, model: Path, restarts: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run; its timed ticks."""
    settings = {
        "run.dir": json.dumps(str(run_dir)),
        "run.num_ticks": WARM_UP + args.ticks + LEFT_OUT,
        "model.path": json.dumps(str(model)),
        "data.system_prompt": '""',
        "schedule.prompts_per_step": args.prompts,
        "generator.group_size": args.group_size,
        "generator.sampling.max_new_tokens": args.new_tokens,
        "evaluation.every": 0,
        "checkpoint.every": 0,
        "checkpoint.every_minutes": 0,
        "observability.console": '"none"',
        "recovery.max_restarts": restarts,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    counted = run_dir.with_suffix(".json")
    sizes: dict[str, int] = {}
    done = threading.Event()

    def watch() -> None:  # the journal is removed at the end
        while not done.wait(0.2):
            try:
                sizes.update({entry.name: entry.stat().st_size for entry in os.scandir(run_dir / "journal")})
            except OSError:
                continue

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        recipe = ROOT / "recipes" / "smollm2.toml"
        command = [sys.executable, __file__, "--controller", str(counted), "train", str(recipe), *words]
        subprocess.run(command, check=True, timeout=1200)
    finally:
        done.set()
        watching.join()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ticks = range(WARM_UP, WARM_UP + args.ticks)
    spent = dict.fromkeys(ticks, 0.0)
    for event in json.loads((run_dir / "trace.json").read_text()):
        if event.get("name") == "journal" and event["args"]["tick"] in spent:
            spent[event["args"]["tick"]] += event["dur"] / 1e6
    executors = sum(key.startswith("idle/") for key in rows[0])
    return {
        "step_s": [rows[tick]["time/step_s"] for tick in ticks],
        "journal_s": list(spent.values()),
        "controller_s_a_tick": json.loads(counted.read_text()) / len(rows),
        "journal_bytes_a_tick": sum(sizes.values()) / max(1, len(sizes)) * executors,
    }


if __name__ == "__main__":
    main()
