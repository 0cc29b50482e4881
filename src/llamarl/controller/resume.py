"""Going on with a run that stopped: its configuration with what the user sets on top, its newest
checkpoint, and what must still be the same for the bits to be those of the uninterrupted run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from llamarl.channels.samples import Limits
from llamarl.checkpoint.mirror import Mirror
from llamarl.checkpoint.storage import Checkpoint, CheckpointStore
from llamarl.config import RunConfig, begun_in, load_config, to_plain
from llamarl.controller.begun_settings import RESHARDABLE, differences, explain
from llamarl.controller.fork import FORKED_FROM
from llamarl.controller.journaled import load_journal
from llamarl.controller.notices import done_again, left_behind, reached_policy
from llamarl.controller.preflight import check_reward
from llamarl.controller.prepare import Prepared, absolute_dir, describe_plan, prepare
from llamarl.controller.products import incomplete_products, tick_of_products, write_products
from llamarl.controller.run import execute, mirror_of, num_rows, save_settings
from llamarl.controller.run_folder import CONFIG_FILE, RunFolder, held, refuse_if_held
from llamarl.controller.settle import fetch_weights, fix_end_of_decay, refuse_other_models
from llamarl.determinism import platform_differences
from llamarl.errors import ConfigError
from llamarl.plural import plural

__all__ = ["plan_resume", "resume_run"]


def plan_resume(config: RunConfig, *, every_key: bool = True) -> str:
    """What going on with a run would be, as text (``plan_run``); changes nothing.

    Raises:
        ConfigError: The run would not go on bit for bit.
        CheckpointError: The newest checkpoint is torn.
    """
    run_dir = absolute_dir(config)
    begun = load_config(run_dir / CONFIG_FILE)
    prepared = prepare(fix_end_of_decay(config, begun), begun)
    try:
        check_reward(prepared.config)
        refuse_other_models(prepared.local, run_dir)
        store = CheckpointStore(run_dir / "checkpoints", prepared.config.checkpoint)
        if not store.list():
            if done := _done_without_checkpoint(run_dir, prepared.config):
                return done
            _refuse(to_plain(begun), {}, prepared, run_dir, run_dir)
        else:
            checkpoint = store.load()
            had = checkpoint.run.get("config", {})
            _refuse(had, checkpoint.manifest.platform, prepared, run_dir, checkpoint.path)
            if checkpoint.tick + 1 >= prepared.config.run.num_ticks:
                missing = incomplete_products(run_dir, prepared.config, checkpoint.path)
                if missing and checkpoint.tick + 1 == prepared.config.run.num_ticks:
                    return f"{run_dir} is at its last tick; its checkpoint would give again: {', '.join(missing)}"
                return _complete(run_dir, prepared.config, checkpoint, missing)
        return describe_plan(prepared, every_key=every_key)
    finally:
        if prepared.hosts is not None:
            prepared.hosts.close()


def resume_run(config: RunConfig) -> None:
    """Go on with the run in ``config.run.dir`` from its newest checkpoint, or from the start if it has none.

    Raises:
        ConfigError: There is no run, or this recipe or machine would not give the bits of the uninterrupted run.
        CheckpointError: The newest checkpoint is torn.
    """
    run_dir = absolute_dir(config)
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"--resume: {run_dir} holds no run (no {CONFIG_FILE}); start one without --resume")
    refuse_if_held(run_dir)
    begun = load_config(run_dir / CONFIG_FILE)
    prepared = prepare(fix_end_of_decay(config, begun), begun)
    fetch_weights(prepared.config)
    check_reward(prepared.config)
    refuse_other_models(prepared.local, run_dir)
    with held(run_dir) as folder, contextlib.ExitStack() as stack:
        folder.keep_id()
        mirror = stack.enter_context(mirror_of(prepared.config, folder))
        store = CheckpointStore(run_dir / "checkpoints", prepared.config.checkpoint)
        for note in store.clean():
            print(left_behind(store.folder / note, store.list()), file=sys.stderr)
        if not store.list():
            if done := _done_without_checkpoint(run_dir, prepared.config):
                print(done)
                return
            moved = _refuse(to_plain(begun), {}, prepared, run_dir, run_dir)
            _continue_run(prepared, folder, mirror, after_tick=-1, load_from=None, moved=moved)
            return
        checkpoint = store.load()
        had = checkpoint.run.get("config", {})
        moved = _refuse(had, checkpoint.manifest.platform, prepared, run_dir, checkpoint.path)
        if checkpoint.tick + 1 == prepared.config.run.num_ticks:
            incomplete = incomplete_products(run_dir, prepared.config, checkpoint.path)
            best = tick_of_products(run_dir, prepared.config, checkpoint.tick) if incomplete else checkpoint.tick
            source = checkpoint.path if best == checkpoint.tick else store.load(best).path
            for folder_name, why in incomplete.items():
                print(f"{run_dir / folder_name}: {why}; it is written again from {source}", file=sys.stderr)
            write_products(folder, source, prepared.local, incomplete)
        if checkpoint.tick + 1 >= prepared.config.run.num_ticks:
            missing = incomplete_products(run_dir, prepared.config, checkpoint.path)
            print(_complete(run_dir, prepared.config, checkpoint, missing))
            return
        store.clean(after_tick=checkpoint.tick)
        _continue_run(prepared, folder, mirror, after_tick=checkpoint.tick, load_from=checkpoint.path, moved=moved)


def _complete(run_dir: Path, config: RunConfig, checkpoint: Checkpoint, missing: Collection[str]) -> str:
    """What is said of a run that has passed its last tick.

    Raises:
        ConfigError: It lacks what a run's end writes.
    """
    if missing:
        raise ConfigError(
            f"--run.num_ticks {config.run.num_ticks}: {run_dir} has passed that tick, and a run's end writes "
            f"{', '.join(missing)}: give at least {checkpoint.tick + 2}; or take the model of any checkpoint by llamarl export"
        )
    return f"{run_dir} is complete at {plural(checkpoint.tick + 1, 'tick')}; raise --run.num_ticks to prolong it"


def _continue_run(
    prepared: Prepared,
    folder: RunFolder,
    mirror: Mirror | None,
    *,
    after_tick: int,
    load_from: Path | None,
    moved: bool,
) -> None:
    """From the checkpoint, and from the journal of the ticks since then as far as there is one, where
    the run has not ``moved`` to another layout or platform."""
    run_dir, latest = folder.path, prepared.config.schedule.weights == "latest"
    resumed = load_journal(
        run_dir,
        folder.identity.run_id,
        prepared.graph,
        prepared.config,
        after_tick=after_tick,
        moved=moved,
        limits=Limits.of_model(prepared.local.model.path),
    )
    if resumed.reports:
        print(resumed.describe(run_dir), file=sys.stderr)
    else:
        print(done_again(run_dir, after_tick + 1, num_rows(run_dir), latest=latest), file=sys.stderr)
    save_settings(prepared, run_dir)
    execute(prepared, folder, resume_after_tick=after_tick, load_from=load_from, resumed=resumed, mirror=mirror)


def _done_without_checkpoint(run_dir: Path, config: RunConfig) -> str:
    """What is said of a run without a checkpoint that has reached its last tick and left all that this one writes;
    empty: it has not."""
    if num_rows(run_dir) != config.run.num_ticks or incomplete_products(run_dir, config):
        return ""
    return f"{run_dir} is complete at {plural(config.run.num_ticks, 'tick')}; it kept no checkpoint to prolong it from"


def _refuse(had: Mapping[str, Any], platform: Mapping[str, str], prepared: Prepared, run_dir: Path, made: Path) -> bool:
    """Raises ConfigError if ``made`` (a checkpoint, or a run that has none yet) was made otherwise:
    by the configuration ``had``, on ``platform``, if known. True: it was, and the user consents."""
    if made == run_dir and (run_dir / FORKED_FROM).is_file():
        raise ConfigError(
            f"--resume: {run_dir} holds no checkpoint, and a fork has no other beginning: fork its source again into a new "
            f"folder ({run_dir / FORKED_FROM} names it)"
        )
    checkpoint = prepared.config.checkpoint
    found = every = differences(had, to_plain(prepared.config), begun_in(run_dir / CONFIG_FILE))
    if checkpoint.reshard:
        found = [difference for difference in found if difference.key not in RESHARDABLE]
    moved = platform_differences(platform, prepared.facts) if platform else []
    elsewhere = [] if checkpoint.other_platform else moved
    if found or elsewhere:
        policy = reached_policy(run_dir) if made != run_dir else ""
        raise ConfigError(explain(found, elsewhere, run_dir, made, policy=policy))
    if consented := [str(line) for line in (*every, *moved)]:
        print("\n  - ".join([f"goes on to rounding, no longer bit for bit, from {made}:", *consented]), file=sys.stderr)
    return bool(consented)
