"""For tests of the engine."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama", "sdpa").save_pretrained(path)
    return path


@pytest.fixture
def fp8_on_a_cpu() -> None:
    """Whose product knows scales of rows; torch 2.11's on a CPU knows one of the whole alone."""
    codes, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError as error:
        if "only supports per-tensor scaling for CPU" in str(error):
            pytest.skip("this torch's fp8 product on a CPU has no scale a row")
        raise
