"""``llamarl eval``: score a model folder or a finished run on a task."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamarl.cli.flags import OutputFile, in_flags
from llamarl.errors import ConfigError, ModelError

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Samples held-out prompts and judges the responses.

  llamarl eval runs/tiny                                      the final policy of a run, on its own task
  llamarl eval path/to/model --recipe recipes/smollm2.toml    any Hugging Face folder, on a recipe's task
  llamarl eval runs/tiny --samples 8 --prompts 200 --json     pass@8 over 200 prompts, as one JSON object

accuracy is the share of scored samples with reward >= 1; pass@k the share of prompts with a right one among k samples.
A sample whose judge failed is counted as failed and enters neither. Exit code 1 if every sample failed."""


def add_parser(verbs: Any, full: bool = True) -> None:
    parser = verbs.add_parser(
        "eval",
        help="score a model or a run on a task",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="Hugging Face folder, bundled:tiny, or a run folder")
    parser.add_argument("--recipe", help="recipe that names the task (a run folder brings its own)")
    parser.add_argument("--prompts", type=int, help="held-out prompts (default: the recipe's evaluation.num_prompts)")
    parser.add_argument("--samples", type=int, help="responses a prompt, the k of pass@k (default: the recipe's)")
    parser.add_argument("--temperature", type=float, help="sampling temperature, 0 is greedy (default: the recipe's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--responses", metavar="OUT.jsonl", help="also write every prompt, response and verdict")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    from llamarl.config import load_config
    from llamarl.controller.preflight import check_engine

    model, recipe = _locate(args.model, args.recipe)
    given = {"model.path": ("model", json.dumps(model, ensure_ascii=False))}
    for key, flag in (("num_prompts", "prompts"), ("samples_per_prompt", "samples"), ("temperature", "temperature")):
        if getattr(args, flag) is not None:
            given[f"evaluation.{key}"] = (f"--{flag}", str(getattr(args, flag)))
    overrides = [word for key, (_, value) in given.items() for word in (f"--{key}", value)]
    try:
        config = load_config(recipe, [*args.overrides, *overrides], [_find_missing])
    except ConfigError as error:
        raise ConfigError(in_flags(str(error), {key: flag for key, (flag, _) in given.items()})) from None
    check_engine(config, sections=["evaluation"])
    with OutputFile(args.responses, "--responses") if args.responses else contextlib.nullcontext() as responses:
        scores = _evaluate(config, responses)
    if args.json:
        print(json.dumps(scores))
    else:
        for key, value in scores.items():
            print(f"{key:<20} {value:.4f}" if isinstance(value, float) else f"{key:<20} {value}")
    return 1 if scores["failed"] == scores["samples"] else 0


def _locate(model: str, recipe: str | None) -> tuple[str, str | None]:
    """(model folder, recipe) of what the user named: a run folder holds both."""
    folder = Path(model)
    if (folder / "config.toml").is_file():
        if not (folder / "model" / "config.json").is_file() and (folder / "adapter").is_dir():
            raise ConfigError(
                f"{folder} wrote its adapter alone (lora.export_merged is off): merge {folder / 'adapter'} into its base model with "
                "peft (merge_and_unload, save_pretrained) and give that folder with --recipe"
            )
        if not (folder / "model" / "config.json").is_file():
            raise ConfigError(
                f"{folder} is a run without a final policy in {folder / 'model'}: let it finish "
                f"(llamarl train RECIPE --resume {folder})"
            )
        return str(folder / "model"), recipe or str(folder / "config.toml")
    return model, recipe


def _find_missing(config: Any) -> Iterator[str]:
    from llamarl.environments.factory import task_mistakes
    from llamarl.models.folders import resolve_model_path

    try:
        resolve_model_path(config.model.path)
    except ModelError as error:
        yield str(error)
    yield from task_mistakes(config.task, config.run.seed)


def _evaluate(config: Any, responses: OutputFile | None) -> dict[str, Any]:
    from llamarl.environments.pool import RewardPool
    from llamarl.executors.evaluator import evaluate, sample_groups
    from llamarl.executors.generator import make_engine, resolve_device, sampling_params
    from llamarl.executors.prompts import make_prompt_stream
    from llamarl.models.loading import load_tokenizer

    tokenizer = load_tokenizer(config.model.path)
    prompts = make_prompt_stream(config, tokenizer).eval_prompts(config.evaluation.num_prompts)
    samples = config.evaluation.samples_per_prompt
    with RewardPool(config.task, seed=config.run.seed) as pool:  # first: a judge that cannot start costs no sampling
        engine = make_engine(config, tokenizer, device=resolve_device(config.evaluation.device))
        params = sampling_params(config.generator.sampling, tokenizer, temperature=config.evaluation.temperature)
        print(f"sampling {len(prompts)} prompts x {samples} responses ...", file=sys.stderr)
        groups = sample_groups(engine, prompts, params, tokenizer, samples_per_prompt=samples, seed=config.run.seed)
        groups = pool.score(groups)
    if responses is not None:
        for group in groups:
            for response in group.responses:
                responses.write_line(json.dumps(_line(group, response)))
    scores = evaluate(groups)
    return {
        "model": config.model.path,
        "task": config.task.name,
        "prompts": len(prompts),
        "samples": len(prompts) * samples,
        "temperature": config.evaluation.temperature,
        "accuracy": scores["accuracy"],
        f"pass@{samples}": scores["pass_at_k"],
        "reward_mean": scores["reward_mean"],
        "length_mean": scores["length_mean"],
        "failed": int(scores["failed"]),
    }


def _line(group: Any, response: Any) -> dict[str, Any]:
    outcome = response.outcome
    verdict = (
        {"reward": outcome.value} if hasattr(outcome, "value") else {"failed": outcome.kind, "detail": outcome.detail}
    )
    return {"prompt": group.prompt.text, "answer": group.prompt.answer, "response": response.text} | verdict
