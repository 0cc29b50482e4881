"""What is counted of a step."""

import torch

from llamarl.models.parallel import ParallelLayout
from llamarl.trainer.statistics import StepStatistics


def test_more_tokens_than_a_float32_can_count_are_counted_exactly() -> None:
    count = (1 << 24) + 1
    statistics = StepStatistics([], 0, ParallelLayout(fsdp=1, tp=1, mesh=None), torch.device("cpu"))
    statistics.add({"entropy": torch.tensor(1.0)}, num_computed=count, num_trained=count)
    assert statistics.metrics()["tokens/computed"] == count and statistics.num_observed == count
