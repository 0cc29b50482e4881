"""A scenario whose executors lie on several hosts: where each is, as a run would place it, and what the links between them add."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from llamarl.config import RunConfig
from llamarl.controller.graph import Graph
from llamarl.controller.standard_graph import llamarl_graph
from llamarl.errors import ConfigError, PlanError
from llamarl.models.precision import BFLOAT16_PAYS_FROM
from llamarl.roles import present_roles
from llamarl.runtime.config import HERE, hosts_named, parse_workers
from llamarl.runtime.host_placement import spread
from llamarl.simulator.links import Links, distances, payload_bytes
from llamarl.simulator.scenario import Scenario

__all__ = ["apart", "hosts_of_plan", "hosts_of_recipe", "weight_bytes_of"]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def hosts_of_recipe(config: RunConfig) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """(executor -> the host of each of its ranks, all hosts) as a run of the recipe would place them, ``here`` among them.

    Raises:
        PlanError: The recipe names no hosts, or leaves naming them to Slurm, or names some that there are not.
    """
    if not config.hosts.workers:
        raise PlanError("--link joins hosts, and none are named: add --hosts a,b (and --on trainer=b)")
    names = [worker.address for worker in parse_workers(config.hosts.workers)]
    if len(set(names)) < len(names):  # of one address, with ports
        names = list(config.hosts.workers)
    executors = llamarl_graph(config).executors
    sizes = {role.name: role.units(config) for role in present_roles(config) if role.section}
    try:
        on = {name: hosts_named(found, config.hosts.workers) for name, found in config.hosts.on.items()}
        where = spread(executors, len(names), on, tensor_parallel=sizes)
    except (ConfigError, ValueError) as error:
        raise PlanError(f"hosts: {error}") from None
    named = {-1: HERE, **dict(enumerate(names))}
    return {name: tuple(named[host] for host in ranks) for name, ranks in where.items()}, (HERE, *names)


def hosts_of_plan(scenario: Scenario, devices_per_host: int) -> dict[str, tuple[str, ...]]:
    """Executor -> its hosts where each role fills hosts of its own, named by numbers; rewards and controller are with the trainer."""
    count = {
        "trainer": -(-scenario.trainer_devices // devices_per_host),
        "generator": -(-scenario.generator_devices // devices_per_host),
    }
    trainer = tuple(f"trainer{number}" for number in range(count["trainer"]))
    return {
        "trainer": trainer,
        "generator": tuple(f"generator{number}" for number in range(count["generator"])),
        "reward": trainer[:1],
    }


def weight_bytes_of(config: RunConfig, num_parameters: float) -> float:
    """Of one version as it travels: in the generator's dtype, or in that of its unlike replicas."""
    dtype = config.generator.served_dtype
    return num_parameters * (
        _BYTES.get(dtype, 4) if dtype != "auto" else 2 if num_parameters >= BFLOAT16_PAYS_FROM else 4
    )


def apart(
    scenario: Scenario,
    where: Mapping[str, Sequence[str]],
    links: Links,
    *,
    controller: str,
    weight_bytes: float,
    by_tree: bool = False,
) -> Scenario:
    """``scenario`` with what the links between its hosts add.

    Args:
        where: Executor -> hosts of its ranks.
        controller: The host of the controller.
        weight_bytes: Of one version as it travels.
        by_tree: The scenario's own hand-over (``weights_load_s``) counts links already, and is replaced.
    """
    roles = {spec.name for spec in scenario.graph.executors}
    graph: Graph = scenario.graph
    sequences = scenario.prompts_per_step * scenario.group_size
    found = distances(
        {name: hosts for name, hosts in where.items() if name in roles},
        graph.channels,
        links,
        controller=controller,
        data_bytes=payload_bytes(sequences, sequences * scenario.lengths.mean),
        weight_bytes=weight_bytes,
    )
    load_s = 0.0 if by_tree else scenario.weights_load_s
    return dataclasses.replace(scenario, distances=found, weights_load_s=load_s)
