"""For all tests: how hypothesis runs, that no model hub is asked, and one thread for each of the processes that share the cores."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tests run side by side; threads that wait for each other cost more than they give
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks anybody but a server of its own (``hub_server``)

# Examples that write files take more than hypothesis' 200 ms on a busy machine; slow is not wrong.
settings.register_profile("llamarl", deadline=None)
settings.load_profile("llamarl")
