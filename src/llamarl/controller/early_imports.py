"""The imports of a run's processes, begun while its recipe is checked: they take seconds of a core. Imports no torch itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamarl.config import RunConfig

__all__ = ["modules_of_model", "start_fork_servers"]


def start_fork_servers(config: RunConfig) -> None:
    """Preload imports in fork servers while the recipe is checked. Says nothing of mistakes: the
    checks that follow do."""
    from llamarl.controller.graph import colocated_group, llamarl_graph
    from llamarl.determinism import rank_environment
    from llamarl.errors import LlamaRLError
    from llamarl.runtime.fork_server import shared_modules, start_early
    from llamarl.runtime.placement import here, may_have_gpus, place

    if config.run.runtime != "local" or config.hosts.wanted or may_have_gpus():
        return
    try:
        graph = llamarl_graph(config)
        machine = here(cores=config.run.cores or None, cuda_devices=0)
        placement = place(graph.executors, [machine], colocated=colocated_group(config, graph))
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
    from llamarl.errors import LlamaRLError
    from llamarl.models.folders import resolve_model_path
    from llamarl.reading import read_object

    if not path.startswith("bundled:") and not os.path.isdir(os.path.expanduser(path)):
        return ()
    try:
        kind = str(read_object(resolve_model_path(path) / "config.json")["model_type"]).replace("-", "_")
    except (LlamaRLError, KeyError, OSError):
        return ()
    return (f"transformers.models.{kind}.modeling_{kind}",)
