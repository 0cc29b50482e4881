"""A training run on disk: check it, start it, go on with it.

    recipe ─▶ preflight (paths, data, first prompts) ─▶ placement ─▶ run folder ─▶ runtime + run_graph ─▶ model/

The run folder's ``config.toml`` holds the resolved configuration: with the thread counts that were used, since the bits
depend on them.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llamarl.checkpoint.platform import platform_differences, platform_facts
from llamarl.checkpoint.snapshot import describe_run, run_differences
from llamarl.checkpoint.storage import CheckpointStore
from llamarl.config import RunConfig, load_config, save_config, to_plain
from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.controller.job import llamarl_graph
from llamarl.controller.preflight import (
    check_engine,
    check_lora,
    check_parallel_sizes,
    check_prompts,
    check_reward,
)
from llamarl.controller.replay import check_replay, needs_of, take_log
from llamarl.controller.run_folder import CONFIG_FILE, held, make_folder, refuse_a_run
from llamarl.controller.weight_edges import WeightEdge, settle_weight_edges
from llamarl.errors import ConfigError, LlamaRLError, ModelError
from llamarl.executors.sample_path import sample_path
from llamarl.models.folders import resolve_model_path
from llamarl.observability.events import REPLAY_FILE, EventLog
from llamarl.observability.job import describe_job
from llamarl.observability.recorder import Recorder
from llamarl.runtime.base import Report
from llamarl.runtime.factory import make_runtime
from llamarl.runtime.placement import Placement, Turns, place
from llamarl.trainer.config import OptimizerConfig

__all__ = ["plan_run", "replay_run", "resume_run", "start_run"]

_SECTIONS = {
    "generator": "generator",
    "reference": "reference",
    "critic": "critic",
    "trainer": "trainer",
    "evaluation": "evaluator",
}
"""Section of a recipe -> the executor whose threads and device it settles."""
_TRAINER_LAYOUT = frozenset({"trainer.fsdp", "trainer.tp", "trainer.threads", "threads of trainer"})
"""What ``checkpoint.reshard`` lets differ."""
_DETAILS = {
    "generator": "samples groups of responses",
    "reward": "judges them in worker processes",
    "reference": "a frozen model's log-probs of every token",
    "critic": "estimates returns, and learns to",
    "trainer": "updates the policy, hands over weights",
    "evaluator": "scores versions on held-out prompts",
}


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A run that has passed its checks: thread counts and devices are settled."""

    config: RunConfig
    graph: Graph
    placement: Placement
    weight_edges: tuple[WeightEdge, ...]


def plan_run(config: RunConfig) -> str:
    """What a run of ``config`` would be: configuration, graph and placement, as text. Starts nothing."""
    import tomli_w

    prepared = _prepare(config)
    return (
        f"# configuration\n{tomli_w.dumps(to_plain(prepared.config))}\n"
        f"# graph\n{prepared.graph.describe()}\n\n# placement\n{prepared.placement.table()}\n\n"
        f"# weight hand-over\n"
        + "\n".join(f"{edge.channel} ({edge.ends}): {edge.summary()}" for edge in prepared.weight_edges)
    )


def start_run(config: RunConfig) -> None:
    """Run ``config`` from tick 0 in a new folder.

    Raises:
        LlamaRLError: Whatever ended the run; the message carries its cause.
    """
    _start(_prepare(config))


def replay_run(config: RunConfig, source: Path) -> None:
    """Repeat the run in ``source`` bit for bit in a new folder, ``config.run.dir``.

    Args:
        config: What ``source`` saved, with overrides that change no bit.

    Raises:
        ConfigError: The configuration would give other bits, or the new folder holds a run.
        EventLogError: The log of ``source`` is missing, torn or too short.
    """
    original = load_config(source / CONFIG_FILE)
    if original.schedule.weights != "latest":
        print(
            f"{source} made no decisions that need a log (schedule.weights = 'exact'): running it again",
            file=sys.stderr,
        )
        start_run(config)
        return
    check_replay(source, to_plain(original), to_plain(config), config.run.num_ticks)
    _start(_prepare(config), replay_of=source)


def _start(prepared: _Prepared, *, replay_of: Path | None = None) -> None:
    run_dir = _absolute(prepared.config)
    refuse_a_run(run_dir)
    check_reward(prepared.config)
    make_folder(run_dir)
    with held(run_dir):
        refuse_a_run(run_dir)  # another process may have run here since
        (run_dir / REPLAY_FILE).unlink(missing_ok=True)  # of a replay that ended before its first tick
        if replay_of is not None:
            take_log(replay_of, run_dir)
        _save(prepared, run_dir)
        _execute(prepared, run_dir, resume_after_tick=None, load_from=None)


def _save(prepared: _Prepared, run_dir: Path) -> None:
    new = run_dir / f"{CONFIG_FILE}.new"
    try:
        save_config(prepared.config, new)
        os.replace(new, run_dir / CONFIG_FILE)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write {run_dir / CONFIG_FILE}: {error.strerror}") from error


def resume_run(config: RunConfig) -> None:
    """Go on with the run in ``config.run.dir`` from its last good checkpoint, or from the start if it has none.

    Raises:
        ConfigError: There is no run, or this recipe or machine would not give the bits of the uninterrupted run.
        CheckpointError: Every checkpoint is torn.
    """
    run_dir = _absolute(config)
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"--resume: {run_dir} holds no run (no {CONFIG_FILE}); start one without --resume")
    begun = load_config(run_dir / CONFIG_FILE)
    prepared = _prepare(_settle_rate(config, begun))
    check_reward(prepared.config)
    with held(run_dir):
        store = CheckpointStore(run_dir / "checkpoints", prepared.config.checkpoint)
        for note in store.clean():
            print(note, file=sys.stderr)
        if not store.list():
            differences = run_differences({"config": to_plain(begun)}, {"config": to_plain(prepared.config)})
            _refuse(differences, prepared, run_dir, run_dir)
            _save(prepared, run_dir)
            _execute(prepared, run_dir, resume_after_tick=-1, load_from=None)
            return
        checkpoint = store.load()
        differences = run_differences(checkpoint.run, _describe(prepared))
        if not prepared.config.checkpoint.other_platform:
            differences += platform_differences(checkpoint.manifest.platform)
        _refuse(differences, prepared, run_dir, checkpoint.path)
        if checkpoint.tick + 1 >= prepared.config.run.num_ticks:
            if not any((run_dir / made).is_dir() for made in ("model", "adapter")):
                raise ConfigError(
                    f"--run.num_ticks {prepared.config.run.num_ticks}: {run_dir} has passed that tick without writing its "
                    f"model, which the last tick does: give at least {checkpoint.tick + 2}"
                )
            print(f"{run_dir} is complete at {checkpoint.tick + 1} ticks; raise --run.num_ticks to prolong it")
            return
        _tell_of_a_rate_of_zero(prepared.config)
        _save(prepared, run_dir)
        store.clean(after_tick=checkpoint.tick)
        _execute(prepared, run_dir, resume_after_tick=checkpoint.tick, load_from=checkpoint.path)


def _settle_rate(config: RunConfig, begun: RunConfig) -> RunConfig:
    """A falling rate whose end ``config`` leaves open ends where that of ``begun`` does, or with the run that it describes."""

    def settled(optimizer: OptimizerConfig, earlier: OptimizerConfig) -> OptimizerConfig:
        if optimizer.schedule == "constant" or optimizer.decay_ticks:
            return optimizer
        return dataclasses.replace(optimizer, decay_ticks=earlier.decay_ticks or begun.run.num_ticks)

    critic = dataclasses.replace(config.critic, optimizer=settled(config.critic.optimizer, begun.critic.optimizer))
    return dataclasses.replace(config, optimizer=settled(config.optimizer, begun.optimizer), critic=critic)


def _tell_of_a_rate_of_zero(config: RunConfig) -> None:
    optimizer = config.optimizer
    if optimizer.schedule != "constant" and not optimizer.min_lr_ratio and config.run.num_ticks > optimizer.decay_ticks:
        print(
            f"optimizer.schedule {optimizer.schedule!r} has fallen to 0 at tick {optimizer.decay_ticks}: the ticks after it change "
            f"no weight. To go on learning, start a new run with model.path = RUN/model",
            file=sys.stderr,
        )


def _tell_of_a_long_warmup(config: RunConfig) -> None:
    optimizer, num_ticks = config.optimizer, config.run.num_ticks
    if optimizer.warmup_ticks >= num_ticks:
        print(
            f"optimizer.warmup_ticks {optimizer.warmup_ticks} outlasts run.num_ticks {num_ticks}: the rate ends at "
            f"{num_ticks / (optimizer.warmup_ticks + 1):.0%} of optimizer.lr",
            file=sys.stderr,
        )


def _refuse(differences: Sequence[str], prepared: _Prepared, run_dir: Path, made: Path) -> None:
    """Raises ConfigError if ``made`` (a checkpoint, or a run that has none yet) was made otherwise."""
    if prepared.config.checkpoint.reshard:
        differences = [line for line in differences if line.partition(":")[0] not in _TRAINER_LAYOUT]
    if not differences:
        return
    keys = {line.partition(":")[0] for line in differences}
    platform = keys & set(platform_facts())
    advice = []
    if keys - platform:
        advice.append(f"Resume with {run_dir / CONFIG_FILE} as the recipe, or start a new run.")
    if keys <= _TRAINER_LAYOUT:
        advice.append("With --checkpoint.reshard true the trainer goes on in the new layout, to rounding.")
    if platform:
        advice.append("With --checkpoint.other_platform true the run goes on here, to rounding.")
    raise ConfigError(
        f"--resume: {made} was made otherwise, so the run would not go on bit for bit:\n"
        + "\n".join(f"  - {line}" for line in differences)
        + "\n"
        + "\n".join(advice)
    )


def _prepare(config: RunConfig) -> _Prepared:
    """Refuse what cannot run, before any process starts; settle threads and devices."""
    config = _settle_rate(config, config)
    folder = resolve_model_path(config.model.path)
    check_prompts(config, folder)
    _check_vocabularies(config, folder)
    graph = llamarl_graph(config)
    placement = place(graph.executors, cores=config.run.cores or None, turns=_turns(config))
    settled = {spec.name: spec for spec in placement.executors}
    changes: dict[str, Any] = {
        section: dataclasses.replace(
            getattr(config, section), threads=settled[name].threads, device=_device_kind(settled[name].device)
        )
        for section, name in _SECTIONS.items()
        if name in settled
    }
    config = dataclasses.replace(config, **changes)
    _raise_all(
        lambda: check_parallel_sizes(config, folder, cores=placement.cores),
        lambda: check_lora(config),
        lambda: check_engine(config),
    )
    executors = tuple(dataclasses.replace(spec, config=config) for spec in placement.executors)
    graph, weight_edges = settle_weight_edges(config, Graph(executors, graph.channels))
    _tell_of_a_long_warmup(config)
    return _Prepared(config, graph, placement, weight_edges)


def _turns(config: RunConfig) -> Turns | None:
    """Who takes turns in a co-located job: of everyone on the one long cycle a single executor works at a time."""
    if not config.schedule.colocated:
        return None
    return Turns(sharing=("generator", "trainer"), members=("generator", *sample_path(config)))


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

    beside = {"reference.path": config.has_reference and config.reference.path}
    beside["critic.path"] = config.has_critic and config.critic.path
    for key, path in beside.items():
        if path:
            ours, theirs = (load_model_config(f).get_text_config().vocab_size for f in (folder, path))
            if ours != theirs:
                raise ConfigError(
                    f"{key}: {path} has a vocabulary of {theirs} tokens, {config.model.path} one of {ours}: "
                    "both must read the same tokens"
                )


def _device_kind(device: str) -> str:
    return "cuda" if device.startswith("cuda") else "cpu"


def _absolute(config: RunConfig) -> Path:
    return Path(config.run.dir).expanduser().resolve()


def _describe(prepared: _Prepared) -> dict[str, Any]:
    threads = {spec.name: spec.threads for spec in prepared.graph.executors}
    return describe_run(to_plain(prepared.config), threads)


class _RunCheckpoints:
    """Connects the controller's question "is this tick saved?" with the store, which proves and renames on a thread:
    reading every byte again must not hold up the job."""

    def __init__(self, store: CheckpointStore, prepared: _Prepared, recorder: Recorder, events: EventLog) -> None:
        self._events = events
        self._store = store
        self._prepared = prepared
        self._recorder = recorder
        self._folders: dict[int, Path] = {}
        self._required: set[int] = set()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._finishing: list[Future[object]] = []

    def require(self, tick: int) -> None:
        self._required.add(tick)

    def folder_for(self, tick: int) -> Path | None:
        due = self._prepared.config.checkpoint.is_due(tick, self._prepared.config.run.num_ticks)
        if not due and tick not in self._required:
            return None
        if tick not in self._folders:
            self._folders[tick] = self._store.begin(tick)
        return self._folders[tick]

    def on_saved(self, tick: int) -> None:
        self._raise_failures(wait=False)
        self._recorder.sync()
        self._events.sync()
        self._finishing.append(self._thread.submit(self._store.finish, tick, _describe(self._prepared)))

    def close(self) -> None:
        """Return when the last checkpoint is proved.

        Raises:
            CheckpointError: One could not be finished.
        """
        self.settle()
        self._raise_failures(wait=True)

    def settle(self) -> None:
        """Return when nothing is being proved any more, well or ill; what was begun and not finished is removed."""
        self._thread.shutdown(wait=True)
        for tick in self._folders:
            self._store.abort(tick)

    def _raise_failures(self, *, wait: bool) -> None:
        while self._finishing and (wait or self._finishing[0].done()):
            self._finishing.pop(0).result()


class _Observe:
    """Event log and recorder as an observer of the controller; the log first."""

    def __init__(self, recorder: Recorder, events: EventLog) -> None:
        self._recorder = recorder
        self._events = events

    def on_report(self, report: Report) -> None:
        self._events.append(report.events)
        self._recorder.on_report(report)


def _staleness(config: RunConfig) -> str:
    staleness, segments = config.schedule.max_staleness, config.generator.max_segments
    which = "the latest weights, " if config.schedule.weights == "latest" else ""
    bound = config.token_staleness_bound
    return f"{which}max_staleness {staleness}, max_segments {segments}: no token older than {bound} versions"


def _execute(prepared: _Prepared, run_dir: Path, *, resume_after_tick: int | None, load_from: Path | None) -> None:
    config, graph = prepared.config, prepared.graph
    facts = {
        "model": config.model.path,
        "task": config.task.name,
        "algorithm": config.algorithm.name,
        "staleness": _staleness(config),
        **{edge.channel: edge.summary() for edge in prepared.weight_edges},
        "run": str(run_dir),
    }
    needs = needs_of(run_dir, config.run.num_ticks)
    events = EventLog(run_dir, resume_after_tick)
    recorder = Recorder(
        run_dir,
        config.observability,
        [spec.name for spec in graph.executors],
        config.run.num_ticks,
        resume_after_tick,
        job=describe_job(run_dir.name, graph.executors, graph.channels, details=_DETAILS, facts=facts),
        run_config=to_plain(config),
    )
    runtime = make_runtime(config.run.runtime)
    checkpoints = _RunCheckpoints(
        CheckpointStore(run_dir / "checkpoints", config.checkpoint), prepared, recorder, events
    )
    stopped = "stopped by an error"
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
            observers=[_Observe(recorder, events)],
            needs=needs,
        )
        checkpoints.close()
        stopped = ""
    except KeyboardInterrupt:
        stopped = "stopped by the user"
        raise
    except LlamaRLError as error:
        stopped = type(error).__name__  # the command line prints the cause, once
        raise
    finally:
        runtime.close()
        checkpoints.settle()
        recorder.close(stopped)
