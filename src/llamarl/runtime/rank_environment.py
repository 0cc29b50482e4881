"""The environment variables of a rank's process on this machine."""

from __future__ import annotations

import os
import sys

from llamarl.runtime.determinism import environment

__all__ = ["LOOPBACK", "rank_environment"]

_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
LOOPBACK = {"GLOO_SOCKET_IFNAME": _INTERFACE, "NCCL_SOCKET_IFNAME": _INTERFACE}
"""Environment of a job that stays on one machine: where process groups listen, which by themselves
ask for the host's name and take its address. A lone rank's group listens too."""


def rank_environment(threads: int) -> dict[str, str]:
    """Of a rank on this machine. What torch and the group libraries read when they are imported
    must be there from the start."""
    return {
        **os.environ,
        **environment(threads),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path)),
        **LOOPBACK,
    }
