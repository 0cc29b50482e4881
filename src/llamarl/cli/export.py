"""``llamarl export``: a run's policy as a Hugging Face folder, from a checkpoint, in a precision of choice."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
from pathlib import Path

from llamarl.errors import ConfigError

__all__ = ["add_arguments", "run"]

_DESCRIPTION = """\
Writes the policy of a checkpoint as a Hugging Face folder.

  llamarl export runs/tiny --out policy                          the newest checkpoint, in the precision that was served
  llamarl export runs/tiny --tick 39 --out policy                checkpoint tick_000039, the policy after 40 ticks
  llamarl export runs/tiny --dtype bfloat16 --out policy         in half the bytes of float32
  llamarl export runs/tiny --dtype float32 --out policy          the trainer's own weights, though bfloat16 was served
  llamarl export runs/lora --adapter --out adapter               the adapters of a LoRA run alone, for peft

Fewer bits than were served round most of a small learning rate's changes away."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("run_dir", metavar="RUN", help="run folder")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; must not exist, or be empty")
    parser.add_argument(
        "--tick",
        type=int,
        help="checkpoint to take, as its folder is numbered (default: the newest, or with evaluation.patience that of the "
        "lowest held-out loss)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="precision of the weights (default: that in which they were sampled from and evaluated)",
    )
    parser.add_argument("--adapter", action="store_true", help="the adapters of a LoRA run, not merged")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run a tokenizer that is Python code of the model's folder"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from llamarl.api.run import Run
    from llamarl.checkpoint.storage import CheckpointStore
    from llamarl.controller.begun import refuse_code_of_a_run
    from llamarl.controller.products import tick_of_products
    from llamarl.models.folders import local_model_path

    given = Run(args.run_dir)
    run_dir, config, out = given.dir, given.config, Path(args.out).expanduser()
    if args.adapter and not config.lora.rank:
        raise ConfigError(f"--adapter: {run_dir} trained all weights (lora.rank is 0); leave it out")
    if args.adapter and args.dtype not in (None, "float32"):
        raise ConfigError(f"--dtype {args.dtype}: adapters are written in float32, as they were trained; leave it out")
    _refuse_to_replace(out)
    model = config.model  # of all that a run names an export reads this alone
    trusted = {"model": {"trust_remote_code": True}} if args.trust_remote_code else {}
    refuse_code_of_a_run(config, run_dir, trusted, sections=("model",))
    path = local_model_path(model.path, code=model.trust_remote_code)
    config = dataclasses.replace(config, model=dataclasses.replace(model, path=path))
    store = CheckpointStore(run_dir / "checkpoints")
    checkpoint = store.load(args.tick)
    if args.tick is None and config.evaluation.patience:
        checkpoint = store.load(tick_of_products(run_dir, config, checkpoint.tick))
    from llamarl.checkpoint.storage import saving
    from llamarl.trainer.checkpoint_export import export_checkpoint

    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be made ({error.strerror}): choose another folder") from error
    try:
        with saving(out, "the model"):
            facts = export_checkpoint(checkpoint.path, config, partial, export_dtype=args.dtype, adapter=args.adapter)
            if out.exists():
                out.rmdir()  # empty, as checked
            os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{out}: {checkpoint.path.name} of {run_dir}, policy version {facts.policy_version}, {facts.dtype}")
    return 0


def _refuse_to_replace(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise ConfigError(f"--out {out} exists already: choose another folder, or remove it")
