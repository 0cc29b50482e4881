"""The processes of a run on this machine, found below its controller, and struck. Linux (``/proc``)."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tools.chaos.plan import Blow, Target

__all__ = ["alive", "descendants", "ranks", "strike_processes", "targets", "wait_for_end"]

_WORKER, _GUARD = "llamarl.environments.worker", "llamarl-guard"
_POLL_S = 0.02


def targets(controller: int) -> list[Target]:
    """Who may be struck now: the controller, its ranks, and the processes that hold environments; guards are left out."""
    parents = _processes()
    if controller not in parents:
        return []
    found = [Target(name="controller", pid=controller)]
    for pid, parent in parents.items():
        if _name(parent) == _GUARD and _is_below(pid, controller, parents):
            found.append(Target(name="environments" if _WORKER in _command(pid) else _name(pid), pid=pid))
    return found


def ranks(controller: int) -> dict[str, int]:
    """Name of each of its ranks, such as ``generator 1``, and its process."""
    return {found.name: found.pid for found in targets(controller)[1:] if found.name != "environments"}


def strike_processes(blow: Blow, victims: Sequence[Target]) -> str:
    """Send them the blow's signal; returns what was done, in words."""
    for target in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target.pid, signal.SIGKILL if blow.kind == "kill" else signal.SIGSTOP)
    return "killed" if blow.kind == "kill" else "stopped"


def descendants(above: int) -> list[int]:
    """Every process below one, itself left out."""
    parents = _processes()
    return [pid for pid in parents if pid != above and _is_below(pid, above, parents)]


def alive(pid: int) -> bool:
    """Whether a process runs, or is stopped; not one that has ended and is not buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for_end(pids: set[int], limit_s: float) -> set[int]:
    """Those of ``pids`` that are still there after ``limit_s``."""
    until = time.monotonic() + limit_s
    while (left := {pid for pid in pids if alive(pid)}) and time.monotonic() < until:
        time.sleep(_POLL_S)
    return left


def _processes() -> dict[int, int]:
    """Of all there are: pid -> its parent."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                if stat[0] not in "ZX":
                    parents[int(entry.name)] = int(stat[1])
    return parents


def _name(pid: int) -> str:
    """What ``ps -o comm`` shows: of a rank, what it is called, such as ``generator 1``."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _is_below(pid: int, above: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != above:
        pid = parents[pid]
    return pid == above
