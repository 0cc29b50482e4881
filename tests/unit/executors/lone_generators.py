"""Generators driven alone, and versions of weights for them."""

from collections.abc import Mapping
from pathlib import Path

import torch

from llamarl.config import RunConfig
from llamarl.controller.graph import llamarl_graph
from llamarl.executors.base import ExecutorContext
from llamarl.executors.generator import GeneratorExecutor

__all__ = ["Version", "generator", "ranks_of"]


class Version:
    """Weights of version v: the first ones times 1 + v / 100."""

    parameters: Mapping[str, object] = {}  # so that no engine takes them as they lie

    def __init__(self, version: int) -> None:
        self.version = version

    def load_into(self, tensors: Mapping[str, torch.Tensor], layout: object = None) -> None:
        if not _FIRST:
            _FIRST.update({name: tensor.clone() for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            tensor.copy_(_FIRST[name]).mul_(1.0 + 0.01 * self.version)


_FIRST: dict[str, torch.Tensor] = {}


def generator(config: RunConfig, run_dir: Path | None = None, rank: int = 0) -> GeneratorExecutor:
    """A rank of a recipe's generator, set up."""
    graph = llamarl_graph(config)
    ends = {"reads": graph.inputs["generator"], "writes": graph.outputs["generator"]}
    num_ranks = graph.executors[0].num_ranks
    context = ExecutorContext(
        name="generator", rank=rank, num_ranks=num_ranks, device="cpu", run_dir=run_dir, seed=0, **ends
    )
    executor = GeneratorExecutor(config, context)
    executor.setup()
    return executor


def ranks_of(config: RunConfig) -> list[GeneratorExecutor]:
    return [generator(config, rank=rank) for rank in range(llamarl_graph(config).executors[0].num_ranks)]
