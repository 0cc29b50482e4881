"""The transports by name, and which one an edge takes: decided by where its ranks are, and said aloud.

Only the one asked for is imported.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llamarl.transports.base import SinkTransport, SourceTransport

__all__ = ["TRANSPORTS", "Place", "choose_transport", "sink_transport", "source_transport"]

TRANSPORTS = {
    "shared_memory": "llamarl.transports.shared_memory:SharedMemory",
    "cuda_ipc": "llamarl.transports.cuda_ipc:CudaIpc",
    "tcp": "llamarl.transports.tcp:Tcp",
}
"""Name -> module and the common part of its two classes' names: ``...Source`` and ``...Sink``."""


def source_transport(name: str, *, num_sink_ranks: int) -> SourceTransport:
    """The source rank's end. A transport between GPUs takes this process's current one.

    Raises:
        ValueError: Unknown name.
        ChannelError: The transport does not work here.
    """
    made: SourceTransport = _end(name, "Source").here(num_sink_ranks=num_sink_ranks)
    return made


def sink_transport(name: str, *, rank: int) -> SinkTransport:
    """The end of sink rank ``rank``; otherwise as ``source_transport``."""
    made: SinkTransport = _end(name, "Sink").here(rank=rank)
    return made


def _end(name: str, end: str) -> Any:
    if name not in TRANSPORTS:
        near = difflib.get_close_matches(name, TRANSPORTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"transport {name!r} is unknown, expected one of {', '.join(TRANSPORTS)}{hint}")
    module, _, kind = TRANSPORTS[name].partition(":")
    return getattr(importlib.import_module(module), kind + end)


@dataclass(frozen=True)
class Place:
    """Where one rank runs."""

    host: str
    device: str
    """``cpu`` or ``cuda:0``."""
    process: str = ""
    """Ranks of one host with the same name here run in one process; empty: in one of its own."""


def choose_transport(sources: Sequence[Place], sinks: Sequence[Place]) -> tuple[str, str]:
    """(name, reason): ``shared_memory``, ``cuda_ipc`` or ``tcp``; one for the whole channel.

    Hosts decide first: where any two ranks that may talk sit on different hosts, all use ``tcp``,
    which maps memory between those that share a host. On one host, GPUs on both sides use
    ``cuda_ipc``, anything else ``shared_memory``; so do GPUs of one process, because CUDA opens no
    memory handle in the process that made it, and runs in one process are for looking, not for speed.

    Raises:
        ValueError: A side has no ranks.
    """
    if not sources or not sinks:
        raise ValueError(f"a weights channel needs ranks on both sides, got {len(sources)} and {len(sinks)}")
    hosts = sorted({place.host for place in (*sources, *sinks)})
    if len(hosts) > 1:
        where = f"ranks lie on {len(hosts)} hosts ({', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''})"
        return "tcp", where
    shared = {place.process for place in sources} & {place.process for place in sinks} - {""}
    if shared:
        return "shared_memory", f"source and sink are one process of host {hosts[0]}"
    if all(place.device.startswith("cuda") for place in (*sources, *sinks)):
        return "cuda_ipc", f"all ranks hold GPUs of host {hosts[0]}"
    return "shared_memory", f"all ranks lie on host {hosts[0]}, and not all hold GPUs"
