"""The Ray cluster of one job: joined as its driver, its nodes asked what they are, their cores and GPUs taken.

    why_refused (ray status, a process of its own) ─▶ connect (ray.init) ─▶ nodes, inventories (a task a node)
    take: one placement group for all nodes of a layout ─▶ a HostAgent in each bundle ─▶ close: agents, groups, connection

Ray starts and reports; it never does anything again (``max_restarts = 0``). Its public interface alone is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from llamarl.controller.config import HERE, is_address
from llamarl.errors import ConfigError, TransferError
from llamarl.plural import plural
from llamarl.runtime.ray.inventory import Inventory, health_of, take_inventory

__all__ = ["Cluster", "Node", "check_access", "connect", "one_line", "why_refused"]

_ASK_S = 15.0
"""For the head to answer at all; that a token is wrong it says in less than one."""
_INVENTORY_S = 60.0
_AGENT_S = 60.0
_END_S = 8.0
_RAY = (2, 60)
"""The oldest that pyproject.toml takes."""
_HEAD = "node:__internal_head__"
T = TypeVar("T")


@dataclass(frozen=True)
class Node:
    """Of a cluster, alive when the job began."""

    name: str
    """As Ray calls it (``ray start --node-name``), by itself its address."""
    address: str
    node_id: str
    cores: int
    gpus: int
    is_head: bool = False


class Cluster:
    """See the module. Any thread."""

    def __init__(
        self,
        nodes: Sequence[Node],
        inventories: Sequence[Inventory],
        here: int,
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        self.nodes, self.inventories = tuple(nodes), tuple(inventories)
        self.left_out = left_out or {}
        """Nodes that can take no part -> why."""
        self.here = here
        """The node that this process is on."""
        self._agents: dict[int, Any] = {}
        self._groups: list[Any] = []
        self._bundles: dict[int, tuple[Any, int]] = {}
        """Node -> placement group, and which of its bundles is there."""
        self._gpus: dict[int, list[str]] = {}
        self._lock = threading.RLock()
        self._closed = False

    @property
    def told_s(self) -> float:
        """How long it may take until the cluster knows that a node is gone to which the cable was cut."""
        return health_of(self._head.health)[1]

    @property
    def _head(self) -> Inventory:
        return next(
            (own for node, own in zip(self.nodes, self.inventories, strict=True) if node.is_head), self.inventories[0]
        )

    def lines(self) -> list[str]:
        """What a dry run says of it: who may use it, what can be read on the way, how soon a death is known."""
        import ray

        head = self._head
        ended_s, cut_s = health_of(head.health)
        return [
            f"nodes: {', '.join(f'{n.name} ({n.cores} cores, {n.gpus} GPUs)' for n in self.nodes)}; the controller is on "
            f"{self.nodes[self.here].name}",
            *(f"left out: {name}, {why}" for name, why in self.left_out.items()),
            _free(ray.cluster_resources(), ray.available_resources()),
            "token: asked for"
            if head.token
            else "token: NOT asked for, whoever reaches the head runs code here: RAY_AUTH_MODE=token and `ray get-auth-token --generate`",
            f"TLS: on, {head.tls.authority} has signed all nodes"
            if head.tls
            else "TLS: off, the token and all data can be read on the way: set RAY_USE_TLS=1 on networks that others use",
            f"health: a node that ends is known after about {ended_s:g} s, one that is cut off after {cut_s:g} s "
            f"({', '.join(f'RAY_health_check_{name}={value}' for name, value in head.health.items())} on the head)",
        ]

    def alive(self, number: int) -> bool:
        """Whether the cluster counts the node among those that live."""
        import ray

        return any(node["Alive"] and node["NodeID"] == self.nodes[number].node_id for node in ray.nodes())

    def submit(self, number: int, work: Callable[..., Any], *arguments: Any) -> Any:
        """Have a function of ours called on a node, once; a Ray reference to its result."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        pinned = NodeAffinitySchedulingStrategy(self.nodes[number].node_id, soft=False)
        return ray.remote(work).options(num_cpus=0, max_retries=0, scheduling_strategy=pinned).remote(*arguments)

    def call(self, number: int, within_s: float, work: Callable[..., T], *arguments: Any) -> T:
        """The result of a function of ours on a node.

        Raises:
            TransferError: It does not come.
        """
        import ray
        from ray.exceptions import RayError

        try:
            result: T = ray.get(self.submit(number, work, *arguments), timeout=within_s)
        except RayError as error:
            raise TransferError(f"node {self.nodes[number].name}: {one_line(error)}") from error
        return result

    def take(self, shares: Mapping[int, tuple[int, int]], within_s: float) -> str:
        """Take cores and GPUs of nodes, of all or of none.

        Args:
            shares: Node -> cores, GPUs.

        Returns:
            Why it could not be had, in words; empty: it is ours.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        with self._lock:
            numbers = list(shares)
            group = placement_group(
                [_resources(*shares[number]) for number in numbers],
                strategy="SPREAD",
                bundle_label_selector=[{"ray.io/node-id": self.nodes[number].node_id} for number in numbers],
            )
            if not group.wait(within_s):
                remove_placement_group(group)
                wanted = "; ".join(f"{self.nodes[n].name} {_cores_and_gpus(c, g)}" for n, (c, g) in shares.items())
                return f"the cluster did not give all of this within {within_s:g} s: {wanted}. Others may hold it: ray status shows who"
            self._groups.append(group)
            for place, number in enumerate(numbers):
                self._bundles.setdefault(number, (group, place))
                if shares[number][1]:
                    self._gpus[number] = self._gpus.get(number, []) + _gpu_ids(
                        group, place, shares[number][1], within_s
                    )
        return ""

    def gpus(self, number: int) -> Sequence[str]:
        """What Ray calls the GPUs of a node that are ours, in the order of our own device numbers."""
        return tuple(self._gpus.get(number, ()))

    def agent(self, number: int) -> Any:
        """The agent on a node of which something was taken; started when it is first asked for.

        Raises:
            ConnectionError: It does not start.
        """
        with self._lock:
            if number not in self._agents:
                self._agents[number] = self._start(number)
            return self._agents[number]

    def forget(self, number: int) -> None:
        """The agent of a node is to end, if it has not: whoever asks for one there gets another."""
        import ray

        with self._lock:
            if (agent := self._agents.pop(number, None)) is not None:
                ray.kill(agent)

    def end_ranks(self, within_s: float) -> None:
        """Have every agent end the ranks that it holds."""
        import ray

        with self._lock:
            if ending := [agent.end.remote() for agent in self._agents.values()]:
                ray.wait(ending, num_returns=len(ending), timeout=within_s)

    def close(self) -> None:
        """End all agents with what they started, give back what was taken, leave the cluster. Idempotent."""
        import ray
        from ray.util.placement_group import remove_placement_group

        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.end_ranks(_END_S)
            for agent in self._agents.values():
                ray.kill(agent)
            for group in self._groups:
                remove_placement_group(group)
        ray.shutdown()

    def _start(self, number: int) -> Any:
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from llamarl.runtime.ray.host_agent import HostAgent

        group, place = self._bundles[number]
        resources = group.bundle_specs[place]
        actor: Any = ray.remote(HostAgent)
        agent = actor.options(
            num_cpus=resources.get("CPU", 0),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, place),
        ).remote(self.inventories[number])
        try:
            ray.get(agent.now_s.remote(), timeout=_AGENT_S)
        except RayError as error:
            ray.kill(agent)
            raise ConnectionError(
                f"node {self.nodes[number].name}: no agent starts there ({one_line(error)})"
            ) from error
        return agent


def connect(address: str, ports: tuple[int, int] = (0, 0)) -> Cluster:
    """Join a cluster as the driver of one job, and ask all its nodes what they are.

    Args:
        address: ``auto`` or ``HOST:PORT``.
        ports: On which processes of the job may listen; (0, 0): any.

    Raises:
        ConfigError: As :func:`check_access`, or a node cannot say what it is.
    """
    check_access(address)
    import ray
    from ray.exceptions import RayError

    before = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.redirect_stderr(open(os.devnull, "w", encoding="utf-8")):
            ray.init(address, log_to_driver=False, configure_logging=False)
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--cluster {address}: {one_line(error)}") from error
    finally:
        signal.signal(signal.SIGTERM, before)  # ours ends a run in order
    try:
        return _with_inventories(ports)
    except BaseException:
        ray.shutdown()
        raise


def _with_inventories(ports: tuple[int, int]) -> Cluster:
    import ray
    from ray.exceptions import RayError

    from llamarl.determinism import platform_facts
    from llamarl.runtime.host_placement import Machine, unlike

    here_id = ray.get_runtime_context().get_node_id()
    nodes = sorted((_node(node) for node in ray.nodes() if node["Alive"]), key=lambda node: _natural(node.name))
    cluster = Cluster(nodes, (), 0)
    asked = [cluster.submit(n, take_inventory, one.address, one.cores, one.gpus, ports) for n, one in enumerate(nodes)]
    until = time.monotonic() + _INVENTORY_S
    told: dict[str, Inventory] = {}
    left_out: dict[str, str] = {}
    here = Machine(HERE, 0, 0, platform_facts())
    for node, answer in zip(nodes, asked, strict=True):
        try:
            told[node.node_id] = inventory = ray.get(answer, timeout=max(0.1, until - time.monotonic()))
        except (RayError, ImportError) as error:
            left_out[node.name] = f"which does not say what it is, as one without llamarl: {one_line(error)}"
            continue
        if differs := unlike([here, Machine(node.name, 0, 0, inventory.facts)], allow=True):
            left_out[node.name] = f"where software differs: {'; '.join(differs)}"
            del told[node.node_id]
    taking_part = [node for node in nodes if node.node_id in told]
    own = [number for number, node in enumerate(taking_part) if node.node_id == here_id]
    if not own:
        name = next(node.name for node in nodes if node.node_id == here_id)
        raise ConfigError(
            f"the node of this process cannot take part: {name}, {left_out[name]}. Start Ray there with the Python of this llamarl"
        )
    return Cluster(taking_part, [told[node.node_id] for node in taking_part], own[0], left_out)


@functools.cache
def check_access(address: str) -> None:
    """See that the cluster at an address takes orders of this user; asked once in a process, early:
    nothing large is imported.

    Raises:
        ConfigError: Ray is not installed, nothing answers, or the token is not the cluster's.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--cluster needs Ray: pip install 'llamarl[cluster]', on every node")
    have = importlib.metadata.version("ray")
    if tuple(int(digits) for digits in re.findall("[0-9]+", have)[:2]) < _RAY:
        raise ConfigError(
            f"--cluster needs Ray {_RAY[0]}.{_RAY[1]}, and here is {have}: pip install 'llamarl[cluster]', on every node"
        )
    if address != "auto" and not is_address(address):
        raise ConfigError(f"--cluster {address}: must be auto or HOST:PORT, such as 10.0.0.1:6379")
    if refusal := why_refused(address):
        raise ConfigError(f"--cluster {address}: {refusal}")


def why_refused(address: str) -> str:
    """Why the cluster at an address takes no orders of this user, in a line; empty: it does.

    Asked by ``ray status`` in a process of its own: inside ``ray.init`` a wrong token is tried for
    20 s and a missing one aborts the process.
    """
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "status"]
    try:
        asked = subprocess.run(
            [*command, *(() if address == "auto" else ("--address", address))],
            capture_output=True,
            text=True,
            timeout=_ASK_S,
        )
    except subprocess.TimeoutExpired:
        return f"nothing answers there within {_ASK_S:g} s; is its head up (ray start --head)?"
    if not asked.returncode:
        return ""
    if "authentication token" in asked.stderr.lower():
        has_none = "couldn't find" in asked.stderr
        which = "this user has no token" if has_none else "the token of this user is missing or not that cluster's"
        return f"{which}: put it into ~/.ray/auth_token (or RAY_AUTH_TOKEN_PATH), with RAY_AUTH_MODE=token"
    if address == "auto" and "find any running Ray instance" in asked.stderr:
        return "no Ray cluster runs on this machine: ray start --head begins one, HOST:PORT names one elsewhere"
    said = [line for line in asked.stderr.splitlines() if line.strip()]
    return said[-1].strip() if said else f"ray status ends with {asked.returncode}"


def one_line(error: BaseException) -> str:
    """What Ray raises, without the twenty lines around it."""
    cause = getattr(error, "cause", None)
    text = str(cause) if isinstance(cause, BaseException) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(?:Error|Exception)\b: ", line)]
    return f"Ray: {(named[-1:] or lines[:1] or [type(error).__name__])[0][:300]}"


def _node(found: Mapping[str, Any]) -> Node:
    resources = found["Resources"]
    return Node(
        name=str(found["NodeName"] or found["NodeManagerAddress"]),
        address=str(found["NodeManagerAddress"]),
        node_id=str(found["NodeID"]),
        cores=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        is_head=_HEAD in resources,
    )


def _cores_and_gpus(cores: float, gpus: float) -> str:
    return plural(int(cores), "core") + (f" and {plural(int(gpus), 'GPU')}" if gpus else "")


def _free(all_of_it: Mapping[str, float], free: Mapping[str, float]) -> str:
    """What of a cluster nobody holds now, for people."""
    now, ever = (_cores_and_gpus(one.get("CPU", 0), one.get("GPU", 0)) for one in (free, all_of_it))
    return f"free now: {now} of {ever}"


def _resources(cores: int, gpus: int) -> dict[str, float]:
    wanted = {"CPU": float(cores), "GPU": float(gpus)}
    return {name: count for name, count in wanted.items() if count} or {"CPU": 0.001}


def _gpu_ids(group: Any, place: int, count: int, within_s: float) -> list[str]:
    """Which GPUs a bundle holds: a task that asks for them all is told."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    pinned = PlacementGroupSchedulingStrategy(group, place)
    asked = ray.remote(_own_gpus).options(num_cpus=0, num_gpus=count, max_retries=0, scheduling_strategy=pinned)
    found: list[str] = ray.get(asked.remote(), timeout=within_s)
    return found


def _own_gpus() -> list[str]:
    import ray

    return [str(one) for one in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


def _natural(name: str) -> list[tuple[int, str]]:
    """Node 10 after node 9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]
