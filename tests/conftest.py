"""For all tests: how hypothesis runs, that no model hub is asked, and one thread for each of the processes that share the cores."""

from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import settings

from llamarl.engine.kernel_library import KernelsUnavailable, build_library

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tests run side by side; threads that wait for each other cost more than they give
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks anybody but a server of its own (``hub_server``)

# Examples that write files take more than hypothesis' 200 ms on a busy machine; slow is not wrong.
settings.register_profile("llamarl", deadline=None)
settings.load_profile("llamarl")


def pytest_configure(config: pytest.Config) -> None:
    """The engine's loops are compiled before any test, once: some seconds, and a line on stderr, that no test expects."""
    if not hasattr(config, "workerinput"):
        with contextlib.suppress(KernelsUnavailable):
            build_library()
