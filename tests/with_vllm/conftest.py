"""What runs against a real vLLM, on a CPU: ``make test-vllm`` makes its environment. Elsewhere these tests are skipped."""

import os

os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
