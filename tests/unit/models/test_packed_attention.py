from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from llamarl.models.attention import PackedSequences, attending, fused_attention

LENGTHS = [5, 1, 40, 17, 38, 23]


def _row(lengths: list[int], vocab: int) -> tuple[torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(1)
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return torch.randint(3, vocab, (sum(lengths),), generator=generator), ends


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_row_gives_the_logits_of_each_sequence_alone_under_the_librarys_attention(family: str) -> None:
    packed_model, plain_model = tiny_model(family, "llamarl_packed"), tiny_model(family, "eager")
    tokens, ends = _row(LENGTHS, packed_model.config.vocab_size)
    packed = PackedSequences.of(ends)
    with torch.no_grad(), attending(packed):
        together = packed_model(tokens[None], position_ids=packed.position_ids("cpu"), use_cache=False).logits[0]
        for start, end in zip(ends, ends[1:], strict=False):
            alone = plain_model(tokens[None, start:end], use_cache=False).logits[0]
            torch.testing.assert_close(together[start:end], alone, atol=2e-5, rtol=1e-4)


def _varlen_of_torch_2_11(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """Sequence by sequence; query heads may share key heads, which nobody has to announce."""
    share, rows = query.shape[1] // key.shape[1], []
    for start, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]
        hidden = (distance < 0) | ((distance > window_size[0]) if window_size[0] >= 0 else False)
        weights = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf")).softmax(-1)
        rows.append((weights @ v).transpose(0, 1))
    return torch.cat(rows)


def _varlen_of_torch_2_12(*args: Any, enable_gqa: bool = False, **settings: Any) -> torch.Tensor:
    assert enable_gqa == (args[0].shape[1] != args[1].shape[1]), "shared key heads have to be announced"
    return _varlen_of_torch_2_11(*args, **settings)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("flash", [_varlen_of_torch_2_11, _varlen_of_torch_2_12])
def test_the_flash_kernel_is_called_as_each_torch_declares_it(
    flash: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain_model = tiny_model(family, "llamarl_packed"), tiny_model(family, "eager")
    tokens, ends = _row(LENGTHS, model.config.vocab_size)
    monkeypatch.setattr("llamarl.models.attention._can_use_varlen", lambda query, softcap: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
    packed = PackedSequences.of(ends)
    with torch.no_grad(), attending(packed):
        together = model(tokens[None], position_ids=packed.position_ids("cpu"), use_cache=False).logits[0]
        for start, end in zip(ends, ends[1:], strict=False):
            alone = plain_model(tokens[None, start:end], use_cache=False).logits[0]
            torch.testing.assert_close(together[start:end], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_gradients_of_a_packed_row_are_the_sum_over_sequences(family: str) -> None:
    packed_model, plain_model = tiny_model(family, "llamarl_packed"), tiny_model(family, "eager")
    tokens, ends = _row(LENGTHS, packed_model.config.vocab_size)
    packed = PackedSequences.of(torch.tensor(ends))
    logits = packed_model(
        tokens[None], position_ids=packed.position_ids("cpu"), packed_sequences=packed, use_cache=False
    ).logits[0]
    torch.log_softmax(logits, -1).gather(1, tokens[:, None]).sum().backward()
    for start, end in zip(ends, ends[1:], strict=False):
        alone = plain_model(tokens[None, start:end], use_cache=False).logits[0]
        torch.log_softmax(alone, -1).gather(1, tokens[start:end, None]).sum().backward()
    reference = dict(plain_model.named_parameters())
    for name, parameter in packed_model.named_parameters():
        expected = reference[name].grad
        assert parameter.grad is not None and expected is not None, name
        scale = expected.abs().max()  # sums of products that cancel round by the largest, on every instruction set
        torch.testing.assert_close(parameter.grad / scale, expected / scale, atol=2e-5, rtol=0.0, msg=name)


def test_boundaries_that_do_not_fit_are_refused() -> None:
    model = tiny_model("llama", "llamarl_packed")
    tokens = torch.arange(3, 8)[None]
    with pytest.raises(ValueError, match="sequence boundaries"):
        model(tokens, use_cache=False)
    with pytest.raises(ValueError, match="ends at 4"), attending(PackedSequences.of([0, 4])):
        model(tokens, use_cache=False)


def test_bfloat16_that_will_have_a_gradient_attends_in_float32_on_the_cpu() -> None:
    torch.manual_seed(0)
    narrow = [torch.randn(2, heads, 8, 16).to(torch.bfloat16).requires_grad_() for heads in (4, 2, 2)]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    out, exact = (fused_attention(*qkv, scale=0.25, mask=mask) for qkv in (narrow, wide))
    assert out.dtype == torch.bfloat16 and torch.equal(out, exact.to(torch.bfloat16))
    weights = torch.randn(out.shape).to(torch.bfloat16)
    out.backward(weights)
    exact.backward(weights.float())
    for mine, theirs in zip(narrow, wide, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad.to(torch.bfloat16))
