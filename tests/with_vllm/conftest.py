"""What runs against a real vLLM, on a CPU: ``make test-vllm`` makes its environment. Elsewhere these tests are skipped."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "models"))  # tiny_models
