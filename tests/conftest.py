"""For all tests: how hypothesis runs."""

from __future__ import annotations

from hypothesis import settings

# Examples that write files take more than hypothesis' 200 ms on a busy machine; slow is not wrong.
settings.register_profile("llamarl", deadline=None)
settings.load_profile("llamarl")
