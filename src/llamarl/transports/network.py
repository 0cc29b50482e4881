"""What a process of a job must know of the network to be reached, and to know whom it reaches without it.

A job on one machine has none of this: :func:`mine` is None, everything is shared memory, and nothing listens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Network", "TlsFiles", "join", "mine", "this_space"]


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files on this host: own certificate and key, and the authority that must have signed the peer's."""

    certificate: Path
    private_key: Path
    authority: Path


@dataclass(frozen=True, kw_only=True)
class Network:
    """A process's place among the hosts of its job."""

    space: str
    """Equal at two processes if one can open the other's memory by ``/proc/PID/fd``: see :func:`this_space`."""
    address: str
    """Numeric address at which the job's other hosts reach this one; what listens is bound to it alone."""
    key: bytes
    """The run's key, 32 bytes; never printed."""
    ports: tuple[int, int] = (0, 0)
    """First and last port to listen on; (0, 0): whichever is free."""
    tls: TlsFiles | None = None

    def __repr__(self) -> str:
        return f"Network(space={self.space!r}, address={self.address!r})"


_mine: Network | None = None


def join(network: Network | None) -> None:
    """Say, once and before any channel is opened, where this process is."""
    global _mine
    _mine = network


def mine() -> Network | None:
    """Where this process is; None where the whole job is on one machine."""
    return _mine


def this_space() -> str:
    """Names the set of processes that see each other's ``/proc/PID/fd``: kernel's boot id, pid namespace and user.

    Containers of one machine have one boot id and different pid namespaces, so they are apart.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"
