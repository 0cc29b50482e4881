"""Which address a daemon listens on where nobody says, and how users write workers. No name is looked up."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence

from llamarl.runtime.hosts.connection import Worker

__all__ = ["DEFAULT_PORT", "own_address", "parse_ports", "parse_worker", "parse_workers"]

DEFAULT_PORT = 22222
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.@-]*[A-Za-z0-9_])?")
_V6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
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


def parse_worker(text: str, default_port: int = DEFAULT_PORT) -> Worker:
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
    return Worker(name=text, address=name, port=int(port) if port else default_port)


def parse_workers(texts: Sequence[str]) -> list[Worker]:
    """All of them, under the shortest names that tell them apart.

    Raises:
        ValueError: One cannot be read, or two are one.
    """
    workers = [parse_worker(text) for text in texts]
    places = [(worker.address, worker.port) for worker in workers]
    for place, worker in zip(places, workers, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"{worker.name!r} is named twice")
    return workers
