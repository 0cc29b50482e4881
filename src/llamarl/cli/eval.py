"""``llamarl eval``: score a model folder or a finished run on a task."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llamarl.cli.flags import OutputFile
from llamarl.errors import ConfigError, LlamaRLError, Mistake, ModelError

if TYPE_CHECKING:
    from llamarl.models.exported import NamedModel

__all__ = ["add_arguments", "run"]

_MAX_CAUSES = 5
"""Causes of failed samples that are printed."""
_WHOLE = 1_000_000
"""Prompts, more than any test set has."""
_DESCRIPTION = """\
Samples held-out prompts and judges the responses.

  llamarl eval runs/tiny                                      the final policy of a run, on its own task
  llamarl eval path/to/model --recipe smollm2                 any Hugging Face folder, on a recipe's task
  llamarl eval path/to/adapter --recipe tiny                  a LoRA adapter, merged into its base model
  llamarl eval path/to/model --data gsm8k --n 8 --greedy      the whole test set: pass@1 greedy and sampled, pass@8, majority@8
  llamarl eval runs/tiny --n 8 --prompts 200 --json           over 200 prompts, as one JSON object
  llamarl eval path/to/model --data gsm8k --n 8 --best-of path/to/reward_model

A run brings its own settings: task, prompts, seeds, sampling, engine, precision and threads. Without flags its last evaluation
is repeated, to the token. A recipe's (or a run's) other keys are changed by --section.key VALUE, for example
--generator.engine.dtype bfloat16, --generator.quantization int8, --evaluation.threads 2.

A response is right when its reward is at least 1. pass@1 is the mean over prompts of the share of right ones, pass@k the chance
that one of k is right (unbiased, from n responses), majority@n whether the most frequent answer is, best_of@n whether the one is
that a reward model (--best-of) rates highest; each with its 95 % interval over prompts (Wilson). greedy_pass@1 is at temperature 0.
answered is the share of responses in which an answer is found: format apart from answers, with the parts of the reward.
accuracy is the share of scored samples with reward >= 1, accuracy_error its standard error over prompts (of two or more),
accuracy_before that of the model with which the run began, where it was asked the same.
truncated_fraction is the share of responses cut at generator.sampling.max_new_tokens (128 by default): they are judged as they stand.
A sample whose judge failed is counted as failed and enters neither. Exit code 1 if every sample failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument(
        "model", help="run folder, Hugging Face folder, id of the Hub (org/name), LoRA adapter folder, or bundled:tiny"
    )
    parser.add_argument("--base", metavar="FOLDER", help="base model of an adapter (default: the one that it names)")
    parser.add_argument("--recipe", help="recipe that names the task (a run folder brings its own)")
    parser.add_argument(
        "--data", metavar="TASK", help="task in place of the recipe's: gsm8k, math, countdown, reasoning_gym:NAME"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        help="held-out prompts (default: the recipe's evaluation.num_prompts; of --data gsm8k all)",
    )
    parser.add_argument("--n", "--samples", dest="samples", type=int, help="responses a prompt (default: the recipe's)")
    parser.add_argument("--greedy", action="store_true", help="also one response a prompt at temperature 0")
    parser.add_argument("--best-of", metavar="FOLDER", help="reward model whose favourite of the n is judged too")
    parser.add_argument("--temperature", type=float, help="sampling temperature, 0 is greedy (default: the recipe's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--responses", metavar="OUT.jsonl", help="also write every prompt, response and verdict")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from llamarl.api.llm import open_policy
    from llamarl.models.exported import find_model

    named = find_model(args.model, args.base)
    settings = {
        **_of_other_task(args, args.recipe or named.recipe),
        "task.name": ("--data", args.data),
        "evaluation.num_prompts": ("--prompts", _num_prompts(args)),
        "reward_model.path": ("--best-of", args.best_of),
        "evaluation.samples_per_prompt": ("--samples", args.samples),
        "evaluation.temperature": ("--temperature", args.temperature),
    }
    named, config = open_policy(
        named,
        recipe=args.recipe,
        words=args.overrides,
        settings=settings,
        checks=[functools.partial(_find_missing, rates=bool(args.best_of))],
        section="evaluation",
    )
    given = any(word.startswith("--task.") for word in args.overrides)
    if not (args.recipe or args.data or named.recipe or given or args.model.startswith("bundled:")):
        raise ConfigError(
            f"which task? {args.model} is no run, which would bring its own: name a recipe that has it (--recipe RECIPE), or set "
            "it by --data, or --task.name and the keys beside it"
        )
    if config.algorithm.imitates:
        raise ConfigError(
            f"{args.model} was fine-tuned on rows, which have no judge: name a task that has one, by --data or --recipe RECIPE"
        )
    _compute_as_in_a_run(config.evaluation.threads)
    with OutputFile(args.responses, "--responses") if args.responses else contextlib.nullcontext() as responses:
        scores, lines = _evaluate(config, named, greedy=args.greedy, rate=bool(args.best_of))
        try:
            if responses is not None:
                for line in lines:
                    responses.write_line(json.dumps(line))
        finally:  # a full disk costs no scores
            _show(scores, as_json=args.json)
    return 1 if scores["failed"] == scores["samples"] else 0


def _show(scores: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({key: None if value != value else value for key, value in scores.items()}))  # JSON has no NaN
        return
    intervals = scores.pop("intervals")
    for key, value in scores.items():
        between = "   [{:.4f}, {:.4f}]".format(*intervals[key]) if key in intervals else ""
        print(f"{key:<20} {value:.4f}{between}" if isinstance(value, float) else f"{key:<20} {value}")


def _of_other_task(args: argparse.Namespace, recipe: str | None) -> dict[str, tuple[str, Any]]:
    """What ``--data`` sets beside the task's name, if it is another: of the recipe's task only the workers stay, and of a
    fine-tuning run neither its loss, which takes rows alone, nor what ends it."""
    from llamarl.config import known_keys, read_settings

    said = read_settings(None, args.overrides).get("task", {})
    stays = {"name", "pool", *said}
    defaults = {key: info.get_default(call_default_factory=True) for key, info in known_keys().items()}
    of_task = {key: one for key, one in defaults.items() if key.startswith("task.") and key.split(".")[1] not in stays}
    own = read_settings(recipe) if recipe else {}
    task = own.get("task")
    is_other = args.data and not (isinstance(task, dict) and task.get("name") == args.data)
    settings = {key: ("--data", one) for key, one in of_task.items() if is_other}
    algorithm = own.get("algorithm") if args.data or "name" in said else None
    if isinstance(algorithm, dict) and algorithm.get("name") == "sft":
        settings |= {"algorithm.name": ("--data", "aipo"), "evaluation.patience": ("--data", 0)}
    return settings


def _find_missing(config: Any, *, rates: bool) -> Iterator[Mistake]:
    from llamarl.environments.factory import task_mistakes
    from llamarl.models.folders import resolve_model_path
    from llamarl.models.reward_model import check_reward_model

    try:
        resolve_model_path(config.model.path, weights=False)
        if rates:  # a run's own has no part in its accuracy
            check_reward_model(config.reward_model.path)
    except ModelError as error:
        yield from error.mistakes
    yield from task_mistakes(config.task, config.run.seed)


def _num_prompts(args: argparse.Namespace) -> int | None:
    """As asked; of a task that brings its own test set, all of it."""
    from llamarl.environments.factory import PRESETS

    return _WHOLE if args.prompts is None and args.data in PRESETS else args.prompts


def _evaluate(
    config: Any, named: NamedModel, *, greedy: bool, rate: bool
) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """The scores, and a line of each response."""
    from llamarl.engine.episodes import make_player
    from llamarl.engine.factory import make_engine, resolve_device, sampling_params
    from llamarl.environments.episode_pool import EpisodePool
    from llamarl.environments.factory import make_prompt_stream
    from llamarl.environments.pool import RewardPool
    from llamarl.executors.evaluator import evaluate, sample_groups, standard_error
    from llamarl.executors.measures import answered, measures
    from llamarl.executors.self_check import check_generated
    from llamarl.executors.version_loader import load_adapter
    from llamarl.models.loading import load_tokenizer
    from llamarl.plural import plural
    from llamarl.progress import shown, watch

    def judged(groups: Any) -> Any:
        watch("judging", "response", sum(len(group.responses) for group in groups), lambda: 0)
        return pool.score(groups)

    check_generated(config)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    samples = config.evaluation.samples_per_prompt
    with contextlib.ExitStack() as pools:
        pool = pools.enter_context(RewardPool(config.task, seed=config.run.seed))  # first: it may not start
        environments = pools.enter_context(EpisodePool(config.task)) if config.task.has_environment else None
        prompts = make_prompt_stream(config, tokenizer, environments).eval_prompts(config.evaluation.num_prompts)
        device = resolve_device(config.evaluation.device.split(",")[0], "--evaluation.device")
        engine = make_engine(config, tokenizer, device=device)
        if named.adapter is not None:
            load_adapter(engine, named.adapter, model_path=config.model.path)
        params = sampling_params(config.generator.sampling, tokenizer, temperature=config.evaluation.temperature)
        print(f"sampling {plural(len(prompts), 'prompt')} x {plural(samples, 'response')} ...", file=sys.stderr)
        pools.enter_context(shown())
        player = make_player(config, engine, tokenizer, environments)
        groups = sample_groups(player, prompts, params, tokenizer, samples_per_prompt=samples, seed=config.run.seed)
        ratings = _ratings(config, groups) if rate else None
        groups = judged(groups)
        sure = []
        if greedy:
            surest = sampling_params(config.generator.sampling, tokenizer, temperature=0.0)
            player = make_player(config, engine, tokenizer, environments)
            sure = sample_groups(player, prompts, surest, tokenizer, samples_per_prompt=1, seed=config.run.seed)
            sure = judged(sure)
    lines = (
        _line(group, response) | mark
        for mark, asked in (({}, groups), ({"greedy": True}, sure))
        for group in asked
        for response in group.responses
    )
    _tell_failed_and_cut([*groups, *sure], config)
    tasks = list(config.task.tasks)
    scores = evaluate(groups, tasks)
    of_greedy = {f"greedy_{key}": one for key, one in measures(sure).items()} if sure else {}
    found = {**of_greedy, **measures(groups, ratings)}
    all_scores = {
        "model": named.words,
        "task": config.task.titles,
        "prompts": len(prompts),
        "samples": len(prompts) * samples,
        "temperature": config.evaluation.temperature,
        "accuracy": scores["accuracy"],
        **({"accuracy_error": error} if (error := standard_error(groups)) == error else {}),
        **_before(named, config),
        **{key: one.value for key, one in found.items()},
        "intervals": {key: [one.low, one.high] for key, one in found.items() if one.low == one.low},
        **({"answered": share} if (share := answered(groups)) == share else {}),
        "reward_mean": scores["reward_mean"],
        "length_mean": scores["length_mean"],
        "truncated_fraction": _share_cut(groups),
        "failed": int(scores["failed"]),
        **{key: value for key, value in scores.items() if key.startswith(("tasks/", "parts/"))},
    }
    return all_scores, lines


def _tell_failed_and_cut(groups: Any, config: Any) -> None:
    from llamarl.executors.reward import count_causes

    for cause, count in itertools.islice(count_causes(groups).items(), _MAX_CAUSES):
        print(f"failed, so in no figure: {count} x {cause}", file=sys.stderr)
    if cut := _share_cut(groups):
        limits = f"generator.sampling.max_new_tokens = {config.generator.sampling.max_new_tokens}"
        limits += " or task.max_turns" * config.task.has_environment
        print(f"{cut:.1%} of the responses were cut by {limits} and judged as they stand", file=sys.stderr)


def _share_cut(groups: Any) -> float:
    """Share of responses that a limit ended: their answer may be missing, so that they count as wrong."""
    ends = [response.finish_reason for group in groups for response in group.responses]
    return ends.count("length") / len(ends)


def _ratings(config: Any, groups: Any) -> Any:
    """A reward model's score of each response, NaN where it has none."""
    import math

    from llamarl.engine.factory import resolve_device
    from llamarl.executors.base import ExecutorContext
    from llamarl.executors.reward_model import RewardModelExecutor

    device = resolve_device(config.reward_model.device.split(",")[0], "--reward_model.device")
    context = ExecutorContext(
        name="reward_model", rank=0, num_ranks=1, device=device, run_dir=None, seed=config.run.seed
    )
    executor = RewardModelExecutor(config, context)
    executor.setup()
    rated = executor.rate(groups)
    executor.close()
    name = config.reward_model.name
    return [[math.nan if r.verdict is None else r.verdict.parts[name] for r in g.responses] for g in rated]


def _before(named: NamedModel, config: Any) -> dict[str, Any]:
    """What the run's first evaluation found, of the model that it began with; nothing where it asked otherwise."""
    if named.run is None:
        return {}
    from llamarl.config import load_config
    from llamarl.observability.metrics import read_metrics

    try:
        then, rows = load_config(named.run / "config.toml"), read_metrics(named.run)
    except LlamaRLError:  # of another version, or without its metrics: no reason to lose what was sampled
        return {}
    if _asked(then) != _asked(config):
        return {}
    first = next((row for row in rows if row.get("eval/policy_version") == 0), {})
    return {"accuracy_before": first["eval/accuracy"]} if first.get("eval/accuracy") is not None else {}


def _asked(config: Any) -> tuple[Any, ...]:
    """What decides which questions are asked, in which words, and how responses are drawn and judged."""
    how, sampling = config.evaluation, config.generator.sampling
    of_run = how.num_prompts, how.samples_per_prompt, how.temperature, config.run.seed
    return of_run, config.task, config.data, dataclasses.replace(sampling, temperature=1.0)


def _line(group: Any, response: Any) -> dict[str, Any]:
    outcome = response.outcome
    verdict = (
        {"reward": outcome.value} if hasattr(outcome, "value") else {"failed": outcome.kind, "detail": outcome.detail}
    )
    said = {"response": response.text, "finish_reason": response.finish_reason}
    return {"prompt": group.prompt.text, "answer": group.prompt.answer} | said | verdict


def _compute_as_in_a_run(threads: int) -> None:
    """Take the kernels and the thread count with which a run's executor computed, so that the same
    weights give the same bits.

    Args:
        threads: As the run recorded it; 0: as many as torch takes.
    """
    from llamarl.determinism import environment, pin

    if threads and "torch" not in sys.modules:
        os.environ.update(environment(threads))
    import torch

    pin(threads or torch.get_num_threads())
