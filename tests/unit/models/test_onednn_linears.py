import pytest
import torch
from tiny_models import tiny_model

from llamarl.models.onednn import OneDnnLinear, use_onednn_linears


@pytest.mark.parametrize("shape", [(1, 7, 24), (5, 24), (2, 3, 4, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_equal_those_of_nn_linear(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(24, 40, bias=bias)
    fast = torch.nn.Linear(24, 40, bias=bias)
    fast.load_state_dict(plain.state_dict())
    assert use_onednn_linears(torch.nn.Sequential(fast)) == 1
    x = torch.randn(shape)
    results = []
    for layer in (plain, fast):
        inputs = x.clone().requires_grad_()
        out = layer(inputs)
        (out * out.detach().cos()).sum().backward()
        results.append([out.detach(), inputs.grad, *(p.grad for p in layer.parameters())])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_model_keeps_its_parameters_and_gives_the_same_loss_and_gradients_also_when_checkpointed() -> None:
    tokens = torch.arange(3, 40)[None]
    plain, fast = tiny_model("qwen2", "sdpa"), tiny_model("qwen2", "sdpa").train()
    assert use_onednn_linears(fast) == 3 * 7 + 1
    assert isinstance(fast.lm_head, OneDnnLinear)
    assert list(dict(fast.named_parameters())) == list(dict(plain.named_parameters()))
    plain(tokens, labels=tokens, use_cache=False).loss.backward()
    for checkpointing in (False, True):
        if checkpointing:
            fast.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        fast.zero_grad()
        fast(tokens, labels=tokens, use_cache=False).loss.backward()
        for (name, a), b in zip(plain.named_parameters(), fast.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, atol=1e-4, rtol=1e-3, msg=name)


def test_same_inputs_give_the_same_bits() -> None:
    torch.manual_seed(1)
    layer = torch.nn.Linear(96, 64)
    use_onednn_linears(torch.nn.Sequential(layer))
    x = torch.randn(50, 96)
    first, second = (torch.autograd.grad(layer(x).square().sum(), layer.weight)[0] for _ in range(2))
    assert torch.equal(first, second)
