from collections.abc import Iterator

import pytest
import torch

from llamarl.models.attention import fused_attention
from llamarl.models.repeatable import demanded, suspended
from llamarl.models.transfer import indices


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    enabled, warn_only = _settings()
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _settings() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def test_preferred_determinism_is_demanded_inside_and_preferred_again_after_an_error() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.raises(ZeroDivisionError), demanded("cuda:0"):
        assert _settings() == (True, False)
        raise ZeroDivisionError
    assert _settings() == (True, True)
    with suspended("cuda"):
        assert _settings()[0] is False
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert _settings() == (True, True)
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("block", [demanded, suspended])
def test_nothing_changes_where_determinism_is_off_or_on_the_cpu(block: object) -> None:
    torch.use_deterministic_algorithms(False)
    with block("cuda"):  # type: ignore[operator]
        assert _settings()[0] is False
    torch.use_deterministic_algorithms(True, warn_only=True)
    with block("cpu"):  # type: ignore[operator]
        assert _settings() == (True, True)


def test_lists_become_one_tensor_each_also_empty_ones() -> None:
    tensors = indices([[3, 1], [], [7]], "cpu")
    assert [t.tolist() for t in tensors] == [[3, 1], [], [7]]
    assert all(t.dtype == torch.int64 for t in tensors)


def test_shared_heads_give_what_repeated_heads_give() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (6, 2, 2))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    repeated = [x.repeat_interleave(3, dim=1) for x in (k, v)]
    expected = torch.softmax((q @ repeated[0].mT * 0.3).masked_fill(~mask, float("-inf")), -1) @ repeated[1]
    torch.testing.assert_close(fused_attention(q, k, v, scale=0.3, causal=True), expected)
    torch.testing.assert_close(fused_attention(q, k, v, scale=0.3, mask=mask), expected)
