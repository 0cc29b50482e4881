"""Generators driven alone, and versions of weights for them."""

from collections.abc import Mapping

import torch

from llamarl.config import RunConfig
from llamarl.controller.graph import llamarl_graph
from llamarl.executors.base import ExecutorContext
from llamarl.executors.generator import GeneratorExecutor

__all__ = ["Version", "ranks_of"]


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


def ranks_of(config: RunConfig) -> list[GeneratorExecutor]:
    """Every rank of a recipe's generator, set up."""
    graph = llamarl_graph(config)
    spec = graph.executors[0]
    ends = {"reads": graph.inputs["generator"], "writes": graph.outputs["generator"]}
    ranks = []
    for rank in range(spec.num_ranks):
        context = ExecutorContext(
            name="generator", rank=rank, num_ranks=spec.num_ranks, device="cpu", run_dir=None, seed=0, **ends
        )
        ranks.append(GeneratorExecutor(config, context))
        ranks[-1].setup()
    return ranks
