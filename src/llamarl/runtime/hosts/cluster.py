"""What a kind of cluster owes a job: a class that does what :class:`Cluster` says.

    connect ─▶ nodes ─▶ take: cores and GPUs of some ─▶ agent: one process on a node ─▶ ranks, their bytes, files
                                                                     └─ has ended ─▶ lose: did its node go with it?

A kind reaches nodes, starts one process on each, and says when a node is gone. The rest stands on
that and is the same for all: ranks, their links and clocks (``launcher.py``), the agent in that
process (``agent.py``), files (``files/file_client.py``), who goes where, and what is brought up again
elsewhere. A kind does nothing again by itself: redoing is the controller's.

``ray.py`` is one; ``llamarl.settings.job.CLUSTERS`` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

from llamarl.errors import DataError
from llamarl.import_path import import_user
from llamarl.runtime.hosts.node import Node
from llamarl.settings.job import CLUSTERS, split_cluster

__all__ = ["Agent", "Cluster", "end_ranks", "find_cluster"]

T = TypeVar("T")

Agent = Callable[..., Future[Any]]
"""The :class:`llamarl.runtime.hosts.agent.HostAgent` on a node: called with the name of a method and
its arguments, any thread, it has that awaited on the agent's event loop and sends the result back by
pickle. Several are under way at once (``receive`` waits while others are answered). All raise
``ConnectionError``, with the cause in a few words, once the agent has ended or its node is gone, and
never before: a slow node is waited for."""


class Cluster(Protocol):
    """The nodes of one job, by their places in ``nodes``, which stay. Any thread."""

    nodes: Sequence[Node]
    """That can take part, this process's among them."""
    left_out: Mapping[str, str]
    """Nodes that cannot -> why, such as without llamarl or with another one."""
    here: int
    """The node that this process is on."""
    told_s: float
    """How long it takes at most until the cluster knows of a node that is gone, or cut off."""

    @staticmethod
    def check_access(address: str) -> None:
        """Raise what :meth:`connect` would where the cluster refuses us, before anything large is
        imported; a kind that cannot tell early does nothing."""
        return

    @staticmethod
    def connect(address: str, ports: tuple[int, int]) -> Cluster:
        """Join a cluster for one job, and have its nodes say what they are.

        Args:
            address: As the user has written it; empty where only the kind was named.
            ports: On which processes of the job may listen; (0, 0): any.

        Raises:
            ConfigError: There is none, it refuses us, or the node of this process cannot take part.
        """
        ...

    def lines(self) -> list[str]:
        """What a dry run says of it: nodes, who may use it, what can be read on the way, how soon a
        death is known."""
        ...

    def call(self, number: int, within_s: float, work: Callable[..., T], *arguments: Any) -> T:
        """The result of a function of ours in a process on a node, of which nothing need be taken.

        Raises:
            TransferError: It does not come.
        """
        ...

    def take(self, shares: Mapping[int, tuple[int, int]], within_s: float) -> str:
        """Take cores and GPUs of nodes, of all or of none; more of a node may be asked for later.

        Args:
            shares: Node -> cores, GPUs.

        Returns:
            Why it could not be had, in words; empty: it is ours, as always where nobody keeps accounts.
        """
        ...

    def gpus(self, number: int) -> Sequence[str]:
        """Of a node those that are ours, for ``CUDA_VISIBLE_DEVICES``, in the order of our device numbers."""
        ...

    def agent(self, number: int) -> Agent:
        """The agent on a node of which something was taken: ``HostAgent(node)`` on the event loop of a
        process there, started when it is first asked for. That process is the parent of ranks, which
        end with it; it ends when the controller's does.

        Raises:
            ConnectionError: It does not start.
        """
        ...

    async def lose(self, number: int) -> bool:
        """An agent has ended, or did not start: end what is left of it, so that the next who asks gets
        another. Whether its node is gone, which it then stays; True within ``told_s``, False at a sign
        of life alone: ranks are brought up elsewhere, or there again, by this word."""
        ...

    def close(self) -> None:
        """End all agents with what they started (:func:`end_ranks`), give back what was taken. Idempotent."""
        ...


def end_ranks(agents: Iterable[Agent], within_s: float) -> None:
    """Have agents end the ranks that they hold; they stay. Any thread."""
    wait([agent("end") for agent in agents], timeout=within_s)


def find_cluster(cluster: str) -> tuple[type[Cluster], str]:
    """Class and address of what ``hosts.cluster`` says.

    Raises:
        DataError: A kind of the user's own cannot be imported, or lacks what :class:`Cluster` asks of it.
    """
    kind, address = split_cluster(cluster)
    found: Any = import_user(CLUSTERS.get(kind, kind), "hosts.cluster")
    owed = {name: getattr(Cluster, name) for name in vars(Cluster) if not name.startswith("_")}
    del owed["check_access"]  # what a class inherits of it does for one that cannot tell early
    lacking = [name for name, function in owed.items() if getattr(found, name, function) is function]
    lacking += [] if hasattr(found, "check_access") else ["check_access"]
    if lacking:
        raise DataError.at(
            "hosts.cluster",
            f"{kind!r} is no cluster, as it lacks {', '.join(lacking)}: {__name__}.Cluster says what each does",
        )
    return found, address
