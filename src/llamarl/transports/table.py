"""The transports by name or import path, and which one an edge takes: decided by where its ranks are, and said aloud.

Only the one asked for is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamarl.import_path import resolve, why_no_name
from llamarl.transports.network import mine

if TYPE_CHECKING:  # who only asks for a name needs no torch
    from llamarl.transports.base import Transport

__all__ = ["TRANSPORTS", "Place", "choose_transport", "name_here", "transport_kind"]

TRANSPORTS = {
    "shared_memory": "llamarl.transports.shared_memory:SharedMemory",
    "cuda_ipc": "llamarl.transports.cuda_ipc:CudaIpc",
    "tcp": "llamarl.transports.tcp:Tcp",
}


def transport_kind(name: str) -> type[Transport]:
    """The transport of a name, or of an import path.

    Raises:
        ValueError: Unknown name.
    """
    if why := why_no_name(name, TRANSPORTS, "my_transport.py:Name"):
        raise ValueError(f"transport {why}")
    found: Any = resolve(TRANSPORTS.get(name, name))
    kind: type[Transport] = found
    return kind


def name_here(name: str) -> str:
    """What carries the bytes of a channel that was given ``name``: in a job on several hosts memory that is shared on
    one goes between them by sockets."""
    return "tcp" if name == "shared_memory" and mine() is not None else name


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
