from collections.abc import Callable
from typing import Any

import pytest
import torch
from launches import LargestTensor
from torch.utils._python_dispatch import TorchDispatchMode

from llamarl.trainer.logprobs import LogitTransform, token_logprobs

TRANSFORMS = [
    LogitTransform(),
    LogitTransform(temperature=0.7),
    LogitTransform(scale=0.25, temperature=1.5),
    LogitTransform(softcap=2.0),
    LogitTransform(scale=0.5, softcap=3.0, temperature=0.8),
]


def _plain(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, t: LogitTransform
) -> Any:
    logits = (hidden @ weight.T + (0 if bias is None else bias)) * t.scale
    if t.softcap is not None:
        logits = t.softcap * torch.tanh(logits / t.softcap)
    log_p = torch.log_softmax(logits / t.temperature, dim=-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def _inputs(dtype: torch.dtype, with_bias: bool, tokens: int = 13) -> list[Any]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(29, 8, dtype=dtype, requires_grad=True)
    bias = torch.randn(29, dtype=dtype, requires_grad=True) if with_bias else None
    return [hidden, weight, bias, torch.randint(0, 29, (tokens,))]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 13, 100])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_values_and_gradients_are_those_of_log_softmax_in_float64(
    transform: LogitTransform, chunk: int, with_bias: bool
) -> None:
    def gradients(function: Callable[..., Any]) -> list[torch.Tensor]:
        hidden, weight, bias, targets = _inputs(torch.float64, with_bias)
        logprobs, entropy = function(hidden, weight, bias, targets)
        factors = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
        ((logprobs * factors).sum() + (entropy * factors.flip(0)).sum()).backward()
        return [logprobs, entropy, hidden.grad, weight.grad, *([] if bias is None else [bias.grad])]

    ours = gradients(lambda *a: token_logprobs(*a, transform, chunk_tokens=chunk, entropy_needs_grad=True))
    for got, expected in zip(ours, gradients(lambda *a: _plain(*a, transform)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [5, 100])
@pytest.mark.parametrize("transform", [TRANSFORMS[1], TRANSFORMS[4]])
def test_several_tokens_of_a_position_have_theirs_also_where_one_stands_twice(
    transform: LogitTransform, chunk: int
) -> None:
    def gradients(function: Callable[..., Any]) -> list[torch.Tensor]:
        hidden, weight, bias, targets = _inputs(torch.float64, True)
        columns = torch.stack([targets, (targets + 3) % 29, targets], dim=1)
        logprobs, entropy = function(hidden, weight, bias, columns)
        factors = torch.linspace(-1, 2, columns.numel(), dtype=torch.float64).view(columns.shape)
        ((logprobs * factors).sum() + entropy.square().sum()).backward()
        return [logprobs, hidden.grad, weight.grad, bias.grad]

    def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, columns: torch.Tensor) -> Any:
        rows = [_plain(hidden, weight, bias, column, transform) for column in columns.T]
        return torch.stack([row[0] for row in rows], dim=1), rows[0][1]

    ours = gradients(lambda *a: token_logprobs(*a, transform, chunk_tokens=chunk, entropy_needs_grad=True))
    for got, expected in zip(ours, gradients(plain), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_without_entropy_gradient_the_log_probs_keep_theirs() -> None:
    hidden, weight, bias, targets = _inputs(torch.float64, False)
    logprobs, entropy = token_logprobs(hidden, weight, bias, targets, LogitTransform(), chunk_tokens=4)
    assert not entropy.requires_grad
    logprobs.sum().backward()
    h, w, _, _ = _inputs(torch.float64, False)
    _plain(h, w, None, targets, LogitTransform())[0].sum().backward()
    torch.testing.assert_close(hidden.grad, h.grad)
    torch.testing.assert_close(weight.grad, w.grad)


def test_bfloat16_inputs_give_float32_log_probs_near_the_exact_ones() -> None:
    hidden, weight, bias, targets = _inputs(torch.bfloat16, True)
    logprobs, _ = token_logprobs(hidden, weight, bias, targets, LogitTransform(), chunk_tokens=4)
    exact, _ = _plain(hidden.double(), weight.double(), bias.double(), targets, LogitTransform())
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), exact, rtol=0.02, atol=0.05)
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_a_huge_logit_does_not_overflow() -> None:
    hidden = torch.tensor([[1000.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(
        hidden, torch.tensor([[1.0], [-1.0]]), None, torch.tensor([0]), LogitTransform(), chunk_tokens=1
    )
    assert logprobs.item() == 0.0 and entropy.item() == pytest.approx(0.0)


def test_no_tokens_give_a_zero_gradient() -> None:
    hidden, weight, _, _ = _inputs(torch.float64, False, tokens=0)
    logprobs, _ = token_logprobs(
        hidden, weight, None, torch.zeros(0, dtype=torch.int64), LogitTransform(), chunk_tokens=4
    )
    logprobs.sum().backward()
    torch.testing.assert_close(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("shape", [(13,), (13, 2)])
def test_log_probs_are_no_view_in_which_a_change_in_place_would_lose_fsdp2_its_hook(shape: tuple[int, ...]) -> None:
    hidden, weight, _, _ = _inputs(torch.float32, False)
    found = token_logprobs(hidden, weight, None, torch.ones(shape).long(), LogitTransform(), chunk_tokens=4)
    assert found[0].shape == shape and [tensor._base for tensor in found] == [None, None]


@pytest.mark.parametrize("entropy_needs_grad", [False, True])
def test_no_tensor_of_tokens_times_vocabulary_is_made_forward_or_backward(entropy_needs_grad: bool) -> None:
    tokens, vocabulary, chunk, width = 256, 1024, 16, 4
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with LargestTensor() as ours:
        logprobs, entropy = token_logprobs(
            hidden, weight, None, targets, LogitTransform(), chunk_tokens=chunk, entropy_needs_grad=entropy_needs_grad
        )
        (logprobs.sum() + (entropy.sum() if entropy_needs_grad else 0.0)).backward()
    assert ours.elements == chunk * vocabulary
    with LargestTensor() as plain:
        _plain(hidden, weight, None, targets, LogitTransform())
    assert plain.elements == tokens * vocabulary


class _Products(TorchDispatchMode):
    """How many times the hidden states were multiplied by the output layer."""

    def __init__(self, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.shape, self.found = (tokens, vocabulary), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        multiplies = func._overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.mkldnn._linear_pointwise,
        )
        self.found += multiplies and isinstance(out, torch.Tensor) and tuple(out.shape) == self.shape
        return out


@pytest.mark.parametrize(("chunk", "expected"), [(8, 1), (20, 1), (4, 4)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_of_a_single_chunk_are_computed_once_and_give_the_same_bits(
    chunk: int, expected: int, softcap: float | None
) -> None:
    transform = LogitTransform(temperature=0.7, softcap=softcap)
    hidden, weight, _, targets = _inputs(torch.float32, False, tokens=8)
    with _Products(min(chunk, 8), len(weight)) as products:
        logprobs, _ = token_logprobs(hidden, weight, None, targets, transform, chunk_tokens=chunk)
        logprobs.square().sum().backward(retain_graph=True)
    assert products.found == expected
    first = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logprobs.square().sum().backward()  # what was kept is gone: computed again
    assert torch.equal(hidden.grad, first[0]) and torch.equal(weight.grad, first[1])


def test_temperature_zero_cannot_train() -> None:
    with pytest.raises(ValueError, match="temperature must be > 0"):
        LogitTransform(temperature=0.0)


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_on_a_device_no_token_is_a_product_of_its_own_and_no_chunk_waits_for_the_host() -> None:
    """A repeatable ``scatter_add`` on CUDA copies strides from the host; a batch of single rows is a block of threads each."""
    inputs = [x.detach().to("meta").requires_grad_(x.is_floating_point()) for x in _inputs(torch.float32, False)[:2]]
    targets = torch.empty(13, dtype=torch.int64, device="meta")
    with _Names() as names:
        logprobs, entropy = token_logprobs(
            *inputs, None, targets, LogitTransform(), chunk_tokens=5, entropy_needs_grad=True
        )
        torch.autograd.grad((logprobs + entropy).sum(), inputs)
    assert "mm" in names.seen and not {"bmm", "scatter_add_", "scatter_add", "item", "nonzero"} & names.seen
