"""Hosts on one machine that share nothing but the kernel: own network, processes, mounts, name and System V memory. Linux, as root.

bridge 10.87.0.254 (the controller's side) ── veth ── 10.87.0.1   host 1: own /tmp, /dev/shm, pids, hostname
                                           └─ veth ── 10.87.0.2   host 2
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llamarl.runtime.hosts.worker_program import READY

__all__ = ["KEY", "NamespaceHost", "namespace_hosts", "why_not"]

_LETTERS = itertools.cycle("abcdefgh")
KEY = bytes(range(100, 132))


@dataclass
class NamespaceHost:
    """One host, and the worker on it."""

    name: str
    address: str
    link: str
    """Its end of the wire, on the controller's side."""
    process: subprocess.Popen[str]
    port: int = 0

    @property
    def at(self) -> str:
        return f"{self.address}:{self.port}"

    def pids(self) -> list[int]:
        """Everything that runs on it."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    def ranks(self) -> list[int]:
        """Processes of ranks, guards among them."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"llamarl.runtime.rank_process" in file.read():
                    found.append(pid)
        return found

    def cut_off(self) -> None:
        """Pull the cable."""
        _ip("link", "set", self.link, "down")


def why_not() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    missing = [tool for tool in ("ip", "unshare", "mount", "bash") if not shutil.which(tool)]
    if missing:
        return f"needs {', '.join(missing)}"
    try:
        _ip("link", "add", f"lh{os.getpid() % 10_000}t", "type", "bridge")
        _ip("link", "del", f"lh{os.getpid() % 10_000}t")
    except OSError as error:
        return f"may make no network here: {error}"
    return ""


@contextmanager
def namespace_hosts(count: int, net: str = "10.87.0", *, flags: Sequence[str] = ()) -> Iterator[list[NamespaceHost]]:
    """``count`` hosts on which ``llamarl worker`` runs; nothing of them is left afterwards.

    Args:
        flags: Of every worker.
    """
    mark = f"lh{os.getpid() % 10_000}{next(_LETTERS)}"  # the kernel takes its time with links of hosts that are gone
    bridge = f"{mark}b"
    hosts: list[NamespaceHost] = []
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"{net}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number in range(1, count + 1):
            hosts.append(_host(f"{mark}h{number}", f"{mark}v{number}", f"{net}.{number}", bridge, flags))
        for host in hosts:
            assert host.process.stdout is not None
            line = host.process.stdout.readline()
            assert line.startswith(READY), line
            host.port = int(json.loads(line[len(READY) :])["port"])
        yield hosts
    finally:
        for host in hosts:
            assert host.process.stdin is not None
            host.process.stdin.close()
        for host in hosts:
            try:
                host.process.wait(15.0)
            except subprocess.TimeoutExpired:
                host.process.kill()  # and with it, by unshare, everything on the host
                host.process.wait()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _host(name: str, link: str, address: str, bridge: str, flags: Sequence[str]) -> NamespaceHost:
    _ip("netns", "add", name)
    _ip("link", "add", link, "type", "veth", "peer", "name", "e0", "netns", name)
    _ip("link", "set", link, "master", bridge, "up")
    for words in (
        ("address", "add", f"{address}/24", "dev", "e0"),
        ("link", "set", "e0", "up"),
        ("link", "set", "lo", "up"),
    ):
        _ip("netns", "exec", name, "ip", *words)
    inside = (
        f"hostname {name}; mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm; export HOME=/tmp XDG_CACHE_HOME=/tmp/cache; "
        'cd /; exec "$0" -m llamarl.cli.main worker "$@"'
    )
    worker = ["--key", "-", "--bind", address, *flags]
    process = subprocess.Popen(
        ["ip", "netns", "exec", name, "unshare", "-m", "-u", "-p", "-i", "-f", "--mount-proc", "--kill-child"]
        + ["bash", "-c", inside, sys.executable, *worker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(KEY.hex() + "\n")
    process.stdin.flush()
    return NamespaceHost(name, address, link, process)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
