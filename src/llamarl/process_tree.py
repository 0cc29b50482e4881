"""Processes below this one: adopted when their parents end, buried when they end, killed when
nothing of them may be left.

For guards: small processes that run none of the user's code and sleep until what they guard has
ended. Imports next to nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time

__all__ = ["adopt_orphans", "end_process", "end_with_parent", "hide_memory", "kill_descendants", "reap"]


_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_SWEEP_S = 5.0
"""Longest wait for killed processes to be gone: one that hangs in the kernel must not keep the guard."""


def adopt_orphans() -> None:
    """From now on a process below this one whose parent ends becomes this one's child (Linux):
    wherever it tries to hide, be it in a session of its own or forked twice."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when ``parent`` ends (Linux); exit now if it has ended.

    The kernel counts the *thread* that started this process as the parent.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # asked after the call above: a death between the two is not missed
        os._exit(1)


def hide_memory() -> None:
    """Keep other processes of this user from reading this one's memory, environment and open files (Linux)."""
    _prctl(_PR_SET_DUMPABLE, 0)


def reap(pid: int) -> int | None:
    """Bury every child that has ended; the exit code of ``pid`` (negative: the signal) if it was among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                break
            if ended == pid:
                code = os.waitstatus_to_exitcode(status)
    return code


def kill_descendants(leader: int) -> int | None:
    """Kill everything below this process, and again what was forked meanwhile, until nothing is left; at most 5 s.

    Args:
        leader: A child that leads a process group; where the system has no ``/proc`` only this group is killed.

    Returns:
        The exit code of ``leader``, as :func:`reap` tells it, if it ended now.
    """
    code, until = None, time.monotonic() + _SWEEP_S
    if not os.path.isdir("/proc/self"):
        _kill_group(leader)
    while time.monotonic() < until:
        descendants = _descendants()
        for group in set(descendants.values()):  # at once: none of its members can fork out of it meanwhile
            _kill_group(group)
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended = reap(leader)
        code = ended if code is None else code
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        time.sleep(0.002)
    return code


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _descendants() -> dict[int, int]:
    """Process group of every process below this one; empty where the system has no ``/proc``."""
    children: dict[int, list[tuple[int, int]]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                    fields = stat.read().rpartition(b")")[2].split()  # the name before it may hold anything
                    children.setdefault(int(fields[1]), []).append((int(name), int(fields[2])))
    found: dict[int, int] = {}
    parents = [os.getpid()]
    while parents:
        below = children.get(parents.pop(), [])
        found.update(below)
        parents += [pid for pid, _ in below]
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_process(code: int) -> None:
    """End with ``code`` at once: what was registered for the end is done and the streams are
    written out, no module is taken apart, which with torch and transformers takes 0.4 to 1.4 s.

    Returns where Python's own end has something to do: a thread that it would wait for, a stream
    that cannot be written, which it tells of.
    """
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    if any(not thread.daemon for thread in others):
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            return
    os._exit(code)
