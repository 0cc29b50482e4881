"""The cluster that a job may use, as a recipe or a command line names it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from llamarl.errors import Mistake
from llamarl.strict import NO_BITS, STRICT, ListOf, refuse

__all__ = ["HERE", "HostsConfig", "host_settings", "hosts_named", "is_address", "parse_ports"]

HERE = "here"
"""Names the controller's node among hosts."""
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HostsConfig:
    """Nodes of a Ray cluster. Where ranks are changes no bit: thread counts, processors and versions do."""

    cluster: Annotated[str, NO_BITS] = ""
    """Ray cluster that the job runs on, from one of its nodes: "auto" is the one that this machine
    is a node of, "HOST:PORT" names its head. Empty: this machine alone, and nothing listens. On the
    command line: --cluster auto."""

    on: Annotated[dict[str, ListOf[str]], NO_BITS] = Field(default_factory=dict)
    """Executor -> its nodes, by the names or addresses that Ray gives them, or by their places in
    the list that --dry-run prints ("0", "2-3"); "here" is the controller's node. Ranks fill a node
    before the next. One that is not named goes where fewest ranks are. On the command line: --on
    generator=a,b."""

    port_range: Annotated[str, NO_BITS] = ""
    """Ports on which processes of the job may listen on each node, beside Ray's own: "20000-20100". Empty: any."""

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
        if self.cluster.startswith("ray://"):
            yield Mistake(
                "cluster",
                "is an address of Ray Client, over which this process would be on no node: ranks could not reach it. Start the job on "
                "a node: ray job submit --address http://HEAD:8265 --working-dir . -- llamarl train RECIPE --cluster auto",
            )
        elif self.cluster and self.cluster != "auto" and not is_address(self.cluster):
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
