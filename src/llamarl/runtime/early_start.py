"""Ranks of a run are on their way while its checks are still going on: what they need is imported first, and once for them and this process."""

from __future__ import annotations

import os

from llamarl.config import RunConfig
from llamarl.controller.standard_graph import colocated_group, llamarl_graph
from llamarl.errors import LlamaRLError
from llamarl.models.folders import resolve_model_path
from llamarl.reading import read_object
from llamarl.runtime.children import shared_modules, start_early
from llamarl.runtime.placement import may_have_gpus, place
from llamarl.runtime.rank_environment import rank_environment

__all__ = ["modules_of_model", "start_fork_servers"]


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
    of_model = modules_of_model(config.model.path)
    threads = [spec.threads for spec in placement.executors for _ in range(spec.num_ranks)]
    last = max(set(threads), key=threads.count)  # those that are started by themselves import meanwhile
    for count in sorted(set(threads), key=lambda count: (count == last, count)):
        modules, may_be_a_fork = shared_modules(placement.executors, count), count == last
        start_early(modules, rank_environment(count), also=of_model, may_be_a_fork=may_be_a_fork)


def modules_of_model(path: str) -> tuple[str, ...]:
    """What loading this model imports, and makes, first; nothing for one that is not here yet, or no folder."""
    if not path.startswith("bundled:") and not os.path.isdir(os.path.expanduser(path)):
        return ()
    try:
        kind = str(read_object(resolve_model_path(path) / "config.json")["model_type"]).replace("-", "_")
    except (LlamaRLError, KeyError, OSError):
        return ()
    return (f"transformers.models.{kind}.modeling_{kind}", "llamarl.models.first_load")
