"""Decoder layers as one compiled function, by torch's compiler for this CPU: what it makes of them, and that nothing changes.

A kernel is what is left of the compiler's graph after fusion: a group of loops that a GPU runs as one, a product, or
attention. (Of the C++ made here several share a function, so functions are fewer.) Attention is one operator, of four
kernels on a GPU: keys and values into their blocks, parts of contexts, their sum.
"""

import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import paged_reference
import pytest
import torch
from engine_runs import make_sequences
from tiny_models import FAMILIES, SPARSE, tiny_model
from torch._dynamo.exc import SkipFrame
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch._inductor.ir import MultiOutput
from torch._inductor.utils import run_and_get_code
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llamarl.engine import compiled_layers, linears, model_runner
from llamarl.engine.engine import NativeEngine
from llamarl.engine.model_runner import ModelRunner
from llamarl.engine.scheduler import Chunk
from llamarl.engine.sequence import Sequence
from llamarl.errors import ConfigError
from llamarl.settings.engine import EngineConfig

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++ on a CPU")

_ALTERNATING = {"qwen2", "gemma3_text", "smollm3", "olmo3", "cohere2", "exaone4"}
COMPILED = {family: 1 + (family in _ALTERNATING) for family in FAMILIES if family not in (*SPARSE, "gemma2", "gpt2")}
"""Family -> kinds of layers: with and without a window, or rotation."""
BLOCKS, SIZE = 16, 16


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What g++ makes of torch's headers: once, not for each test."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch, headers: Path) -> Iterator[None]:
    """With the library's products, nothing found compiled by other tests, and, as ``repeatable.suspended`` has it in a
    step on a GPU, no wish for repeatable kernels, whichever test before left one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(headers))
    monkeypatch.setattr(model_runner, "reads_in_place", lambda attention, device: attention == "auto")
    monkeypatch.setattr(model_runner, "compiles_layers", lambda in_place, *_: in_place)
    monkeypatch.setitem(sys.modules, "llamarl.models.paged_kernel", paged_reference)
    monkeypatch.setattr(linears, "_packs", lambda dtype: False)
    torch.compiler.reset()
    counters.clear()
    wished, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(wished, warn_only=warn_only)
    torch.compiler.reset()


@pytest.fixture
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers become one graph each, whose operators run one by one: seconds less."""
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs, config_patches: graph.forward)


def make_runner(
    family: str,
    folder: Path,
    attention: Literal["auto", "copied"] = "auto",
    dtype: Literal["float32", "bfloat16"] = "float32",
    quantization: str = "none",
) -> ModelRunner:
    tiny_model(family, "eager").save_pretrained(folder)
    config = EngineConfig(
        block_size=SIZE,
        kv_cache_bytes=2 * 3 * BLOCKS * SIZE * 2 * 16 * getattr(torch, dtype).itemsize,
        dtype=dtype,
        cuda_graphs="padded",
        attention=attention,
    )
    runner = ModelRunner(folder, config, device="cpu", quantization=quantization)
    runner._cache.normal_(generator=torch.Generator().manual_seed(1))
    return runner


def decodes(count: int) -> list[Chunk]:
    """At positions 20, 26, ... of sequences with three blocks each."""
    starts = [20 + 6 * i for i in range(count)]
    return [Chunk([7 + i], n, [3 * i, 3 * i + 1, 3 * i + 2], decode=True) for i, n in enumerate(starts)]


@torch.inference_mode()
def computed(runner: ModelRunner, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a step, and the cache after it; the runner's own is as before."""
    before = runner._cache.clone()
    logits = runner.padded_decoder.run(decodes(count))
    assert logits is not None
    after = runner._cache.clone()
    runner._cache.copy_(before)
    return logits.clone(), after


def kernels_of(step: Callable[[], Any]) -> tuple[list[int], str]:
    """Of each function that is compiled in ``step`` how many kernels it has; and their code."""
    found: list[int] = []

    def count(nodes: list[Any]) -> list[Any]:
        found.append(sum(not isinstance(node.node, MultiOutput) and "Nop" not in type(node).__name__ for node in nodes))
        return nodes

    # as on a GPU: two halves that are joined are computed where they are used
    with torch._inductor.config.patch(_post_fusion_custom_pass=count, force_pointwise_cat=True):
        _, codes = run_and_get_code(step)
    return found, "\n".join(codes)


def graphs() -> int:
    """That torch has made since they were last counted."""
    return int(counters.pop("stats", Counter())["unique_graphs"])


def assert_equal_steps(runner: ModelRunner, plain: ModelRunner, count: int) -> None:
    for one, other in zip(computed(runner, count), computed(plain, count), strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_compiled_layer_is_fourteen_kernels_and_computes_what_it_did(family: str, tmp_path: Path) -> None:
    """Norm, product, rotated queries and keys, attention, product, norm, product, activation, product, sum."""
    runner, plain = make_runner(family, tmp_path), make_runner(family, tmp_path, "copied")
    (kernels, _), code = kernels_of(lambda: computed(runner, 4))  # one function for all layers
    assert kernels - 1 + 4 <= 14 and "attend_pages" in code
    assert_equal_steps(runner, plain, 4)
    before = computed(runner, 4)[0]
    graphs()
    for changed in (runner, plain):
        with torch.no_grad():
            for parameter in changed.parameters_for_sync().values():
                parameter.mul_(1.25)
        changed.weights_updated()
    assert_equal_steps(runner, plain, 4)  # weights are read where they lie: nothing was folded into the code
    assert (computed(runner, 4)[0] - before).abs().max() > 0.1 and graphs() == 0


@pytest.mark.usefixtures("fp8_on_a_cpu")
def test_rounding_to_fp8_is_fused_and_no_further_from_the_model_than_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel more than in bfloat16, where a layer that is not compiled starts 63 in all."""
    monkeypatch.setattr(model_runner, "supported_quantizations", lambda device: ("none", "fp8"))
    plain, compiled = (make_runner("llama", tmp_path, kind, "bfloat16", "fp8") for kind in ("copied", "auto"))
    runners = make_runner("llama", tmp_path, "copied"), plain, compiled
    (kernels, _), _ = kernels_of(lambda: computed(compiled, 5))
    assert kernels - 1 + 4 <= 15
    errors = []
    for seed in range(12):  # caches
        for runner in runners:
            runner._cache.normal_(generator=torch.Generator().manual_seed(seed))
        exact, *rounded = (computed(runner, 5)[0] for runner in runners)
        errors.append([float((one - exact).abs().mean() / exact.abs().mean()) for one in rounded])
    of_plain, of_compiled = torch.tensor(errors).mean(0).tolist()
    assert of_compiled < 1.1 * of_plain < 0.2


@pytest.mark.usefixtures("traced_alone")
@pytest.mark.parametrize(
    ("family", "kinds"),
    [("gemma2", 2), *(pytest.param(family, kinds, marks=pytest.mark.long) for family, kinds in COMPILED.items())],
)
def test_a_kind_of_layer_is_compiled_once_for_one_row_and_once_for_more(
    family: str, kinds: int, tmp_path: Path
) -> None:
    runner, plain = make_runner(family, tmp_path), make_runner(family, tmp_path, "copied")
    made = []
    for count in (5, 3, 5, 1):
        assert_equal_steps(runner, plain, count)
        made.append(graphs())
    assert made == [2 * kinds, 0, 0, 0]


@pytest.mark.usefixtures("traced_alone")
def test_an_engine_whose_layers_are_compiled_draws_the_tokens_of_one_whose_are_not(tmp_path: Path) -> None:
    """Prompts, windows, soft caps and a version that arrives in between."""
    tiny_model("gemma2", "eager").save_pretrained(tmp_path)

    def drawn(attention: Literal["auto", "copied"]) -> list[Sequence]:
        config = EngineConfig(
            block_size=16, max_sequences=16, max_batch_tokens=64, kv_cache_bytes=1 << 20, cuda_graphs="padded",
            attention=attention,
        )  # fmt: skip
        engine, sequences = NativeEngine(tmp_path, config, eos_token_ids=()), make_sequences(temperature=1.0)
        for sequence in sequences:
            sequence.params = replace(sequence.params, max_new_tokens=8)
        engine.add(sequences)
        for _ in range(6):
            engine.step()
        with torch.no_grad():
            for parameter in engine.parameters_for_sync().values():
                parameter.mul_(1.01)
        engine.weights_updated(1)
        while engine.has_work:
            engine.step()
        return sequences

    compiled, plain = drawn("auto"), drawn("copied")
    assert 0 < graphs() <= 2 * 2  # kinds of layers, one row and more
    assert [s.tokens for s in compiled] == [s.tokens for s in plain]
    for one, other in zip(compiled, plain, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=2e-5, rtol=0)


@pytest.mark.usefixtures("traced_alone")
@pytest.mark.parametrize("count", [1, 3])
def test_layers_are_compiled_for_rows_that_no_run_chooses(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the order of sums would hang on the rows that a run, or its resume, begins with."""
    seen: list[int] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Any], config_patches: Any) -> Any:
        shapes = [value.shape for value in inputs if isinstance(value, torch.Tensor) and value.dim() == 3]
        seen.append(max(int(size) for shape in shapes for size in shape[:2]))
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", note)
    monkeypatch.setattr(model_runner, "FIRST_ROWS", (200, 1))  # within the context of a model this small
    computed(make_runner("llama", tmp_path), count)
    assert seen == [200, 1]


@pytest.mark.usefixtures("traced_alone")
@pytest.mark.parametrize("first", [16, 32])
def test_rows_as_many_as_a_head_or_a_state_is_wide_are_still_any_number_of_rows(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's heads are 256 wide, as many as the first rows: torch takes sizes that are equal at first for one size."""
    monkeypatch.setattr(model_runner, "FIRST_ROWS", (first, 1))
    runner = make_runner("gemma2", tmp_path)
    computed(runner, 5)
    assert graphs() == 2 * 2
    computed(runner, 3)
    assert graphs() == 0


@pytest.mark.usefixtures("traced_alone")
def test_nothing_is_compiled_for_what_a_run_brings(tmp_path: Path) -> None:
    """Another setting of torch asks for code of its own, which would be fitted to the step that it meets; another engine
    of the same kind takes the code that is there."""
    for _ in range(2):
        runner = make_runner("llama", tmp_path)
        computed(runner, 3)
    assert graphs() == 2
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(ConfigError, match="nothing was compiled before the first one"):
            computed(runner, 3)
    finally:
        torch.set_num_threads(threads)


def test_code_that_was_kept_for_other_first_rows_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler looks up what it kept without the rows that it was fitted to."""
    found = []
    for rows in (17, 40, 17):
        monkeypatch.setattr(model_runner, "FIRST_ROWS", (rows, 1))
        monkeypatch.setattr(compiled_layers, "FIRST_ROWS", (rows, 1))
        torch.compiler.reset()
        counters.clear()
        computed(make_runner("llama", tmp_path), 3)
        found.append((counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]))
    assert found[1:] == [(2, 0), (0, 2)]


def test_a_layer_that_torch_cannot_take_whole_ends_the_step_with_the_settings_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No piece of it goes uncompiled unsaid."""
    monkeypatch.setattr(LlamaRMSNorm, "forward", torch.compiler.disable(LlamaRMSNorm.forward))
    with pytest.raises(ConfigError, match='compiles LlamaDecoderLayer.*engine.attention = "copied" needs none'):
        computed(make_runner("llama", tmp_path), 2)


def test_a_card_without_bfloat16_ends_the_step_with_the_settings_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A T4, a V100: torch compiles no bfloat16 for them."""

    def refuse(*_: Any, **__: Any) -> None:
        raise SkipFrame("BF16 is not supported")  # as torch._inductor.compile_fx has it

    monkeypatch.setattr(compile_fx, "compile_fx", refuse)
    with pytest.raises(ConfigError, match='BF16 is not supported.*engine.attention = "copied" needs none'):
        computed(make_runner("llama", tmp_path), 2)


@pytest.mark.parametrize(
    ("quantization", "family", "dtype", "compiled"),
    [
        ("none", "llama", "bfloat16", True),
        ("none", "llama", "float32", False),
        ("int8", "llama", "bfloat16", False),
        ("fp8", "llama", "bfloat16", True),
        ("none", "qwen3_moe", "bfloat16", False),
    ],
)
def test_dense_layers_in_half_precision_are_compiled_but_for_int8_products(
    quantization: str, family: str, dtype: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(model_runner, "reads_in_place", lambda *_: True)
    monkeypatch.setattr(model_runner, "supported_quantizations", lambda device: ("none", "int8", "fp8"))
    asked: list[Any] = []
    monkeypatch.setattr(model_runner, "compile_layers", asked.append)
    tiny_model(family, "eager").save_pretrained(tmp_path)
    ModelRunner(tmp_path, EngineConfig(dtype=dtype), device="cpu", quantization=quantization)
    assert bool(asked) == compiled
