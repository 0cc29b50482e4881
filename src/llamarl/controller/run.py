"""A training run on disk: check it, start it, carry it out. ``resume``, ``fork`` and ``replay`` begin elsewhere and end here.

    recipe ─▶ preflight (paths, data, first prompts) ─▶ placement ─▶ run folder ─▶ runtime + run_graph ─▶ model/

The run folder's ``config.toml`` holds the resolved configuration: with the thread counts that were used, since the bits
depend on them.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.checkpoint.storage import CheckpointStore
from llamarl.config import GROUP_BASELINES, RunConfig, changed_keys, save_config, to_plain
from llamarl.controller.controller import run_graph
from llamarl.controller.frozen_models import record_models
from llamarl.controller.graph import Graph
from llamarl.controller.job_hosts import JobHosts, open_hosts
from llamarl.controller.journaled import keeps_journal
from llamarl.controller.model_sources import fetch_weights, local, pinned
from llamarl.controller.notices import checkpoint_bytes, checkpoint_plan, replica_line, replica_table, what_is_saved
from llamarl.controller.preflight import (
    check_architectures,
    check_engine,
    check_lora,
    check_models,
    check_parallel_sizes,
    check_prompts,
    check_reward,
    check_reward_models,
)
from llamarl.controller.recovery import Recovery
from llamarl.controller.replacing import Replacing
from llamarl.controller.run_checkpoints import RunCheckpoints
from llamarl.controller.run_folder import CONFIG_FILE, RunFolder, held, make_folder, refuse_a_run
from llamarl.controller.scaling import SCALABLE, Scaled, Scaling, Sources, rescaled
from llamarl.controller.standard_graph import colocated_group, llamarl_graph
from llamarl.controller.stragglers import Stragglers
from llamarl.controller.weight_edges import WeightEdge, choose_transports
from llamarl.environments.code import warning_of_no_box
from llamarl.errors import ConfigError, LlamaRLError, ModelError, NothingTrained, RunFolderLost, RunStopped
from llamarl.models.folders import resolve_model_path
from llamarl.models.precision import resolved_precisions
from llamarl.observability.events import EVENTS_FILE, REPLAY_FILE, EventLog, read_events
from llamarl.observability.job_description import describe_job
from llamarl.observability.metrics import METRICS_FILE, read_metrics
from llamarl.observability.recorder import Recorder
from llamarl.observability.rollouts import remove_partial
from llamarl.observability.summary import RunSummary
from llamarl.observability.writing import Patience
from llamarl.plural import plural
from llamarl.reading import user_path
from llamarl.roles import present_roles, with_settings
from llamarl.runtime.absent_hosts import why_no_room
from llamarl.runtime.base import Report, Runtime
from llamarl.runtime.journal import Journal, Resumed, remove_journal
from llamarl.runtime.make_runtime import make_runtime
from llamarl.runtime.placement import Placement, place
from llamarl.trainer.config import TrainerConfig
from llamarl.transports.network import join

__all__ = [
    "Prepared",
    "absolute_dir",
    "describe_plan",
    "description",
    "execute",
    "join_network",
    "num_rows",
    "plan_run",
    "prepare",
    "save_settings",
    "fix_end_of_decay",
    "start",
    "start_run",
]


_SHARED_FOLDER_S = 30.0
"""How long a file that another host has written into a shared folder may take to be seen here."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run that has passed its checks: thread counts and devices are settled."""

    config: RunConfig
    """As it is written down: models of the Hub by id and commit."""
    local: RunConfig
    """As it is carried out: models by folders."""
    graph: Graph
    """Its executors have configurations of the latter kind."""
    placement: Placement
    weight_edges: tuple[WeightEdge, ...]
    hosts: JobHosts | None = None
    """None: all on this machine."""


def plan_run(config: RunConfig, *, every_key: bool = True) -> str:
    """What a run of ``config`` would be: configuration, graph and placement, as text. Starts nothing.

    Args:
        every_key: Whether keys that are at their defaults are printed too.
    """
    return describe_plan(prepare(config), every_key=every_key)


def describe_plan(prepared: Prepared, *, every_key: bool = True) -> str:
    """See :func:`plan_run`. The run's hosts are let go."""
    import tomli_w

    of_cluster = ""
    if prepared.hosts is not None:
        of_cluster = prepared.hosts.plan_lines(prepared.graph.channels, absolute_dir(prepared.config))
        prepared.hosts.close()
    shown, num_default = (to_plain(prepared.config), 0) if every_key else changed_keys(prepared.config)
    rest = f"# and {num_default} keys at their defaults: --every-key prints them\n" if num_default else ""
    replicas = f"# replicas\n{table}\n\n" if (table := replica_table(prepared.config)) else ""
    return (
        f"# configuration\n{tomli_w.dumps(shown)}{rest}\n"
        f"# graph\n{prepared.graph.describe()}\n\n# placement\n{prepared.placement.table()}\n\n"
        f"{replicas}"
        f"# weight hand-over\n"
        + "\n".join(f"{edge.channel} ({edge.ends}): {edge.summary()}" for edge in prepared.weight_edges)
        + of_cluster
    )


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
    with held(run_dir) as folder:
        refuse_a_run(run_dir)  # another process may have run here since
        folder.begin()
        remove_journal(run_dir)
        (run_dir / REPLAY_FILE).unlink(missing_ok=True)  # of a replay that ended before its first tick
        if repeats is not None and by_log:
            shutil.copyfile(repeats / EVENTS_FILE, run_dir / REPLAY_FILE)  # a killed replay goes on from there
        save_settings(prepared, run_dir)
        record_models(prepared.local, run_dir)
        execute(prepared, folder, resume_after_tick=None, load_from=None)


def save_settings(prepared: Prepared, run_dir: Path) -> None:
    new = run_dir / f"{CONFIG_FILE}.new"
    try:
        save_config(prepared.config, new)
        os.replace(new, run_dir / CONFIG_FILE)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write {run_dir / CONFIG_FILE}: {error.strerror}") from error


def num_rows(run_dir: Path) -> int:
    """Ticks of which the metrics hold a row."""
    path = run_dir / METRICS_FILE
    return max((int(row.get("step") or 0) for row in read_metrics(path)), default=-1) + 1 if path.is_file() else 0


def fix_end_of_decay(config: RunConfig, begun: RunConfig) -> RunConfig:
    """A falling rate whose end ``config`` leaves open ends where that of ``begun`` does, or with the run that it describes."""
    optimizer = config.optimizer
    if optimizer.schedule == "constant" or optimizer.decay_ticks:
        return config
    ends = begun.optimizer.decay_ticks or begun.run.num_ticks
    return dataclasses.replace(config, optimizer=dataclasses.replace(optimizer, decay_ticks=ends))


def _tell_of_micro_batches(config: RunConfig, folder: Path) -> None:
    """Not an error: a recipe may go from one machine to another, and from one rank to several."""
    trainer = config.trainer
    asked, threads = trainer.microbatches_at_once, trainer.threads
    if asked > 1 and (why := _why_one_at_a_time(trainer, folder)):
        print(
            f"trainer.microbatches_at_once {asked} does nothing, they are computed one at a time: {why}",
            file=sys.stderr,
        )
    elif trainer.device == "cpu" and asked > threads:
        print(
            f"trainer.microbatches_at_once {asked} is more than trainer.threads {threads}: {threads} at a time",
            file=sys.stderr,
        )


def _why_one_at_a_time(trainer: TrainerConfig, folder: Path) -> str:
    """Why a trainer computes one micro-batch after the other, whatever it is asked; empty: it does as it is asked."""
    from llamarl.models.decoder import changes_with_length
    from llamarl.models.loading import load_model_config

    if trainer.num_ranks > 1:
        return f"the trainer has {trainer.num_ranks} ranks, which meet in every layer"
    if trainer.device != "cpu":
        return f"the trainer is on {trainer.device}"
    return "the model's rotary frequencies follow the length" if changes_with_length(load_model_config(folder)) else ""


def _tell_of_a_long_warmup(config: RunConfig) -> None:
    optimizer, num_ticks = config.optimizer, config.run.num_ticks
    if optimizer.warmup_ticks >= num_ticks:
        print(
            f"optimizer.warmup_ticks {optimizer.warmup_ticks} outlasts run.num_ticks {num_ticks}: the rate ends at "
            f"{num_ticks / (optimizer.warmup_ticks + 1):.0%} of optimizer.lr",
            file=sys.stderr,
        )


def prepare(config: RunConfig, begun: RunConfig | None = None) -> Prepared:
    """Refuse what cannot run, before any process starts; settle threads and devices.

    Args:
        begun: Of the run that is gone on with: it may do so without some of its hosts.
    """
    if warning := warning_of_no_box(config.task):
        print(warning, file=sys.stderr)
    recorded = pinned(fix_end_of_decay(config, config))
    config = local(recorded)
    check_models(config)
    check_reward_models(config)
    check_architectures(config)
    folder = resolve_model_path(config.model.path)
    if not check_prompts(config, folder) and config.evaluation.every:
        print(
            "nothing is held out, so this run is not evaluated: raise task.eval_fraction above 0 (two questions or more), or "
            "give task.eval_data",
            file=sys.stderr,
        )
        config, recorded = (
            dataclasses.replace(one, evaluation=dataclasses.replace(one.evaluation, every=0))
            for one in (config, recorded)
        )
    _check_vocabularies(config, folder)
    graph = llamarl_graph(config)
    hosts = open_hosts(config, begun)
    try:
        prepared = _place_executors(recorded, config, folder, graph, hosts)
    except BaseException:
        if hosts is not None:
            hosts.close()
        raise
    if hosts is not None and hosts.news:
        print(hosts.news, file=sys.stderr)
    return prepared


def _place_executors(
    recorded: RunConfig, config: RunConfig, folder: Path, graph: Graph, hosts: JobHosts | None
) -> Prepared:
    """Threads, devices and transports, on this machine or on hosts."""
    colocated = colocated_group(config, graph)
    if hosts is None:
        placement = place(graph.executors, cores=config.run.cores or None, colocated=colocated)
    else:
        placement = hosts.place(graph.executors, colocated)
    settled = {spec.name: spec for spec in placement.executors}
    used = {
        role.name: {"threads": settled[role.name].threads, "device": _device_kind(settled[role.name].device)}
        for role in present_roles(config)
        if role.section
    }
    config, recorded = with_settings(config, used), with_settings(recorded, used)
    processor = hosts.facts["processor"] if hosts is not None else ""
    precisions = resolved_precisions(config, processor)
    config, recorded = with_settings(config, precisions), with_settings(recorded, precisions)
    if config.lora.rank and not config.lora.targets:
        from llamarl.models.adapters import with_targets

        lora = with_targets(config.lora, folder)
        config, recorded = dataclasses.replace(config, lora=lora), dataclasses.replace(recorded, lora=lora)
    try:
        _raise_all(
            lambda: check_parallel_sizes(config, folder, cores=sum(placement.cores_of.values()) or placement.cores),
            lambda: check_lora(config),
            lambda: check_engine(config),
        )
    except ConfigError as error:
        if hosts is None or not hosts.absent:
            raise
        raise ConfigError(why_no_room(hosts.absent, hosts.named, str(error))) from error
    executors = tuple(dataclasses.replace(spec, config=config.for_executor(spec.name)) for spec in placement.executors)
    graph = Graph(executors, graph.channels)
    graph, weight_edges = choose_transports(config, graph, hosts=placement.hosts or None)
    _tell_of_a_long_warmup(config)
    _tell_of_micro_batches(config, folder)
    if not config.evaluation.every and config.evaluation.dp * config.evaluation.tp > 1:
        print("evaluation.dp and evaluation.tp do nothing: evaluation.every is 0", file=sys.stderr)
    return Prepared(recorded, config, graph, placement, weight_edges, hosts)


def _raise_all(*checks: Callable[[], None]) -> None:
    """Run every check; raise what one found, or what all found as one ConfigError."""
    found: list[ConfigError | ModelError] = []
    for check in checks:
        try:
            check()
        except (ConfigError, ModelError) as error:
            found.append(error)
    if len(found) == 1:
        raise found[0]
    if found:
        lines = "\n".join(f"  - {error}" for error in found)
        raise ConfigError(f"{len(found)} mistakes in the configuration:\n{lines}")


def _check_vocabularies(config: RunConfig, folder: Path) -> None:
    """The models beside the policy read its tokens, so they must know them."""
    from llamarl.models.loading import load_model_config

    models = [role.model for role in present_roles(config) if role.model and not role.model.own_tokens]
    beside = {model.key: model.path(config) for model in models}
    beside |= {
        f"executors.{name}.settings.model.path": config.for_executor(name).model.path for name in config.executors
    }
    for key, path in beside.items():
        if path != config.model.path:
            ours, theirs = (load_model_config(f).get_text_config().vocab_size for f in (folder, path))
            if ours != theirs:
                raise ConfigError(
                    f"{key}: {path} has a vocabulary of {theirs} tokens, {config.model.path} one of {ours}: "
                    "both must read the same tokens"
                )


def _device_kind(device: str) -> str:
    return "cuda" if device.startswith("cuda") else "cpu"


def absolute_dir(config: RunConfig) -> Path:
    return user_path(config.run.dir, "run.dir").resolve()


def description(prepared: Prepared) -> dict[str, Any]:
    """What a checkpoint says of its run. Thread counts and devices are settled in the configuration."""
    return {"config": to_plain(prepared.config)}


class _Observe:
    """Reported files, event log and recorder as an observer of the controller; the log before the recorder."""

    def __init__(
        self,
        recorder: Recorder,
        events: EventLog,
        folder: RunFolder,
        checkpoints: RunCheckpoints,
    ) -> None:
        self._recorder = recorder
        self._events = events
        self._folder = folder
        self._checkpoints = checkpoints

    def on_report(self, report: Report) -> None:
        self._folder.check()
        self._checkpoints.on_report(report)
        self._events.append(report.events)
        self._recorder.on_report(report)


def _staleness(config: RunConfig) -> str:
    staleness, segments = config.schedule.max_staleness, config.generator.max_segments
    which = "the latest weights, " if config.schedule.weights == "latest" else ""
    bound = config.token_staleness_bound
    return f"{which}max_staleness {staleness}, max_segments {segments}: no token older than {plural(bound, 'version')}"


def join_network(prepared: Prepared) -> None:
    """Say where this process is among the hosts of the job, before any memory of it is made."""
    join(prepared.hosts.own_network() if prepared.hosts is not None else None)


def execute(
    prepared: Prepared,
    folder: RunFolder,
    *,
    resume_after_tick: int | None,
    load_from: Path | None,
    resumed: Resumed | None = None,
) -> None:
    """Carry the run out, to its end.

    Args:
        resumed: What its journal holds, of a run that has begun before in this folder; None: it is new.
    """
    config, graph, run_dir = prepared.config, prepared.graph, folder.path
    resumed = resumed or Resumed()
    files = None
    if prepared.hosts is not None:
        files = prepared.hosts.open_files(run_dir, folder.identity.run_id, graph.executors, load_from)
    facts = {
        "model": config.model.path,
        "task": config.task.titles,
        "algorithm": config.algorithm.name,
        "staleness": _staleness(config),
        **({"replicas": replica_line(config)} if config.generator.replicas else {}),
        **{edge.channel: edge.summary() for edge in prepared.weight_edges},
        "checkpoints": checkpoint_plan(
            config,
            checkpoint_bytes(prepared.local),
            num_held=len(CheckpointStore(run_dir / "checkpoints").list()),
            free_bytes=shutil.disk_usage(run_dir).free,
        ),
        **({"hosts": prepared.hosts.summary()} if prepared.hosts is not None else {}),
        **({"run folder": files.summary()} if files is not None else {}),
        "run": str(run_dir),
    }
    needs = _needs_of(run_dir, config.run.num_ticks)
    platform = prepared.hosts.facts if prepared.hosts is not None else None
    patience = Patience(config.deadlines.disk_s)
    events = EventLog(run_dir, resume_after_tick, platform=platform, patience=patience)
    recorder = Recorder(
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
            facts=facts,
            version_bytes={e.channel: e.bytes_per_rank / e.versions for e in prepared.weight_edges if e.versions},
        ),
        run_config=to_plain(config),
        group_baseline=config.algorithm.advantage in GROUP_BASELINES,
        written_until=resumed.last_tick,
        disk_s=config.deadlines.disk_s,
    )
    restarts = config.recovery.max_restarts > 0
    join_network(prepared)
    runtime: Runtime
    if prepared.hosts is not None:
        runtime = prepared.hosts.runtime(files, restarts=restarts, resumed=resumed)
    else:
        limit_s = config.deadlines.collective_s
        runtime = make_runtime(config.run.runtime, collective_timeout_s=limit_s, restarts=restarts, resumed=resumed)
    journal = None
    if keeps_journal(config):
        weights = [channel.name for channel in graph.channels if channel.kind is ChannelKind.WEIGHTS]
        journal = Journal(
            run_dir, folder.identity.run_id, weights=weights, number=resumed.next_number, tell=recorder.message
        )
    patience_s = _SHARED_FOLDER_S if files is not None else 0.0
    store = CheckpointStore(run_dir / "checkpoints", config.checkpoint, patience_s=patience_s, platform=platform)
    checkpoints = RunCheckpoints(
        store,
        config.checkpoint,
        config.run.num_ticks,
        description(prepared),
        recorder,
        events,
        folder,
        ranks={spec.name: spec.num_ranks for spec in graph.executors},
        far=None if files is None else files.far,
    )
    rule = Recovery(max_restarts=config.recovery.max_restarts)
    replacing = _replacing(config, rule, recorder)
    remove_partial(run_dir)
    stopped = "by an error"
    try:
        run_graph(
            graph,
            runtime,
            num_ticks=config.run.num_ticks,
            seed=config.run.seed,
            run_dir=run_dir,
            first_tick=0 if resume_after_tick is None else resume_after_tick + 1,
            load_from=load_from,
            deadlines=config.deadlines,
            checkpoints=checkpoints,
            observers=[_Observe(recorder, events, folder, checkpoints)],
            needs=needs,
            replacing=replacing,
            journal=journal,
            stragglers=Stragglers(multiple=multiple) if (multiple := config.recovery.straggler_multiple) else None,
            scaling=None
            if replacing is None or SCALABLE not in prepared.graph.inputs
            else _scaling(prepared, folder, recorder, checkpoints),
        )
        checkpoints.close()
        stopped = ""
    except KeyboardInterrupt:
        stopped = "by the user"
        raise
    except RunStopped:  # the command line prints the cause, once
        stopped = "by the run itself"
        raise
    except LlamaRLError as error:
        lost = folder.lost()
        stopped = f"by an error ({type(error).__name__})"
        if lost and not isinstance(error, RunFolderLost):  # whoever met it first did not know the whole of it
            stopped = f"by an error ({RunFolderLost.__name__})"
            raise RunFolderLost(lost) from error
        raise
    finally:
        if journal is not None:
            journal.close(done=not stopped)
        runtime.close()
        remove_partial(run_dir)
        if files is not None and stopped:
            files.hurry()
        checkpoints.flush()
        if files is not None:
            files.end()
        if prepared.hosts is not None:
            prepared.hosts.close()
        recorder.close(stopped, clocks=prepared.hosts.clocks() if prepared.hosts is not None else None)
        if stopped and not folder.identity.change():
            last = next(reversed(store.list()), None)
            print(f"\n{what_is_saved(run_dir, last, num_rows(run_dir), config.run.num_ticks)}", file=sys.stderr)
    raise_if_nothing_trained(recorder.summary())


def _scaling(prepared: Prepared, folder: RunFolder, recorder: Recorder, checkpoints: RunCheckpoints) -> Scaling:
    """The generator's replicas as ``config.toml`` has them, until somebody asks for others."""

    def took_effect(scaled: Scaled, tick: int) -> None:
        folder.check()
        checkpoints.rescaled(SCALABLE, scaled.spec.num_ranks, tick)
        config = with_settings(prepared.config, {SCALABLE: {"dp": scaled.config.generator.dp}})
        if prepared.hosts is not None:
            prepared.hosts.move(SCALABLE, scaled.hosts)
            config = dataclasses.replace(config, hosts=prepared.hosts.settings_again(SCALABLE, config.hosts))
        try:
            save_settings(dataclasses.replace(prepared, config=config), folder.path)
        except ConfigError as error:
            recorder.message(f"a resume begins with the replicas that there were: {error}")

    def plan(replicas: int, sources: Sources) -> Scaled:
        return rescaled(prepared.local, prepared.graph, replicas, prepared.hosts, sources)

    return Scaling(folder.path, plan, took_effect, recorder.message)


def _replacing(config: RunConfig, rule: Recovery, recorder: Recorder) -> Replacing | None:
    """None where a death ends the run."""
    if not config.recovery.max_restarts:
        return None
    return Replacing(rule, lambda redo: recorder.restarted(redo.next_tick, redo.describe()))


def raise_if_nothing_trained(summary: RunSummary) -> None:
    """Raises NothingTrained if no token of the whole run ever trained."""
    if summary.trained_nothing:
        causes = "".join(f"\n  {line}" for line in summary.failures)
        raise NothingTrained(
            "the run reached its end, but no token of it trained: its model is the one that it began with"
            + (f". {plural(summary.num_failed, 'reward')} failed:{causes}" if summary.num_failed else "")
            + f"\nThe rows of {METRICS_FILE} (tokens/*) show where its tokens went."
        )


def _needs_of(run_dir: Path, num_ticks: int) -> Callable[[ChannelSpec, int], int] | None:
    """For ``run_graph``: the source tick that a tick of a replay needs on the weights edge; None if this is no replay.

    A tick fires only when the newest version that it took in the run replayed has been published, so no executor ever waits inside
    a tick, and both runtimes can repeat a run of either. It cannot deadlock: tick k took versions <= k only, and these depend on
    batches before k.

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
