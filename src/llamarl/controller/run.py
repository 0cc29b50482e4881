"""A training run on disk: start it, carry it out. ``resume``, ``fork`` and ``replay`` begin elsewhere and end here.

    recipe ─▶ prepare ─▶ run folder ─▶ with RunParts(...) as parts: run_graph(parts.marking, parts.runtime, ...) ─▶ model/

What a run consists of beside its graph is made before its first tick, and closed in order whatever ends it:

    hosts and their files ─▶ recorder ─▶ tick log ─▶ runtime ─▶ checkpoints ─▶ marking ─▶ survival
    end: runtime, tick log, files, checkpoints, hosts, recorder; then what is saved, and how to go on, is said

The run folder's ``config.toml`` holds the resolved configuration: with the thread counts that were used, since the bits
depend on them.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from llamarl.channels.base import ChannelSpec
from llamarl.checkpoint.mirror import Mirror, mirrored
from llamarl.checkpoint.storage import CheckpointStore
from llamarl.config import GROUP_BASELINES, RunConfig, begun_in, save_config, to_plain
from llamarl.controller.controller import StopRequest, run_graph
from llamarl.controller.early_end import EarlyEnd, most_ahead
from llamarl.controller.marking import Marking
from llamarl.controller.notices import checkpoint_bytes, checkpoint_plan, replica_line, what_is_saved
from llamarl.controller.preflight import check_reward
from llamarl.controller.prepare import Prepared, absolute_dir, description, prepare
from llamarl.controller.products import tick_of_products, write_products
from llamarl.controller.recorder import Recorder, describe_job
from llamarl.controller.recovery import Recovery
from llamarl.controller.run_folder import CONFIG_FILE, RunFolder, held, make_folder, mark, refuse_a_run
from llamarl.controller.saving import RunCheckpoints, Saving
from llamarl.controller.settle import fetch_weights, record_models
from llamarl.controller.surviving import SurvivingRuntime
from llamarl.errors import TOLD, ConfigError, LlamaRLError, NothingTrained, RunFolderLost, RunStopped
from llamarl.observability.console import LiveLines
from llamarl.observability.events import EVENTS_FILE, REPLAY_FILE, read_events
from llamarl.observability.metrics import METRICS_FILE, read_metrics
from llamarl.observability.rollouts import remove_partial
from llamarl.observability.summary import RunSummary
from llamarl.plural import plural
from llamarl.roles import present_roles
from llamarl.runtime.base import Report, Runtime
from llamarl.runtime.inline import InlineRuntime
from llamarl.runtime.processes import ProcessRuntime
from llamarl.runtime.tick_log import JOURNAL_FOLDER, Resumed, TickLog
from llamarl.runtime.tick_record import remove_records

__all__ = [
    "RunParts",
    "execute",
    "mirror_of",
    "num_rows",
    "raise_if_nothing_trained",
    "save_settings",
    "start",
    "start_run",
]

_SHARED_FOLDER_S = 30.0
"""How long a file that another host has written into a shared folder may take to be seen here."""


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
    with RunParts(prepared, folder, resume_after_tick, load_from, resumed or Resumed(), mirror) as parts:
        with StopRequest(parts.recorder.console.stopping) as request:
            parts.saving.asked = request.take
            run_graph(
                parts.marking,
                parts.runtime,
                seed=prepared.config.run.seed,
                run_dir=folder.path,
                load_from=load_from,
                deadlines=prepared.config.deadlines,
                saving=parts.saving,
                observers=[parts],
            )
        parts.checkpoints.close()
        write_products(folder, parts.final_checkpoint(), prepared.local)
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


class RunParts:
    """The parts of one run, and an observer of the controller's loop.

    Args:
        resume_after_tick: The tick of the checkpoint from which it goes on; None: it begins.
        load_from: That checkpoint's folder.
        resumed: What its journal holds.
        mirror: Of its folder, if it has one.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: RunFolder,
        resume_after_tick: int | None,
        load_from: Path | None,
        resumed: Resumed,
        mirror: Mirror | None = None,
    ) -> None:
        config, run_dir = prepared.config, folder.path
        self._prepared, self._folder, self._resumed = prepared, folder, resumed
        self._mirror = mirror
        if mirror is not None:
            mirror.wake()
        self._files = None
        if prepared.hosts is not None:
            self._files = prepared.hosts.open_files(
                run_dir, folder.identity.run_id, prepared.graph.executors, load_from
            )
        needs = _needs_of(run_dir, config.run.num_ticks)
        self._platform = prepared.facts
        self.recorder = self._make_recorder(resume_after_tick)
        self._log = self._make_log()
        real = self._make_runtime()
        self._store, self.checkpoints = self._make_checkpoints()
        self.saving = Saving(prepared.graph, self.checkpoints, self.last_tick)
        first_tick = 0 if resume_after_tick is None else resume_after_tick + 1
        self.marking = Marking(prepared.graph, first_tick=first_tick, num_ticks=config.run.num_ticks, needs=needs)
        self.runtime: Runtime = self._surviving(real) if isinstance(real, ProcessRuntime) else real
        self.early_end = self._make_early_end()
        if self.early_end and self.early_end.last is not None and self.early_end.last >= first_tick:
            self._shorten(self.early_end.last)  # named before a resume whose recipe says the whole length again
            self.saving.end_after(self.marking, self.early_end.last)
        self._live = LiveLines(real.progress, self.recorder.console) if isinstance(real, ProcessRuntime) else None

    def on_report(self, report: Report) -> None:
        """Note a report that counts."""
        self._folder.check()
        self.checkpoints.on_report(report)
        self.recorder.on_report(report)

    def last_tick(self, report: Report) -> int | None:
        """The tick with which the run is to end sooner than planned, told by the report that shows
        it; ``config.toml`` says it from then on, so that who resumes the run goes no further."""
        if self.early_end is None or (loss := report.metrics.get("eval/loss")) is None:
            return None
        last = self.early_end.note(report.tick, loss)
        self.checkpoints.pin(self.early_end.best)
        if last is not None:
            self._shorten(last)
        return last

    def _shorten(self, last: int) -> None:
        self.checkpoints.shorten(last + 1)
        config = self._prepared.config
        fruitless = plural(config.evaluation.patience, "evaluation")
        self.recorder.message(
            f"held-out loss has not fallen for {fruitless} (evaluation.patience): the run ends with tick {last}"
        )
        shorter = dataclasses.replace(config, run=dataclasses.replace(config.run, num_ticks=last + 1))
        save_settings(dataclasses.replace(self._prepared, config=shorter), self._folder.path)

    def final_checkpoint(self) -> Path:
        """Of a run that has come to its end: the one of which its model is made."""
        newest = self.checkpoints.finished()
        assert newest is not None, "a checkpoint is taken after the last tick"
        best = tick_of_products(self._folder.path, self._prepared.config, newest[0])
        return newest[1] if best == newest[0] else self._store.load(best).path

    def _make_early_end(self) -> EarlyEnd | None:
        """None where nothing ends the run early; else with the losses of the rows before this process's first."""
        config = self._prepared.config
        if not config.evaluation.patience:
            return None
        ahead = most_ahead(self._prepared.graph.channels)
        early_end = EarlyEnd(config.evaluation, num_ticks=config.run.num_ticks, ahead=ahead)
        early_end.note_rows(self.recorder.rows, self._store.ticks())
        self.checkpoints.pin(early_end.best)
        return early_end

    def __enter__(self) -> RunParts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, LlamaRLError) and not isinstance(error, (RunStopped, RunFolderLost)):
                if lost := self._folder.lost():  # whoever met it first did not know the whole of it
                    kind = RunFolderLost
                    raise RunFolderLost(lost) from error
        finally:
            if isinstance(error, Exception):
                self.recorder.console.failed(str(error))
            self._close(_stopped_by(kind))
            if isinstance(error, KeyboardInterrupt) and self._prepared.config.observability.console != "none":
                error.args = (*error.args, TOLD)

    def _close(self, stopped: str) -> None:
        """
        Args:
            stopped: By what, in words; empty: the run came to its end.
        """
        run_dir, hosts, num_ticks = self._folder.path, self._prepared.hosts, self._prepared.config.run.num_ticks
        if self._live is not None:
            self._live.close()
        self.runtime.close()
        if self._log is not None:
            self._log.close(done=not stopped)
        remove_partial(run_dir)
        if self._files is not None and stopped:
            self._files.hurry()
        self.checkpoints.flush()
        if self._files is not None:
            self._files.end()
        if hosts is not None:
            hosts.close()
        self.recorder.close(stopped)
        if stopped and not self._folder.identity.change():
            with suppress(OSError):  # out of reach
                last = next(reversed(self._store.list()), None)
                journaled = any((run_dir / JOURNAL_FOLDER).glob("*"))
                said = what_is_saved(run_dir, last, num_rows(run_dir), num_ticks, journaled=journaled)
                print(f"\n{said}", file=sys.stderr)

    def _facts(self) -> dict[str, Any]:
        """What the console says of the run before its first tick."""
        config, run_dir, prepared = self._prepared.config, self._folder.path, self._prepared
        return {
            **prepared.overview,
            **({} if config.algorithm.imitates else {"staleness": _staleness(config)}),
            **({"replicas": replica_line(config)} if config.generator.replicas else {}),
            **{edge.channel: edge.summary() for edge in prepared.weight_edges},
            "checkpoints": checkpoint_plan(
                config,
                checkpoint_bytes(prepared.local),
                num_held=len(CheckpointStore(run_dir / "checkpoints").list()),
                free_bytes=shutil.disk_usage(run_dir).free,
            ),
            **({"hosts": prepared.hosts.summary()} if prepared.hosts is not None else {}),
            **({"run folder": self._files.summary()} if self._files is not None else {}),
            **({"mirror": config.run.mirror} if self._mirror is not None else {}),
            "run": str(run_dir),
        }

    def _make_recorder(self, resume_after_tick: int | None) -> Recorder:
        config, graph, run_dir = self._prepared.config, self._prepared.graph, self._folder.path
        edges = self._prepared.weight_edges
        return Recorder(
            run_dir,
            config.observability,
            [spec.name for spec in graph.executors],
            config.run.num_ticks,
            resume_after_tick,
            job=describe_job(
                run_dir.name,
                graph.executors,
                graph.channels,
                details={role.name: role.does for role in present_roles(config)},
                facts=self._facts(),
                version_bytes={e.channel: e.bytes_per_rank / e.versions for e in edges if e.versions},
            ),
            run_config=to_plain(config),
            group_baseline=config.algorithm.advantage in GROUP_BASELINES,
            written_until=self._resumed.last_tick,
            disk_s=config.deadlines.disk_s,
            platform=self._platform,
        )

    def _make_runtime(self) -> Runtime:
        config, hosts = self._prepared.config, self._prepared.hosts
        if hosts is not None:
            return hosts.runtime(self._files, log=self._log)
        if config.run.runtime == "inline":
            return InlineRuntime()
        return ProcessRuntime(collective_timeout_s=config.deadlines.collective_s, log=self._log)

    def _make_log(self) -> TickLog | None:
        if not self._prepared.config.recovery.max_restarts:
            return None
        return TickLog(
            self._folder.path / JOURNAL_FOLDER if self._prepared.config.keeps_journal else None,
            self._folder.identity.run_id,
            resumed=self._resumed,
            tell=self.recorder.message,
        )

    def _make_checkpoints(self) -> tuple[CheckpointStore, RunCheckpoints]:
        config = self._prepared.config
        patience_s = _SHARED_FOLDER_S if self._files is not None else 0.0
        folder = self._folder.path / "checkpoints"
        store = CheckpointStore(folder, config.checkpoint, patience_s=patience_s, platform=self._platform)
        return store, RunCheckpoints(
            store,
            config.checkpoint,
            config.run.num_ticks,
            description(self._prepared),
            self.recorder,
            self._folder,
            ranks={spec.name: spec.num_ranks for spec in self._prepared.graph.executors},
            far=None if self._files is None else self._files.far,
            mirror=self._mirror,
        )

    def _surviving(self, runtime: ProcessRuntime) -> Runtime:
        """The runtime that the loop sees; the real one where a death ends the run."""
        settings = self._prepared.config.recovery
        if not settings.max_restarts:
            return runtime
        return SurvivingRuntime(
            runtime,
            self.marking,
            Recovery(max_restarts=settings.max_restarts),
            self.saving,
            tell=lambda redo: self.recorder.restarted(redo.next_tick, redo.describe()),
            log=self._log,
        )


def _stopped_by(kind: type[BaseException] | None) -> str:
    """What ended a run, in words; empty: it came to its end."""
    if kind is None:
        return ""
    if issubclass(kind, KeyboardInterrupt):
        return "by the user"
    if issubclass(kind, RunStopped):  # the command line prints the cause, once
        return "by the run itself"
    return f"by an error ({kind.__name__})" if issubclass(kind, LlamaRLError) else "by an error"


def _staleness(config: RunConfig) -> str:
    staleness, segments = config.schedule.max_staleness, config.generator.max_segments
    which = "the latest weights, " if config.schedule.weights == "latest" else ""
    bound = config.token_staleness_bound
    return f"{which}max_staleness {staleness}, max_segments {segments}: no token older than {plural(bound, 'version')}"


def save_settings(prepared: Prepared, run_dir: Path) -> None:
    """Write ``config.toml``, and before it the mark by which a resume knows the user's own run.

    Raises:
        ConfigError: The folder cannot be written.
    """
    new = run_dir / f"{CONFIG_FILE}.new"
    try:
        save_config(prepared.config, new, begun_in(run_dir / CONFIG_FILE))
        with open(new, "rb") as file:
            os.fsync(file.fileno())  # else a power failure leaves an empty file under the name of the former
        mark(prepared.config, new.read_bytes(), run_dir)
        os.replace(new, run_dir / CONFIG_FILE)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write {run_dir / CONFIG_FILE}: {error.strerror}") from error


def num_rows(run_dir: Path) -> int:
    """Ticks of which the metrics hold a row."""
    path = run_dir / METRICS_FILE
    return max((int(row.get("step") or 0) for row in read_metrics(path)), default=-1) + 1 if path.is_file() else 0


def _needs_of(run_dir: Path, num_ticks: int) -> Callable[[ChannelSpec, int], int] | None:
    """For ``run_graph``: the source tick that a tick of a replay needs on the weights edge; None if this is no replay.

    A tick fires only when the newest version that it took in the run replayed has been published,
    so no executor ever waits inside a tick, and both runtimes can repeat a run of either. It cannot
    deadlock: tick k took versions <= k only, and these depend on batches before k.

    Raises:
        EventLogError: The log is torn or does not reach ``num_ticks``.
    """
    if not (run_dir / REPLAY_FILE).exists():
        return None
    newest: dict[int, int] = {}
    for (tick, _), event in read_events(run_dir / REPLAY_FILE, num_ticks=num_ticks).items():
        newest[tick] = max(newest.get(tick, 0), *(version for _, version in event.swaps))

    def needs(channel: ChannelSpec, tick: int) -> int:
        return max(tick - channel.delay, newest[tick] - 1)

    return needs
