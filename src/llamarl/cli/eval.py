"""``llamarl eval``: score a model folder or a finished run on a task."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from llamarl.errors import ConfigError

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

    model, recipe = _locate(args.model, args.recipe)
    config = load_config(recipe, args.overrides)
    changes = {
        name: value
        for name, value in (
            ("num_prompts", args.prompts),
            ("samples_per_prompt", args.samples),
            ("temperature", args.temperature),
        )
        if value is not None
    }
    try:
        evaluation = dataclasses.replace(config.evaluation, **changes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, path=str(model)), evaluation=evaluation
    )
    scores = _evaluate(config, args.responses)
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
        if not (folder / "model" / "config.json").is_file():
            raise ConfigError(
                f"{folder} is a run without a final policy in {folder / 'model'}: let it finish "
                f"(llamarl train RECIPE --resume {folder})"
            )
        return str(folder / "model"), recipe or str(folder / "config.toml")
    return model, recipe


def _evaluate(config: Any, responses: str | None) -> dict[str, Any]:
    from llamarl.data.prompts import PromptStream
    from llamarl.environments.factory import make_task
    from llamarl.environments.pool import RewardPool
    from llamarl.executors.evaluator import evaluate, sample_groups
    from llamarl.executors.generator import make_engine, resolve_device, sampling_params
    from llamarl.models.loading import load_tokenizer

    tokenizer = load_tokenizer(config.model.path)
    stream = PromptStream(make_task(config.task, seed=config.run.seed), tokenizer, config.data, seed=config.run.seed)
    engine = make_engine(config, tokenizer, device=resolve_device(config.evaluation.device))
    params = sampling_params(config.generator.sampling, tokenizer, temperature=config.evaluation.temperature)
    prompts = stream.eval_prompts(config.evaluation.num_prompts)
    samples = config.evaluation.samples_per_prompt
    print(f"sampling {len(prompts)} prompts x {samples} responses ...", file=sys.stderr)
    groups = sample_groups(engine, prompts, params, tokenizer, samples_per_prompt=samples, seed=config.run.seed)
    pool = RewardPool(config.task, seed=config.run.seed)
    try:
        groups = pool.score(groups)
    finally:
        pool.close()
    if responses:
        with open(responses, "w", encoding="utf-8") as file:
            for group in groups:
                for response in group.responses:
                    print(json.dumps(_line(group, response)), file=file)
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
