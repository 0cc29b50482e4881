"""What "auto" means for a precision."""

import pytest

from llamarl.config import validate
from llamarl.models import precision
from llamarl.models.precision import engine_dtype, has_bfloat16_products, resolve_dtype, resolve_precision

FAST = "x86_64 AMD EPYC amx_bf16 avx2 avx512_bf16 avx512f"
SLOW = "x86_64 Intel Xeon avx2 avx512f"


@pytest.mark.parametrize(
    "processor, has",
    [
        (FAST, True),
        (SLOW, False),
        ("aarch64 bf16", False),
        (f"{FAST} and {FAST}", True),
        (f"{FAST} and {SLOW}", False),
        ("", False),
    ],
)
def test_a_processor_has_products_of_bfloat16_if_all_of_its_kinds_do(processor: str, has: bool) -> None:
    assert has_bfloat16_products(processor) is has


@pytest.mark.parametrize(
    "device, processor, parameters, expected",
    [
        ("cpu", FAST, 20_000_000, "bfloat16"),
        ("cpu", FAST, 19_999_999, "float32"),
        ("cpu", SLOW, 10**9, "float32"),
        ("cuda:1", SLOW, 10**9, "bfloat16"),
        ("cuda", SLOW, 1000, "float32"),
    ],
)
def test_auto_is_bfloat16_for_large_models_where_it_is_fast(
    device: str, processor: str, parameters: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "num_parameters", lambda model: parameters)
    assert resolve_dtype("auto", device=device, model="m", processor=processor) == expected


def test_what_is_named_is_kept() -> None:
    assert resolve_dtype("float32", device="cpu", model="no/such/folder", processor=FAST) == "float32"
    assert engine_dtype("float16", "int8", device="cpu", model="no/such/folder", processor=FAST) == "float16"


def test_around_int8_weights_an_engine_computes_in_float32_and_around_fp8_in_bfloat16() -> None:
    assert engine_dtype("auto", "int8", device="cpu", model="no/such/folder", processor=FAST) == "float32"
    assert engine_dtype("auto", "fp8", device="cuda", model="no/such/folder") == "bfloat16"


def test_every_section_with_a_model_is_settled_and_the_reference_follows_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision, "num_parameters", lambda model: 10**8)
    cpus = {"device": "cpu"}
    settings = {
        "generator": {**cpus, "engine": {"dtype": "float32"}},
        "trainer": {**cpus, "dtype": "auto"},
        "reference": cpus,
    }
    config = resolve_precision(validate({**settings, "algorithm": {"kl_coef": 0.1}}), FAST)
    assert (config.trainer.dtype, config.reference.dtype) == ("bfloat16", "bfloat16")
    assert config.generator.engine.dtype == "float32"
    pinned = validate({**settings, "trainer": {**cpus, "dtype": "float32"}, "algorithm": {"kl_coef": 0.1}})
    assert resolve_precision(pinned, FAST).reference.dtype == "float32"


def test_the_size_of_the_bundled_model_is_that_of_its_weights() -> None:
    from safetensors import safe_open

    from llamarl.models.folders import resolve_model_path

    with safe_open(str(resolve_model_path("bundled:tiny") / "model.safetensors"), "pt") as stored:  # type: ignore[no-untyped-call]
        total = sum(stored.get_tensor(name).numel() for name in stored.keys())
    assert precision.num_parameters("bundled:tiny") == total
