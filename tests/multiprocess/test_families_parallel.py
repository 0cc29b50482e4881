"""Every family in two parts, by FSDP2 and, where it can be cut, by tensor parallelism: the log-probs and gradients of one rank."""

from pathlib import Path

import family_ranks
import pytest
import torch
from family_ranks import tiny_model
from rank_processes import run_meshes
from safetensors.torch import load_file

from llamarl.model_support import FAMILIES

CASES = [f"{family}:fsdp" for family in FAMILIES]
CASES += [f"{name}:tp" for name, family in FAMILIES.items() if "tensor_parallel" not in family]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        tiny_model(family, "eager").save_pretrained(folder / family)
    alone = (0, 1, folder, [f"{family}:fsdp" for family in FAMILIES])
    run_meshes(family_ranks.main, alone, [[(rank, 2, folder, CASES) for rank in range(2)]], limit_s=240)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_what_one_computes(runs: Path, case: str) -> None:
    family, axis = case.split(":")
    alone = load_file(runs / f"{family}-fsdp-1.safetensors")
    cut = load_file(runs / f"{family}-{axis}-2.safetensors")
    assert set(cut) == set(alone)
    torch.testing.assert_close(cut.pop("logprobs"), alone.pop("logprobs"), atol=1e-4, rtol=1e-4)
    largest = max(float(gradient.abs().max()) for gradient in alone.values())
    for name, gradient in alone.items():
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        assert float((cut[name] - gradient).abs().max()) < 1e-3 * scale, name
