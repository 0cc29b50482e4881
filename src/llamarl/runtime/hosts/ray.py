"""The Ray cluster of one job: joined as its driver, its nodes asked what they are, their cores and GPUs taken.

    why_refused (ray status, a process of its own) ─▶ connect (ray.init) ─▶ nodes (a task on each tells)
    take: one placement group for all nodes of a layout ─▶ a HostAgent in each bundle ─▶ close: agents, groups, connection

Ray starts and reports; it never does anything again (``max_restarts = 0``). Its public interface alone is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llamarl.errors import ConfigError, TransferError
from llamarl.plural import plural
from llamarl.runtime.hosts.cluster import Agent, Cluster, end_ranks
from llamarl.runtime.hosts.node import Node, facts_of_this_node
from llamarl.settings.job import HERE
from llamarl.transports.network import TlsFiles

__all__ = ["RayCluster", "RayNode", "health_of", "one_line", "this_node", "why_refused"]

_ASK_S = 15.0
"""For the head to answer at all; that a token is wrong it says in less than one."""
_IMPORT_S = 120.0
"""For Ray's program to be read, some thousand files, from a network disk that has not read them yet; on each node."""
_STATUS = "import sys, ray.scripts.scripts as ray; print(flush=True); sys.argv[:1] = ['ray', 'status']; ray.main()"
_AGENT_S = 60.0
_END_S = 8.0
_LOOK_S = 0.1
_RAY = (2, 60)
"""The oldest that pyproject.toml takes."""
_HEAD = "node:__internal_head__"
_TOKEN = "RAY_AUTH_TOKEN_PATH"
T = TypeVar("T")

_HEALTH = {"initial_delay_ms": 5000, "period_ms": 3000, "timeout_ms": 10000, "failure_threshold": 5}
"""Ray's defaults of ``RAY_health_check_*``, as the head asks nodes for signs of life."""


@dataclass(frozen=True, kw_only=True)
class RayNode(Node):
    """A node with how its Ray is set up; ``name`` is that of ``ray start --node-name``, by itself its address."""

    node_id: str
    is_head: bool
    token: bool
    """Whether its Ray asks for a token."""
    health: Mapping[str, int]
    """Its ``RAY_health_check_*`` without the beginning, milliseconds and a count; those of the head decide."""


class RayCluster(Cluster):
    """Agents are actors, each in the bundle of the job's placement group that holds its node's cores
    and GPUs: ranks are not counted again."""

    nodes: Sequence[RayNode]

    def __init__(self, nodes: Sequence[RayNode], here: int, left_out: Mapping[str, str]) -> None:
        self.nodes, self.here, self.left_out = tuple(nodes), here, left_out
        self._head = next((node for node in nodes if node.is_head), nodes[0])
        self.told_s = health_of(self._head.health)[1]
        self._actors: dict[int, Any] = {}
        self._groups: list[Any] = []
        self._bundles: dict[int, tuple[Any, int]] = {}
        """Node -> placement group, and which of its bundles is there."""
        self._gpus: dict[int, list[str]] = {}
        self._lock = threading.RLock()
        self._closed = False

    @staticmethod
    @functools.cache
    def check_access(address: str) -> None:
        """Ray is installed, something answers, and the token is the cluster's; asked once in a process."""
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("--cluster needs Ray: pip install 'llamarl[cluster]', on every node")
        have = importlib.metadata.version("ray")
        if tuple(int(digits) for digits in re.findall("[0-9]+", have)[:2]) < _RAY:
            raise ConfigError(
                f"--cluster needs Ray {_RAY[0]}.{_RAY[1]}, and here is {have}: pip install 'llamarl[cluster]', on every node"
            )
        if refusal := why_refused(address):
            named = os.environ.get("RAY_ADDRESS") if address == "auto" else ""
            told = f"--cluster {address}{f', by RAY_ADDRESS {named}' if named else ''}: {refusal}"
            raise ConfigError(told) if _TOKEN in refusal else ConfigError.for_now(told)

    @staticmethod
    def connect(address: str, ports: tuple[int, int]) -> RayCluster:
        """Join it as its driver. ``address`` is ``auto`` or ``HOST:PORT``."""
        RayCluster.check_access(address)
        import ray
        from ray.exceptions import RayError

        before = signal.getsignal(signal.SIGTERM)
        try:
            with contextlib.redirect_stderr(open(os.devnull, "w", encoding="utf-8")):
                ray.init(address, log_to_driver=False, configure_logging=False)
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            why = one_line(error)
            if "No node info found" in why:  # Ray looks for one on this machine alone
                why = (
                    "this machine is no node of it: start the job on one that is, or by ray job submit (docs/hosts.md)"
                )
            raise ConfigError(f"--cluster {address}: {why}") from error
        finally:
            signal.signal(signal.SIGTERM, before)  # ours ends a run in order
        try:
            return _with_nodes(ports)
        except BaseException:
            ray.shutdown()
            raise

    def lines(self) -> list[str]:
        import ray

        head = self._head
        ended_s, cut_s = health_of(head.health)
        return [
            f"nodes: {', '.join(f'{n.name} ({n.cores} cores, {n.cuda_devices} GPUs)' for n in self.nodes)}; the controller is on "
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

    def call(self, number: int, within_s: float, work: Callable[..., T], *arguments: Any) -> T:
        import ray
        from ray.exceptions import RayError

        try:
            result: T = ray.get(_submit(self.nodes[number].node_id, work, *arguments), timeout=within_s)
        except RayError as error:
            raise TransferError(f"node {self.nodes[number].name}: {one_line(error)}") from error
        return result

    def take(self, shares: Mapping[int, tuple[int, int]], within_s: float) -> str:
        from ray.exceptions import RayError
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
            try:
                gpus = {
                    number: _gpu_ids(group, place, shares[number][1])
                    for place, number in enumerate(numbers)
                    if shares[number][1]
                }
            except RayError as error:
                remove_placement_group(group)
                return f"the cluster gave GPUs and does not say which within {_AGENT_S:g} s: {one_line(error)}"
            self._groups.append(group)
            for place, number in enumerate(numbers):
                self._bundles.setdefault(number, (group, place))
                self._gpus[number] = self._gpus.get(number, []) + gpus.get(number, [])
        return ""

    def gpus(self, number: int) -> Sequence[str]:
        return tuple(self._gpus.get(number, ()))

    def agent(self, number: int) -> Agent:
        with self._lock:
            if number not in self._actors:
                self._actors[number] = self._start(number)
            return functools.partial(_ask, self._actors[number])

    async def lose(self, number: int) -> bool:
        """Ray raises an error of an actor 1 to 2 s before it knows that the node is gone. So the cluster
        must have declared the node dead, or a task on it shows that it lives; for that a process may have
        to start, on a node that is out of memory or whose disk is slow."""
        node_id, until = self.nodes[number].node_id, time.monotonic() + max(self.told_s, _AGENT_S)
        sign: asyncio.Future[None] = asyncio.wrap_future(_submit(node_id, _live).future())
        gone = False
        while not (gone := not await asyncio.to_thread(_is_alive, node_id) or time.monotonic() > until):
            await asyncio.wait({sign}, timeout=_LOOK_S)
            if sign.done() and sign.exception() is None:
                break
            if sign.done():
                await asyncio.sleep(_LOOK_S)
                sign = asyncio.wrap_future(_submit(node_id, _live).future())
        sign.cancel()
        await asyncio.to_thread(self._end_agent, number)
        return gone

    def _end_agent(self, number: int) -> None:
        import ray

        with self._lock:
            if (actor := self._actors.pop(number, None)) is not None:
                ray.kill(actor)

    def close(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        with self._lock:
            if self._closed:
                return
            self._closed = True
            end_ranks([functools.partial(_ask, actor) for actor in self._actors.values()], _END_S)
            for actor in self._actors.values():
                ray.kill(actor)
            for group in self._groups:
                remove_placement_group(group)
        ray.shutdown()

    def _start(self, number: int) -> Any:
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from llamarl.runtime.hosts.agent import HostAgent

        group, place = self._bundles[number]
        resources = group.bundle_specs[place]
        actor: Any = ray.remote(HostAgent)
        agent = actor.options(
            num_cpus=resources.get("CPU", 0),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, place),
        ).remote(self.nodes[number])
        try:
            ray.get(agent.now_s.remote(), timeout=_AGENT_S)
        except RayError as error:
            ray.kill(agent)
            raise ConnectionError(
                f"node {self.nodes[number].name}: no agent starts there ({one_line(error)})"
            ) from error
        return agent


def _ask(actor: Any, method: str, *arguments: Any) -> Future[Any]:
    answer: Future[Any] = Future()
    answer.set_running_or_notify_cancel()  # whoever waits may stop waiting; the answer comes all the same

    def take(found: Future[Any]) -> None:
        from ray.exceptions import RayTaskError

        try:
            answer.set_result(found.result())
        except (
            RayTaskError
        ) as error:  # of the method itself: who took that for the agent's end would wait for a verdict for ever
            answer.set_exception(RuntimeError(f"the agent's {method!r} raised {one_line(error)}"))
        except Exception as error:
            answer.set_exception(ConnectionError(f"Ray: {type(error).__name__}"))

    getattr(actor, method).remote(*arguments).future().add_done_callback(take)
    return answer


def _submit(node_id: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """Have a function of ours called on a node, once; a Ray reference to its result."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(work).options(num_cpus=0, max_retries=0, scheduling_strategy=pinned).remote(*arguments)


def _is_alive(node_id: str) -> bool:
    """Whether the cluster counts the node among those that live."""
    import ray

    return any(node["Alive"] and node["NodeID"] == node_id for node in ray.nodes())


def _live() -> None:
    """Run on a node, as a sign that it lives."""


def _with_nodes(ports: tuple[int, int]) -> RayCluster:
    import ray
    from ray.exceptions import RayError

    from llamarl.determinism import platform_facts
    from llamarl.runtime.host_placement import Machine, unlike

    here_id = ray.get_runtime_context().get_node_id()
    alive = sorted((_as_ray_tells(node) for node in ray.nodes() if node["Alive"]), key=_head_first)
    asked = [_submit(one["node_id"], this_node, {**one, "ports": ports}) for one in alive]
    until = time.monotonic() + _IMPORT_S
    nodes: list[RayNode] = []
    left_out: dict[str, str] = {}
    here = Machine(HERE, 0, 0, platform_facts())
    for one, answer in zip(alive, asked, strict=True):
        try:
            node: RayNode = ray.get(answer, timeout=max(0.1, until - time.monotonic()))
        except (RayError, ImportError) as error:
            left_out[one["name"]] = f"which does not say what it is, as one without llamarl: {one_line(error)}"
            continue
        if differs := unlike([here, node], allow=True):
            left_out[node.name] = f"where software differs: {'; '.join(differs)}"
        else:
            nodes.append(node)
    own = [number for number, node in enumerate(nodes) if node.node_id == here_id]
    if not own:
        name = next(one["name"] for one in alive if one["node_id"] == here_id)
        raise ConfigError(
            f"the node of this process cannot take part: {name}, {left_out[name]}. Start Ray there with the Python of this llamarl"
        )
    return RayCluster(nodes, own[0], left_out)


def this_node(told: Mapping[str, Any]) -> RayNode:
    """This node.

    Args:
        told: Fields that Ray knows, and ``ports``.
    """
    return RayNode(
        **told,
        **facts_of_this_node(told["address"]),
        tls=_tls_files(os.environ),
        token=os.environ.get("RAY_AUTH_MODE", "").lower() == "token",
        health={name: int(os.environ.get(f"RAY_health_check_{name}", default)) for name, default in _HEALTH.items()},
    )


def health_of(health: Mapping[str, int]) -> tuple[float, float]:
    """Seconds after which the cluster knows of a node that has ended, and of one to which the cable
    is cut: in the first case each question is refused at once, in the second each waits its whole
    time."""
    count, period_s, timeout_s = (health[name] for name in ("failure_threshold", "period_ms", "timeout_ms"))
    return count * period_s / 1000, count * (period_s + timeout_s) / 1000


def _tls_files(environment: Mapping[str, str]) -> TlsFiles | None:
    """Those of Ray's own links, which ours use too."""
    if environment.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    certificate, private_key, authority = (
        Path(environment.get(f"RAY_TLS_{name}", "")) for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT")
    )
    return TlsFiles(certificate=certificate, private_key=private_key, authority=authority)


def why_refused(address: str) -> str:
    """Why the cluster at an address takes no orders of this user, in a line; empty: it does.

    Asked by ``ray status`` in a process of its own: inside ``ray.init`` a wrong token is tried for
    20 s and a missing one aborts the process.
    """
    command = [sys.executable, "-P", "-c", _STATUS, *(() if address == "auto" else ("--address", address))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asked:
        assert asked.stdout is not None
        try:
            if not select.select([asked.stdout], [], [], _IMPORT_S)[0]:
                return f"Ray itself cannot be read within {_IMPORT_S:g} s: is {sys.prefix} on a slow disk?"
            _, errors = asked.communicate(timeout=_ASK_S)
        except subprocess.TimeoutExpired:
            return f"nothing answers there within {_ASK_S:g} s; is its head up (ray start --head)?"
        finally:
            asked.kill()
    if not asked.returncode:
        return ""
    if "authentication token" in errors.lower():
        has_none = "couldn't find" in errors
        which = "this user has no token" if has_none else "the token of this user is missing or not that cluster's"
        return f"{which}: put it into ~/.ray/auth_token (or {_TOKEN}), with RAY_AUTH_MODE=token"
    if address == "auto" and "find any running Ray instance" in errors:
        return "no Ray cluster runs on this machine: ray start --head begins one, HOST:PORT names one elsewhere"
    said = [line for line in errors.splitlines() if line.strip()]
    return said[-1].strip() if said else f"ray status ends with {asked.returncode}"


def one_line(error: BaseException) -> str:
    """What Ray raises, without the twenty lines around it."""
    cause = getattr(error, "cause", None)
    text = str(cause) if isinstance(cause, BaseException) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(?:Error|Exception)\b: ", line)]
    if not named and lines and lines[0].endswith(":"):  # such as versions that do not match: below it stands which
        lines = [" ".join(lines)]
    return f"Ray: {(named[-1:] or lines[:1] or [type(error).__name__])[0][:300]}"


def _as_ray_tells(found: Mapping[str, Any]) -> dict[str, Any]:
    resources = found["Resources"]
    return {
        "name": str(found["NodeName"] or found["NodeManagerAddress"]),
        "address": str(found["NodeManagerAddress"]),
        "node_id": str(found["NodeID"]),
        "cores": int(resources.get("CPU", 0)),
        "cuda_devices": int(resources.get("GPU", 0)),
        "is_head": _HEAD in resources,
    }


def _cores_and_gpus(cores: float, gpus: float) -> str:
    return plural(int(cores), "core") + (f" and {plural(int(gpus), 'GPU')}" if gpus else "")


def _free(all_of_it: Mapping[str, float], free: Mapping[str, float]) -> str:
    """What of a cluster nobody holds now, for people."""
    now, ever = (_cores_and_gpus(one.get("CPU", 0), one.get("GPU", 0)) for one in (free, all_of_it))
    return f"free now: {now} of {ever}"


def _resources(cores: int, gpus: int) -> dict[str, float]:
    wanted = {"CPU": float(cores), "GPU": float(gpus)}
    return {name: count for name, count in wanted.items() if count} or {"CPU": 0.001}


def _gpu_ids(group: Any, place: int, count: int) -> list[str]:
    """Which GPUs a bundle holds: a task that asks for them all is told, in a process that may have to be started first.

    Ray keeps them in a set: where ``CUDA_VISIBLE_DEVICES`` was set for its node, as Slurm does, each process finds
    another order.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    pinned = PlacementGroupSchedulingStrategy(group, place)
    asked = ray.remote(_own_gpus).options(num_cpus=0, num_gpus=count, max_retries=0, scheduling_strategy=pinned)
    found: list[str] = ray.get(asked.remote(), timeout=_AGENT_S)
    return sorted(found, key=_natural)


def _own_gpus() -> list[str]:
    import ray

    return [str(one) for one in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


def _head_first(told: Mapping[str, Any]) -> tuple[bool, list[tuple[int, str]]]:
    """Order of nodes. Where they go by addresses, as on Kubernetes and Slurm, these are others for each cluster: a place
    in the list, by which ``--on`` may name them, then still tells the head from the rest."""
    return not told["is_head"], _natural(told["name"])


def _natural(name: str) -> list[tuple[int, str]]:
    """Node 10 after node 9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]
