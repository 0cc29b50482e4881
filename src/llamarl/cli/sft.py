"""``llamarl sft``: supervised fine-tuning of a model on rows of data, as a warm start or for its own sake."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarl.observability.rollouts import ROLLOUTS_FOLDER

__all__ = ["add_arguments", "run", "settings"]

_DESCRIPTION = """\
Trains a model to write the completions that the data holds: the trainer of `llamarl train`, without generator and reward.

  llamarl sft Qwen/Qwen2.5-0.5B my_chats.jsonl                   one pass over the rows; the model is in runs/sft/model
  llamarl sft MODEL openai/gsm8k --task.subset main --epochs 3   a data set of the Hub
  llamarl sft MODEL DATA --lora.rank 16 --optimizer.lr 2e-4      adapters alone
  llamarl sft MODEL runs/tiny --task.least_reward 1              what a run sampled and its judge found right
  llamarl sft MODEL DATA --trainer.fsdp 2 --dry-run              print what would run, and run nothing
  llamarl train --resume runs/sft                                go on after an interruption, bit for bit
  llamarl train R.toml --model.path runs/sft/model               reinforcement learning from there

A row is {"messages": [..]}, {"prompt": .., "completion": ..} or {"question": .., "answer": ..}; the loss is on what the
assistant says. Every key of a recipe can be set: --section.key VALUE (llamarl --help keys lists them, docs/sft.md explains)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("model", help="Hugging Face folder, or id of a model of the Hub")
    parser.add_argument(
        "data",
        help="file of JSON lines or another table, folder, id of a data set of the Hub, or folder of a run: its best samples",
    )
    parser.add_argument(
        "--epochs", type=float, default=1.0, help="passes over the training rows (default: %(default)g)"
    )
    parser.add_argument("--batch", type=int, default=32, help="rows an optimizer step (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--every-key", action="store_true", help="with --dry-run: print keys at their defaults too")
    parser.set_defaults(run=run)


def settings(model: str, data: str, *, num_ticks: int, batch: int) -> Mapping[str, Any]:
    """Keys of the recipe that the verb stands for."""
    run = (Path(data).expanduser() / ROLLOUTS_FOLDER).is_dir()
    return {
        "run.dir": "runs/sft",
        "run.num_ticks": num_ticks,
        "model.path": model,
        "task.name": "demonstrations",
        **({"task.rollouts": data} if run else {"task.data": data}),
        "algorithm.name": "sft",
        "schedule.prompts_per_step": batch,
        "evaluation.every": max(1, num_ticks // 5),
        "optimizer.lr": 2e-5,
        "optimizer.schedule": "cosine",
        "optimizer.warmup_ticks": num_ticks // 20,
    }


def run(args: argparse.Namespace) -> int:
    from llamarl.cli.train import launch
    from llamarl.config import Check, RunConfig, load_config
    from llamarl.controller.preflight import find_missing
    from llamarl.errors import ConfigError
    from llamarl.executors.demonstrations import num_training_rows

    for name, given in (("--epochs", args.epochs), ("--batch", args.batch)):
        if not given > 0:
            raise ConfigError(f"{name} must be above 0, got {given:g}")

    def load(num_ticks: int, *checks: Check) -> RunConfig:
        given = settings(args.model, args.data, num_ticks=num_ticks, batch=args.batch)
        words = [f"--{key}={json.dumps(value)}" for key, value in given.items()]
        return load_config(None, [*words, *args.overrides], checks)

    first = load(1, find_missing)
    rows = (first.run.epochs or args.epochs) * (num_training_rows(first) or 1)
    num_ticks = max(1, math.ceil(rows / first.schedule.prompts_per_step))
    config = load(load(num_ticks).run.num_ticks)  # the second time by --run.num_ticks, if that was given
    launch(config, dry_run=args.dry_run, every_key=args.every_key)
    return 0
