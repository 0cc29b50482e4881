"""Between plans and recipes: what a recipe or a run asks of a forecast, and the recipe that a plan amounts to."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from llamarl.config import RunConfig, known_keys, merge_tables, validate
from llamarl.errors import ConfigError, PlanError
from llamarl.forecast.memory import MARGIN
from llamarl.forecast.search import GeneratorChoice, Plan, Workload, trainer_demand
from llamarl.settings.algorithms import CRITIC_ADVANTAGES
from llamarl.settings.data import DataConfig
from llamarl.settings.engine import ENGINES, EngineConfig

__all__ = ["NEEDS_FOLDER", "left_out", "model_folder", "plan_settings", "refuse_to_replace", "write_recipe"]

_OURS = "Written by llamarl plan: "
NEEDS_FOLDER = (
    "{shape} is a shape without weights: set model.path to the Hugging Face folder that holds them, before training and before a "
    "dry-run (llamarl train THIS --dry-run --model.path FOLDER)"
)


def left_out(config: RunConfig) -> list[str]:
    """What a run does beside the work that a forecast counts."""
    wanted = {
        "the extra groups of dynamic_sampling": config.dynamic_sampling.enabled,
        "the reference executor": config.has_reference,
        "the reward model": config.reward_model.path,
        "the judge": config.judge.path,
        "what LoRA saves, for every weight is counted as trained and handed over (lora.rank)": config.lora.rank > 0,
        "passes over a batch after the first (trainer.epochs)": config.trainer.epochs > 1,
        "what moves to host memory (trainer.offload_optimizer)": config.trainer.offload_optimizer,
        "the critic": config.algorithm.advantage in CRITIC_ADVANTAGES,
        "what prompts save that are computed once a group (trainer.share_prompts)": config.trainer.share_prompts
        is True,
        'versions that arrive inside a tick (schedule.weights = "latest")': config.schedule.weights == "latest",
    }
    return [name for name, asked in wanted.items() if asked]


def model_folder(model_path: str) -> str | None:
    """What a recipe may name as ``model.path``; None for a bundled shape, which has no weights."""
    path = Path(model_path).expanduser()
    if path.is_file():
        return str(path.parent)
    return model_path if path.is_dir() or model_path.startswith("bundled:") else None


def plan_settings(plan: Plan, work: Workload, model_path: str, oversubscription: float) -> dict[str, dict[str, Any]]:
    """Recipe sections that make llamarl run ``plan``; hybrid sharding becomes plain sharding over all data ranks.

    On CPU cores each role is one process, with the threads that it was planned for. On GPUs of one kind the cache is left to
    what they hold: an evaluator, which is not planned for, may share one.
    """
    cpu, t, demand = plan.hardware.is_cpu, plan.trainer.layout, plan.generator.demand
    first = plan.generators[0]
    one_kind = len(plan.generators) == 1 and first.is_even
    threads = {"threads": plan.generator_devices} if cpu else {}
    precision = {} if cpu else {"dtype": "bfloat16"}  # of the recipe's, or its default, rates of a core are fitted
    return {
        "model": {"path": model_path},
        "schedule": {
            "prompts_per_step": work.prompts_per_step,
            "max_staleness": plan.max_staleness,
            "colocated": plan.colocated,
        },
        "generator": {
            "group_size": work.group_size,
            "max_segments": demand.max_segments,
            "oversubscription": oversubscription if demand.partial else 1.0,
            "dp": first.replicas if one_kind else 1,
            "tp": first.layout.tp,
            "quantization": _quantization(first),
            **threads,
            "sampling": {"max_new_tokens": work.response.limit},
            "engine": {
                **precision,
                "max_sequences": first.demand.slots,
                "kv_cache_bytes": _cache_bytes(first) if cpu or len(plan.generators) > 1 else 0,
            },
            **({} if one_kind else {"shards": 0, "replicas": _replica_tables(plan.generators)}),
        },
        "trainer": {
            "fsdp": t.data_ranks,
            "tp": t.tp,
            "pp": t.pp,
            "cp": t.cp,
            "ep": t.ep,
            **({"threads": plan.trainer.threads} if cpu else {}),
            **precision,
            "max_tokens_per_microbatch": trainer_demand(work).budget(t),
            "activation_checkpointing": "full" if t.recompute else "none",
        },
    }


def _quantization(choice: GeneratorChoice) -> str:
    precision = choice.layout.precision
    return "none" if precision == choice.hardware.device.train_precision else precision


def _cache_bytes(choice: GeneratorChoice) -> int:
    """The planned cache of a replica's rank and room for blocks half full, within what the margin leaves."""
    cache = choice.memory["kv_cache"]
    room = choice.hardware.usable_memory_bytes / (1.0 + MARGIN / 2) - sum(choice.memory.values())
    return math.ceil(cache + max(0.0, min(0.25 * cache, room)))


def _replica_tables(choices: Sequence[GeneratorChoice]) -> list[dict[str, Any]]:
    """``[[generator.replicas]]`` of each kind; shares are the prompts of a replica, as whole
    numbers in their ratios."""
    unit = math.lcm(*(choice.replicas // math.gcd(choice.replicas, choice.prompts) for choice in choices))
    return [
        {
            "dp": choice.replicas,
            "share": choice.prompts * unit // choice.replicas,
            "tp": choice.layout.tp,
            "quantization": _quantization(choice),
            "max_sequences": choice.demand.slots,
            "kv_cache_bytes": _cache_bytes(choice) if len(choices) > 1 else 0,
        }
        for choice in choices
    ]


# -- the file ---------------------------------------------------------------------------------------------------------


def refuse_to_replace(path: Path) -> None:
    """Refuse to write over a recipe that no plan has written.

    Raises:
        PlanError: The file is there.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not there; or writing it says why not
        return
    if text.strip() and not text.startswith(f"# {_OURS}"):
        raise PlanError(
            f"--recipe {path}: is there already, and no plan has written it; plan reads a recipe without the flag "
            f"(llamarl plan {path}), and --recipe names the file that it writes: give another"
        )


def write_recipe(
    path: Path,
    plan: Plan,
    work: Workload,
    *,
    model_path: str,
    oversubscription: float,
    config: dict[str, Any],
    title: str,
) -> None:
    """Write the recipe of a plan.

    Args:
        config: Recipe as written whose other settings the new one keeps; empty: none.
        title: Of the plan, for its first line.

    Raises:
        PlanError: llamarl does not run it, or refuses its settings, the other settings forbid turns, or the file cannot be
            written.
    """
    if work.model.unsupported:
        raise PlanError(f"--recipe: llamarl train does not run this model: {work.model.unsupported}")
    if plan.colocated and config and (forbidden := _why_not_in_turns(config)):
        raise PlanError(
            f"--recipe: the recipe's other settings forbid turns, so plan without 0 (--staleness 1,2): {forbidden}"
        )
    kind = "cpu" if plan.hardware.is_cpu else "cuda"
    served = ENGINES["native"].quantizations[kind]
    if strange := {_quantization(choice) for choice in plan.generators} - {"none", *served}:
        raise PlanError(
            f"--recipe: llamarl's engine does not serve {', '.join(sorted(strange))} there: leave --precision out"
        )
    folder = model_folder(model_path)
    settings = plan_settings(plan, work, folder or model_path, oversubscription)
    for role in ("generator", "trainer"):
        if config.get(role, {}).get("device", "auto") not in ("auto", kind):
            settings[role]["device"] = kind
    if plan.colocated and "weights" in config.get("schedule", {}):
        settings["schedule"]["weights"] = "exact"  # in turns no version arrives inside a tick
    own = config.get("generator", {})
    if "replicas" in own:  # in whose place the plan has its own
        config = {**config, "generator": {key: value for key, value in own.items() if key != "replicas"}}
    header = f"{_OURS}{title}"
    node = plan.hardware.device.devices_per_node
    if not plan.hardware.is_cpu:
        header += "\nAn evaluator (evaluation.every, .tp) is not planned for: it takes a device that is unused, or shares one."
    if not plan.hardware.is_cpu and plan.used > node:
        header += f"\nIt takes hosts of {node} devices: llamarl train THIS --cluster auto (docs/hosts.md)."
    if plan.other_kinds:
        one = len(plan.generators) == 1
        names = ", ".join(
            f"generator{'' if one else f'_{n}'} on {c.hardware.device.name}" for n, c in enumerate(plan.generators)
        )
        header += f"\nPlace the roles: hosts.on, trainer on {plan.hardware.device.name}, {names}; hosts.allow_unlike."
    if folder is None:
        header += f"\n{NEEDS_FOLDER.format(shape=model_path)}"
    whole = merge_tables(config, settings)
    text = _recipe_text(merge_tables(whole, _raised_limits(whole, work.prompt_tokens)), set(known_keys()), header)
    try:
        validate(tomllib.loads(text))
    except ConfigError as error:
        raise PlanError(f"--recipe: llamarl train would refuse this job: {error}") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--recipe {path}: cannot write it: {error}") from error


def _why_not_in_turns(config: dict[str, Any]) -> str:
    """What else in a recipe keeps generator and trainer from taking turns; empty: nothing."""
    turns = {"colocated": True, "max_staleness": 0, "weights": "exact"}
    plain = {"schedule": turns, "generator": {"max_segments": 1, "oversubscription": 1.0}}
    try:
        validate(merge_tables(config, plain))
    except ConfigError as error:
        return str(error) if "schedule.colocated" in str(error) else ""
    return ""


def _raised_limits(recipe: Mapping[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """Settings that let a recipe have what was planned, where its limits, or the defaults, do not.

    Args:
        recipe: Nested, with the plan's settings.
    """
    raised: dict[str, Any] = {}
    if prompt_tokens > recipe.get("data", {}).get("max_prompt_tokens", DataConfig.max_prompt_tokens):
        raised["data"] = {"max_prompt_tokens": math.ceil(prompt_tokens)}
    generator = recipe.get("generator", {})
    engine = generator.get("engine", {})
    most = max(table.get("max_sequences", 0) for table in (engine, *generator.get("replicas", ())))
    if most > engine.get("max_batch_tokens", EngineConfig.max_batch_tokens):
        raised["generator"] = {"engine": {"max_batch_tokens": most}}
    return raised


def _recipe_text(settings: Mapping[str, Any], known: Collection[str], header: str) -> str:
    """TOML of the settings; those that this version's configuration does not know are left out.

    Args:
        known: Dotted keys that a recipe may hold.
        header: First lines, without ``#``.
    """

    def kept(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
        own = {k: kept(f"{section}.{k}", v) if isinstance(v, Mapping) else v for k, v in values.items()}
        return {k: v for k, v in own.items() if isinstance(v, dict) or f"{section}.{k}" in known or section in known}

    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    return "\n".join([*lines, "", tomli_w.dumps({key: kept(key, values) for key, values in settings.items()})])
