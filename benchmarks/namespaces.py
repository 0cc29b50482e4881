"""Hosts on one machine: network namespaces on a bridge, each behind a link of its own that can be limited. Linux, as root."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["can_make_hosts", "enter", "made_hosts"]

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def can_make_hosts() -> bool:
    """Whether this process may make network namespaces."""
    return os.name == "posix" and os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


def enter(name: str) -> None:
    """Move the calling thread, and what it starts later, into the network namespace ``name``; empty: stay."""
    if not name:
        return
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if _LIBC.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {name}")
    finally:
        os.close(fd)


@contextmanager
def made_hosts(count: int, *, rate: str = "") -> Iterator[list[tuple[str, str]]]:
    """(namespace, address) of ``count`` hosts that reach one another; they are gone afterwards.

    Args:
        rate: Of each host's link, each way, in ``tc``'s words (``1gbit``); empty: as fast as memory.
    """
    mark = f"lb{os.getpid() % 100_000}"
    bridge = f"{mark}br"
    hosts = [(f"{mark}h{index}", f"10.99.0.{index + 1}") for index in range(count)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for index, (name, address) in enumerate(hosts):
            outside = f"{mark}v{index}"
            _ip("netns", "add", name)
            _ip("link", "add", outside, "type", "veth", "peer", "name", "e0", "netns", name)
            _ip("link", "set", outside, "master", bridge, "up")
            inside = ("netns", "exec", name, "ip")
            _ip(*inside, "address", "add", f"{address}/24", "dev", "e0")
            _ip(*inside, "link", "set", "e0", "up")
            _ip(*inside, "link", "set", "lo", "up")
            if rate:
                limit = ("root", "tbf", "rate", rate, "burst", "512k", "latency", "20ms")
                _run("tc", "qdisc", "add", "dev", outside, *limit)
                _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "e0", *limit)
        yield hosts
    finally:
        for index, (name, _) in enumerate(hosts):  # the link first: a process that is still inside keeps the namespace
            subprocess.run(["ip", "link", "del", f"{mark}v{index}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
