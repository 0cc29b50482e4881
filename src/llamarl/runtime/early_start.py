"""Ranks of a run are on their way while its checks are still going on: what they will import is imported beside what this process does."""

from __future__ import annotations

import glob
import os

from llamarl.config import RunConfig
from llamarl.controller.standard_graph import colocated_group, llamarl_graph
from llamarl.errors import LlamaRLError
from llamarl.runtime.children import shared_modules, start_early
from llamarl.runtime.local import rank_environment
from llamarl.runtime.placement import place

__all__ = ["start_fork_servers"]


def start_fork_servers(config: RunConfig) -> None:
    """Start the fork servers that a run of ``config`` on this machine will ask for. Says nothing of mistakes: the checks that follow do."""
    if config.run.runtime != "local" or _may_have_gpus():
        return
    try:
        graph = llamarl_graph(config)
        cores = config.run.cores or None
        placement = place(graph.executors, cores=cores, cuda_devices=0, colocated=colocated_group(config, graph))
    except LlamaRLError:
        return
    for threads in sorted({spec.threads for spec in placement.executors}):
        start_early(shared_modules(placement.executors, threads), rank_environment(threads))


def _may_have_gpus() -> bool:
    """Asked of the system, since torch takes seconds to say."""
    return bool(glob.glob("/dev/nvidia[0-9]*")) or os.path.exists("/dev/kfd")
