"""Which address a daemon listens on where nobody says. No name is looked up."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

__all__ = ["own_address"]

_FAR = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses that no host has (they are for documentation): whatever leads there leads out."""


def own_address(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The address of this host at which others reach it, and why it is that one.

    Started by ssh: the one that ssh came in by. In a Slurm job: the one towards the node where it was launched. Else the one that
    leads out of this host; where none does, the loopback.
    """
    words = environment.get("SSH_CONNECTION", "").split()
    if len(words) == 4:
        return words[2], "ssh came in by it"
    if (launcher := environment.get("SLURM_LAUNCH_NODE_IPADDR")) and (address := _towards(launcher)):
        return address, "it leads to the node where the job was launched"
    for far, family in _FAR:
        if address := _towards(far, family):
            return address, "it leads out of this host"
    return "127.0.0.1", "this host has no other: only controllers on it can come in"


def _towards(address: str, family: int | None = None) -> str:
    """Connecting a datagram socket sends nothing: the kernel only chooses the way."""
    family = family or (socket.AF_INET6 if ":" in address else socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, 9))
        except OSError:
            return ""
        return str(asking.getsockname()[0])
