"""For all tests: how hypothesis runs, and that no model hub is asked."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks anybody but a server of its own (``hub_server``)

# Examples that write files take more than hypothesis' 200 ms on a busy machine; slow is not wrong.
settings.register_profile("llamarl", deadline=None)
settings.load_profile("llamarl")
