"""Which kinds of box there are, how each is started, and which of them this machine has.

| kind | what it is |
|---|---|
| ``bwrap`` | bubblewrap: namespaces of users (not for root), processes, network, mounts and IPC |
| ``namespaces`` | the same namespaces by Linux's own calls |
| ``plain`` | limits and a filter of system calls alone: the machine's files can be read |
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from llamarl.environments.sandbox.installation import find_installation
from llamarl.environments.sandbox.limits import BoxLimits

__all__ = ["KINDS", "Kind", "box_user", "command"]

Kind = Literal["bwrap", "namespaces", "plain"]
KINDS: tuple[Kind, ...] = ("bwrap", "namespaces", "plain")
"""The strongest first; ``plain`` only where the user asks for it by name."""

_HERE = Path(__file__).parent
_ALONE = ("-I", "-S", "-B")


def box_user(uid_map: str, process: int) -> int:
    """A user id that nobody else has, for the programs of boxes that root starts.

    Args:
        uid_map: What ``/proc/self/uid_map`` says: which ids there are here.
        process: Makes it another one for each box at a time, so that the kernel counts their processes apart.
    """
    lines = [[int(word) for word in line.split()] for line in uid_map.splitlines()]
    most = max((first + count for first, _, count in lines), default=1)
    if most > 1 << 31:
        return 1_000_000_000 + process
    if most > 60_000:
        return 30_000 + process % 30_000
    return most - 1


def command(kind: Kind, limits: BoxLimits, fds: tuple[int, int, int]) -> list[str]:
    """The words that start a box of a kind.

    Args:
        fds: ``inside.main``'s arguments.

    Raises:
        FileNotFoundError: There is no bubblewrap.
    """
    python, readable = find_installation().python, find_installation().readable
    numbers = list(map(str, fds))
    if kind == "plain":
        return [python, *_ALONE, str(_HERE / "inside.py"), *numbers]
    links = dict(find_installation().links)
    if kind == "namespaces":
        spec = {"readable": readable, "links": links, "disk_mb": limits.disk_mb, "files": limits.files}
        return [python, *_ALONE, str(_HERE / "namespaces.py"), json.dumps(spec), *numbers]
    inside = [python, *_ALONE, "-c", (_HERE / "inside.py").read_text(encoding="utf-8"), *numbers]
    return [*_bwrap(readable, links, limits), *inside]


def _bwrap(readable: tuple[str, ...], links: Mapping[str, str], limits: BoxLimits) -> list[str]:
    found = shutil.which("bwrap")
    if found is None:
        raise FileNotFoundError("bubblewrap (bwrap) is not installed")
    words = [found, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "box"]
    if os.geteuid() == 0:  # stays root in the first process, which makes the program another user
        words += ["--cap-drop", "ALL"]
        for name in ("CHOWN", "KILL", "SETGID", "SETUID", "SYS_PTRACE"):
            words += ["--cap-add", f"CAP_{name}"]
    else:
        words += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    above = {str(folder) for path in (*readable, "/dev/null") for folder in Path(path).parents} - {"/"}
    for folder in sorted(above):  # bubblewrap would let root alone enter them
        words += ["--perms", "0755", "--dir", folder]
    for path in readable:
        words += ["--ro-bind", path, path]
    for path, target in links.items():
        words += ["--symlink", target, path]
    words += ["--proc", "/proc"]
    for name in ("null", "zero", "full", "random", "urandom"):
        words += ["--dev-bind-try", f"/dev/{name}", f"/dev/{name}"]
    words += [
        "--symlink",
        "/tmp",
        "/dev/shm",
        "--perms",
        "1777",
        "--size",
        str(limits.disk_mb << 20),
        "--tmpfs",
        "/tmp",
    ]
    return [*words, "--remount-ro", "/", "--chdir", "/tmp"]
