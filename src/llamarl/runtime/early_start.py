"""Ranks of a run are on their way while its checks are still going on: what they will import is imported beside what this process does."""

from __future__ import annotations

from llamarl.config import RunConfig
from llamarl.controller.standard_graph import colocated_group, llamarl_graph
from llamarl.errors import LlamaRLError
from llamarl.runtime.children import shared_modules, start_early
from llamarl.runtime.local import rank_environment
from llamarl.runtime.placement import may_have_gpus, place

__all__ = ["start_fork_servers"]


def start_fork_servers(config: RunConfig) -> None:
    """Start the fork servers that a run of ``config`` on this machine will ask for. Says nothing of mistakes: the checks that follow do."""
    if config.run.runtime != "local" or config.hosts.wanted or may_have_gpus():
        return
    try:
        graph = llamarl_graph(config)
        cores = config.run.cores or None
        placement = place(graph.executors, cores=cores, cuda_devices=0, colocated=colocated_group(config, graph))
    except LlamaRLError:
        return
    for threads in sorted({spec.threads for spec in placement.executors}):
        start_early(shared_modules(placement.executors, threads), rank_environment(threads))
