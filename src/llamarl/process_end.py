"""The end of a process that has imported much: Python would take every module apart first, which
with torch and transformers takes 0.4 to 1.4 s, longer than a short command and as long as a rank's
part of a short run."""

from __future__ import annotations

import atexit
import os
import sys
import threading

__all__ = ["end_process"]


def end_process(code: int) -> None:
    """End with ``code`` at once: what was registered for the end is done and the streams are
    written out, no module is taken apart.

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
