"""What can be known of the CUDA path without a GPU: tensors on torch's ``meta`` device have a shape and a device, but no values.

A step runs on that device from the plan to the draws. A tensor that was left on the CPU, a size that the fp8 product does
not take, or a value that the host would have to wait for ends the test.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from launches import Launches
from tiny_models import FAMILIES, SPARSE, tiny_config
from transformers import AutoModelForCausalLM

from llamarl.engine import linears, model_runner
from llamarl.engine.linears import _Fp8Linear, supported_quantizations
from llamarl.engine.model_runner import ModelRunner
from llamarl.engine.sampler import _draw
from llamarl.engine.scheduler import Chunk, Member, Prompt, StepPlan
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.settings.engine import EngineConfig

META = torch.device("meta")


def _runner(
    monkeypatch: pytest.MonkeyPatch, family: str, quantization: str, layers: int = 3, **settings: Any
) -> ModelRunner:
    """Of a model of ``family`` without values, on a device that offers what CUDA does."""

    def load(path: object, layout: object, *, dtype: torch.dtype, **_: Any) -> tuple[torch.nn.Module, dict[str, int]]:
        with META:
            model = AutoModelForCausalLM.from_config(
                tiny_config(family, num_hidden_layers=layers), attn_implementation="llamarl_paged", dtype=dtype
            )
        return model.eval(), {}

    monkeypatch.setattr(model_runner, "load_tensor_parallel", load)
    monkeypatch.setattr(model_runner, "supported_quantizations", lambda device: ("none", "fp8"))
    config = EngineConfig(block_size=4, kv_cache_bytes=1 << 18, **{"dtype": "float32", **settings})
    return ModelRunner(Path("unused"), config, device=META, quantization=quantization)


def _member(order: int, source: Any) -> tuple[Member, Any]:
    params = SamplingParams(max_new_tokens=4)
    sequence = Sequence(prompt_index=order, sample_index=0, prompt_tokens=[5], params=params, seed=order)
    return Member(order, sequence, (order, (5,))), source


def _mixed_plan() -> StepPlan:
    """Two decodes of unlike length, a whole prompt, and the second part of another; a prompt's end for two members."""
    chunks = [
        Chunk([7], 70, list(range(18)), decode=True),
        Chunk([8], 2, [20], decode=True),
        Chunk([5, 6, 9], 0, [21], decode=False),
        Chunk([5, 6, 9, 4, 3], 6, [22, 23, 24], decode=False),
    ]
    finished = Prompt([5, 6, 9])
    return StepPlan(
        copies=[(20, 25)],
        fresh=[24, 26],
        chunks=chunks,
        samples=[_member(0, 0), _member(1, 1), _member(2, 2), _member(3, 2)],
        completed=[(finished, 2)],
    )


def _decode_plan() -> StepPlan:
    chunks = [Chunk([7], 70, list(range(18)), decode=True), Chunk([8], 2, [20], decode=True)]
    return StepPlan(fresh=[20], chunks=chunks, samples=[_member(0, 0), _member(1, 1)])


@pytest.mark.parametrize(
    ("family", "dtype", "quantization", "cuda_graphs"),
    [
        *(
            (family, "bfloat16", "none", "padded") for family in FAMILIES if family not in SPARSE
        ),  # these count tokens on the host
        ("qwen2", "bfloat16", "fp8", "padded"),
        ("llama", "float32", "none", "off"),
        ("gemma2", "bfloat16", "none", "off"),
        ("qwen2", "bfloat16", "fp8", "off"),
    ],
)
def test_a_step_stays_on_the_device_until_the_draws_are_read(
    family: str, dtype: str, quantization: str, cuda_graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = _runner(monkeypatch, family, quantization, dtype=dtype, cuda_graphs=cuda_graphs)
    for plan in (_mixed_plan(), _decode_plan()):
        logits = runner.execute(plan)
        assert logits.device == META and logits.shape == (len(plan.samples), 97) and logits.dtype == torch.float32
        for filters in ({}, {"temperature": 0.0}, {"temperature": 0.7, "min_p": 0.1}, {"top_k": 5, "top_p": 0.9}):
            params = [SamplingParams(max_new_tokens=4, **filters) for _ in plan.samples]  # type: ignore[arg-type]
            draws = _draw(logits, params, range(len(params)), [0] * len(params))
            assert draws.device == META and draws.shape == (2, len(params)) and draws.dtype == torch.float64
    runner.weights_updated()
    with pytest.raises((NotImplementedError, RuntimeError)):  # what reading a value does here
        draws.tolist()


@pytest.mark.parametrize(
    ("family", "quantization", "budget"),
    [("llama", "none", 39), ("qwen2", "none", 39), ("qwen3", "none", 55), ("gemma2", "none", 74), ("llama", "fp8", 63)],
)
def test_a_decoded_layer_starts_no_more_kernels_than_it_did(
    family: str, quantization: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for layers in (2, 4):
        runner = _runner(monkeypatch, family, quantization, layers, dtype="bfloat16", cuda_graphs="padded")
        runner.execute(_decode_plan())
        with Launches() as launches:
            runner.execute(_decode_plan())
        counts.append(launches.count)
        assert launches.waiting == set()
    assert (counts[1] - counts[0]) / 2 <= budget


@pytest.mark.parametrize(
    ("filters", "budget"), [({}, 31), ({"temperature": 0.7}, 33), ({"top_k": 5, "top_p": 0.9}, 52)]
)
def test_draws_start_no_more_kernels_than_they_did(filters: dict[str, Any], budget: int) -> None:
    params = [SamplingParams(max_new_tokens=4, **filters)] * 4
    with Launches() as launches:
        _draw(torch.empty(4, 97, device=META), params, range(4), [0] * 4)
    assert launches.count <= budget and launches.waiting == set()


def test_a_tensor_left_on_the_cpu_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = _runner(monkeypatch, "llama", "none", cuda_graphs="off")
    monkeypatch.setattr(model_runner, "indices", lambda lists, device: [torch.tensor(values) for values in lists])
    with pytest.raises(RuntimeError, match="device"):
        runner.execute(_mixed_plan())


def test_fp8_needs_a_device_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda:0")
    for capability, expected in (((8, 0), ("none",)), ((8, 9), ("none", "fp8")), ((9, 0), ("none", "fp8"))):
        monkeypatch.setattr(linears.torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert supported_quantizations(cuda) == expected
    assert supported_quantizations(torch.device("cpu")) == ("none", "int8")
    monkeypatch.setattr(linears.torch.version, "hip", "7.0")  # an MI300X says (9, 4), and has other codes
    assert supported_quantizations(cuda) == ("none",)


@pytest.mark.usefixtures("fp8_on_a_cpu")
@pytest.mark.parametrize(("inside", "outside", "bias"), [(32, 48, False), (24, 19, True), (16, 97, True)])
def test_fp8_of_any_size_is_the_product_of_rounded_rows(inside: int, outside: int, bias: bool) -> None:
    """Against float32 arithmetic on the rounded codes, by the CPU's version of the product."""
    generator = torch.Generator().manual_seed(inside)
    layer = torch.nn.Linear(inside, outside, bias=bias, dtype=torch.float32)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    served = _Fp8Linear([layer])
    served.refresh()
    x = torch.randn(2, 3, inside, generator=generator)

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        scale = rows.abs().amax(dim=-1, keepdim=True) / 448
        return (rows / scale).to(torch.float8_e4m3fn).float() * scale

    with torch.no_grad():
        expected = rounded(x) @ rounded(layer.weight).T
        found = served(x)
    if bias:
        expected = expected + layer.bias.detach()
    assert found.shape == (2, 3, outside) and found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7 * expected.abs().max().item())


@pytest.mark.usefixtures("fp8_on_a_cpu")
def test_fp8_weights_keep_their_addresses_over_versions() -> None:
    layer = torch.nn.Linear(24, 19)
    fp8 = _Fp8Linear([layer])
    fp8.refresh()
    before, x = fp8.addresses, torch.randn(2, 24)
    old = fp8(x)
    with torch.no_grad():
        layer.weight.neg_()
        layer.bias.neg_()
    fp8.refresh()
    assert fp8.addresses == before and before[0] and before[2] and before[3]
    torch.testing.assert_close(fp8(x), -old)


@pytest.mark.usefixtures("fp8_on_a_cpu")
def test_a_row_of_nans_stays_alone_in_fp8() -> None:
    layer = torch.nn.Linear(32, 16)
    fp8 = _Fp8Linear([layer])
    fp8.refresh()
    x = torch.randn(3, 32)
    with torch.no_grad():
        clean = fp8(x)
        x[1, 5] = float("nan")
        dirty = fp8(x)
    assert dirty[1].isnan().all()
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])
