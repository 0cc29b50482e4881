"""What a node is made of, as far as it decides where ranks go, how payloads travel and which bits come out."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llamarl.determinism import platform_facts
from llamarl.transports.network import TlsFiles, this_space

__all__ = ["Inventory", "health_of", "interface_of", "take_inventory"]

_HEALTH = {"initial_delay_ms": 5000, "period_ms": 3000, "timeout_ms": 10000, "failure_threshold": 5}
"""Ray's defaults of ``RAY_health_check_*``, as the head asks nodes for signs of life."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """One node, as a task on it tells."""

    address: str
    """Numeric: the one at which the cluster's other nodes reach it."""
    space: str
    """Whose memory is within reach: see :func:`llamarl.transports.network.this_space`."""
    cores: int
    cuda_devices: int
    """Both as Ray counts them there, whoever has them now."""
    interface: str
    """That owns ``address``."""
    ports: tuple[int, int] = (0, 0)
    """On which its processes may listen; (0, 0): any."""
    tls: TlsFiles | None = None
    """Its own files, by ``RAY_USE_TLS``, for its ranks and the controller's links."""
    token: bool = False
    """Whether its Ray asks for a token."""
    health: Mapping[str, int] = field(default_factory=dict)
    """Its ``RAY_health_check_*`` without the beginning, milliseconds and a count; those of the head decide."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Versions and processor: ``determinism.platform_facts``."""


def take_inventory(address: str, cores: int, cuda_devices: int, ports: tuple[int, int] = (0, 0)) -> Inventory:
    """This node, of which Ray knows the rest."""
    return Inventory(
        address=address,
        space=this_space(),
        cores=cores,
        cuda_devices=cuda_devices,
        interface=interface_of(address),
        ports=ports,
        tls=_tls_files(os.environ),
        token=os.environ.get("RAY_AUTH_MODE", "").lower() == "token",
        health={name: int(os.environ.get(f"RAY_health_check_{name}", default)) for name, default in _HEALTH.items()},
        facts=platform_facts(),
    )


def health_of(health: Mapping[str, int]) -> tuple[float, float]:
    """Seconds after which the cluster knows of a node that has ended, and of one to which the cable
    is cut: in the first case each question is refused at once, in the second each waits its whole
    time."""
    count, period_s, timeout_s = (health[name] for name in ("failure_threshold", "period_ms", "timeout_ms"))
    return count * period_s / 1000, count * (period_s + timeout_s) / 1000


def _tls_files(environment: Mapping[str, str]) -> TlsFiles | None:
    """Those of Ray's own links, which ours use too."""
    if environment.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    certificate, private_key, authority = (
        Path(environment.get(f"RAY_TLS_{name}", "")) for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT")
    )
    return TlsFiles(certificate=certificate, private_key=private_key, authority=authority)


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
