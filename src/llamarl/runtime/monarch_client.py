"""This process as Monarch's client: brought up once, quietly, with its failure reports turned into ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

import monarch.actor
import monarch.config
from monarch.actor import HostMesh, MeshFailure, this_host

__all__ = ["fault_listeners", "local_host"]

fault_listeners: set[Callable[[str, str], None]] = set()
"""Called with the name of an actor mesh and the text of its failure, on a thread of Monarch's. A failure may be told long
after its mesh has gone from use, so a listener must know its own meshes."""

_NOTICE = b"Monarch internal logs are being written to"
_BRING_UP_S = 30.0
_NEVER = "90d"
_SILENT = "10m"
_KEPT = "1h"
_PATIENCE = (
    "actor_spawn_max_idle",
    "get_actor_state_max_idle",
    "get_proc_state_max_idle",
    "host_spawn_ready_timeout",
    "mesh_proc_spawn_max_idle",
    "message_delivery_timeout",
    "supervision_watchdog_timeout",
)
"""Limits after which Monarch takes a silent process for dead, or drops a message to it: 30 s to 2 minutes, which processes on an
overloaded machine exceed, and those of a job that was stopped (Ctrl-Z, a paused container), for its clock goes on. Deaths on this
machine are noticed by pidfd, and what hangs ends at the job's own deadlines: they are lifted. With other hosts a silent process is
dead after ten minutes, a message dropped after an hour."""
_ORPHANED = "1h"
"""How long Monarch lets actors on other hosts live whose controller is not heard of; by default one minute. It ends them without a
word to anybody, also those of a job that was stopped or of a laptop that slept."""
_abroad = False
"""Whether a job of this process has been on other hosts: the limits are the process's, and the wider ones would harm it."""


async def local_host(*, alone: bool) -> HostMesh:
    """This machine.

    Args:
        alone: No process of this one's jobs is on another host. On Linux the kernel ends them with their controller then, and
            Monarch's limit on orphans is lifted.

    Raises:
        TimeoutError: Monarch's local host did not stand within 30 s.
    """
    global _abroad
    _abroad = _abroad or not alone
    monarch.actor.unhandled_fault_hook = _on_fault
    limits: dict[str, str | None] = dict.fromkeys(_PATIENCE, _SILENT if _abroad else _NEVER)
    if _abroad:
        limits["message_delivery_timeout"] = _KEPT
    limits["mesh_orphan_timeout"] = None if sys.platform == "linux" and not _abroad else _ORPHANED
    monarch.config.configure(**limits)
    with _without_notice():
        host = this_host()
        await asyncio.wait_for(host.initialized.as_asyncio(), _BRING_UP_S)
    return host


def _on_fault(failure: MeshFailure) -> None:
    """Takes the place of a hook that would print the cause a second time and end this process without a close."""
    for listener in list(fault_listeners):
        listener(failure.mesh_name, str(failure))


@contextlib.contextmanager
def _without_notice() -> Iterator[None]:
    """Hold back what is written to file descriptor 2 and write it afterwards, less Monarch's notice of its log file.

    The notice is printed from native code and has no switch.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            for line in held:
                if not line.startswith(_NOTICE):
                    os.write(2, line)
