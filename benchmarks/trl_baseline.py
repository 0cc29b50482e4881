"""One GRPO run by TRL, timed a step: the baseline of ``end_to_end.py``, run with TRL's own environment.

Reads a JSON job on standard input (model folder, prompts as token texts with answers, sizes, threads; for a run that learns also
output_dir, save_every, learning_rate, schedule, warmup_steps) and prints one JSON object: seconds of each step and its mean reward.
With ``resume`` it goes on from the last checkpoint in output_dir; seconds are then of the steps since. Precision "bfloat16" is TRL's
``bf16=True``: float32 weights, products in bfloat16. The reward is 1 where the answer is the last number of the response, or with
answer_after what follows that mark's last occurrence.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
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
        return [float(last_answer(text) == right) for text, right in zip(completions, answer, strict=True)]

    def last_answer(text: str) -> str | None:
        if mark := job.get("answer_after"):
            _, found, given = text.rpartition(mark)
            return given.strip().replace(",", "") if found else None
        numbers = re.findall(r"-?\d+", text)
        return numbers[-1] if numbers else None

    lengths: list[int] = []
    steps: list[float] = []
    begun = 0.0

    class Clock(TrainerCallback):
        """Seconds from the beginning of a step to its end; saving is not among them."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            nonlocal begun
            begun = time.monotonic()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append(time.monotonic() - begun)

    samples = job["prompts_per_step"] * job["group_size"]
    config = GRPOConfig(
        output_dir=job.get("output_dir") or tempfile.mkdtemp(),
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=samples // job["micro_batch"],
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        max_steps=job["num_steps"],
        learning_rate=job.get("learning_rate", 1e-6),
        lr_scheduler_type=job.get("schedule", "constant"),
        warmup_steps=job.get("warmup_steps", 0),
        temperature=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=job.get("precision") == "bfloat16",
        fp16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="steps" if job.get("save_every") else "no",
        save_steps=job.get("save_every", 500),
        save_only_model=not job.get("resume"),
        save_total_limit=2 if job.get("resume") else None,
        logging_strategy="steps" if job.get("resume") else "no",
        logging_steps=1,
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
    resumes = bool(job.get("resume")) and any(Path(config.output_dir).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=resumes)
    import trl

    mean_length = sum(lengths) / max(1, len(lengths))
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    found = {"step_s": steps, "rewards": rewards, "length_mean": mean_length}
    print(json.dumps(found | {"trl": trl.__version__, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
