"""The kernels in Triton: on a GPU, or by Triton's interpreter on the CPU (``make test-kernels``)."""

import os
from contextlib import nullcontext
from typing import Any

import paged_reference
import pytest
import torch

from llamarl.transports.checksum import _ODD, mix64

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = "float16" if INTERPRETED else "bfloat16"  # which the interpreter does not multiply
LENGTHS = [1, 64, 65, 130, 1, 257, 128, 2] if INTERPRETED else [1, 64, 65, 1000, 1, 4097, 128, 2]


@pytest.fixture(autouse=True)
def no_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(torch.cuda, "device", lambda there: nullcontext())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the interpreter
@pytest.mark.parametrize(("dtype", "largest"), [("float32", 1e-6), (HALF, 2e-2)])
@pytest.mark.parametrize(
    ("H", "KV", "D", "size", "window", "softcap"),
    [(12, 2, 128, 16, None, None), (8, 8, 64, 3, 1, None), (32, 8, 80, 16, 700, 5.0), (4, 1, 256, 4, None, 2.0)],
)
def test_the_kernel_over_blocks_equals_float64_and_repeats(
    H: int, KV: int, D: int, size: int, window: int | None, softcap: float | None, dtype: str, largest: float,
    device: torch.device,
) -> None:  # fmt: skip
    """Contexts of one token, at tiles' and parts' edges and, on a GPU, of thousands; NaN in every slot of nobody's."""
    from llamarl.models.paged_kernel import attend_pages

    torch.manual_seed(0)
    lengths = torch.tensor(LENGTHS)
    tables = 1 + torch.randperm(len(lengths) * (width := -(-max(LENGTHS) // size))).view(len(lengths), width)
    keys, values = torch.full((2, tables.numel() + 1, size, KV, D), float("nan"), dtype=getattr(torch, dtype))
    for table, length in zip(tables, lengths.tolist(), strict=True):
        at = table[torch.arange(length) // size], torch.arange(length) % size
        keys[at], values[at] = (torch.randn(length, KV, D, dtype=keys.dtype) for _ in range(2))
    query = torch.randn(len(lengths), H, D, dtype=keys.dtype)
    how: dict[str, Any] = {"scale": D**-0.5, "window": window, "softcap": softcap}
    expected = paged_reference.attend_pages(query.double(), keys, values, tables, lengths, **how)
    there = [x.to(device) for x in (query, keys, values, tables, lengths)]
    found = [attend_pages(*there, **how).cpu() for _ in range(2)]
    assert (found[0].double() - expected).abs().max() < largest * expected.abs().max()
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the interpreter
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 8 * 4095, 8 * 4096, 8 * 4097, 100_003])
def test_the_checksum_of_a_gpu_is_that_of_elementwise_operations_on_the_cpu(size: int, device: torch.device) -> None:
    """Up to and past a program's share of the words, which are 4,096, and with bytes left over."""
    from llamarl.transports import mix_kernel

    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    found = mix_kernel.mix64(data.to(device), _ODD).cpu() + size
    assert found.item() == mix64(data).item()
