"""Linear layers of one input as one product."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from llamarl.engine.linears import fused_of, serve_linears


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 6), nn.Linear(8, 6)


def test_a_product_is_made_once_an_input_and_let_go_of_when_all_its_parts_have_been_taken() -> None:
    model = _Mlp()
    expected = {name: getattr(model, name) for name in ("gate_proj", "up_proj")}
    (product,) = serve_linears(
        model, quantization="none", head=nn.Identity(), quantize_head=False, device=torch.device("cpu")
    )
    assert fused_of(model.gate_proj) is fused_of(model.up_proj) is product
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
