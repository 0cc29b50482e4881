"""Which address a daemon listens on where nobody says, and whether others are reached from here. No name is looked up."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence

__all__ = ["own_address", "why_unreached"]

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


async def why_unreached(places: Sequence[tuple[str, int]], within_s: float) -> str:
    """At which of these addresses and ports nothing takes a connection, in words; empty: something does at all of them."""

    async def one(address: str, port: int) -> str:
        at = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        try:
            async with asyncio.timeout(within_s):
                _, writer = await asyncio.open_connection(address, port)
        except TimeoutError:
            return f"nothing answers at {at} within {within_s:g} s"
        except OSError as error:
            return f"{at}: {os.strerror(error.errno) if error.errno else error}"
        writer.close()
        return ""

    return "; ".join(filter(None, await asyncio.gather(*(one(address, port) for address, port in places))))


def _towards(address: str, family: int | None = None) -> str:
    """Connecting a datagram socket sends nothing: the kernel only chooses the way."""
    family = family or (socket.AF_INET6 if ":" in address else socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, 9))
        except OSError:
            return ""
        return str(asking.getsockname()[0])
