"""The compiled loops against torch, and the decoder made of them against the library's module."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_model

from llamarl.engine import kernel_library
from llamarl.engine.config import EngineConfig
from llamarl.engine.engine import NativeEngine
from llamarl.engine.kernel_library import KernelsUnavailable, build_library
from llamarl.engine.kernels import Kernels, load_kernels
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.models.loading import load_model


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    try:
        return load_kernels()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


def _sequences() -> list[Sequence]:
    """Groups of two; the second prompt is long enough to be computed in chunks, over windows and beside decodes."""
    lengths = (5, 31, 12)
    return [
        Sequence(
            prompt_index=i,
            sample_index=j,
            prompt_tokens=[3 + (11 * i + 5 * k * k) % 90 for k in range(n)],
            params=SamplingParams(max_new_tokens=24, temperature=float(j)),
            seed=10 * i + j,
        )
        for i, n in enumerate(lengths)
        for j in range(2)
    ]


def _run(folder: Path, kind: str, quantization: str = "none", dtype: str = "float32") -> list[Sequence]:
    config = EngineConfig(
        block_size=4,
        kv_cache_bytes=1 << 17,
        max_sequences=5,
        max_batch_tokens=16,
        kernels=kind,
        dtype=dtype,  # type: ignore[arg-type]
    )
    engine = NativeEngine(folder, config, eos_token_ids=(), quantization=quantization)
    sequences = _sequences()
    engine.add(sequences)
    while engine.has_work:
        engine.step()
    return sequences


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_lean_decoder_samples_the_tokens_of_the_module(kernels: Kernels, family: str, tmp_path: Path) -> None:
    tiny_model(family, "sdpa").save_pretrained(tmp_path)
    module, lean = _run(tmp_path, "torch"), _run(tmp_path, "compiled")
    for expected, got in zip(module, lean, strict=True):
        assert got.tokens == expected.tokens
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(expected.logprobs), atol=5e-5, rtol=0)
        assert got.logprobs != [] and got.finish_reason == "length"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_through_the_loops_is_nearer_to_float32_than_the_module_is(
    kernels: Kernels, family: str, tmp_path: Path
) -> None:
    tiny_model(family, "sdpa").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16, attention="sdpa").float()  # rounded weights, exact arithmetic
    errors = {}
    for kind in ("torch", "compiled"):
        off = []
        for s in _run(tmp_path, kind, dtype="bfloat16"):
            if s.params.temperature:
                with torch.no_grad():
                    logits = model(torch.tensor([s.prompt_tokens + s.tokens])).logits[0, len(s.prompt_tokens) - 1 : -1]
                exact = logits.log_softmax(-1).gather(1, torch.tensor(s.tokens)[:, None])[:, 0]
                off.append((torch.tensor(s.logprobs) - exact).square())
        errors[kind] = torch.cat(off).mean().sqrt().item()
    assert errors["compiled"] < errors["torch"] < 0.1


def test_int8_through_the_loops_is_int8_through_torch(kernels: Kernels, tmp_path: Path) -> None:
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    plain, lean = _run(tmp_path, "torch", "int8"), _run(tmp_path, "compiled", "int8")
    same = sum(a == b for s, t in zip(plain, lean, strict=True) for a, b in zip(s.tokens, t.tokens, strict=True))
    assert same > 0.9 * sum(len(s.tokens) for s in plain)  # an activation may round the other way


def test_loops_equal_torch_in_shapes_that_fill_no_vector(kernels: Kernels) -> None:
    torch.manual_seed(0)
    x, delta, weight = torch.randn(3, 37), torch.randn(3, 37), torch.rand(37)
    expected_x = x + delta
    norm = kernels.add_norm(x, delta, weight, 1e-5)
    assert torch.equal(x, expected_x)
    torch.testing.assert_close(norm, F.rms_norm(expected_x, (37,), weight, 1e-5))
    rows = torch.randn(4, 2 * 19) * 30
    torch.testing.assert_close(kernels.gated_silu(rows), F.silu(rows[:, :19]) * rows[:, 19:], atol=1e-6, rtol=1e-5)
    quantized, scales = kernels.quantize_rows(rows)
    torch.testing.assert_close(scales, rows.abs().amax(1) / 127)
    assert ((quantized.float() - 128) * scales[:, None] - rows).abs().max() <= scales.max() / 2 * 1.01
    torch.testing.assert_close(kernels.scale_rows(rows.clone(), scales, None), rows * scales[:, None])


def test_bfloat16_loops_round_once_and_to_nearest(kernels: Kernels) -> None:
    loops, bf16 = load_kernels(torch.bfloat16), torch.bfloat16
    torch.manual_seed(3)
    x, delta, weight = torch.randn(5, 37), torch.randn(5, 37).to(bf16), torch.rand(37).to(bf16)
    kept = x.clone()
    got = loops.add_norm(x, delta, weight, 1e-5)
    assert torch.equal(x, kept + delta.float())
    assert torch.equal(got, kernels.add_norm(kept, delta.float(), weight.float(), 1e-5).to(bf16))
    rows = (torch.randn(4, 2 * 19) * 30).to(bf16)
    assert torch.equal(loops.gated_silu(rows), kernels.gated_silu(rows.float()).to(bf16))
    angles = torch.rand(3, 16) * 6
    qkv, slots = torch.randn(3, 4 * 24).to(bf16), torch.tensor([5, 0, 2])  # two heads, one of K and V
    caches = [torch.zeros(2, 4, 1, 24, dtype=dtype) for dtype in (bf16, bf16, torch.float32, torch.float32)]
    plain = qkv.float()
    loops.rotate_and_store(qkv, angles.cos(), angles.sin(), None, 1e-5, slots, *caches[:2])
    kernels.rotate_and_store(plain, angles.cos(), angles.sin(), None, 1e-5, slots, *caches[2:])
    assert torch.equal(qkv, plain.to(bf16))
    assert all(torch.equal(a, b.to(bf16)) for a, b in zip(caches[:2], caches[2:], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "window"), [(64, None), (128, 9), (24, None)])
def test_decode_attention_reads_each_sequence_through_its_own_blocks(
    kernels: Kernels, size: int, window: int | None, dtype: torch.dtype
) -> None:
    loops = load_kernels(dtype)
    torch.manual_seed(1)
    block, heads, kv_heads, lengths = 3, 4, 2, [1, 7, 20]
    keys, values = (torch.randn(16, block, kv_heads, size).to(dtype) for _ in range(2))
    tables = [[5], [9, 2, 11], [0, 15, 3, 8, 1, 12, 7]]
    qkv = torch.randn(3, (heads + 2 * kv_heads) * size).to(dtype)
    out = torch.full((3, heads * size), math.nan, dtype=dtype)
    offsets = torch.tensor([0, 1, 4])
    flat = torch.tensor([b for table in tables for b in table])
    loops.decode_attention(qkv, keys, values, flat, offsets, torch.tensor(lengths), window, 0.2, out)
    qkv, keys, values = qkv.float(), keys.float(), values.float()
    for n, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        first = 0 if window is None else max(0, length - window)
        k, v = (c[table].view(-1, kv_heads, size)[first:length].repeat_interleave(2, 1) for c in (keys, values))
        query = qkv[n].view(-1, size)[:heads]
        weights = torch.einsum("hd,thd->ht", query, k).mul(0.2).softmax(-1)
        expected = torch.einsum("ht,thd->hd", weights, v).to(dtype)
        torch.testing.assert_close(out[n].view(heads, size), expected)


def test_nan_of_one_row_stays_in_that_row(kernels: Kernels) -> None:
    rows = torch.randn(3, 64)
    rows[1, 5] = math.nan
    _, scales = kernels.quantize_rows(rows)
    results = (kernels.add_norm(rows.clone(), None, torch.ones(64), 1e-5), kernels.gated_silu(rows), scales[:, None])
    for result in results:
        assert result[[0, 2]].isfinite().all() and not result[1].isfinite().all()
    keys = torch.randn(4, 2, 1, 64)
    keys[2, 0, 0, 3] = math.nan
    out = torch.empty(2, 128)
    tables = (torch.tensor([0, 2, 1, 3]), torch.tensor([0, 2]), torch.tensor([4, 4]))
    kernels.decode_attention(torch.randn(2, 256), keys, torch.randn(4, 2, 1, 64), *tables, None, 0.1, out)
    assert out[0].isnan().all() and out[1].isfinite().all()


def test_rows_do_not_depend_on_the_number_of_threads(kernels: Kernels) -> None:
    rows = torch.randn(50, 128)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(kernels.gated_silu(rows))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_without_a_compiler_the_engine_says_so_and_computes_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    expected = _run(tmp_path, "torch")
    monkeypatch.setattr(kernel_library.shutil, "which", lambda name: None)
    build_library.cache_clear()
    named = _run(tmp_path, "compiled")
    told = capsys.readouterr().err
    by_itself = _run(tmp_path, "auto")
    build_library.cache_clear()
    for got in (named, by_itself):
        assert [s.logprobs for s in got] == [s.logprobs for s in expected]
    assert "no effect here: no C++ compiler" in told
    assert capsys.readouterr().err == ""


def test_a_model_that_the_loops_do_not_fit_goes_through_its_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("gemma2", "eager").save_pretrained(tmp_path)
    assert all(s.finish_reason == "length" for s in _run(tmp_path, "compiled"))
    assert "no effect here: architecture 'gemma2' does not support" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_with_biases_is_the_same_through_the_loops(kernels: Kernels, dtype: str, tmp_path: Path) -> None:
    model = tiny_model("qwen2", "sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(tmp_path)
    plain, lean = _run(tmp_path, "torch", "int8", dtype), _run(tmp_path, "compiled", "int8", dtype)
    assert all(s.finish_reason == "length" for s in lean)
    same = [(s, t) for s, t in zip(plain, lean, strict=True) if s.tokens[0] == t.tokens[0]]  # rounding may tip a draw
    assert len(same) >= 5
    assert max(abs(s.logprobs[0] - t.logprobs[0]) for s, t in same) < 0.1
