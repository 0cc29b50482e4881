"""A training run on disk: start it, carry it out. ``resume``, ``fork`` and ``replay`` begin elsewhere and end here.

    recipe ─▶ prepare ─▶ run folder ─▶ RunParts (runtime, recorder, checkpoints ...) + run_graph ─▶ model/

The run folder's ``config.toml`` holds the resolved configuration: with the thread counts that were used, since the bits
depend on them.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from llamarl.checkpoint.mirror import Mirror, mirrored
from llamarl.config import RunConfig
from llamarl.controller.controller import StopRequest, run_graph
from llamarl.controller.preflight import (
    check_reward,
)
from llamarl.controller.prepare import Prepared, absolute_dir, prepare
from llamarl.controller.products import write_products
from llamarl.controller.run_folder import RunFolder, held, make_folder, refuse_a_run
from llamarl.controller.run_parts import RunParts, save_settings
from llamarl.controller.settle import fetch_weights, record_models
from llamarl.errors import NothingTrained
from llamarl.observability.events import EVENTS_FILE, REPLAY_FILE
from llamarl.observability.metrics import METRICS_FILE
from llamarl.observability.summary import RunSummary
from llamarl.plural import plural
from llamarl.runtime.tick_log import JOURNAL_FOLDER, Resumed
from llamarl.runtime.tick_record import remove_records

__all__ = ["execute", "mirror_of", "raise_if_nothing_trained", "start", "start_run"]


def start_run(config: RunConfig) -> None:
    """Run ``config`` from tick 0 in a new folder.

    Raises:
        LlamaRLError: Whatever ended the run; the message carries its cause.
    """
    start(prepare(config))


def start(prepared: Prepared, *, repeats: Path | None = None, by_log: bool = False) -> None:
    """Carry a run out from tick 0.

    Args:
        repeats: Run whose bits it is to have.
        by_log: Whether it follows that run's log.
    """
    run_dir = absolute_dir(prepared.config)
    refuse_a_run(run_dir)
    fetch_weights(prepared.config)
    check_reward(prepared.config)
    make_folder(run_dir)
    with held(run_dir) as folder, ExitStack() as stack:
        refuse_a_run(run_dir)  # another process may have run here since
        folder.begin()
        mirror = stack.enter_context(mirror_of(prepared.config, folder))
        if (run_dir / JOURNAL_FOLDER).is_dir():  # of a run that ended before it wrote its configuration
            remove_records(run_dir / JOURNAL_FOLDER)
        (run_dir / REPLAY_FILE).unlink(missing_ok=True)  # of a replay that ended before its first tick
        if repeats is not None and by_log:
            shutil.copyfile(repeats / EVENTS_FILE, run_dir / REPLAY_FILE)  # a killed replay goes on from there
        save_settings(prepared, run_dir)
        record_models(prepared.local, run_dir)
        execute(prepared, folder, resume_after_tick=None, load_from=None, mirror=mirror)


def mirror_of(config: RunConfig, folder: RunFolder) -> AbstractContextManager[Mirror | None]:
    """That of a run, if it has one: nobody else's while the block lasts, complete at its end (``mirrored``)."""
    if not config.run.mirror:
        return nullcontext()
    return mirrored(config.run.mirror, folder.identity, config.deadlines.disk_s)


def execute(
    prepared: Prepared,
    folder: RunFolder,
    *,
    resume_after_tick: int | None,
    load_from: Path | None,
    resumed: Resumed | None = None,
    mirror: Mirror | None = None,
) -> None:
    """Carry the run out, to its end.

    Args:
        resumed: What its journal holds, of a run that has begun before in this folder; None: it is new.
    """
    with (
        RunParts(prepared, folder, resume_after_tick, load_from, resumed or Resumed(), mirror) as parts,
        StopRequest(parts.recorder.console.stopping) as request,
    ):
        run_graph(
            parts.marking,
            parts.runtime,
            seed=prepared.config.run.seed,
            run_dir=folder.path,
            load_from=load_from,
            deadlines=prepared.config.deadlines,
            saving=parts.saving,
            observers=[parts],
            request=request,
            last_tick=parts.last_tick,
        )
        parts.checkpoints.close()
        if parts.early_end is not None:
            write_products(folder.path, prepared.local, parts.early_end.best)
    raise_if_nothing_trained(parts.recorder.summary())


def raise_if_nothing_trained(summary: RunSummary) -> None:
    """Raises NothingTrained if no token of the whole run ever trained, or no update was finite."""
    if summary.all_skipped:
        raise NothingTrained(
            "each update of the run was skipped, since its loss or gradient was not finite: its model is the one that it began "
            "with. Look at algorithm.name if the loss is your own, else lower optimizer.lr"
        )
    if summary.trained_nothing:
        causes = "".join(f"\n  {line}" for line in summary.failures)
        raise NothingTrained(
            "the run reached its end, but no token of it trained: its model is the one that it began with"
            + (f". {plural(summary.num_failed, 'reward')} failed:{causes}" if summary.num_failed else "")
            + f"\nThe rows of {METRICS_FILE} (tokens/*) show where its tokens went."
        )
