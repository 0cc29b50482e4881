"""Where the ranks of a job are once hosts of it have gone: for each another host, with all its ranks.

a host is gone ─▶ launcher.lost ─▶ stand_in (pure) ─▶ take its share there ─▶ relocate: from now on its ranks are there
                                                                              prepare: files that they read go there
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llamarl.controller.job_files import JobFiles
from llamarl.errors import CheckpointError, TransferError
from llamarl.runtime.host_placement import Machine, stand_in
from llamarl.runtime.worker import RankReport, WorkerPlan
from llamarl.transports.network import Network

if TYPE_CHECKING:
    from llamarl.runtime.ray.launcher import RayLauncher

__all__ = ["HostPlaces"]

_LOOK_S = 0.05


class HostPlaces:
    """Implements :class:`llamarl.runtime.processes.Places`.

    Args:
        where: Executor -> the host of each rank. Changed in place, as ``files`` and ``launcher`` have it too.
        hosts: Of the cluster, in the order of their numbers.
        on_gpus: Executors on GPUs.
        take: Takes on one host what the ranks of another have there; why it could not, empty: it did.
        allow_unlike: Whether the other host may differ in what decides bits.
        told_s: How long it may take to hear that a host is gone.
    """

    def __init__(
        self,
        where: dict[str, tuple[int, ...]],
        hosts: Sequence[Machine],
        on_gpus: Collection[str],
        launcher: RayLauncher,
        files: JobFiles | None,
        network: Callable[[int], Network],
        take: Callable[[int, int], str],
        *,
        allow_unlike: bool,
        told_s: float = 0.0,
    ) -> None:
        self._where, self._hosts, self._on_gpus = where, hosts, on_gpus
        self._launcher, self._files, self._network = launcher, files, network
        self._take, self._allow_unlike, self._told_s = take, allow_unlike, told_s
        self._stand_ins: dict[int, int] = {}
        """Host that is gone -> the one that was taken for its ranks."""
        self._full: set[int] = set()
        """Hosts that had no room when one was needed."""

    def adapt(self, plan: WorkerPlan) -> WorkerPlan:
        host = self._where[plan.spec.name][plan.rank]
        return plan if self._files is None else self._files.adapt(plan, host)

    def has_place(self, executor: str) -> bool:
        return all(self._other(host) is not None for host in self._lost(executor))

    def relocate(self, executor: str) -> Sequence[Network]:
        for host in self._lost(executor):
            other = self._other(host)
            if (
                other is None
            ):  # gone since ``has_place`` was asked: its ranks are then not started, which is their death
                continue
            for name, ranks in self._where.items():
                self._where[name] = tuple(other if at == host else at for at in ranks)
        return [self._network(host) for host in self._where[executor]]

    def prepare(self, executor: str, load_from: Path | None) -> None:
        if self._files is None:
            return
        ranks = self._where[executor]
        hosts = set(ranks)  # as they are now: another executor's death may move all ranks of one meanwhile
        try:
            self._files.send_to_new_hosts(executor, load_from, ranks)
        except (CheckpointError, TransferError) as error:
            if self._hears_of_a_loss(hosts):
                raise ConnectionError(str(error)) from error
            raise

    def bring_files(self, executor: str, report: RankReport) -> None:
        if self._files is not None:
            self._files.bring(executor, report, self._where[executor][report.rank])

    def _hears_of_a_loss(self, hosts: Collection[int]) -> bool:
        """Whether one of these is gone; files may break off before that is known."""
        until = time.monotonic() + self._told_s
        while not (lost := self._launcher.lost.intersection(hosts)) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return bool(lost)

    def _lost(self, executor: str) -> list[int]:
        return sorted(set(self._where[executor]) & self._launcher.lost)

    def _other(self, host: int) -> int | None:
        """The host that takes the place of another, with room for its ranks that is ours already;
        None: there is none."""
        if (known := self._stand_ins.get(host)) is not None and known not in self._launcher.lost:
            return known
        while True:
            other = stand_in(
                host,
                self._hosts,
                self._where,
                gone=self._launcher.lost | self._full,
                on_gpus=self._on_gpus,
                allow_unlike=self._allow_unlike,
            )
            if other is None or not self._take(other, host):
                break
            self._full.add(other)
        if other is not None:
            self._stand_ins[host] = other
        return other
