"""Linear layers as the engine serves them: one product for one input, right in every precision and on every processor.

``test_older_processors.py`` runs this file again with instruction sets masked.
"""

import weakref

import pytest
import torch
from torch import Tensor, nn

from llamarl.engine.linears import FusedLinear, serve_linears

CPU = torch.device("cpu")


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 6), nn.Linear(8, 6)


def _served(weight: Tensor, *, quantization: str = "none", bias: Tensor | None = None) -> FusedLinear:
    layer = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, dtype=weight.dtype)
    layer.weight.data = weight
    if bias is not None:
        layer.bias.data = bias
    (served,) = serve_linears(nn.Sequential(layer), quantization=quantization, device=CPU)
    return served


def test_a_product_is_made_once_an_input_and_let_go_of_when_all_its_parts_have_been_taken() -> None:
    model = _Mlp()
    expected = {name: getattr(model, name) for name in ("gate_proj", "up_proj")}
    (product,) = serve_linears(model, quantization="none", device=CPU)
    made: list[weakref.ref[torch.Tensor]] = []
    product.register_forward_hook(lambda module, inputs, out: made.append(weakref.ref(out)))
    with torch.inference_mode():
        for rows in (3, 5):
            x = torch.randn(rows, 8)
            gate = model.gate_proj(x)
            assert made[-1]() is not None  # held for the other part
            up = model.up_proj(x)
            assert made.pop()() is None and not made  # one product, of which only the parts are left
            torch.testing.assert_close(gate, expected["gate_proj"](x))
            torch.testing.assert_close(up, expected["up_proj"](x))
            given = weakref.ref(x)
            del x
            assert given() is None


@pytest.mark.parametrize(("features", "rows"), [(256, 4), (256, 1), (37, 3), (1024, 33)])
def test_int8_products_of_the_largest_numbers_are_the_exact_integer_products(features: int, rows: int) -> None:
    """Numbers of -1 and 1 are kept by int8 exactly, at its largest codes, of which two products need 17 bits."""
    generator = torch.Generator().manual_seed(features)
    signs = lambda *shape: torch.randint(0, 2, shape, generator=generator) * 2 - 1  # noqa: E731
    weight, x = signs(24, features), signs(rows, features)
    weight[0], weight[1], x[0] = 1, -1, 1
    found = _served(weight.float(), quantization="int8")(x.float())
    assert torch.equal(found.round().long(), x @ weight.T)
    torch.testing.assert_close(found, found.round(), atol=2e-6 * features, rtol=0)


def test_int8_products_of_usual_numbers_err_by_the_rounding_of_both_factors() -> None:
    torch.manual_seed(0)
    weight, x, bias = torch.randn(64, 256), torch.randn(8, 256), torch.randn(64)
    found = _served(weight, quantization="int8", bias=bias)(x)
    error = (found - torch.nn.functional.linear(x, weight, bias)).square().mean().sqrt()
    # each of 256 products of two unit numbers errs by both roundings: steps of 3 / 127, of which 0.29 is the mean error
    assert 0 < error < 2 * 16 * 3 / 127 * 0.29 * 1.5


@pytest.mark.parametrize(
    ("dtype", "sum_error"), [(torch.float32, 5e-6), (torch.bfloat16, 0.06), (torch.float16, 0.008)], ids=str
)
def test_unquantized_products_are_right_to_the_rounding_of_their_type(dtype: torch.dtype, sum_error: float) -> None:
    torch.manual_seed(0)
    weight, x, bias = (torch.randn(shape).to(dtype) for shape in ((24, 40), (5, 40), (24,)))
    found = _served(weight, bias=bias)(x)
    assert found.dtype == dtype
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(found.double(), exact, atol=sum_error, rtol=2 * torch.finfo(dtype).eps)
