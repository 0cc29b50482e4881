"""Tensors counted in real trainer ranks against the planner's forecast; benchmarks/memory_forecast.py has twenty layouts."""

from pathlib import Path

import pytest
import torch
from memory_forecast import LONG, MODEL, PROMPT, SPARSE, LiveBytes, forecast, measure
from transformers import AutoConfig, AutoModelForCausalLM

from llamarl.forecast.ticks import TrainerLayout

SMALL = {
    **MODEL,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "vocab_size": 4096,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL), dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "layout",
    [
        TrainerLayout(micro_batch=2, recompute=False),
        TrainerLayout(pp=2, micro_batch=1, recompute=False),
        TrainerLayout(fsdp=2, micro_batch=2),
    ],
)
def test_each_part_of_a_ranks_memory_is_forecast_within_a_tenth(folder: Path, layout: TrainerLayout) -> None:
    sequences = 4 * layout.micro_batch * layout.fsdp
    fullest = max(measure(str(folder), layout, sequences), key=lambda found: found["sum"])
    said = forecast(layout, sequences, SMALL)
    assert {part: said[part] / size for part, size in fullest.items()} == pytest.approx(
        dict.fromkeys(said, 1.0), abs=0.1
    )


@pytest.mark.long
def test_experts_over_ranks_that_share_data_are_forecast_within_a_tenth(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SPARSE), dtype=torch.float32).save_pretrained(tmp_path)
    layout = TrainerLayout(fsdp=2, ep=2, micro_batch=2, recompute=False)
    fullest = max(measure(str(tmp_path), layout, 16), key=lambda found: found["sum"])
    said = forecast(layout, 16, SPARSE)
    assert {part: said[part] / size for part, size in fullest.items()} == pytest.approx(
        dict.fromkeys(said, 1.0), abs=0.1
    )


def test_bytes_are_counted_from_making_to_freeing() -> None:
    held = torch.zeros(1000)  # 4,000 bytes
    with LiveBytes([held]) as counted:
        first = torch.ones(500)
        view = first[:10]
        second = first + 1
        del first
        assert counted.live == 4000 + 2000 + 2000  # the view keeps the whole
        del view
        third = second * 2
        storage = third.untyped_storage()
        storage.resize_(0)
        assert counted.live == 4000 + 2000
    assert counted.peak == 4000 + 2000 + 2000


def test_one_long_sequence_whose_rows_are_cut_is_forecast_within_a_tenth(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**LONG), dtype=torch.float32).save_pretrained(tmp_path)
    layout, response = TrainerLayout(cp=2, recompute=False), 8192 - PROMPT
    fullest = max(measure(str(tmp_path), layout, 1, response), key=lambda found: found["sum"])
    said = forecast(layout, 1, LONG, response)
    assert {part: said[part] / size for part, size in fullest.items()} == pytest.approx(
        dict.fromkeys(said, 1.0), abs=0.1
    )
