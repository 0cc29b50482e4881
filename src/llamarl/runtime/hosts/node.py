"""What a node is made of, as far as it decides where ranks go, how payloads travel and which bits come out."""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass
from typing import Any

from llamarl.determinism import platform_facts
from llamarl.runtime.host_placement import Machine
from llamarl.transports.network import TlsFiles, this_space

__all__ = ["Node", "facts_of_this_node", "interface_of"]


@dataclass(frozen=True, kw_only=True)
class Node(Machine):
    """One machine or container of a cluster, alive when the job began, as a process on it tells; cores
    and devices as the cluster counts them there, whoever has them now."""

    address: str
    """Numeric: the one at which the cluster's other nodes reach it."""
    space: str
    """Whose memory is within reach: see :func:`llamarl.transports.network.this_space`."""
    interface: str
    """That owns ``address``."""
    ports: tuple[int, int] = (0, 0)
    """On which its processes may listen; (0, 0): any."""
    tls: TlsFiles | None = None
    """Its own files, for its ranks and the controller's links; None: what these carry is not encrypted."""


def facts_of_this_node(address: str) -> dict[str, Any]:
    """Fields of :class:`Node` that only a process on it can tell."""
    return {"space": this_space(), "interface": interface_of(address), "facts": platform_facts()}


def interface_of(address: str) -> str:
    """The network interface that owns a numeric address; empty if none does. Asks the kernel, never a name server."""
    if ":" in address:
        return _interface_of_v6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return "lo" if address.startswith("127.") else ""


def _interface_of_v6(address: str) -> str:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            return next((line.split()[5] for line in table if line.startswith(wanted)), "")
    except OSError:
        return ""
