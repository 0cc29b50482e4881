"""One GRPO run by TRL, timed a step: the baseline of ``end_to_end.py``, run with TRL's own environment.

Reads a JSON job on standard input (model folder, prompts as token texts with answers, sizes, threads) and prints one JSON
object: seconds of each step. The reward is the share of prompts whose answer stands last in the response.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from typing import Any


def main() -> None:
    job = json.load(sys.stdin)
    import torch

    torch.set_num_threads(job["threads"])
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(job["model"], trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [
            float(bool(found := re.findall(r"-?\d+", text)) and found[-1] == right)
            for text, right in zip(completions, answer, strict=True)
        ]

    lengths: list[int] = []
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.monotonic())

    samples = job["prompts_per_step"] * job["group_size"]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=samples // job["micro_batch"],
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        max_steps=job["num_steps"],
        learning_rate=1e-6,
        temperature=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    rows = [{"prompt": p["text"], "answer": p["answer"]} for p in job["prompts"]]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    started = time.monotonic()
    trainer.train()
    steps = [end - begin for begin, end in zip([started, *ends[:-1]], ends, strict=True)]
    import trl

    mean_length = sum(lengths) / len(lengths)
    print(json.dumps({"step_s": steps, "length_mean": mean_length, "trl": trl.__version__, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
