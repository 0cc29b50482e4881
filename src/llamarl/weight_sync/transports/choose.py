"""Which transport a weights channel uses: decided by where the ranks are, and said aloud. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Place", "choose_transport"]


@dataclass(frozen=True)
class Place:
    """Where one rank runs."""

    host: str
    device: str
    """``cpu`` or ``cuda:0``."""
    process: str = ""
    """Ranks of one host with the same name here run in one process; empty: in one of its own."""


def choose_transport(sources: Sequence[Place], sinks: Sequence[Place]) -> tuple[str, str]:
    """(name, reason): ``shared_memory``, ``cuda_ipc`` or ``rdma``; one for the whole channel.

    Hosts decide first: where any two ranks that may talk sit on different hosts, all use ``rdma``. On one host, GPUs on
    both sides use ``cuda_ipc``, anything else ``shared_memory``; so do GPUs of one process, because CUDA opens no memory
    handle in the process that made it, and runs in one process are for looking, not for speed.

    Raises:
        ValueError: A side has no ranks.
    """
    if not sources or not sinks:
        raise ValueError(f"a weights channel needs ranks on both sides, got {len(sources)} and {len(sinks)}")
    hosts = sorted({place.host for place in (*sources, *sinks)})
    if len(hosts) > 1:
        return "rdma", f"ranks lie on {len(hosts)} hosts ({', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''})"
    shared = {place.process for place in sources} & {place.process for place in sinks} - {""}
    if shared:
        return "shared_memory", f"source and sink are one process of host {hosts[0]}"
    if all(place.device.startswith("cuda") for place in (*sources, *sinks)):
        return "cuda_ipc", f"all ranks hold GPUs of host {hosts[0]}"
    return "shared_memory", f"all ranks lie on host {hosts[0]}, and not all hold GPUs"
