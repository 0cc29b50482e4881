"""What hosts have, as an answer to ``llamarl plan --devices``: from a file, or from the workers that run on them.

inventory.toml ───────────────────────────────┐
--devices inventory --hosts a,b ─▶ workers ───┴▶ host, kind, number ─▶ pools, and the hosts of each kind
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.errors import PlanError

if TYPE_CHECKING:
    from llamarl.planner.replica_times import Pool
    from llamarl.runtime.hosts.inventory import Inventory

__all__ = ["ASKED", "HostDevices", "from_inventories", "hosts_asked", "is_inventory", "pools_of", "read_inventory"]

ASKED = "inventory"
"""``--devices inventory``: what the hosts' workers tell."""


@dataclass(frozen=True)
class HostDevices:
    """A host, and its devices of one kind."""

    name: str
    kind: str
    """As ``--hardware`` takes it."""
    count: int


def is_inventory(devices: object) -> bool:
    """Whether ``--devices`` asks for what hosts have, instead of saying it."""
    return isinstance(devices, str) and (devices == ASKED or devices.endswith(".toml"))


def read_inventory(path: Path) -> list[HostDevices]:
    """Of a file with a table ``[hosts]``: name = "8:h100-sxm".

    Raises:
        PlanError: It is another file, or a line says something else.
        FileError: It cannot be read.
    """
    from llamarl.planner.hardware import find_hardware
    from llamarl.reading import read_toml

    table = read_toml(path).get("hosts")
    if not isinstance(table, dict) or not table:
        raise PlanError(f'--devices {path}: expected a table [hosts] with lines such as a = "8:h100-sxm"')
    found = []
    for name, text in table.items():
        count, _, kind = str(text).partition(":")
        if not isinstance(text, str) or not count.strip().isdigit() or not int(count) or not kind.strip():
            raise PlanError(f'--devices {path}: {name} = {text!r} is no number and kind, such as "8:h100-sxm"')
        found.append(HostDevices(name, find_hardware(kind).device.name, int(count)))
    return found


def hosts_asked(hosts: dict[str, Any]) -> list[HostDevices]:
    """What the workers on the hosts of a recipe's section ``hosts`` tell of them.

    Raises:
        PlanError: No host is named, one has no GPU, or one of which no rates are known.
        ConfigError: A host does not answer.
    """
    from llamarl.config import validate
    from llamarl.controller.job_hosts import open_hosts

    found = open_hosts(validate({"hosts": hosts}))
    if found is None:
        raise PlanError(f"--devices {ASKED} asks the workers of hosts: name them, --hosts a,b,c")
    try:
        return from_inventories([worker.name for worker in found.workers.workers], found.inventories)
    finally:
        found.close()


def from_inventories(names: Sequence[str], inventories: Sequence[Inventory]) -> list[HostDevices]:
    """Host by host what its devices are called in a plan.

    Raises:
        PlanError: One has no GPU, or one of which no rates are known, or several kinds.
    """
    from llamarl.planner.hardware import device_names, kind_of_gpu

    found = []
    for name, inventory in zip(names, inventories, strict=True):
        gpus = set(inventory.device_names)
        if not gpus:
            raise PlanError(f"--devices {ASKED}: {name} has no GPU: leave it out; plans for hosts count GPUs")
        kinds = {kind_of_gpu(gpu) for gpu in gpus}
        if len(kinds) > 1 or None in kinds:
            raise PlanError(
                f"--devices {ASKED}: {name} has {', '.join(sorted(gpus))}, of which no rates are known: say in a file what to count "
                f'them as, {name} = "{len(inventory.device_names)}:KIND", and give that (--devices FILE.toml); known are '
                f"{', '.join(device_names())}"
            )
        found.append(HostDevices(name, str(kinds.pop()), len(inventory.device_names)))
    return found


def pools_of(hosts: Sequence[HostDevices]) -> tuple[list[Pool], dict[str, list[str]]]:
    """The devices of each kind, in the order of the first host of each, and the names of its hosts.

    Raises:
        PlanError: Hosts of one kind have unlike numbers of devices, over which no role spreads evenly.
    """
    from llamarl.planner.hardware import find_hardware
    from llamarl.planner.replica_times import Pool

    names: dict[str, list[str]] = {}
    counts: dict[str, set[int]] = {}
    for host in hosts:
        names.setdefault(host.kind, []).append(host.name)
        counts.setdefault(host.kind, set()).add(host.count)
    pools = []
    for kind, own in names.items():
        if len(counts[kind]) > 1:
            each = ", ".join(f"{host.name} {host.count}" for host in hosts if host.kind == kind)
            raise PlanError(
                f"hosts with {kind} have unlike numbers of them ({each}): roles spread evenly; leave some out"
            )
        each_has = counts[kind].pop()
        hardware = find_hardware(kind)
        hardware = replace(hardware, device=replace(hardware.device, devices_per_node=each_has))
        pools.append(Pool(hardware=hardware, devices=each_has * len(own)))
    return pools, names
