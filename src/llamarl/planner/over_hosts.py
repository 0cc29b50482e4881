"""A plan over several hosts: what their network does to the hardware, and which hosts each role gets. Pure.

A run spreads the ranks of a role evenly over its hosts, tensor-parallel peers together, so a plan has a placement where each role
has hosts of its own, or where an even share of both roles fits on every host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from llamarl.planner.hardware import Hardware
from llamarl.planner.search import Plan

__all__ = ["hosts_needed", "most_on_a_host", "place_roles", "with_network"]


def with_network(hardware: Hardware, *, bytes_per_s: float, round_trip_s: float) -> Hardware:
    """``hardware`` whose hosts are joined by links of a host that reach ``bytes_per_s`` each way, as measured.

    The devices of a host share its link, and nothing is taken off its rate for protocols.
    """
    device = hardware.device
    each = bytes_per_s / device.devices_per_node / hardware.efficiency.link
    sources = {**device.sources, "inter_node_bytes_per_s": "--link, of a host, over its devices"}
    changed = replace(device, inter_node_bytes_per_s=each, sources=sources)
    return replace(hardware, device=changed).with_efficiency(inter_node_latency_s=round_trip_s / 2.0)


def hosts_needed(devices: int, hardware: Hardware) -> int:
    """Hosts that hold so many devices."""
    return -(-devices // hardware.device.devices_per_node)


def place_roles(plan: Plan, hardware: Hardware, hosts: Sequence[str]) -> dict[str, list[str]] | None:
    """Executor -> its hosts, as ``hosts.on`` has them; None: such a run would put more on some host than it has.

    Args:
        hosts: By name; those at the end may stay without a role.
    """
    room, g, t = hardware.device.devices_per_node, plan.generator, plan.trainer.layout
    if plan.system != "separate":
        share = most_on_a_host(g.devices, g.layout.tp * g.layout.cp, len(hosts))
        return {"generator": list(hosts), "trainer": list(hosts)} if share <= room else None
    for first in range(1, len(hosts)):
        for last in range(1, len(hosts) - first + 1):
            own = (
                most_on_a_host(g.devices, g.layout.tp * g.layout.cp, first),
                most_on_a_host(t.devices, t.tp * t.pp * t.cp, last),
            )
            if max(own) <= room:
                return {"generator": list(hosts[:first]), "trainer": list(hosts[first : first + last])}
    if (
        most_on_a_host(g.devices, g.layout.tp * g.layout.cp, len(hosts))
        + most_on_a_host(t.devices, t.tp * t.pp * t.cp, len(hosts))
        <= room
    ):
        return {"generator": list(hosts), "trainer": list(hosts)}
    return None


def most_on_a_host(devices: int, unit: int, hosts: int) -> int:
    """On one of them, if units of tensor-parallel peers are spread evenly: a host without a unit would hold parts of one."""
    units = devices // unit
    return math.ceil(units / hosts) * unit if units >= hosts else math.ceil(devices / hosts)
