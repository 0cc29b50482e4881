"""A run that begins at a checkpoint of another one, under other settings: what may differ, and what is copied.

    SOURCE/checkpoints/tick_000039 ─▶ proved ─▶ FORK/checkpoints/tick_000039  (its manifest names the fork's configuration)
    SOURCE/{metrics,events}.jsonl  ─▶ rows up to tick 39                       FORK/forked_from.json says where it comes from

Rollouts and trace of the ticks before stay with the source. A fork that is killed goes on by ``--resume`` like any run.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from llamarl.checkpoint.snapshot import Checkpoint
from llamarl.checkpoint.storage import CheckpointStore, saving
from llamarl.config import RunConfig, begun_in, load_config, to_plain
from llamarl.controller.begun_settings import Difference, differences
from llamarl.controller.notices import reached_policy
from llamarl.controller.preflight import check_reward
from llamarl.controller.prepare import Prepared, absolute_dir, description, plan_run, prepare
from llamarl.controller.run import execute, mirror_of, save_settings
from llamarl.controller.run_folder import CONFIG_FILE, held, make_folder, refuse_a_run
from llamarl.controller.settle import changed_files, fetch_weights, fix_end_of_decay, model_checksum, record_models
from llamarl.errors import CheckpointError, ConfigError, ModelError
from llamarl.models.folders import resolve_model_path
from llamarl.observability.events import EVENTS_FILE
from llamarl.observability.metrics import METRICS_FILE
from llamarl.observability.writing import replace_file
from llamarl.plural import plural
from llamarl.strict import Effect

__all__ = ["FORKED_FROM", "copy_history", "fork_run", "plan_fork", "refuse_bound"]

FORKED_FROM = "forked_from.json"

_PROMPTS = ("run.seed", "generator.group_size", "task.", "data.")
"""Keys, or beginnings of keys, that say which prompt an index stands for: unfinished responses are kept by index."""
_LIMITS = ("schedule.max_staleness", "generator.max_segments", "generator.sampling.max_new_tokens")
"""Of unfinished responses: they may already be beyond a lower one."""
_HELD = ("model.path", "critic.path")
"""Models whose weights a checkpoint holds: another one would not be read."""


def plan_fork(config: RunConfig, source: Path, *, every_key: bool = True) -> str:
    """What ``fork_run`` would run, as text (``plan_run``); changes nothing, and refuses what that would."""
    return plan_run(config, every_key=every_key, prepared_by=lambda asked: _checked(asked, source)[0])


def fork_run(config: RunConfig, source: Path) -> None:
    """A new run in ``config.run.dir`` that goes on from the newest checkpoint of ``source`` under other settings.

    The new run is whole in itself: the checkpoint, the rows and the event log up to it are copied.

    Args:
        config: What ``source`` saved, with any overrides (``begun_config``).

    Raises:
        ConfigError: The new folder holds a run, or the states in the checkpoint cannot serve such a run.
        CheckpointError: ``source`` has no checkpoint, or it is torn.
    """
    source = source.resolve()
    run_dir = absolute_dir(config)
    refuse_a_run(run_dir)
    prepared, checkpoint, changed = _checked(config, source)
    fetch_weights(prepared.config)
    check_reward(prepared.config)
    make_folder(run_dir)
    with held(run_dir) as folder, ExitStack() as stack:
        refuse_a_run(run_dir)
        folder.begin()
        mirror = stack.enter_context(mirror_of(prepared.config, folder))
        record_models(prepared.local, run_dir)
        copied = copy_history(source, checkpoint, run_dir, description(prepared), changed)
        save_settings(prepared, run_dir)  # last: without its checkpoint nobody must go on with it
        print(f"{run_dir} goes on from {checkpoint.path}, with {_changes(changed)}", file=sys.stderr)
        execute(prepared, folder, resume_after_tick=copied.tick, load_from=copied.path, mirror=mirror)


def _checked(config: RunConfig, source: Path) -> tuple[Prepared, Checkpoint, list[Difference]]:
    """The fork as it would run, the checkpoint that it begins with, and what changes. Makes nothing."""
    begun = load_config(source / CONFIG_FILE)
    prepared = prepare(fix_end_of_decay(config, begun))
    checkpoint = CheckpointStore(source / "checkpoints").load()
    changed = differences(checkpoint.run.get("config", {}), to_plain(prepared.config), begun_in(source / CONFIG_FILE))
    refuse_bound(changed, checkpoint, prepared.local, begun, source)
    if checkpoint.tick + 1 >= prepared.config.run.num_ticks:
        raise ConfigError(
            f"--fork: {checkpoint.path} is of {plural(checkpoint.tick + 1, 'tick')}, so no tick is left of "
            f"--run.num_ticks {prepared.config.run.num_ticks}: give at least {checkpoint.tick + 2}"
        )
    return prepared, checkpoint, changed


def refuse_bound(
    changed: Sequence[Difference], checkpoint: Checkpoint, config: RunConfig, begun: RunConfig, source: Path
) -> None:
    """Refuse changes under which the states of ``checkpoint`` mean something else or are missing.

    Args:
        config: Of the fork.
        begun: Of the run that made the checkpoint.

    Raises:
        ConfigError: It names each such key.
    """
    carries = _carries_responses(checkpoint)
    reasons = []
    for difference in changed:
        if difference.effect is Effect.IN_STATE:
            reasons.append(f"{difference}; the states in a checkpoint depend on it")
        elif difference.key == "schedule.max_staleness" and difference.asked > difference.had:
            reasons.append(
                f"{difference}; the checkpoint holds no older versions than it needed, so only less is possible"
            )
        elif carries and difference.key.startswith(_PROMPTS):
            reasons.append(f"{difference}; the checkpoint holds unfinished responses to prompts that it chose")
        elif carries and difference.key in _LIMITS and difference.asked < difference.had:
            reasons.append(f"{difference}; the checkpoint holds unfinished responses, which may be beyond that")
        elif difference.key in _HELD and not _same_model(difference.had, difference.asked):
            reasons.append(f"{difference}; the weights are those in the checkpoint")
    for key, sentence in changed_files(config, source).items():
        if key == "model.path" and config.lora.rank:
            reasons.append(f"{sentence}; the adapters in the checkpoint were trained on it")
        elif carries and key.startswith(_PROMPTS):
            reasons.append(f"{sentence}; the checkpoint holds unfinished responses to prompts of it")
    if config.samples != begun.samples:
        reasons.append("algorithm.name and task.rollouts: only one of the two runs samples responses")
    if config.has_critic and not (checkpoint.path / "critic").is_dir():
        reasons.append(f"algorithm.advantage is {config.algorithm.advantage!r}, but the checkpoint holds no critic")
    if reasons:
        raise ConfigError(
            f"--fork: {checkpoint.path} cannot serve a run with other settings of these keys:\n"
            + "\n".join(f"  - {line}" for line in reasons)
            + f"\nLeave them out, or start a new run with {reached_policy(source)}."
        )


def copy_history(
    source: Path, checkpoint: Checkpoint, run_dir: Path, described: Mapping[str, Any], changed: Sequence[Difference]
) -> Checkpoint:
    """Give the new run in ``run_dir`` a past: the checkpoint under its own description, rows and events up to it.

    Raises:
        CheckpointError: The disk is full, or the source changed under the copy.
    """
    store = CheckpointStore(run_dir / "checkpoints")
    folder = store.begin(checkpoint.tick)
    try:
        with saving(folder):
            for record in checkpoint.manifest.files:
                (folder / record.path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(checkpoint.path / record.path, folder / record.path)
        copied = store.finish(checkpoint.tick, {str(checkpoint.path): checkpoint.manifest.files}, described)
    except CheckpointError:
        store.abort(checkpoint.tick)
        raise
    origin = {
        "run": str(source),
        "checkpoint": str(checkpoint.path),
        "ticks": checkpoint.tick + 1,
        "changed": {d.key: {"from": d.had, "to": d.asked} for d in changed},
    }
    with saving(run_dir):
        replace_file(run_dir / FORKED_FROM, (json.dumps(origin, indent=1) + "\n").encode())
        for name in (EVENTS_FILE, METRICS_FILE):  # the last one makes it a run that is not started over
            if (source / name).is_file():
                shutil.copyfile(source / name, run_dir / name)
    return copied


def _carries_responses(checkpoint: Checkpoint) -> bool:
    """Whether responses were unfinished when it was taken."""
    states = checkpoint.path.glob("*/rank_*/shard_*.json")  # of every generator
    return any(json.loads(state.read_text(encoding="utf-8"))["active"] for state in states)


def _same_model(had: str, asked: str) -> bool:
    """Whether two folders hold the same files. One that is gone was moved: nothing says what it held."""
    try:
        return bool(had and asked) and len({model_checksum(resolve_model_path(path)) for path in (had, asked)}) == 1
    except ModelError:
        return True


def _changes(changed: Sequence[Difference]) -> str:
    return "; ".join(f"{d.key} = {d.asked!r} (was {d.had!r})" for d in changed) or "the same settings"
