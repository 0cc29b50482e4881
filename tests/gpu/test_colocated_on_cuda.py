"""Trainer and generator in turn on one GPU: what waits holds nothing there, and no bit changes."""

from pathlib import Path

import pytest
import torch
from test_run_on_cuda import BFLOAT16, train
from training_fixtures import make_groups, write_model

from llamarl.engine.engine import NativeEngine
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.engine import EngineConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer.step import Trainer


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"offload_optimizer": True}], ids=str)
def test_parked_trainer_holds_no_device_memory_and_comes_back(
    settings: dict[str, object], device: torch.device, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model")
    before = torch.cuda.memory_allocated(device)
    stays, parked = (
        Trainer(
            folder,
            TrainerConfig(**settings),  # type: ignore[arg-type]
            OptimizerConfig(lr=1e-2),
            AlgorithmConfig(),
            temperature=1.0,
            device="cuda:0",
        )
        for _ in range(2)
    )
    for tick in range(3):
        groups = make_groups(seed=tick)
        assert parked.train(groups, tick) == stays.train(groups, tick)
        held = torch.cuda.memory_allocated(device)
        freed = parked.park()
        assert freed > 0 and held - torch.cuda.memory_allocated(device) >= freed
        handed = parked.parameters_for_sync()
        assert all(tensor.device.type == "cpu" for tensor in handed.values())
        for name, tensor in stays.parameters_for_sync().items():
            assert torch.equal(tensor.cpu(), handed[name]), name
        parked.unpark()
    assert torch.cuda.memory_allocated(device) > before


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_parked_engine_holds_no_device_memory(quantization: str, device: torch.device) -> None:
    if quantization == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    config = EngineConfig(kv_cache_bytes=64 << 20, dtype="bfloat16")
    engine = NativeEngine("bundled:tiny", config, device=device, quantization=quantization)
    held = torch.cuda.memory_allocated(device)
    freed = engine.park()
    assert freed > 60 << 20 and held - torch.cuda.memory_allocated(device) >= freed


@pytest.mark.parametrize("settings", [{}, BFLOAT16], ids=["float32", "bfloat16"])
def test_co_located_job_gives_the_bits_of_the_synchronous_one(settings: dict[str, object], tmp_path: Path) -> None:
    common = {"schedule.max_staleness": 0, "run.runtime": '"local"', "evaluation.every": 0, **settings}
    threads = {"generator.threads": 1, "trainer.threads": 1}
    runs = {}
    for name, value in (("apart", "false"), ("together", "true")):
        rows = train(tmp_path / name, {**common, **threads, "schedule.colocated": value})
        runs[name] = [{key: v for key, v in row.items() if "parked" not in key} for row in rows]
    assert runs["apart"] == runs["together"]
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in runs]
    assert weights[0] == weights[1]
