"""``llamarl eval``: score a model folder or a finished run on a task."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llamarl.cli.flags import OutputFile
from llamarl.errors import ConfigError, Mistake, ModelError

if TYPE_CHECKING:
    from llamarl.models.exported import NamedModel

__all__ = ["add_arguments", "run"]

_DESCRIPTION = """\
Samples held-out prompts and judges the responses.

  llamarl eval runs/tiny                                      the final policy of a run, on its own task
  llamarl eval path/to/model --recipe recipes/smollm2.toml    any Hugging Face folder, on a recipe's task
  llamarl eval path/to/adapter --recipe recipes/tiny.toml     a LoRA adapter, merged into its base model
  llamarl eval runs/tiny --samples 8 --prompts 200 --json     pass@8 over 200 prompts, as one JSON object

A run brings its own settings: task, prompts, seeds, sampling, engine, precision and threads. Without flags its last evaluation
is repeated, to the token. A recipe's (or a run's) other keys are changed by --section.key VALUE, for example
--generator.engine.dtype bfloat16, --generator.quantization int8, --evaluation.threads 2.

accuracy is the share of scored samples with reward >= 1, accuracy_error its standard error over prompts, accuracy_before that
of the model with which the run began, where it was asked the same; pass@k the share of prompts with a right one among k samples.
A sample whose judge failed is counted as failed and enters neither. Exit code 1 if every sample failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument(
        "model", help="run folder, Hugging Face folder, id of the Hub (org/name), LoRA adapter folder, or bundled:tiny"
    )
    parser.add_argument("--base", metavar="FOLDER", help="base model of an adapter (default: the one that it names)")
    parser.add_argument("--recipe", help="recipe that names the task (a run folder brings its own)")
    parser.add_argument("--prompts", type=int, help="held-out prompts (default: the recipe's evaluation.num_prompts)")
    parser.add_argument("--samples", type=int, help="responses a prompt, the k of pass@k (default: the recipe's)")
    parser.add_argument("--temperature", type=float, help="sampling temperature, 0 is greedy (default: the recipe's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--responses", metavar="OUT.jsonl", help="also write every prompt, response and verdict")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from llamarl.api.llm import open_policy

    settings = {
        "evaluation.num_prompts": ("--prompts", args.prompts),
        "evaluation.samples_per_prompt": ("--samples", args.samples),
        "evaluation.temperature": ("--temperature", args.temperature),
    }
    named, config = open_policy(
        args.model,
        base=args.base,
        recipe=args.recipe,
        words=args.overrides,
        settings=settings,
        checks=[_find_missing],
        section="evaluation",
    )
    given = any(word.startswith("--task.") for word in args.overrides)
    if not (args.recipe or named.recipe or given or args.model.startswith("bundled:")):
        raise ConfigError(
            f"which task? {args.model} is no run, which would bring its own: name a recipe that has it (--recipe RECIPE), or set "
            "it by --task.name and the keys beside it"
        )
    if (note := named.narrowed()) is not None:
        print(note, file=sys.stderr)
    _compute_as_in_a_run(config.evaluation.threads)
    with OutputFile(args.responses, "--responses") if args.responses else contextlib.nullcontext() as responses:
        scores = _evaluate(config, named, responses)
    if args.json:
        print(json.dumps({key: None if value != value else value for key, value in scores.items()}))  # JSON has no NaN
    else:
        for key, value in scores.items():
            print(f"{key:<20} {value:.4f}" if isinstance(value, float) else f"{key:<20} {value}")
    return 1 if scores["failed"] == scores["samples"] else 0


def _find_missing(config: Any) -> Iterator[Mistake]:
    from llamarl.environments.factory import task_mistakes
    from llamarl.models.folders import resolve_model_path

    try:
        resolve_model_path(config.model.path, weights=False)
    except ModelError as error:
        yield from error.mistakes
    yield from task_mistakes(config.task, config.run.seed)


def _evaluate(config: Any, named: NamedModel, responses: OutputFile | None) -> dict[str, Any]:
    from llamarl.engine.episodes import make_player
    from llamarl.engine.factory import make_engine, resolve_device, sampling_params
    from llamarl.environments.episode_pool import EpisodePool
    from llamarl.environments.pool import RewardPool
    from llamarl.executors.evaluator import evaluate, sample_groups, standard_error
    from llamarl.executors.prompts import make_prompt_stream
    from llamarl.executors.self_check import check_generated
    from llamarl.executors.version_loader import load_adapter
    from llamarl.models.loading import load_tokenizer
    from llamarl.plural import plural

    check_generated(config)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    samples = config.evaluation.samples_per_prompt
    with contextlib.ExitStack() as pools:
        pool = pools.enter_context(RewardPool(config.task, seed=config.run.seed))  # first: it may not start
        environments = pools.enter_context(EpisodePool(config.task)) if config.task.has_environment else None
        prompts = make_prompt_stream(config, tokenizer, environments).eval_prompts(config.evaluation.num_prompts)
        engine = make_engine(config, tokenizer, device=resolve_device(config.evaluation.device.split(",")[0]))
        if named.adapter is not None:
            load_adapter(engine, named.adapter, model_path=config.model.path)
        params = sampling_params(config.generator.sampling, tokenizer, temperature=config.evaluation.temperature)
        print(f"sampling {plural(len(prompts), 'prompt')} x {plural(samples, 'response')} ...", file=sys.stderr)
        player = make_player(config, engine, tokenizer, environments)
        groups = sample_groups(player, prompts, params, tokenizer, samples_per_prompt=samples, seed=config.run.seed)
        groups = pool.score(groups)
    if responses is not None:
        for group in groups:
            for response in group.responses:
                responses.write_line(json.dumps(_line(group, response)))
    tasks = list(config.task.tasks)
    scores = evaluate(groups, tasks)
    return {
        "model": named.words,
        "task": config.task.titles,
        "prompts": len(prompts),
        "samples": len(prompts) * samples,
        "temperature": config.evaluation.temperature,
        "accuracy": scores["accuracy"],
        "accuracy_error": standard_error(groups),
        **_before(named, config),
        f"pass@{samples}": scores["pass_at_k"],
        "reward_mean": scores["reward_mean"],
        "length_mean": scores["length_mean"],
        "failed": int(scores["failed"]),
        **{key: value for key, value in scores.items() if key.startswith(("tasks/", "parts/"))},
    }


def _before(named: NamedModel, config: Any) -> dict[str, Any]:
    """What the run's first evaluation found, of the model that it began with; nothing where it asked otherwise."""
    if named.run is None:
        return {}
    from llamarl.config import load_config
    from llamarl.observability.metrics import read_metrics

    then = load_config(named.run / "config.toml")
    if (then.evaluation.num_prompts, then.evaluation.samples_per_prompt, then.evaluation.temperature, then.task) != (
        config.evaluation.num_prompts, config.evaluation.samples_per_prompt, config.evaluation.temperature, config.task
    ):  # fmt: skip
        return {}
    first = next((row for row in read_metrics(named.run) if row.get("eval/policy_version") == 0), {})
    return {"accuracy_before": first["eval/accuracy"]} if first.get("eval/accuracy") is not None else {}


def _line(group: Any, response: Any) -> dict[str, Any]:
    outcome = response.outcome
    verdict = (
        {"reward": outcome.value} if hasattr(outcome, "value") else {"failed": outcome.kind, "detail": outcome.detail}
    )
    return {"prompt": group.prompt.text, "answer": group.prompt.answer, "response": response.text} | verdict


def _compute_as_in_a_run(threads: int) -> None:
    """Take the kernels and the thread count with which a run's executor computed, so that the same
    weights give the same bits.

    Args:
        threads: As the run recorded it; 0: as many as torch takes.
    """
    from llamarl.runtime.determinism import environment, pin

    if threads and "torch" not in sys.modules:
        os.environ.update(environment(threads))
    import torch

    pin(threads or torch.get_num_threads(), deterministic=True)
