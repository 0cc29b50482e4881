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
_PATIENCE = {
    name: "10m"
    for name in (
        "actor_spawn_max_idle",
        "get_actor_state_max_idle",
        "get_proc_state_max_idle",
        "host_spawn_ready_timeout",
        "mesh_proc_spawn_max_idle",
        "supervision_watchdog_timeout",
    )
}
"""Limits after which Monarch takes a silent process for dead; by default 30 s, which processes on an overloaded machine exceed.
Deaths on this machine are noticed by pidfd, and what hangs ends at the job's own deadlines."""
_KEPT = {"message_delivery_timeout": "1h"}
"""How long Monarch keeps what it cannot deliver. After its own 30 s an order or a report to a process that was suspended (Ctrl-Z, a
paused container) never comes; kept for longer than ``deadlines.step_s`` commonly is, the job goes on or says what it waited for."""
_ORPHANED = "1h"
"""How long Monarch lets actors live whose controller is not heard of. Its own limit of one minute of the wall clock ends, without a
word to anybody, the actors of a job that was suspended or of a laptop that slept."""


async def local_host(*, alone: bool) -> HostMesh:
    """This machine.

    Args:
        alone: No process of this one's jobs is on another host. On Linux the kernel ends them with their controller then, and
            Monarch's limit on orphans is lifted.

    Raises:
        TimeoutError: Monarch's local host did not stand within 30 s.
    """
    monarch.actor.unhandled_fault_hook = _on_fault
    orphaned = None if alone and sys.platform == "linux" else _ORPHANED
    monarch.config.configure(**_PATIENCE, **_KEPT, mesh_orphan_timeout=orphaned)
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
