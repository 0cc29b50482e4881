"""Between plans and recipes: what a recipe or a run asks of the planner, and the recipe that a plan amounts to."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.algorithms.config import CRITIC_ADVANTAGES
from llamarl.data.config import DataConfig
from llamarl.engine.config import EngineConfig
from llamarl.errors import PlanError
from llamarl.planner.generation import GeneratorDemand
from llamarl.planner.hardware import Hardware
from llamarl.planner.lengths import Lengths, constant, read_lengths
from llamarl.planner.search import Plan
from llamarl.planner.training import TrainerDemand, TrainerLayout
from llamarl.reading import parse_json, read_lines

__all__ = ["RecipeQuestion", "budget_of", "plan_settings", "question_from_config", "raised_limits", "recipe_text"]


@dataclass(frozen=True, kw_only=True)
class RecipeQuestion:
    """What a resolved configuration says about the work."""

    model: str
    prompts_per_step: int
    group_size: int
    max_segments: int
    response: Lengths
    prompt_tokens: int | None
    """Mean measured from rollouts; None where there are none."""
    note: str
    share_prompts: bool | None = None
    """``trainer.share_prompts``, where the recipe says it; None: as is faster."""


def question_from_config(
    config: Mapping[str, Any], run_dir: Path | None = None, *, written: Mapping[str, Any] | None = None
) -> RecipeQuestion:
    """The planner's question out of a configuration's plain values.

    Args:
        config: Nested as in a recipe, with defaults filled in.
        written: The same without them.
        run_dir: A run's folder, whose rollouts then give the lengths of prompts and responses.
    """
    try:
        generator = config["generator"]
        limit = int(generator["sampling"]["max_new_tokens"])
        model = str(config["model"]["path"])
        prompts, group = int(config["schedule"]["prompts_per_step"]), int(generator["group_size"])
        segments = int(generator["max_segments"])
    except (KeyError, TypeError) as error:
        raise PlanError(f"the configuration lacks {error} that a plan needs") from error
    response, prompt_tokens = constant(limit), None
    note = (
        f"every response is taken to reach max_new_tokens ({limit}); give --response-tokens or a run folder for better"
    )
    rollouts = run_dir / "rollouts" if run_dir else None
    if rollouts is not None and any(rollouts.glob("*.jsonl")):
        response = read_lengths(rollouts)
        prompt_tokens = _mean_prompt(rollouts)
        note = f"lengths measured in {rollouts}"
    if left_out := _left_out(config):
        note += f"; not in the plan: {', '.join(left_out)}"
    return RecipeQuestion(
        model=model,
        prompts_per_step=prompts,
        group_size=group,
        max_segments=segments,
        response=response,
        prompt_tokens=prompt_tokens,
        note=note,
        share_prompts=(written or {}).get("trainer", {}).get("share_prompts"),
    )


def _left_out(config: Mapping[str, Any]) -> list[str]:
    """What the run does beside the work that a plan counts."""
    algorithm = config.get("algorithm", {})
    wanted = {
        "the extra groups of dynamic_sampling": config.get("dynamic_sampling", {}).get("enabled"),
        "the reference executor": config.get("reference", {}).get("enabled") or algorithm.get("kl_coef"),
        "the reward model": config.get("reward_model", {}).get("path"),
        "the judge": config.get("judge", {}).get("path"),
        "the critic": algorithm.get("advantage") in CRITIC_ADVANTAGES,
    }
    return [name for name, asked in wanted.items() if asked]


def _mean_prompt(rollouts: Path) -> int | None:
    lengths: list[int] = []
    for file in sorted(rollouts.glob("*.jsonl")):
        for where, line in read_lines(file):
            record = parse_json(line, where, big_integers=True, lone_surrogates=True)
            tokens = record.get("prompt_tokens") if isinstance(record, dict) else None
            if isinstance(tokens, list):
                lengths.append(len(tokens))
    return max(1, round(sum(lengths) / len(lengths))) if lengths else None


def plan_settings(
    plan: Plan, model_path: str, hardware: Hardware, oversubscription: float
) -> dict[str, dict[str, Any]]:
    """Recipe sections that make llamarl run ``plan``; hybrid sharding becomes plain sharding over all data ranks.

    A co-located, synchronous plan becomes a run at staleness 0 with ``schedule.colocated``: generator and trainer take turns on
    all devices; on CPU cores, each with all of them in one process.
    """
    g, t, work = plan.generator, plan.trainer.layout, plan.generator.demand
    cpu = hardware.device.train_precision == "fp32"
    shared = plan.system != "separate"
    dtype = "float32" if cpu else "bfloat16"
    quantized = g.layout.precision != hardware.device.train_precision
    one = shared and cpu  # on CPU cores one process does the work of all planned replicas
    together = g.replicas if one else 1
    own, rest = (plan.devices, plan.devices) if shared else (1, t.threads)
    threads, filling = ({"threads": own}, {"threads": rest}) if cpu else ({}, {})
    return {
        "model": {"path": model_path},
        "schedule": {
            "prompts_per_step": work.total_sequences // work.group_size,
            "max_staleness": plan.max_staleness,
            "colocated": shared,
        },
        "generator": {
            "group_size": work.group_size,
            "max_segments": work.max_segments if work.partial else 1,
            "oversubscription": oversubscription if work.partial else 1.0,
            "dp": 1 if one or not g.is_even else g.replicas,
            "tp": 1 if one else g.layout.tp,
            "pp": g.layout.pp,
            "cp": g.layout.cp,
            "quantization": g.layout.precision if quantized else "none",
            **threads,
            "sampling": {"max_new_tokens": work.lengths.limit},
            "engine": {
                "dtype": dtype,
                "max_sequences": work.slots * together,
                "kv_cache_bytes": math.ceil(_cache_bytes(plan) * together),
            },
            # Replicas that some prompts more than others come to are a kind of their own, and no shards of equal size.
            **({} if one or g.is_even else {"shards": 0, "replicas": [{"dp": g.replicas}]}),
        },
        "trainer": {
            "fsdp": 1 if one else t.data_ranks,
            "tp": 1 if one else t.tp,
            "pp": t.pp,
            "cp": t.cp,
            "ep": t.ep,
            "dtype": dtype,
            **filling,
            "max_tokens_per_microbatch": budget_of(t, work),
            "share_prompts": t.share_prompts,
            "activation_checkpointing": "full" if t.recompute else "none",
        },
    }


def budget_of(trainer: TrainerLayout, work: GeneratorDemand) -> int:
    """``trainer.max_tokens_per_microbatch`` of a planned trainer."""
    demand = TrainerDemand(
        lengths=work.lengths,
        prompt_tokens=work.prompt_tokens,
        sequences=work.total_sequences,
        group_size=work.group_size,
    )
    return demand.budget(trainer)


def raised_limits(recipe: Mapping[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """Settings that let a recipe have what was planned, where its limits, or the defaults, do not.

    Args:
        recipe: Nested, with the plan's settings.
        prompt_tokens: Of a planned prompt.
    """
    raised: dict[str, Any] = {}
    if prompt_tokens > recipe.get("data", {}).get("max_prompt_tokens", DataConfig.max_prompt_tokens):
        raised["data"] = {"max_prompt_tokens": math.ceil(prompt_tokens)}
    generator = recipe.get("generator", {})
    engine = generator.get("engine", {})
    sequences = [table.get("max_sequences", 0) for table in (engine, *generator.get("replicas", ()))]
    if max(sequences) > engine.get("max_batch_tokens", EngineConfig.max_batch_tokens):
        raised["generator"] = {"engine": {"max_batch_tokens": max(sequences)}}
    return raised


def _cache_bytes(plan: Plan) -> float:
    """The planned cache of a replica's rank and room for blocks half full, within what the limit leaves."""
    memory = plan.generator.memory
    room = plan.memory_limit - sum(memory.values())
    return memory["kv_cache"] + max(0.0, min(0.25 * memory["kv_cache"], room))


def recipe_text(settings: Mapping[str, Any], known: Collection[str], header: str) -> str:
    """TOML of the settings; those that this version's configuration does not know stand as comments.

    Args:
        known: Dotted keys that a recipe may hold.
        header: First lines, without ``#``.
    """
    lines = [f"# {line}".rstrip() for line in header.splitlines()]

    def write(section: str, values: Mapping[str, Any]) -> None:
        own = {k: v for k, v in values.items() if not isinstance(v, Mapping) and not _are_tables(v)}
        if own:
            lines.extend(["", f"[{section}]"])
        for key, value in own.items():
            text = f"{key} = {_toml(value)}"
            if f"{section}.{key}" not in known and section not in known:  # a table of the user's own keys holds any
                if value in (1, "none"):
                    continue  # what an executor does anyway
                text = f"# {text}   # planned, but not a setting of this version"
            lines.append(text)
        for key, value in values.items():
            if isinstance(value, Mapping):
                write(f"{section}.{key}", value)
            elif _are_tables(value):
                for table in value:
                    lines.extend(["", f"[[{section}.{key}]]", *(f"{k} = {_toml(v)}" for k, v in table.items())])

    for section, values in settings.items():
        write(section, values)
    return "\n".join(lines) + "\n"


def _are_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
