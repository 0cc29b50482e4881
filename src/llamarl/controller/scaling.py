"""Another number of generator replicas while a run goes on: asked for in a file of its folder, done between two ticks.

llamarl scale ─▶ RUN/scale.json ─▶ Scaling.due, before orders are given ─┬▶ executor to start anew, with other ranks
     ▲                                                                   └▶ refused
     └────────────── RUN/scale.jsonl: from which tick on, or why not ◀───┘

A generator whose shards are counted makes the same bits on any number of ranks
(``executors/generator_shard.py``), so nothing is decided here that a run's result depends on.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from llamarl.channels.base import ChannelKind
from llamarl.config import RunConfig, apply_overrides, to_plain, validate
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.controller.standard_graph import colocated_group, llamarl_graph
from llamarl.errors import ConfigError, LlamaRLError
from llamarl.executors.base import ExecutorSpec
from llamarl.observability.writing import append_all, replace_file
from llamarl.reading import read_json
from llamarl.roles import ROLES
from llamarl.runtime.placement import place
from llamarl.transports.segments import SegmentHandle
from llamarl.transports.table import transport_kind

__all__ = [
    "SCALABLE",
    "Answer",
    "Scaled",
    "Scaling",
    "answer_to",
    "ask",
    "of_hosts",
    "rescaled",
    "uneven",
    "weight_sources",
    "why_not_replicas",
    "why_not_scale",
    "withdraw",
]

SCALABLE = "generator"
"""The executor whose ranks may be another number."""
_ASKED = "scale.json"
_ANSWERS = "scale.jsonl"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a request."""

    id: str
    executor: str
    replicas: int
    """That were asked for."""
    tick: int
    """The first with them."""
    refused: str = ""
    """Why there are as many as before; empty: there are as many as were asked for."""
    on: str = ""
    """Their hosts; empty: the job is on one machine."""


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """What a run is from a tick on."""

    config: RunConfig
    spec: ExecutorSpec
    """Of the executor that has other ranks."""
    hosts: tuple[int, ...] = ()
    """The host of each of its ranks; empty: the whole job is on this one."""
    on: str = ""
    """The same for people."""


Sources = tuple[tuple[str, int], ...]
"""Addresses and ports."""


class Hosts(Protocol):
    """Those of a job."""

    def place_rescaled(
        self, executors: Sequence[ExecutorSpec], spec: ExecutorSpec
    ) -> tuple[ExecutorSpec, tuple[int, ...]]:
        """As of ``JobHosts``."""
        ...

    def names(self, ranks: Sequence[int]) -> str:
        """As of ``JobHosts``."""
        ...

    def why_unreached(self, executor: str, ranks: Sequence[int], sources: Sources) -> str:
        """As of ``JobHosts``."""
        ...


def ask(run_dir: Path, executor: str, replicas: int) -> str:
    """Put a request into a run's folder, in place of one that has not been taken; its id.

    Raises:
        ConfigError: The folder cannot be written.
    """
    asked = {"id": secrets.token_hex(8), "executor": executor, "replicas": replicas}
    try:
        replace_file(run_dir / _ASKED, json.dumps(asked).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {run_dir / _ASKED}: {error.strerror}") from error
    return str(asked["id"])


def answer_to(run_dir: Path, request: str) -> Answer | None:
    """What came of a request; None: nothing yet."""
    try:
        lines = (run_dir / _ANSWERS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError):
            if (found := Answer(**json.loads(line))).id == request:
                return found
    return None


def of_hosts(answer: Answer) -> str:
    """Where the replicas are, as the end of a sentence; empty on one machine."""
    return f" (hosts: {answer.on})" if answer.on else ""


def withdraw(run_dir: Path, request: str) -> None:
    """Take a request back, if it has not been taken."""
    asked = _asked(run_dir)
    if asked is not None and asked.get("id") == request:
        (run_dir / _ASKED).unlink(missing_ok=True)


def _asked(run_dir: Path) -> Mapping[str, object] | None:
    """The request that lies in a folder; an empty one if it cannot be read, None if there is none."""
    path = run_dir / _ASKED
    if not os.path.lexists(path):
        return None
    try:
        asked = read_json(path)
    except LlamaRLError:
        return {}
    return asked if isinstance(asked, dict) else {}


def why_not_scale(config: RunConfig, executor: str) -> str:
    """Why a run's replicas cannot be another number while it goes on; empty: they can."""
    generator = config.generator
    changed = config.executors.get(executor)
    if executor != SCALABLE:
        return f"{executor!r} has the ranks that it has: only {SCALABLE!r} may have others while a run goes on"
    if generator.replicas:
        return (
            "generator.replicas names each kind of replica, and bits depend on which of them decodes what: they stay as many as they "
            "are"
        )
    if not generator.shards:
        return (
            "generator.shards is 0, so the bits depend on the number of replicas: only a run with shards can have another one "
            "(a resume may set generator.shards to the replicas that the run began with)"
        )
    if generator.tp * generator.pp > 1:
        return (
            f"generator.tp is {generator.tp} and generator.pp {generator.pp}, and the trainer lays weights out "
            "for the replicas that there are: stop the run, and resume it with another --generator.dp"
        )
    if changed is not None and changed.factory and changed.factory != ROLES[executor].factory:
        return f"executors.{executor}.factory is {changed.factory}, which may not divide its work into shards"
    if config.run.runtime == "inline":
        return "run.runtime is 'inline', where an executor has one rank"
    if config.hosts.wanted and config.schedule.colocated:
        return (
            "schedule.colocated puts it on the hosts of others, one rank beside another: stop the run, and resume it with another "
            "--generator.dp"
        )
    if not config.recovery.max_restarts:
        return "recovery.max_restarts is 0, so that no state is held outside of the processes"
    return ""


def why_not_replicas(config: RunConfig, replicas: int) -> str:
    """Why a run that can be scaled cannot have so many replicas, whatever its hosts; empty: it can."""
    shards = config.generator.shards
    if replicas < 1:
        return f"at least one replica must be left, not {replicas}"
    if replicas > shards:
        return f"{replicas} replicas are more than generator.shards = {shards}: each needs a shard at least to decode"
    return ""


def uneven(config: RunConfig, replicas: int) -> str:
    """What to know of replicas of which some decode more shards than others; empty where all decode as many."""
    shards = config.generator.shards
    if not shards % replicas:
        return ""
    most = -(-shards // replicas)
    as_fast = -(-shards // most)
    note = f", so {as_fast} would be as fast" if as_fast < replicas else ""
    return f"{shards} shards over {replicas} replicas: some decode {most}, and the others wait for them{note}"


def rescaled(
    config: RunConfig, graph: Graph, replicas: int, hosts: Hosts | None = None, sources: Sources = ()
) -> Scaled:
    """A run with another number of generator replicas: everyone else stays as and where they are.

    Args:
        config: Of the run, with threads and devices settled.
        graph: With its executors placed.
        hosts: None: the whole job is on this machine.
        sources: What each host that gets replicas must reach.

    Raises:
        ConfigError: It cannot be.
    """
    if why := why_not_scale(config, SCALABLE) or why_not_replicas(config, replicas):
        raise ConfigError(why)
    for channel in graph.inputs[SCALABLE]:
        if channel.kind is ChannelKind.WEIGHTS and transport_kind(channel.transport).on_device:
            raise ConfigError(
                f"channel {channel.name!r} goes by {channel.transport}, where the source knows each sink: stop the run, and resume it "
                "with another --generator.dp"
            )
    changed = validate(apply_overrides(to_plain(config), ["--generator.dp", str(replicas)]))
    wanted = llamarl_graph(changed)
    if hosts is not None:
        spec, ranks = hosts.place_rescaled(graph.executors, next(s for s in wanted.executors if s.name == SCALABLE))
        if why := hosts.why_unreached(SCALABLE, ranks, sources):
            raise ConfigError(why)
        return Scaled(config=changed, spec=spec, hosts=ranks, on=hosts.names(ranks))
    placed = place(wanted.executors, cores=changed.run.cores or None, colocated=colocated_group(changed, wanted))
    here = {spec.name: spec for spec in graph.executors}
    moved = [s.name for s in placed.executors if s.name != SCALABLE and s.device != here[s.name].device]
    if moved:
        raise ConfigError(
            f"{', '.join(moved)} would have to move to another device: resume with --generator.dp {replicas}"
        )
    spec = next(spec for spec in placed.executors if spec.name == SCALABLE)
    return Scaled(config=changed, spec=spec)


def weight_sources(marking: Marking, executor: str) -> Sources:
    """Addresses and ports from which an executor reads the versions of the weights that lie on its
    edges now; none on one machine."""
    edges = (channel for channel in marking.graph.inputs[executor] if channel.kind is ChannelKind.WEIGHTS)
    handles = (handle for edge in edges for handle in marking.handles_on(edge.name) if handle is not None)
    segments = (handle.address for handle in handles if isinstance(handle.address, SegmentHandle))
    return tuple(sorted({segment.endpoint for segment in segments if segment.space}))


class Scaling:
    """Of one run. Requests that lie there at its beginning are of an earlier one.

    Args:
        plan: Replicas, and where weights were seen to lie last (:func:`weight_sources`) -> what the
            run then is; raises ConfigError.
        took_effect: Called when it is, with the first tick.
        tell: Gets a line for people.
    """

    def __init__(
        self,
        run_dir: Path,
        plan: Callable[[int, Sources], Scaled],
        took_effect: Callable[[Scaled, int], None],
        tell: Callable[[str], None],
    ) -> None:
        self.executor = SCALABLE
        self._run_dir = run_dir
        self._plan = plan
        self._took_effect = took_effect
        self._tell = tell
        self._sources: Sources = ()
        self._looks = self._remove()

    def due(self, marking: Marking, replaceable: Callable[[], Mapping[str, int]]) -> ExecutorSpec | None:
        """The executor, which is not at work, if it is to be started anew now with other ranks.

        Args:
            replaceable: As of ``runtime.base.RestartingRuntime``.
        """
        self._sources = weight_sources(marking, SCALABLE) or self._sources
        if not self._looks or (asked := _asked(self._run_dir)) is None:
            return None
        if not self._remove():  # it would be taken again and again
            self._looks = False
            return None
        tick = marking.done_ticks[SCALABLE]
        replicas = asked.get("replicas")
        request, executor = str(asked.get("id")), str(asked.get("executor"))
        scaled, refused = None, ""
        if executor != SCALABLE or not isinstance(replicas, int):
            refused = f"the request cannot be read, or is not of {SCALABLE!r}"
        elif not marking.is_needed(SCALABLE):
            refused = f"{SCALABLE!r} has done all its ticks"
        elif SCALABLE not in replaceable():
            refused = f"what {SCALABLE!r} holds is not held elsewhere, or its host is gone"
        else:
            try:
                scaled = self._plan(replicas, self._sources)
            except ConfigError as error:
                refused = str(error)
        if scaled is not None:
            self._took_effect(scaled, tick)
        number = replicas if isinstance(replicas, int) else 0
        on = "" if scaled is None else scaled.on
        self._answer(Answer(id=request, executor=executor, replicas=number, tick=tick, refused=refused, on=on))
        return None if scaled is None else scaled.spec

    def _remove(self) -> bool:
        try:
            (self._run_dir / _ASKED).unlink(missing_ok=True)
        except OSError as error:
            self._tell(
                f"{self._run_dir / _ASKED} cannot be removed ({error.strerror}): requests are not looked at any more"
            )
            return False
        return True

    def _answer(self, answer: Answer) -> None:
        asked = f"{answer.executor}={answer.replicas}"
        told = (
            f"stays as it is: {answer.refused}" if answer.refused else f"from tick {answer.tick} on{of_hosts(answer)}"
        )
        self._tell(f"scale {asked}: {told}")
        try:
            file = os.open(self._run_dir / _ANSWERS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                append_all(file, (json.dumps(asdict(answer)) + "\n").encode())
            finally:
                os.close(file)
        except OSError as error:
            self._tell(f"cannot write {self._run_dir / _ANSWERS}: {error.strerror}")
