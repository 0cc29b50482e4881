"""What roles hold of a GPU, against bytes worked out by hand; and which sizes follow."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from llamarl.config import RunConfig, validate
from llamarl.controller import preflight, prepare, settle
from llamarl.controller.device_memory import GpuMemory, held
from llamarl.controller.settle import Machine, with_sizes
from llamarl.determinism import platform_facts
from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime import placement
from llamarl.runtime.placement import Gpu

GB = 1e9
N = 2 * 1000 * 512 + 4 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1024 + 2 * 512) + 512
"""Parameters of the model below: both ends, four layers, the last norm."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def _run(model: Path, settings: Mapping[str, Any] | None = None) -> RunConfig:
    plain: dict[str, Any] = {
        "model": {"path": str(model)},
        "evaluation": {"every": 0},
        "generator": {"device": "cuda", "engine": {"dtype": "bfloat16"}},
        "trainer": {"device": "cuda", "dtype": "bfloat16"},
    }
    for key, value in (settings or {}).items():
        node = plain
        for part in key.split(".")[:-1]:
            node = node.setdefault(part, {})
        node[key.rpartition(".")[2]] = value
    return validate(plain)


def _specs(**devices: str) -> list[ExecutorSpec]:
    return [
        ExecutorSpec(
            name=name, factory="x:y", device=devices.get(name, "cpu"), num_ranks=devices.get(name, "").count(",") + 1
        )
        for name in dict.fromkeys(("generator", "reward", "trainer", *devices))
    ]


def test_parts_are_the_bytes_by_hand(model: Path) -> None:
    config = _run(model, {"generator.engine.kv_cache_bytes": 12_345, "schedule.max_staleness": 2})
    generator, trainer = held(config, _specs(generator="cuda:0", trainer="cuda:1"))
    assert (generator.role, generator.device) == ("generator", "cuda:0")
    assert generator.sure == {"weights": 2 * N, "KV cache": 12_345}
    assert trainer.sure == {"weights, gradients, moments": 18 * N, "versions handed over": 3 * 2 * N}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"trainer.fsdp": 4}, {"weights, gradients, moments": 16 * N / 4, "versions handed over": 2 * 2 * N / 4}),
        ({"trainer.offload_optimizer": True}, {"weights": 2 * N, "versions handed over": 2 * 2 * N}),
        (
            {"trainer.offload_optimizer": True, "trainer.fsdp": 4},
            {"weights, gradients": 8 * N / 4, "versions handed over": 2 * 2 * N / 4},
        ),
        ({"lora.rank": 8}, {"weights": 2 * N, "versions handed over": 2 * 2 * N, "merged weights": 2 * N}),
        ({"lora.rank": 8, "lora.hand_over": "adapter", "lora.targets": ["q_proj"]}, {"weights": 2 * N}),
        ({"trainer.dtype": "float32"}, {"weights, gradients, moments": 16 * N, "versions handed over": 2 * 2 * N}),
        ({"generator.device": "cpu"}, {"weights, gradients, moments": 18 * N}),
    ],
)
def test_a_trainer_holds_what_its_settings_leave(
    settings: Mapping[str, Any], expected: Mapping[str, float], model: Path
) -> None:
    ranks = int(settings.get("trainer.fsdp", 1))
    found = held(_run(model, settings), _specs(trainer=",".join(f"cuda:{rank}" for rank in range(ranks))))
    assert [one.role for one in found] == ["trainer"] * ranks
    assert found[0].sure == pytest.approx(expected)


def test_a_version_is_held_once_where_roles_take_turns(model: Path) -> None:
    config = _run(model, {"schedule.colocated": True, "schedule.max_staleness": 0})
    found = held(config, _specs(generator="cuda:0", trainer="cuda:0"))
    assert found[1].sure == {"weights, gradients, moments": 18 * N}
    apart, in_turn = GpuMemory(found, {}), GpuMemory(found, {}, ("generator", "trainer"))
    context = 2 * 0.6 * GB
    assert apart.sums(sure=True) == {"cuda:0": pytest.approx(20 * N + context)}
    assert in_turn.sums(sure=True) == {"cuda:0": pytest.approx(18 * N + context)}


def test_an_engine_that_takes_adapters_alone_keeps_their_base(model: Path) -> None:
    settings = {"lora.rank": 8, "lora.hand_over": "adapter", "lora.targets": ["q_proj", "down_proj"]}
    settings |= {"generator.engine.kv_cache_bytes": 1000}
    (generator,) = held(_run(model, settings), _specs(generator="cuda:0"))
    base = 4 * (512 * 512 + 512 * 1024)
    assert generator.sure == {"weights": 2 * N, "KV cache": 1000, "base of adapters": 2 * base}


def test_versions_for_another_host_lie_in_host_memory(model: Path) -> None:
    apart = held(_run(model), _specs(generator="cuda:0@a", trainer="cuda:0@b"))
    assert apart[1].sure == {"weights, gradients, moments": 18 * N}
    there = held(_run(model), _specs(generator="cuda:0@a", trainer="cuda:1@a"))
    assert there[1].sure["versions handed over"] == 2 * 2 * N
    assert GpuMemory(apart, {}).sums(sure=True).keys() == {"cuda:0@a", "cuda:0@b"}


@pytest.mark.parametrize(("every", "device", "versions"), [(5, "cuda", 2 + 1), (1, "cuda", 2 + 2), (5, "cpu", 2)])
def test_versions_that_wait_for_an_evaluator_on_a_gpu_are_held_beside_the_generators(
    every: int, device: str, versions: int, model: Path
) -> None:
    config = _run(model, {"evaluation.every": every, "evaluation.device": device, "run.num_ticks": 20})
    specs = [*_specs(trainer="cuda:0"), ExecutorSpec(name="evaluator", factory="x:y", device="cpu")]
    assert held(config, specs)[0].sure["versions handed over"] == pytest.approx(versions * 2 * N)


def test_what_is_sure_to_be_too_much_is_refused_and_what_may_be_is_said(model: Path) -> None:
    found = held(
        _run(model, {"generator.engine.kv_cache_bytes": 1_000_000_000}), _specs(generator="cuda:0", trainer="cuda:0")
    )
    sure = GpuMemory(found, {}).sums(sure=True)["cuda:0"]
    assert sure == pytest.approx(1 * GB + (2 + 18 + 4) * N + 1.2 * GB)
    with pytest.raises(ConfigError, match=r"cuda:0 has .*generator .* weights, .* KV cache; trainer .*kv_cache_bytes"):
        GpuMemory(found, {"cuda:0": 0.99 * sure}).check()
    tight = GpuMemory(found, {"cuda:0": 1.01 * sure})
    tight.check()
    assert "MORE THAN IT MAY HAVE" in tight.table() and not tight.fits
    wide = GpuMemory(found, {"cuda:0": 80 * GB})
    assert wide.fits and wide.table().startswith("cuda:0: at most") and "MORE" not in wide.table()
    GpuMemory(found, {}).check()  # of a GPU that nobody could ask nothing is known


def test_sizes_of_a_cpu_are_what_they_always_were(model: Path) -> None:
    config = _run(model, {"generator.device": "cpu", "trainer.device": "cpu"})
    fitted = with_sizes(config, Machine(_specs()))
    engine, trainer = fitted.generator.engine, fitted.trainer
    assert (engine.block_size, engine.kv_cache_bytes) == (2, 1 << 30)
    assert (trainer.max_tokens_per_microbatch, trainer.share_prompts) == (4096, True)


@pytest.mark.parametrize(("num_parameters", "tokens"), [(19_999_999, 4096), (20_000_000, 1024)])
def test_micro_batches_of_a_larger_model_on_a_cpu_are_smaller(
    model: Path, num_parameters: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settle, "num_parameters", lambda path: num_parameters)
    config = _run(model, {"generator.device": "cpu", "trainer.device": "cpu"})
    assert with_sizes(config, Machine(_specs())).trainer.max_tokens_per_microbatch == tokens


def test_a_recipe_that_says_its_sizes_keeps_them(model: Path) -> None:
    asked = {
        "generator.engine.block_size": 4, "generator.engine.kv_cache_bytes": 5_000_000,
        "trainer.max_tokens_per_microbatch": 333, "trainer.share_prompts": True,
    }  # fmt: skip
    config = _run(model, asked)
    fitted = with_sizes(config, Machine(_specs(generator="cuda:0", trainer="cuda:0"), gpu_bytes={"cuda:0": 80 * GB}))
    assert fitted == config


@pytest.mark.parametrize(
    ("gigabytes", "devices", "in_turn", "tokens"),
    [
        (80, ("cuda:0", "cuda:1"), (), 16384),
        (80, ("cuda:0", "cuda:0"), (), 16384),
        (80, ("cuda:0", "cuda:0"), ("generator", "trainer"), 16384),
        (3.5, ("cuda:0", "cuda:0"), (), 8192),
        (2.8, ("cuda:0", "cuda:0"), (), 4096),
    ],
)
def test_sizes_of_a_gpu_fill_it_and_fit(
    gigabytes: float, devices: tuple[str, str], in_turn: tuple[str, ...], tokens: int, model: Path
) -> None:
    specs = _specs(generator=devices[0], trainer=devices[1])
    sizes = {"cuda:0": gigabytes * GB, "cuda:1": gigabytes * GB}
    config = _run(model, {"schedule.max_staleness": 0} | ({"schedule.colocated": True} if in_turn else {}))
    fitted = with_sizes(config, Machine(specs, gpu_bytes=sizes, in_turn=in_turn))
    engine, trainer = fitted.generator.engine, fitted.trainer
    assert (engine.block_size, trainer.max_tokens_per_microbatch, trainer.share_prompts) == (16, tokens, False)
    longest = 256 * (1024 + config.generator.sampling.max_new_tokens + 16)  # sequences of so many tokens
    assert engine.kv_cache_bytes <= longest * 4 * 2 * 4 * 64 * 2
    memory = GpuMemory(held(fitted, specs), sizes, in_turn)
    assert memory.fits
    larger = dataclasses.replace(engine, kv_cache_bytes=engine.kv_cache_bytes + (1 << 27))
    beyond = dataclasses.replace(fitted, generator=dataclasses.replace(fitted.generator, engine=larger))
    full = not GpuMemory(held(beyond, specs), sizes, in_turn).fits
    assert full or larger.kv_cache_bytes > longest * 4 * 2 * 4 * 64 * 2


def test_a_gpu_that_nobody_could_ask_gets_the_small_sizes(model: Path) -> None:
    fitted = with_sizes(_run(model), Machine(_specs(generator="cuda:0", trainer="cuda:1")))
    assert fitted.generator.engine.kv_cache_bytes == 1 << 30
    assert (fitted.generator.engine.block_size, fitted.trainer.max_tokens_per_microbatch) == (16, 4096)


@pytest.mark.parametrize(
    ("devices", "behind", "other"),
    [
        ({"generator": "cuda:0", "trainer": "cuda:1"}, "cuda:1", "trainer"),
        ({"generator": "cuda:0,cuda:1"}, "cuda:1", "generator"),
        ({"generator": "cuda:0,cuda:2", "trainer": "cuda:3"}, "cuda:3", "trainer"),
        ({"generator": "cuda:0,cuda:2", "trainer": "cuda:4,cuda:0"}, "", ""),  # the first of them is counted
        ({"generator": "cuda:0@a", "trainer": "cuda:1@b"}, "", ""),
        ({"generator": "cuda:3", "judge": "cuda:0", "trainer": "cuda:1"}, "cuda:1", "trainer"),
    ],
)
def test_a_vllm_over_gpus_takes_none_on_which_another_is_placed(
    devices: Mapping[str, str], behind: str, other: str
) -> None:
    engine = {"name": "vllm", "options": {"tensor_parallel_size": 2}}
    plain: dict[str, Any] = {"evaluation": {"every": 0}, "generator": {"device": "cuda", "engine": engine}}
    if judges := "judge" in devices:
        plain["judge"] = {"path": "m"}
    if not behind:
        prepare._check_gpus_of_vllm(validate(plain), _specs(**devices))
        return
    with pytest.raises(
        ConfigError, match=f"tensor_parallel_size is 2.*takes {behind} too, where '{other}' is"
    ) as refused:
        prepare._check_gpus_of_vllm(validate(plain), _specs(**devices))
    section = "judge" if judges else "generator"
    assert str(refused.value).endswith(
        f"put it by number ({section}.device = 'cuda:N') where as many behind it are free"
    )


def test_a_dry_run_on_gpus_settles_and_shows_what_they_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (placement, preflight):
        monkeypatch.setattr(module, "may_have_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    asked: list[str] = []

    def gpus(executors: Sequence[ExecutorSpec]) -> dict[str, Gpu]:
        asked.extend(spec.name for spec in executors if spec.device.startswith("cuda"))
        return {"cuda:0": Gpu("one kind", 24e9), "cuda:1": Gpu("other kind", 24e9), "cuda:2": Gpu("idle", 1.0)}

    monkeypatch.setattr(prepare, "gpus_here", gpus)
    config = validate(
        {"run": {"dir": str(tmp_path / "run")}, "model": {"path": "bundled:tiny"}, "evaluation": {"every": 0}}
    )
    shown = prepare.plan_run(config)
    assert asked == ["generator", "trainer"]
    for line in ("block_size = 16", "max_tokens_per_microbatch = 16384", "share_prompts = false"):
        assert line in shown
    lines = shown[shown.index("# memory of the GPUs") :].splitlines()[1:3]
    assert [line.split(":")[:2] for line in lines] == [["cuda", "0"], ["cuda", "1"]]
    assert all("of 24.00 GB" in line for line in lines)
    assert prepare.prepare(config).facts == {**platform_facts(), "gpu": "one kind and other kind"}
    small = {"cuda:0": Gpu("one kind", 1e8), "cuda:1": Gpu("one kind", 24e9)}
    monkeypatch.setattr(prepare, "gpus_here", lambda executors: small)
    with pytest.raises(ConfigError, match="cuda:0 has 100.00 MB"):
        prepare.plan_run(config)
