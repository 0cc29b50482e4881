"""The hosts that a job may use, as a recipe or a command line names them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from llamarl.errors import Mistake
from llamarl.strict import NO_BITS, STRICT, ListOf, refuse

__all__ = [
    "DEFAULT_PORT", "HERE", "HostsConfig", "Worker", "host_settings", "hosts_named", "parse_ports", "parse_worker", "parse_workers",
]  # fmt: skip

DEFAULT_PORT = 22222
HERE = "here"
"""Names the controller's machine among hosts."""
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.@-]*[A-Za-z0-9_])?")
_V6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
_LAUNCHERS = ("ssh", "slurm")


@plain_dataclass(frozen=True)
class Worker:
    """Where the daemon of a host listens."""

    name: str
    """As the user calls the host."""
    address: str
    port: int


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HostsConfig:
    """Hosts that run ``llamarl worker``. Where ranks are changes no bit: thread counts, processors and versions do."""

    workers: Annotated[ListOf[str], NO_BITS] = ()
    """Hosts that take part: "a", "a:22222", "10.0.0.2". Empty: this machine alone, and nothing listens. On the command line:
    --hosts a,b,c."""

    start: Annotated[Literal["running", "ssh", "slurm"], NO_BITS] = "running"
    """Who starts the workers. "running": they run already. "ssh": this job does, by ssh, and ends them (--hosts ssh:a,b). "slurm":
    it does by srun on every node of the allocation that it runs in (--hosts slurm)."""

    on: Annotated[dict[str, ListOf[str]], NO_BITS] = Field(default_factory=dict)
    """Executor -> its hosts, by the names above, or by their places in the list ("0", "2-3"); "here" is the controller's machine.
    Ranks fill a host before the next. One that is not named goes where fewest ranks are. On the command line: --on
    generator=a,b."""

    key: Annotated[str, NO_BITS] = ""
    """File with the key of running workers; empty: ~/.config/llamarl/worker.key. Workers that the job starts get one of their
    own."""

    command: Annotated[str, NO_BITS] = "llamarl worker"
    """What "ssh" and "slurm" run on a host, where the program has another path: "/opt/venv/bin/llamarl worker"."""

    port_range: Annotated[str, NO_BITS] = ""
    """Ports on which processes of the job may listen on this machine, and on hosts whose workers it starts: "20000-20100". Empty:
    any. A worker of your own takes --port-range."""

    tls_cert: Annotated[str, NO_BITS] = ""
    """This machine's certificate (PEM): then all that travels between hosts goes by TLS, and each end must show one."""

    tls_key: Annotated[str, NO_BITS] = ""
    """The private key of ``tls_cert``."""

    tls_ca: Annotated[str, NO_BITS] = ""
    """The authority that has signed the certificates of all hosts."""

    run_folder: Annotated[Literal["auto", "own"], NO_BITS] = "auto"
    """"auto": a host that is seen to read and write the controller's run folder uses it. Every other host gets one of its own, and
    files travel. "own": all get one of their own, such as where the shared one is slow."""

    standby: Annotated[str, NO_BITS] = ""
    """A host on which `llamarl worker` runs: it keeps a copy of the run's folder, and goes on with the run when this machine is gone.
    On the command line: --standby HOST."""

    standby_after_s: Annotated[PositiveFloat, NO_BITS] = 30.0
    """How long it waits for a controller to which the connection is lost."""

    absent_after_s: Annotated[NonNegativeFloat, NO_BITS] = 30.0
    """How long a resume waits for hosts of the run that do not answer. Then it goes on with those that do, if all ranks have room
    there. A run that begins, and a host that it has not had before, waits for nobody: all must answer."""

    allow_unlike: Annotated[bool, NO_BITS] = False
    """Let ranks run on hosts whose processors or library versions differ: to rounding, no longer the bits of one machine."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    @property
    def wanted(self) -> bool:
        """Whether the job leaves this machine at all."""
        return bool(self.workers) or self.start == "slurm"

    def _mistakes(self) -> Iterator[Mistake]:
        try:
            parse_workers(self.workers)
        except ValueError as error:
            yield Mistake("workers", f": {error}")
        if self.start == "slurm" and self.workers:
            yield Mistake(
                "workers", "must be empty where start is 'slurm': the allocation says which hosts", ("start",)
            )
        if self.start == "ssh" and not self.workers:
            yield Mistake("workers", "is empty, but start is 'ssh': name the hosts", ("start",))
        if self.start == "ssh" and any(parse_worker(text).port != DEFAULT_PORT for text in self._readable()):
            yield Mistake("workers", "may name no ports where start is 'ssh': the workers take free ones", ("start",))
        if self.on and not self.wanted:
            yield Mistake("on", "puts executors on hosts, but workers is empty: name the hosts", ("workers",))
        if self.workers and self.start != "slurm":
            for executor, named in self.on.items():
                try:
                    hosts_named(named, self.workers)
                except ValueError as error:
                    yield Mistake(f"on.{executor}", f": {error}", ("workers",))
        if self.standby:
            try:
                parse_worker(self.standby)
            except ValueError as error:
                yield Mistake("standby", f": {error}")
        if self.port_range:
            try:
                parse_ports(self.port_range)
            except ValueError as error:
                yield Mistake("port_range", f": {error}")
        tls = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        if any(tls.values()) and not all(tls.values()):
            missing = [name for name, value in tls.items() if not value]
            yield Mistake(missing[0], "is empty, but tls_cert, tls_key and tls_ca belong together", tuple(missing[1:]))

    def _readable(self) -> Iterator[str]:
        for text in self.workers:
            try:
                parse_worker(text)
            except ValueError:
                continue
            yield text


def host_settings(hosts: str | Sequence[str], on: Sequence[str] = ()) -> dict[str, Any]:
    """What ``--hosts HOSTS`` and ``--on EXECUTOR=HOSTS`` set: keys of :class:`HostsConfig`; empty where neither is given. ``here``
    alone takes the job back to this machine.

    Raises:
        ValueError: An ``--on`` is of another form, or an executor is named twice.
    """
    given: dict[str, Any] = {}
    if hosts:
        words = [word.strip() for word in (hosts.split(",") if isinstance(hosts, str) else hosts)]
        if words == [HERE]:
            words = []
        kind, colon, rest = (words or [""])[0].partition(":")
        start = "running"
        if kind in _LAUNCHERS and (colon and not rest.isdecimal() or kind == "slurm"):
            start, words = kind, [rest, *words[1:]] if rest else words[1:]
        given = {"workers": words, "start": start, "on": {}}
    for word in on:
        executor, equals, names = word.partition("=")
        if not (executor and equals and names):
            raise ValueError(f"--on takes EXECUTOR=HOST,HOST, such as generator=a,b, got {word!r}")
        if executor in given.setdefault("on", {}):
            raise ValueError(f"--on names {executor!r} twice: list its hosts once, {executor}=a,b")
        given["on"][executor] = [name.strip() for name in names.split(",")]
    return given


def hosts_named(named: Sequence[str], workers: Sequence[str]) -> tuple[int, ...]:
    """Places in ``workers`` of the hosts that a user names, in the user's order; -1 is the controller's machine.

    A host goes by the whole text, by what stands before its port if that is one host's alone, or by its place.

    Raises:
        ValueError: A name is none of theirs, or stands twice.
    """
    found: list[int] = []
    for name in named:
        first, dash, last = name.partition("-")
        addresses = [parse_worker(text).address for text in workers]
        if name in workers:
            found.append(list(workers).index(name))
        elif addresses.count(name) == 1:
            found.append(addresses.index(name))
        elif name == HERE:
            found.append(-1)
        elif first.isdecimal() and (not dash or last.isdecimal()) and int(last or first) < len(workers):
            found += range(int(first), int(last or first) + 1)
        else:
            raise ValueError(f"{name!r} is none of the hosts {', '.join(workers)}, nor {HERE!r}")
    if len(set(found)) < len(found) or not found:
        raise ValueError(f"expected one or more hosts, each once, got {', '.join(named) or 'none'}")
    if -1 in found and len(found) > 1:
        raise ValueError(f"{HERE!r} stands alone: an executor is on this machine or on hosts")
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


def parse_worker(text: str) -> Worker:
    """``name``, ``name:port``, ``10.0.0.2``, ``10.0.0.2:port``, ``[fd00::2]:port`` or ``fd00::2``.

    Raises:
        ValueError: It is none of these.
    """
    name, port = text, ""
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"expected a host such as a, a:{DEFAULT_PORT} or [fd00::2]:{DEFAULT_PORT}, got {text!r}")
        port = rest[1:]
    elif text.count(":") == 1:
        name, _, port = text.partition(":")
    numeric = ":" in name and _V6.fullmatch(name)
    if not (numeric or _NAME.fullmatch(name)) or (port and not (port.isdecimal() and 1 <= int(port) <= 65535)):
        raise ValueError(f"expected a host such as a, a:{DEFAULT_PORT} or [fd00::2]:{DEFAULT_PORT}, got {text!r}")
    return Worker(name=text, address=name, port=int(port) if port else DEFAULT_PORT)


def parse_workers(texts: Sequence[str]) -> list[Worker]:
    """All of them.

    Raises:
        ValueError: One cannot be read, is called "here", or two are one.
    """
    workers = [parse_worker(text) for text in texts]
    places = [(worker.address, worker.port) for worker in workers]
    for place, worker in zip(places, workers, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"{worker.name!r} is named twice")
        if worker.name == HERE:
            raise ValueError(f"no host can be called {HERE!r}: that is the controller's machine")
    return workers
