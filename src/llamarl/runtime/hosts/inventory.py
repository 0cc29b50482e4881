"""What a host is made of, as far as it decides where ranks go, how payloads travel and which bits come out."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from llamarl.checkpoint.platform import platform_facts
from llamarl.transports.network import TlsFiles, this_space

__all__ = ["Inventory", "interface_of", "take_inventory"]

_NAME_DEVICES = (
    "import json, torch; print(json.dumps([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]))"
)
_NAME_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """One host, as its daemon tells of it."""

    address: str
    """Numeric: the one at which the controller has reached it."""
    hostname: str
    """For people; nothing looks it up."""
    space: str
    """Whose memory is within reach: see :func:`llamarl.transports.network.this_space`."""
    cores: int
    memory_bytes: int
    device_names: tuple[str, ...] = ()
    """Of its CUDA devices, as their driver calls them."""
    scratch: str
    """Where its temporary files go."""
    scratch_free_bytes: int
    interface: str
    """That owns ``address``."""
    ports: tuple[int, int] = (0, 0)
    """On which its processes may listen; (0, 0): any."""
    tls: TlsFiles | None = None
    """Its own files, for its ranks."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Versions and processor: ``checkpoint.platform.platform_facts``."""

    @property
    def cuda_devices(self) -> int:
        return len(self.device_names)

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        tls = {name: str(path) for name, path in asdict(self.tls).items()} if self.tls is not None else None
        return {**asdict(replace(self, facts=dict(self.facts), tls=None)), "tls": tls}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Inventory:
        """Of what :meth:`to_plain` gave.

        Raises:
            TypeError: It is of another version.
        """
        tls = values["tls"]
        files = TlsFiles(**{name: Path(path) for name, path in tls.items()}) if tls is not None else None
        names = tuple(values["device_names"])
        return cls(**{**values, "device_names": names, "ports": tuple(values["ports"]), "tls": files})


def take_inventory(
    address: str, *, ports: tuple[int, int] = (0, 0), space: str = "", tls: TlsFiles | None = None
) -> Inventory:
    """This host.

    Args:
        address: At which the controller reaches it.
        ports: That its processes may listen on.
        space: A name instead of the true one: then no process here shares memory with any that has another.
    """
    scratch = tempfile.gettempdir()
    return Inventory(
        address=address,
        hostname=socket.gethostname(),
        space=space or this_space(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        device_names=_device_names(),
        scratch=scratch,
        scratch_free_bytes=shutil.disk_usage(scratch).free,
        interface=interface_of(address),
        ports=ports,
        tls=tls,
        facts=platform_facts(),
    )


@cache
def _device_names() -> tuple[str, ...]:
    """In a process of its own: torch would cost the daemon a second and 200 MB for as long as it lives."""
    if sys.platform == "linux" and not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/dxg"):
        return ()
    named = subprocess.run(
        [sys.executable, "-c", _NAME_DEVICES], capture_output=True, text=True, timeout=_NAME_S, check=False
    )
    try:
        return tuple(map(str, json.loads(named.stdout))) if named.returncode == 0 else ()
    except ValueError:
        return ()


def interface_of(address: str) -> str:
    """The network interface that owns a numeric address; empty if none does. Asks the kernel, never a name server."""
    if ":" in address:
        return _interface_of_v6(address)
    try:
        import fcntl
    except ImportError:  # Windows
        return ""
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
