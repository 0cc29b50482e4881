"""The job's schedule, its deadlines, what it survives, and the cluster that it may use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from llamarl.errors import Mistake
from llamarl.strict import IN_STATE, NO_BITS, STRICT, ListOf, is_import_path, named, refuse, why_no_name

__all__ = [
    "CLUSTERS",
    "DeadlineConfig",
    "HERE",
    "HostsConfig",
    "RecoveryConfig",
    "ScheduleConfig",
    "TRANSPORTS",
    "host_settings",
    "hosts_named",
    "is_address",
    "parse_ports",
    "split_cluster",
]

TRANSPORTS = {
    "shared_memory": "llamarl.transports.shared_memory:SharedMemory",
    "cuda_ipc": "llamarl.transports.cuda_ipc:CudaIpc",
    "tcp": "llamarl.transports.tcp:Tcp",
}
"""``schedule.transport`` -> import path of what carries versions of the weights."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScheduleConfig:
    prompts_per_step: Annotated[PositiveInt, IN_STATE] = 16
    """Prompt groups consumed by one trainer tick, over all data-parallel ranks."""

    max_staleness: NonNegativeInt = 1
    """Delay of the weights edge less one, in trainer ticks; 0 runs synchronously, 1 is LlamaRL's schedule."""

    weights: Annotated[Literal["exact", "latest"], IN_STATE] = "exact"
    """Which version makes batch k. "exact": always version max(0, k - max_staleness), so a run
    repeats bit for bit. "latest": the newest there is, swapped in between decode steps; no trained
    token is older than max_staleness. Such a run depends on timing; its decisions go to
    events.jsonl, from which ``llamarl train --replay RUN_DIR`` repeats it."""

    colocated: Annotated[bool, NO_BITS] = False
    """Generator and trainer share their devices and take turns: the one that waits gives its memory
    back (the generator its weights and KV cache, the trainer on GPUs everything, to host memory).
    Needs max_staleness 0, where they never work at the same time; the bits are those of the same
    run without it. With ``threads`` 0 each gets all cores that are left."""

    transport: Annotated[str, named(("auto", *TRANSPORTS), "my_transport.py:Name"), NO_BITS] = "auto"
    """What carries weight versions. "auto" chooses by where the ranks are and says so at the start:
    "cuda_ipc" between GPUs of one host in processes of their own, "tcp" between hosts, else
    "shared_memory". Or your own as package.module:Name or path/to/file.py:Name, a
    ``llamarl.transports.base.Transport``."""


_COLLECTIVE_MORE_S = 30.0


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DeadlineConfig:
    """Every wait has a limit; when it runs out, the error names who waited for whom and since when."""

    setup_s: Annotated[PositiveFloat, NO_BITS] = 600.0
    """Seconds until every executor stands ready (model loaded, pools up)."""

    step_s: Annotated[PositiveFloat, NO_BITS] = 1800.0
    """Seconds one executor may spend on one tick. One that takes longer hangs: it is ended and
    brought up again, as far as recovery allows it. Judges get nine tenths of it for all samples of
    a tick; in an evaluation what sampling leaves of these, so that a short one loses verdicts there
    (eval/failed)."""

    disk_s: Annotated[NonNegativeFloat, NO_BITS] = 600.0
    """Seconds for which the run waits for a disk that refuses its records (metrics, rollouts,
    events): full, read-only or out of reach. Then it ends, since a run whose records are
    lost must not go on. 0: at once."""

    @property
    def collective_s(self) -> float:
        """Seconds for which a rank waits for others of its executor in a collective: a little
        longer than the controller waits for the executor, since that tells where each rank is and
        may bring the executor up again, and a rank's own error does neither."""
        return max(self.setup_s, self.step_s) + _COLLECTIVE_MORE_S


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RecoveryConfig:
    """What happens when a process dies in the middle of a run (docs/survival.md)."""

    max_restarts: Annotated[NonNegativeInt, NO_BITS] = 8
    """Executors that are brought up again within an hour before a death ends the run; the tick that
    was lost is done again, to the same bits (trainer and critic repeat those since their last
    checkpoint). 0: every death ends the run."""


HERE = "here"
"""Names the controller's node among hosts."""
CLUSTERS: Mapping[str, str] = {"ray": "llamarl.runtime.hosts.ray:RayCluster"}
"""The kinds that are built in -> import paths of their :class:`llamarl.runtime.hosts.cluster.Cluster`.
One more is a row here."""
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HostsConfig:
    """Nodes of a cluster. Where ranks are changes no bit: thread counts, processors and versions do."""

    cluster: Annotated[str, NO_BITS] = ""
    """Cluster that the job runs on, from one of its nodes: "auto" is the one that this machine
    is a node of, "HOST:PORT" names its head. Empty: this machine alone, and nothing listens. On the
    command line: --cluster auto. Of another kind "KIND://ADDRESS" or "KIND", where that may be your own
    as path/to/file.py:Name or package.module:Name, a ``llamarl.runtime.hosts.cluster.Cluster``."""

    on: Annotated[dict[str, ListOf[str]], NO_BITS] = Field(default_factory=dict)
    """Executor -> its nodes, by the names or addresses that the cluster gives them, or by their places in
    the list that --dry-run prints ("0", "2-3"); "here" is the controller's node. Ranks fill a node
    before the next. One that is not named goes where fewest ranks are, to several nodes where none has
    GPUs enough. On the command line: --on generator=a,b."""

    port_range: Annotated[str, NO_BITS] = ""
    """Ports on which processes of the job may listen on each node, beside Ray's own: "20000-20100". Empty: any.
    Where ranks of one executor are on several nodes, gloo and NCCL listen on any as well."""

    run_folder: Annotated[Literal["auto", "own"], NO_BITS] = "auto"
    """"auto": a host that is seen to read and write the controller's run folder uses it. Every
    other host gets one of its own, and files travel. "own": all get one of their own, such as where
    the shared one is slow."""

    allow_unlike: Annotated[bool, NO_BITS] = False
    """Let ranks run on hosts whose processors or library versions differ: to rounding, no longer
    the bits of one machine."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    @property
    def wanted(self) -> bool:
        """Whether the job leaves this machine at all."""
        return bool(self.cluster)

    def _mistakes(self) -> Iterator[Mistake]:
        kind, _ = split_cluster(self.cluster)
        if self.cluster.startswith("ray://"):
            yield Mistake(
                "cluster",
                "is an address of Ray Client, over which this process would be on no node: ranks could not reach it. Start the job on "
                "a node: ray job submit --address http://HEAD:8265 --working-dir . -- llamarl train RECIPE --cluster auto",
            )
        elif why := why_no_name(kind, CLUSTERS, "my_cluster.py:Name"):
            yield Mistake("cluster", f": the kind {why}")
        elif kind == "ray" and self.cluster not in ("", "auto") and not is_address(self.cluster):
            yield Mistake("cluster", f"must be auto or HOST:PORT, such as 10.0.0.1:6379, got {self.cluster!r}")
        if self.on and not self.wanted:
            yield Mistake("on", "puts executors on hosts, but there is no cluster: add --cluster auto", ("cluster",))
        if self.port_range:
            try:
                parse_ports(self.port_range)
            except ValueError as error:
                yield Mistake("port_range", f": {error}")


def is_address(text: str) -> bool:
    """True for HOST:PORT."""
    return _ADDRESS.fullmatch(text) is not None


def split_cluster(cluster: str) -> tuple[str, str]:
    """Kind and address of what ``hosts.cluster`` says: an address alone is Ray's."""
    kind, apart, address = cluster.partition("://")
    own = is_import_path(kind) and not is_address(kind)
    return (kind, address) if apart or own else ("ray", cluster)


def host_settings(cluster: str | None, on: Sequence[str] = ()) -> dict[str, Any]:
    """What ``--cluster ADDRESS`` and ``--on EXECUTOR=HOSTS`` set: keys of :class:`HostsConfig`;
    empty where neither is given. ``here`` takes the job back to this machine.

    Raises:
        ValueError: An ``--on`` is of another form, or an executor is named twice.
    """
    given: dict[str, Any] = {}
    if cluster is not None:
        given = {"cluster": "" if cluster == HERE else cluster, "on": {}}
    for word in on:
        executor, equals, names = word.partition("=")
        if not (executor and equals and names):
            raise ValueError(f"--on takes EXECUTOR=NODE,NODE, such as generator=a,b, got {word!r}")
        if executor in given.setdefault("on", {}):
            raise ValueError(f"--on names {executor!r} twice: list its nodes once, {executor}=a,b")
        given["on"][executor] = [name.strip() for name in names.split(",")]
    return given


def hosts_named(words: Sequence[str], nodes: Sequence[str]) -> tuple[int, ...]:
    """Places in ``nodes`` of those that a user names, in the user's order: by name, or by place.

    Raises:
        ValueError: A word names none of them, or one stands twice.
    """
    found: list[int] = []
    for word in words:
        first, dash, last = word.partition("-")
        if word in nodes:
            found.append(list(nodes).index(word))
        elif first.isdecimal() and (not dash or last.isdecimal()) and int(last or first) < len(nodes):
            found += range(int(first), int(last or first) + 1)
        else:
            raise ValueError(f"{word!r} is none of the nodes {', '.join(nodes)}, nor {HERE!r}")
    if len(set(found)) < len(found) or not found:
        raise ValueError(f"expected one or more nodes, each once, got {', '.join(words) or 'none'}")
    return tuple(found)


def parse_ports(text: str) -> tuple[int, int]:
    """``20000-20100`` or ``20000``.

    Raises:
        ValueError: It is neither, or no port.
    """
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not (first.isdecimal() and last.isdecimal()):
        raise ValueError(f"expected a port or two, such as 20000-20100, got {text!r}")
    ports = int(first), int(last)
    if not 1 <= ports[0] <= ports[1] <= 65535:
        raise ValueError(f"ports lie in 1 .. 65535, the lower one first, got {text!r}")
    return ports
