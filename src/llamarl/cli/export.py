"""``llamarl export``: a run's policy as a Hugging Face folder, from a checkpoint, in a precision of choice."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.errors import ConfigError

if TYPE_CHECKING:
    from llamarl.config import RunConfig
    from llamarl.trainer.narrowing import KLText

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Writes the policy of a checkpoint as a Hugging Face folder.

  llamarl export runs/tiny --out policy                          the newest checkpoint, in the precision that was served
  llamarl export runs/tiny --tick 39 --out policy                checkpoint tick_000039, the policy after 40 ticks
  llamarl export runs/tiny --dtype bfloat16 --out policy         in half the bytes of float32
  llamarl export runs/tiny --dtype float32 --out policy          the trainer's own weights, though bfloat16 was served
  llamarl export runs/lora --adapter --out adapter               the adapters of a LoRA run alone, for peft

Fewer bits than were served round most of a small learning rate's changes away. Then it says how many weights equal the base
model's bit for bit, and the KL a token (served || written) on responses of the run's rollouts, prompts where there are none."""

_NUM_TEXTS = 8


def add_parser(verbs: Any, full: bool = True) -> None:
    parser = verbs.add_parser(
        "export",
        help="write a checkpoint's policy as a model folder",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN", help="run folder")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; must not exist, or be empty")
    parser.add_argument("--tick", type=int, help="checkpoint to take, as its folder is numbered (default: the newest)")
    parser.add_argument(
        "--dtype",
        choices=("served", "source", "float32", "bfloat16", "float16"),
        help="precision of the weights; source is the base model's (default: the run's trainer.export_dtype)",
    )
    parser.add_argument("--adapter", action="store_true", help="the adapters of a LoRA run, not merged")
    parser.add_argument("--no-kl", action="store_true", help="do not measure the KL of fewer bits")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of sentences")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from llamarl.api.run import Run
    from llamarl.checkpoint.storage import CheckpointStore
    from llamarl.controller.model_sources import fetch_weights, local

    given = Run(args.run_dir)
    run_dir, config, out = given.dir, given.config, Path(args.out).expanduser()
    if args.adapter and not config.lora.rank:
        raise ConfigError(f"--adapter: {run_dir} trained all weights (lora.rank is 0); leave it out")
    if args.adapter and args.dtype not in (None, "float32"):
        raise ConfigError(f"--dtype {args.dtype}: adapters are written in float32, as they were trained; leave it out")
    _refuse_to_replace(out)
    fetch_weights(config)
    config = local(config)
    checkpoint = CheckpointStore(run_dir / "checkpoints").load(args.tick)
    from llamarl.checkpoint.storage import saving
    from llamarl.models.exported import Narrowing
    from llamarl.trainer.checkpoint_export import export_checkpoint

    texts = [] if args.no_kl or args.adapter else _texts(run_dir, config, checkpoint.tick)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        with saving(out):
            facts = export_checkpoint(
                checkpoint.path, config, partial, export_dtype=args.dtype, adapter=args.adapter, texts=texts
            )
            if out.exists():
                out.rmdir()  # empty, as checked
            os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    narrowing: Narrowing | None = facts.narrowing
    if args.json:
        print(json.dumps({"out": str(out), "checkpoint": checkpoint.path.name} | dataclasses.asdict(facts)))
        return 0
    print(f"{out}: {checkpoint.path.name} of {run_dir}, policy version {facts.policy_version}, {facts.dtype}")
    if narrowing is not None:
        print(f"served was {facts.served_dtype}: {narrowing.sentence()}")
    return 0


def _refuse_to_replace(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise ConfigError(f"--out {out} exists already: choose another folder, or remove it")


def _texts(run_dir: Path, config: RunConfig, tick: int) -> list[KLText]:
    """Responses of the newest rollouts up to ``tick``; where there are none, held-out prompts."""
    from llamarl.errors import DataError, LlamaRLError
    from llamarl.observability.rollouts import read_rollouts
    from llamarl.trainer.narrowing import KLText, text_of

    for earlier in range(tick, max(-1, tick - 100), -1):
        try:
            rollouts = [rollout for rollout in read_rollouts(run_dir, earlier) if rollout.response.sample_index == 0]
        except DataError:  # no such file
            continue
        texts = [text_of(rollout.prompt_tokens.tolist(), rollout.response.tokens.tolist()) for rollout in rollouts]
        return [text for text in texts if text is not None][:_NUM_TEXTS]
    from llamarl.environments.episode_pool import EpisodePool
    from llamarl.executors.prompts import make_prompt_stream
    from llamarl.models.loading import load_tokenizer

    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    try:
        with contextlib.ExitStack() as pools:
            environments = None
            if config.task.has_environment:
                environments = pools.enter_context(EpisodePool(config.task, num_workers=1))
            prompts = make_prompt_stream(config, tokenizer, environments).eval_prompts(_NUM_TEXTS)
    except LlamaRLError:  # a task whose data is gone does not keep its policy from being written
        return []
    return [KLText(prompt.tokens.tolist(), 1) for prompt in prompts if len(prompt.tokens) > 1]
