"""Main module of a worker process: ``python -m llamarl.runtime.bootstrap``, started by Monarch.

Before Monarch's own main takes over, it puts in place what must hold from the first line on: Ctrl-C is the controller's
business (a terminal sends it to the whole process group), output goes to the pipes that the controller reads, and a
process whose controller died while it was being born leaves. Child processes of a worker may import this module again;
it does nothing then.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

__all__ = ["OUTPUT_PREFIX", "PARENT_PID", "main"]

OUTPUT_PREFIX = "LLAMARL_OUTPUT_PREFIX"
"""Environment variable: path prefix of the pipes ``.stdout`` and ``.stderr``. On another machine they are not there, and
output goes where Monarch's host process sends its own (a Slurm job's log, say)."""
PARENT_PID = "LLAMARL_PARENT_PID"
"""Environment variable: pid of the process that must be the parent; absent on another host."""

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.pop(PARENT_PID, "")  # asked after the call above: a death between the two is not missed
    if parent and os.getppid() != int(parent):
        sys.exit(1)
    prefix = os.environ.pop(OUTPUT_PREFIX, "")
    if os.path.exists(f"{prefix}.stdout"):
        for stream, fd in (("stdout", 1), ("stderr", 2)):
            pipe = os.open(f"{prefix}.{stream}", os.O_WRONLY)
            os.dup2(pipe, fd)
            os.close(pipe)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    multiprocessing.set_start_method("forkserver", force=True)  # Monarch runs threads: a plain fork may deadlock
    from monarch._src.actor.bootstrap_main import invoke_main

    invoke_main()


if __name__ == "__main__":
    main()
