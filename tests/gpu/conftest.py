"""Everything in this folder needs a CUDA device and is skipped, with the reason, where there is none; but Triton's
kernel, which its interpreter runs on a CPU (``TRITON_INTERPRET=1``).

The suites before it have tested the same arithmetic on the CPU; here only what a device can change is asked.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).resolve().parent
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before anything computes on the device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            interpreted = os.environ.get("TRITON_INTERPRET") == "1" and item.path.name == "test_triton_kernels.py"
            if not (interpreted or torch.cuda.is_available()):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch finds none"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def repeatable_kernels() -> Iterator[None]:
    """As a run sets them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
