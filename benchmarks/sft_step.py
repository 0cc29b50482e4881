"""Seconds a token of supervised fine-tuning, llamarl against TRL's SFTTrainer: same model, rows, batch, precision and cores, one run.

    python benchmarks/sft_step.py --model path/to/SmolLM2-135M-Instruct --rows rows.jsonl --json OUT

Rows are ``{"prompt": text, "completion": text}``. TRL runs in an environment of its own (``--trl-env``, as of
``end_to_end.py``), with the loss on completions, padded and packed in turn; its better one counts. The sides alternate
(A B A B); each side's first step is warm-up. A token is one that goes through the model, padding apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH = 16
"""Rows an optimizer step."""
MICRO_BATCH = 4
"""Rows of TRL's micro-batch."""
MAX_TOKENS = 1024


def main() -> None:
    from end_to_end import trl_python
    from harness import claim, spread, write_report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--rows", required=True, help="JSON lines of prompt and completion")
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--trl-env", default="runs/trl-env", help="virtual environment for TRL; made if missing")
    parser.add_argument("--rounds", type=int, default=2, help="A B rounds, TRL padded and packed in turn")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a round, after one of warm-up")
    args = parser.parse_args()
    python = trl_python(Path(args.trl_env))
    ours: list[float] = []
    theirs: dict[str, list[float]] = {"padded": [], "packed": []}
    for number in range(args.rounds):
        ours += run_llamarl(args.model, args.rows, args.steps + 1)
        kind = "packed" if number % 2 else "padded"
        job = {"model": args.model, "rows": args.rows, "steps": args.steps + 1, "packing": kind == "packed"}
        theirs[kind] += run_trl(python, job)
        print(f"llamarl {ours[-args.steps :]}, TRL {kind} {theirs[kind][-args.steps :]} s a 1,000 tokens", flush=True)
    llamarl = spread(ours)
    trl = {kind: spread(found) for kind, found in theirs.items() if found}
    best = min(found["median"] for found in trl.values())
    ratio = llamarl["median"] / best
    print(f"llamarl {llamarl['median']:.2f} s, TRL {best:.2f} s a 1,000 tokens: ratio {ratio:.2f}")
    results = {"batch": BATCH, "llamarl_s_per_1000_tokens": llamarl, "trl_s_per_1000_tokens": trl}
    claims = [claim("seconds a token of fine-tuning, llamarl by TRL", ratio, 0.5, at_least=False)]
    write_report(args.json, results, claims)


def run_llamarl(model: str, rows: str, steps: int) -> list[float]:
    """Seconds a 1,000 tokens of each step but the first."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = {
            "run.num_ticks": steps,
            "run.dir": run_dir,
            "trainer.threads": len(os.sched_getaffinity(0)),
            "trainer.dtype": "float32",
            "trainer.max_tokens_per_microbatch": 2048,
            "data.max_prompt_tokens": MAX_TOKENS,
            "data.too_long": "skip",
            "evaluation.every": 0,
            "checkpoint.every": 0,
        }
        words = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "llamarl.cli.main", "sft", model, rows, "--batch", str(BATCH), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [1000 * row["time/step_s"] / row["tokens/computed"] for row in found[1:]]


def run_trl(python: Path | str, job: dict[str, Any]) -> list[float]:
    """The same of TRL."""
    command = [str(python), __file__, "--child"]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return list(json.loads(done.stdout.splitlines()[-1]))


def child() -> None:
    """One run of TRL: prints the seconds a 1,000 tokens of each step but the first."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    job = json.load(sys.stdin)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with open(job["rows"], encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    begun, times, counts = 0.0, [], []

    class Clock(TrainerCallback):
        """Seconds of each step."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            nonlocal begun
            begun = time.monotonic()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.monotonic() - begun)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "num_tokens" in logs:
                counts.append(float(logs["num_tokens"]))

    packing = bool(job["packing"])
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=job["steps"],
        per_device_train_batch_size=1 if packing else MICRO_BATCH,
        gradient_accumulation_steps=MICRO_BATCH if packing else BATCH // MICRO_BATCH,
        packing=packing,
        max_length=MAX_TOKENS,
        completion_only_loss=True,
        learning_rate=2e-5,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[Clock()],
    )
    trainer.train()
    tokens = [after - before for before, after in zip([0.0, *counts], counts, strict=False)]
    print(json.dumps([1000 * t / n for t, n in list(zip(times, tokens, strict=False))[1:]]))


if __name__ == "__main__":
    child() if sys.argv[1:] == ["--child"] else main()
