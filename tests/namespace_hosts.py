"""Hosts on one machine that share nothing but the kernel: own network, processes, mounts, name and System V memory. Linux, as root.

bridge 10.87.0.254 (the controller's side) ── veth ── 10.87.0.1   host 1: own /tmp, /dev/shm, pids, hostname
                                           └─ veth ── 10.87.0.2   host 2
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NamespaceHost", "bare_hosts", "why_not"]

_LETTERS = itertools.cycle("abcdefgh")
_END_S = 15.0


@dataclass
class NamespaceHost:
    """One host, and the program on it."""

    name: str
    address: str
    link: str
    """Its end of the wire, on the controller's side."""
    process: subprocess.Popen[str]
    """With it ends the host, and everything on it."""

    def words(self, *command: str) -> list[str]:
        """A command as it runs on this host, of which it sees processes, files and network."""
        return ["nsenter", "-t", str(_only_child(self.process.pid)), "-m", "-u", "-p", "-i", "-n", "--wdns=/", *command]

    def pids(self) -> list[int]:
        """Everything that runs on it, as seen from outside."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    def commands(self) -> dict[int, str]:
        """The same with their command lines; processes that have ended and wait for their parent are left out."""
        found = {}
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if words := Path(f"/proc/{pid}/cmdline").read_bytes():
                    found[pid] = words.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def named(self, name: str) -> list[int]:
        """The processes that show themselves by this name, as ranks do."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == f"{name}\n":
                    found.append(pid)
        return found

    @property
    def root(self) -> Path:
        """Its files, as seen from outside."""
        return Path(f"/proc/{_only_child(self.process.pid)}/root")

    def files(self) -> list[str]:
        """What lies in its own temporary folder and in its own shared memory."""
        inside = self.root
        folders = [inside / "tmp", inside / "dev" / "shm"]
        return sorted(
            f"/{path.relative_to(inside)}" for folder in folders for path in folder.rglob("*") if not path.is_dir()
        )

    def cut_off(self) -> None:
        """Pull the cable."""
        _ip("link", "set", self.link, "down")

    def kill(self) -> None:
        """End everything that runs on it, at once; it has ended when this returns."""
        with contextlib.suppress(OSError, IndexError):
            os.kill(_only_child(self.process.pid), 9)  # the first process of its own numbers: all others go with it
        self.process.wait(_END_S)


def why_not(*tools: str) -> str:
    """Why there can be no such hosts here; empty if there can.

    Args:
        tools: Programs that are needed besides.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount", "bash", *tools) if not shutil.which(tool)]
    if missing:
        return f"needs {', '.join(missing)}"
    try:
        _ip("link", "add", f"lh{os.getpid() % 10_000}t", "type", "bridge")
        _ip("link", "del", f"lh{os.getpid() % 10_000}t")
    except OSError as error:
        return f"may make no network here: {error}"
    return ""


@contextmanager
def bare_hosts(
    count: int,
    program: Callable[[str, str], Sequence[str]],
    net: str = "10.87.0",
    *,
    before: str = ":",
    output: int = subprocess.PIPE,
) -> Iterator[list[NamespaceHost]]:
    """``count`` hosts that run one program each, with whose end they end; nothing of them is left afterwards.

    The program ends by the end of its standard input, or by SIGTERM 3 s later, or is killed.

    Args:
        program: Takes the host's name and address, gives the words of its command.
        before: Shell commands for each host before its program: mounts of its own.
    """
    mark = f"lh{os.getpid() % 10_000}{next(_LETTERS)}"  # the kernel takes its time with links of hosts that are gone
    bridge = f"{mark}b"
    hosts: list[NamespaceHost] = []
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"{net}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number in range(1, count + 1):
            name, address = f"{mark}h{number}", f"{net}.{number}"
            hosts.append(_host(name, f"{mark}v{number}", address, bridge, program(name, address), before, output))
        yield hosts
    finally:
        for host in hosts:
            assert host.process.stdin is not None
            with contextlib.suppress(OSError):
                host.process.stdin.close()
        for host in hosts:
            _end(host.process)
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _end(process: subprocess.Popen[str]) -> None:
    """A host's program, then its host."""
    try:
        process.wait(3.0)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError, IndexError):
            os.kill(_only_child(process.pid), 15)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()  # and with it, by unshare, everything on the host
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _only_child(pid: int) -> int:
    """The first process of a host: the child of its ``unshare``."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _host(
    name: str, link: str, address: str, bridge: str, program: Sequence[str], before: str, output: int
) -> NamespaceHost:
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
        f"set -e; hostname {name}; mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm; export HOME=/tmp XDG_CACHE_HOME=/tmp/cache; "
        f'{before}; cd /; exec "$0" "$@"'
    )
    process = subprocess.Popen(
        ["ip", "netns", "exec", name, "unshare", "-m", "-u", "-p", "-i", "-f", "--mount-proc", "--kill-child"]
        + ["bash", "-c", inside, *program],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output if output == subprocess.DEVNULL else None,
        text=True,
    )
    return NamespaceHost(name, address, link, process)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
