"""Where the ranks of a job are once hosts of it have gone: for each another host, with all its ranks. And where a tick is done a
second time beside the first.

connection to a host ends ─▶ launcher.lost ─▶ stand_in (pure) ─▶ settle: from now on its ranks are there
                                                                 prepare: files that they read go there
a tick is slow ─▶ why_no_second ─▶ second_hosts (pure) ─▶ begin_second: more ranks, of another incarnation, are there; prepare
one of the two is ended ─▶ end_second: the executor's ranks are where those of the other are
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llamarl.controller.job_files import JobFiles
from llamarl.errors import CheckpointError, TransferError
from llamarl.runtime.host_placement import Machine, second_hosts, stand_in
from llamarl.runtime.hosts.launcher import HostLauncher
from llamarl.runtime.places import SecondPlace
from llamarl.runtime.worker import RankReport, WorkerPlan
from llamarl.transports.network import Network

__all__ = ["HostPlaces", "Seconds"]

_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """What second attempts at ticks need to find hosts."""

    threads: Mapping[str, int]
    """Executor -> cores of each of its ranks."""
    here: Machine
    """The controller's machine."""
    never: Mapping[str, str] = field(default_factory=dict)
    """Executors that have none -> why."""
    where: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    """Executor and incarnation of a second attempt -> the host of each rank. Changed in place, as others have it too."""


class HostPlaces:
    """Implements :class:`llamarl.runtime.places.Places`.

    Args:
        where: Executor -> the host of each rank, -1 for the controller's machine. Changed in place, as ``files`` and ``launcher`` have
            it too.
        hosts: Those that the user has named, in that order.
        on_gpus: Executors on GPUs.
        allow_unlike: Whether the other host may differ in what decides bits.
        told_s: How long it may take to hear that a host is gone.
        seconds: None: no tick is started a second time.
    """

    def __init__(
        self,
        where: dict[str, tuple[int, ...]],
        hosts: Sequence[Machine],
        on_gpus: Collection[str],
        launcher: HostLauncher,
        files: JobFiles | None,
        network: Callable[[int], Network],
        *,
        allow_unlike: bool,
        told_s: float = 0.0,
        seconds: Seconds | None = None,
    ) -> None:
        self._where, self._hosts, self._on_gpus = where, hosts, on_gpus
        self._launcher, self._files, self._network = launcher, files, network
        self._allow_unlike, self._told_s, self._seconds = allow_unlike, told_s, seconds

    def adapt(self, plan: WorkerPlan) -> WorkerPlan:
        host = self._hosts_of(plan.spec.name, plan.incarnation)[plan.rank]
        return plan if self._files is None else self._files.adapt(plan, host)

    def has_place(self, executor: str) -> bool:
        return all(self._other(host) is not None for host in self._lost(executor))

    def settle(self, executor: str) -> Sequence[Network]:
        for host in self._lost(executor):
            other = self._other(host)
            if (
                other is None
            ):  # gone since ``has_place`` was asked: its ranks are then not started, which is their death
                continue
            for name, ranks in self._where.items():
                self._where[name] = tuple(other if at == host else at for at in ranks)
        return [self._network(host) for host in self._where[executor]]

    def why_no_second(self, executor: str) -> str:
        """Why a second attempt at its tick has room nowhere; empty: it has."""
        found = self._second(executor)
        return found if isinstance(found, str) else ""

    def begin_second(self, executor: str, incarnation: int, late: Sequence[int]) -> SecondPlace:
        assert self._seconds is not None, "no tick is started a second time"
        ranks = self._where[executor]
        found = self._second(executor, slow={ranks[rank] for rank in late})
        if isinstance(found, str):  # a host has gone since ``why_no_second`` was asked
            found = ranks
        self._seconds.where[executor, incarnation] = found
        machines = {-1: self._seconds.here, **dict(enumerate(self._hosts))}
        return SecondPlace(
            [self._network(host) for host in found],
            self._launcher if found[0] >= 0 else None,
            ", ".join(dict.fromkeys(machines[host].name for host in found)),
        )

    def end_second(self, executor: str, incarnation: int, *, stays: bool) -> None:
        assert self._seconds is not None, "no tick is started a second time"
        hosts = self._seconds.where.pop((executor, incarnation))
        if stays:
            self._where[executor] = hosts

    def _second(self, executor: str, slow: Collection[int] = ()) -> tuple[int, ...] | str:
        seconds = self._seconds
        if seconds is None or executor in seconds.never:
            return "nobody chooses a host for it" if seconds is None else seconds.never[executor]
        others = {name: hosts for (name, _), hosts in seconds.where.items()}
        return second_hosts(
            executor,
            seconds.threads,
            seconds.here,
            self._hosts,
            self._where,
            seconds=others,
            slow=slow,
            gone=self._launcher.lost,
        )

    def _hosts_of(self, executor: str, incarnation: int) -> tuple[int, ...]:
        second = None if self._seconds is None else self._seconds.where.get((executor, incarnation))
        return self._where[executor] if second is None else second

    def prepare(self, executor: str, load_from: Path | None, incarnation: int) -> None:
        if self._files is None:
            return
        ranks = self._hosts_of(executor, incarnation)
        hosts = set(ranks)  # as they are now: another executor's death may move all ranks of one meanwhile
        try:
            self._files.send_again(executor, load_from, ranks)
        except (CheckpointError, TransferError) as error:
            if self._hears_of_a_loss(hosts):
                raise ConnectionError(str(error)) from error
            raise

    def bring_files(self, executor: str, report: RankReport, incarnation: int) -> None:
        if self._files is not None:
            self._files.bring(executor, report, self._hosts_of(executor, incarnation)[report.rank])

    def _hears_of_a_loss(self, hosts: Collection[int]) -> bool:
        """Whether one of these is gone; files may break off before that is known."""
        until = time.monotonic() + self._told_s
        while not (lost := self._launcher.lost.intersection(hosts)) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return bool(lost)

    def _lost(self, executor: str) -> list[int]:
        return sorted(set(self._where[executor]) & self._launcher.lost)

    def _other(self, host: int) -> int | None:
        return stand_in(
            host,
            self._hosts,
            self._where,
            gone=self._launcher.lost,
            on_gpus=self._on_gpus,
            allow_unlike=self._allow_unlike,
        )
