"""What a run that has begun may be given other values for: on resume, in a replay, in a fork. Pure.

    RUN/config.toml ─▶ + what the user set (recipe, overrides) ─▶ configuration to go on with ─▶ its differences, each with
                                                                                                  the way out

Whether a key changes bits stands where the key is defined (``llamarl.strict.Effect``).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.config import key_effects, known_keys
from llamarl.models.folders import is_commit, split_revision
from llamarl.reading import with_paths_from
from llamarl.roles import ROLES
from llamarl.strict import Effect

__all__ = ["RESHARDABLE", "Difference", "differences", "explain", "settings_on_top"]

RESHARDABLE = frozenset(
    f"{role.section}.{name}" for role in ROLES.values() if role.reshards for name in (*role.sizes, "ep", "threads")
)
"""What ``checkpoint.reshard`` lets differ."""

_AUTOMATIC: Mapping[str, tuple[Any, ...]] = {
    "threads": (0,), "device": ("auto",), "decay_ticks": (0,), "dtype": ("", "auto"), "targets": ([],),
    "block_size": (0,), "kv_cache_bytes": (0,), "max_tokens_per_microbatch": (0,), "share_prompts": ("auto",),
}  # fmt: skip
"""Last part of a key -> values by which a recipe leaves it to the run's start; its config.toml then
says what came of it."""


@dataclass(frozen=True)
class Difference:
    """A key that changes bits, with two values."""

    key: str
    had: Any
    asked: Any
    effect: Effect

    def __str__(self) -> str:
        return f"{self.key}: it has {self.had!r}, this run {self.asked!r}"


def settings_on_top(begun: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The run's own configuration with what the user set put on top.

    A value that leaves a choice to the start of a run (``threads = 0``) keeps what was chosen then;
    ``run.dir`` is not taken.

    Args:
        begun: As ``config.toml`` holds it, nested.
        given: What the user set, nested; its keys need not exist.
    """
    merged = dict(begun)
    for name, value in given.items():
        earlier = begun.get(name)
        if isinstance(value, Mapping) and isinstance(earlier, Mapping):
            merged[name] = settings_on_top(earlier, value)
        elif isinstance(earlier, list) and _are_tables(value) and _are_tables(earlier) and len(value) == len(earlier):
            merged[name] = [settings_on_top(had, one) for had, one in zip(earlier, value, strict=True)]
        elif _was_then(str(value), str(earlier)):
            merged[name] = earlier
        elif earlier is None or value not in _AUTOMATIC.get(name, ()):
            merged[name] = value
    return merged


def _was_then(named: str, pinned: str) -> bool:
    """Whether ``pinned`` is the commit that a repository of the Hub had when the run began, and
    ``named`` leaves it open."""
    (repo, revision), (earlier, commit) = split_revision(named), split_revision(pinned)
    return repo == earlier and is_commit(commit) and not is_commit(revision)


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, Mapping) for one in value)


def differences(saved: Mapping[str, Any], current: Mapping[str, Any], begun: Path = Path()) -> list[Difference]:
    """Keys that change bits and differ between two nested configurations. A key that ``saved``
    lacks had its default. Paths to the same file from ``begun``, or else from here, are the same. Replicas of a
    generator whose shards are counted change none, nor does which of its GPUs an executor has."""
    found, effects = [], key_effects()
    saved, current = (with_paths_from(Path.cwd(), with_paths_from(begun, of)) for of in (saved, current))
    for key, of_key in effects.items():
        had, asked = _value(saved, key), _value(current, key)
        for leaf, values in _leaves(key, had, asked) if had != asked else ():
            effect = effects.get(leaf.partition(".settings.")[2], of_key)
            other_gpu = leaf.endswith(".device") and all(str(device).startswith("cuda") for device in values)
            if Effect.NO_BITS not in (of_key, effect) and not other_gpu:
                found.append(Difference(leaf, *values, effect))
    if _shards(saved) == _shards(current) and _value(current, _SHARDS):
        found = [difference for difference in found if difference.key not in (_SHARDS, _REPLICAS)]
    return found


def _leaves(key: str, had: Any, asked: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """What differs of two values: of tables the keys inside."""
    if not (isinstance(had, Mapping) and isinstance(asked, Mapping) and had.keys() <= asked.keys()):
        yield key, (had, asked)
        return
    for name in asked:
        if had.get(name) != asked[name]:
            yield from _leaves(f"{key}.{name}", had.get(name), asked[name])


_SHARDS, _REPLICAS = "generator.shards", "generator.dp"


def _shards(config: Mapping[str, Any]) -> int:
    """Shares into which a configuration cuts the generator's work: what bits depend on in the two keys."""
    return int(_value(config, _SHARDS) or _value(config, _REPLICAS))


def explain(found: Sequence[Difference], platform: Sequence[str], run_dir: Path, made: Path, *, policy: str) -> str:
    """Why a resume is refused, and the ways out.

    Args:
        platform: Differences of library versions and processor, one line each.
        made: The checkpoint, or the run if it has none.
        policy: Setting by which a new run begins with the policy of the checkpoint
            (``reached_policy``); empty: there is none.
    """
    lines = [f"--resume: {made} was made otherwise, so the run would not go on bit for bit:"]
    lines += [f"  - {line}" for line in (*map(str, found), *platform)]
    keys = [difference.key for difference in found]
    if found:
        lines.append(f"To go on as before, leave out {', '.join(f'--{key}' for key in keys)}.")
    if found and set(keys) <= RESHARDABLE:
        lines.append("With --checkpoint.reshard true the trainer goes on in the new layout, to rounding.")
    bound = [difference.key for difference in found if difference.effect is Effect.IN_STATE]
    if bound:
        begin = f", with {policy} to begin where this one ended" if policy else ""
        lines.append(
            f"The states in a checkpoint depend on {', '.join(bound)}: for another value start a new run{begin}."
        )
    elif found and policy:
        words = [word for d in found for word in (f"--{d.key}", _word(d.asked))]
        command = shlex.join(["llamarl", "train", "--resume", str(run_dir), "--fork", f"{run_dir}-fork", *words])
        lines.append(f"For a new run that goes on from this checkpoint otherwise: {command}")
    if platform:
        lines.append("With --checkpoint.other_platform true the run goes on here, to rounding.")
    return "\n".join(lines)


def _word(value: Any) -> str:
    """A value as the command line takes it."""
    import tomli_w

    if isinstance(value, str):
        return value
    return tomli_w.dumps({"value": value}).partition("=")[2].strip().replace("\n", " ")


def _value(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return _plain(known_keys()[key].get_default(call_default_factory=True))
        node = node[part]
    return _plain(node)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
