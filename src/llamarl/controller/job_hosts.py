"""The hosts of one job, which are nodes of a cluster: given ranks, and told to the ranks as the
network that they are on. The kind of cluster is ``hosts.cluster``'s (``settings/job.py:CLUSTERS``).

[hosts] ─▶ Cluster: nodes and what they are ─▶ which node each rank gets ─▶ their cores and GPUs taken ─▶ launcher, networks

Once a host has gone, another takes its place, with all its ranks:

a host is gone ─▶ launcher.lost ─▶ stand_in (pure) ─▶ take its share there ─▶ relocate: from now on its ranks are there
                                                                              prepare: files that they read go there
"""

from __future__ import annotations

import atexit
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations, islice
from pathlib import Path

from llamarl.config import RunConfig
from llamarl.controller.job_files import JobFiles, folder_answers
from llamarl.determinism import joint_facts
from llamarl.errors import CheckpointError, ConfigError, LlamaRLError, TransferError
from llamarl.executors.base import ExecutorSpec
from llamarl.roles import present_roles
from llamarl.runtime.host_placement import Machine, layouts, spread, unlike, what_changed, why_no_room
from llamarl.runtime.hosts.cluster import Cluster, find_cluster
from llamarl.runtime.hosts.launcher import HostLauncher
from llamarl.runtime.placement import ColocatedGroup, Gpu, Placement, all_gpus, place, share_of, stand_in
from llamarl.runtime.processes import ProcessRuntime
from llamarl.runtime.tick_log import TickLog
from llamarl.runtime.worker import RankReport, WorkerPlan
from llamarl.settings.job import HERE, hosts_named, parse_ports
from llamarl.transports.network import Network, join
from llamarl.transports.run_key import KEY_BYTES

__all__ = ["JobHosts", "open_hosts"]

_LOOK_S = 0.05

_GPUS_S = 120.0
"""For a host to ask its driver."""
_TAKE_S = 30.0
_STAND_IN_S = 5.0
"""For the cluster to give what a host needs that takes the place of another; it is free, or it is not."""


@dataclass
class JobHosts:
    """Hosts that have said what they are, and the key of the one run that they are for. While it goes on they are the
    :class:`llamarl.runtime.processes.Places` of its ranks."""

    cluster: Cluster
    config: RunConfig
    named: Sequence[str]
    """All hosts of the job, as the user calls them; those that are in ``absent`` take no part."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Hosts that the job begins without -> why."""
    run_key: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES), repr=False)
    """Of this run alone: its ranks have it from the controller, inside the cluster."""
    where: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Executor -> the host of each rank, once :meth:`place` has been called. Changed in place, as files and launcher have
    it too."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Versions and processors of the machines that hold ranks, once :meth:`place` has been called."""
    taken: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Host -> cores and GPUs that are ours there."""
    launcher: HostLauncher | None = None
    """Once :meth:`runtime` has been called."""
    machines: Sequence[Machine] = ()
    """The hosts, once :meth:`place` has been called."""
    placement: Placement | None = None
    """Of its executors, likewise."""
    files: JobFiles | None = None
    """Likewise as :meth:`runtime` was given them."""
    stand_ins: dict[int, int] = field(default_factory=dict)
    """Host that is gone -> the one that was taken for its ranks."""
    full: set[int] = field(default_factory=set)
    """Hosts that had no room when one was needed."""
    news: str = ""
    """What the user is to know of hosts that are absent, likewise."""

    def place(self, executors: Sequence[ExecutorSpec], colocated: ColocatedGroup | None) -> Placement:
        """Give every rank a host, and there cores and a device. What becomes of ranks of absent hosts is in ``news``.

        Raises:
            ConfigError: It cannot be done; every mistake is named.
        """
        config, named = self.config, list(self.named)
        hosts = self.cluster.nodes
        on = {executor: self._given(executor) for executor in config.hosts.on}
        there = {named.index(host.name): host for host in hosts}
        together = colocated.sharing if colocated is not None else ()
        tensor_parallel = {role.name: role.units(config) for role in present_roles(config) if role.section}
        gpus = [there[number].cuda_devices if number in there else 0 for number in range(len(named))]
        cores = [there[number].cores if number in there else 1 for number in range(len(named))]
        whole = spread(
            executors,
            len(named),
            on,
            tensor_parallel=tensor_parallel,
            together=together,
            cuda_devices=gpus,
            cores=cores,
        )
        without = layouts(
            executors,
            on,
            there,
            tensor_parallel=tensor_parallel,
            together=together,
            allow_unlike=config.hosts.allow_unlike,
        )
        trouble: ConfigError | None = None
        # a new run keeps the places that the user has named; who has none may go to hosts that are alike
        for where in without if self.absent else (whole, *islice(without, 1 if on else None)):
            try:
                placement = self._fit(where, executors, hosts, colocated)
            except ConfigError as error:
                trouble = trouble or error
            else:
                self.news = what_changed(self.absent, whole, where, named)
                return placement
        assert trouble is not None, "there is a layout"
        if self.cluster.left_out:
            left_out = "\n".join(f"  - {name}, {why}" for name, why in self.cluster.left_out.items())
            trouble = ConfigError(f"{trouble}\nthese nodes take no part:\n{left_out}")
        if not self.absent:
            raise trouble
        raise self.no_room(trouble) from trouble

    def no_room(self, trouble: ConfigError) -> ConfigError:
        """Why a run does not go on without the hosts that are absent.

        Args:
            trouble: Why its ranks have no place on the others.
        """
        return ConfigError.for_now(why_no_room(self.absent, self.named, str(trouble)))

    def _fit(
        self,
        layout: Mapping[str, Sequence[int]],
        executors: Sequence[ExecutorSpec],
        hosts: Sequence[Machine],
        colocated: ColocatedGroup | None,
    ) -> Placement:
        """Ranks where ``layout`` says, by the numbers of all hosts that are named.

        Args:
            hosts: Those that take part.

        Raises:
            ConfigError: They do not fit there, or the machines differ too much.
        """
        numbers = {self.named.index(host.name): place for place, host in enumerate(hosts)}
        self.where = {name: tuple(numbers[host] for host in ranks) for name, ranks in layout.items()}
        used = sorted({host for ranks in self.where.values() for host in ranks})
        self.facts = joint_facts([hosts[host].facts for host in used])
        found = unlike([hosts[host] for host in used], allow=self.config.hosts.allow_unlike)
        if found:
            listed = "\n".join(f"  - {line}" for line in found)
            raise ConfigError(
                "the nodes of this job differ in what decides the bits of a run, or whether they understand each other:\n"
                f"{listed}\nLeave some of them out by --on, or make them alike; other processors and libraries (not another llamarl, "
                "nor Python 3.11 beside 3.12) are accepted with hosts.allow_unlike = true: to rounding, no longer bit for bit."
            )
        placement = place(executors, hosts, self.where, colocated=colocated)
        self.machines, self.placement = hosts, placement
        return placement

    def gpus(self) -> dict[str, Gpu]:
        """Each GPU on which a rank is placed, by its name in ``Placement.by_gpu``: all kinds and the least memory of its host,
        for which of them will be ours is not known yet. Nothing where a host does not say, of which the user is told."""
        assert self.placement is not None, "asked once ranks have a place"
        devices = {device for spec in self.placement.by_gpu() for device in spec.device.split(",") if "@" in device}
        names = sorted({device.rpartition("@")[2] for device in devices})
        numbers = {node.name: number for number, node in enumerate(self.cluster.nodes)}

        def any_of(name: str) -> Gpu | None:
            found = self.cluster.call(numbers[name], _GPUS_S, all_gpus)
            kinds = " or ".join(sorted({gpu.kind for gpu in found}))
            return Gpu(kinds, min(gpu.memory for gpu in found)) if found else None

        try:
            with ThreadPoolExecutor(max(1, len(names))) as asking:
                found = dict(zip(names, asking.map(any_of, names), strict=True))
        except LlamaRLError as error:
            print(
                f"how much its GPUs hold is not known ({error}), so that what the recipe leaves open is small: give "
                "generator.engine.kv_cache_bytes and trainer.max_tokens_per_microbatch",
                file=sys.stderr,
            )
            return {}
        each = {device: found[device.rpartition("@")[2]] for device in sorted(devices)}
        return {} if None in each.values() else {device: gpu for device, gpu in each.items() if gpu}

    def take(self, where: Mapping[str, Sequence[int]], within_s: float) -> str:
        """Take what ranks need of their nodes beyond what is ours there, of all nodes at once; why
        it is not to be had, empty: it is.

        Args:
            where: Executor -> the host of each rank, as they are to be.
        """
        assert self.placement is not None, "take follows place"
        more: dict[int, tuple[int, int]] = {}
        for host in sorted({host for ranks in where.values() for host in ranks}):
            cores, gpus = share_of(host, self.placement.executors, where, self.machines[host])
            own_cores, own_gpus = self.taken.get(host, (0, 0))
            if host not in self.taken or cores > own_cores or gpus > own_gpus:
                more[host] = max(0, cores - own_cores), max(0, gpus - own_gpus)
        if more and (why_not := self.cluster.take(more, within_s)):
            return why_not
        for host, (cores, gpus) in more.items():
            own_cores, own_gpus = self.taken.get(host, (0, 0))
            self.taken[host] = own_cores + cores, own_gpus + gpus
        return ""

    def _take_for(self, other: int, lost: int) -> str:
        """Take on one host what the ranks of another have that is gone; why not."""
        moved = {name: [other if at == lost else at for at in ranks] for name, ranks in self.where.items()}
        return self.take({name: [at for at in ranks if at == other] for name, ranks in moved.items()}, _STAND_IN_S)

    def names(self, ranks: Sequence[int]) -> str:
        """The machines of ranks, for people."""
        return ", ".join(self.cluster.nodes[host].name for host in ranks)

    def network(self, host: int) -> Network:
        """A process on one of the hosts."""
        one = self.cluster.nodes[host]
        return Network(space=one.space, address=one.address, key=self.run_key, ports=one.ports, tls=one.tls)

    def open_files(
        self, run_dir: Path, run_id: str, executors: Sequence[ExecutorSpec], load_from: Path | None
    ) -> JobFiles:
        """Take what the job needs of its nodes, settle how files go between the run's folder and
        them, send what their ranks read.

        Raises:
            ConfigError: The cluster does not give it.
            CheckpointError, TransferError: A file is not as it was written, or a host cannot take it.
        """
        if why_not := self.take(self.where, _TAKE_S):
            raise ConfigError.for_now(why_not)
        own = self.config.hosts.run_folder == "own"
        files = JobFiles(run_dir, run_id, self.cluster, self.where, own_folders=own)
        try:
            files.send_content(executors)
            files.send_saved(load_from)
        except BaseException:
            files.hurry()
            files.end()
            raise
        return files

    def plan_lines(self, run_dir: Path) -> str:
        """What a dry run says of the cluster, for people: security, health, how payloads travel
        between each pair of hosts that have ranks, whose folder is shared."""
        used = sorted({host for ranks in self.where.values() for host in ranks})
        space = [one.space for one in self.cluster.nodes]
        pairs = [(f"{self.names([a])} and {self.names([b])}", space[a] == space[b]) for a, b in combinations(used, 2)]
        lines = {
            "cluster": self.cluster.lines(),
            "between hosts": [f"{pair}: {'shared memory' if shared else 'tcp'}" for pair, shared in pairs],
            "run folder": self._folder_lines(run_dir),
        }
        return "".join(f"\n\n# {title}\n" + "\n".join(text) for title, text in lines.items())

    def _folder_lines(self, run_dir: Path) -> list[str]:
        """Which hosts see the place where the run's folder will be; found out by files that are removed again."""
        if self.config.hosts.run_folder == "own":
            return ['hosts.run_folder = "own": every host gets a folder of its own, files travel']
        place = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
        try:
            answers = folder_answers(place, self.cluster, sorted({h for ranks in self.where.values() for h in ranks}))
        except LlamaRLError as error:
            return [f"whether hosts share it is not known: {error}"]
        return [
            f"{name}: shared, ranks write into it" if not why else f"{name}: not shared ({why}), files travel"
            for name, why in answers.items()
        ]

    def runtime(self, files: JobFiles | None = None, *, log: TickLog | None = None) -> ProcessRuntime:
        """Processes on the hosts that :meth:`place` chose.

        Args:
            files: As :meth:`open_files` made them.
            log: See ``ProcessRuntime``. This process has joined the job's network.
        """
        assert self.placement is not None, "placed before its ranks run"
        on_lost = files.lose if files is not None else lambda host: None
        self.launcher = launcher = HostLauncher(self.cluster, self.where, on_lost, self.placement.executors)
        self.files = files
        return ProcessRuntime(
            collective_timeout_s=self.config.deadlines.collective_s,
            launchers=dict.fromkeys(self.where, launcher),
            networks={name: [self.network(host) for host in ranks] for name, ranks in self.where.items()},
            places=self,
            log=log,
        )

    def adapt(self, plan: WorkerPlan) -> WorkerPlan:
        host = self.where[plan.spec.name][plan.rank]
        return plan if self.files is None else self.files.adapt(plan, host)

    def has_place(self, executor: str) -> bool:
        return all(self._other(host) is not None for host in self._lost(executor))

    def relocate(self, executor: str) -> Sequence[Network]:
        for host in self._lost(executor):
            other = self._other(host)
            if other is None:  # gone since ``has_place``: its ranks are then not started, which is their death
                continue
            for name, ranks in self.where.items():
                self.where[name] = tuple(other if at == host else at for at in ranks)
        return [self.network(host) for host in self.where[executor]]

    def prepare(self, executor: str, load_from: Path | None) -> None:
        if self.files is None:
            return
        ranks = self.where[executor]
        hosts = set(ranks)  # as they are now: another executor's death may move all ranks of one meanwhile
        try:
            self.files.send_to_new_hosts(executor, load_from, ranks)
        except (CheckpointError, TransferError) as error:
            if self._hears_of_a_loss(hosts):
                raise ConnectionError(str(error)) from error
            raise

    def bring_files(self, executor: str, report: RankReport) -> None:
        if self.files is not None:
            self.files.bring(executor, report, self.where[executor][report.rank])

    def _hears_of_a_loss(self, hosts: Collection[int]) -> bool:
        """Whether one of these is gone; files may break off before that is known."""
        until = time.monotonic() + 2 * self.cluster.told_s
        while not (lost := self._gone.intersection(hosts)) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return bool(lost)

    @property
    def _gone(self) -> set[int]:
        assert self.launcher is not None, "its ranks run"
        return self.launcher.lost

    def _lost(self, executor: str) -> list[int]:
        return sorted(set(self.where[executor]) & self._gone)

    def _other(self, host: int) -> int | None:
        """The host that takes the place of another, with room for its ranks that is ours already;
        None: there is none."""
        if (known := self.stand_ins.get(host)) is not None and known not in self._gone:
            return known
        assert self.placement is not None, "its ranks run"
        allow = self.config.hosts.allow_unlike
        while True:
            without = self._gone | self.full
            other = stand_in(host, self.placement, self.machines, self.where, gone=without, allow_unlike=allow)
            if other is None or not self._take_for(other, host):
                break
            self.full.add(other)
        if other is not None:
            self.stand_ins[host] = other
        return other

    def summary(self) -> str:
        """Where the executors are, for people."""
        parts = [f"{executor} on {self.names(list(dict.fromkeys(ranks)))}" for executor, ranks in self.where.items()]
        if without := {**self.absent, **self.cluster.left_out}:
            parts.append(f"without {', '.join(without)}")
        return "; ".join(parts)

    def close(self) -> None:
        """Leave the cluster and its network; nothing of this job is left there. Idempotent."""
        self.cluster.close()
        join(None)
        atexit.unregister(self.close)

    def _given(self, executor: str) -> tuple[int, ...]:
        """The hosts on which the user wants an executor, by the numbers of all that are named; empty: any."""
        words = self.config.hosts.on.get(executor)
        if words is None:
            return ()
        own = self.cluster.nodes[self.cluster.here].name
        addresses = {node.address: node.name for node in self.cluster.nodes}
        for word in set(words) & set(self.cluster.left_out) - set(self.absent):
            raise ConfigError(f"hosts.on.{executor}: {word} can take no part, {self.cluster.left_out[word]}")
        try:
            return hosts_named([own if word == HERE else addresses.get(word, word) for word in words], self.named)
        except ValueError as error:
            raise ConfigError(f"hosts.on.{executor}: {error}") from error


def open_hosts(config: RunConfig, begun: RunConfig | None = None) -> JobHosts:
    """The nodes of the cluster that a configuration names; this process is on their network from then on.

    Args:
        begun: Of the run that is gone on with: it may do so without some of the nodes that it was given.

    Raises:
        ConfigError: There is no such cluster, it refuses us, or a node cannot say what it is.
    """
    ports = parse_ports(config.hosts.port_range) if config.hosts.port_range else (0, 0)
    kind, address = find_cluster(config.hosts.cluster)
    cluster = kind.connect(address, ports)
    names = Counter(node.name for node in cluster.nodes)
    if twice := [name for name, count in names.items() if count > 1]:
        cluster.close()
        raise ConfigError(
            f"--cluster {config.hosts.cluster}: {names[twice[0]]} nodes are called {twice[0]}, and a job tells nodes by their names: "
            "give each its own (of Ray: ray start --node-name)"
        )
    known = {word for node in cluster.nodes for word in (node.name, node.address)} | {HERE}
    had = {word for words in begun.hosts.on.values() for word in words} if begun is not None else set()
    absent = {
        name: f"{name}, {cluster.left_out[name]}"
        if name in cluster.left_out
        else f"{name} is no node of the cluster any more"
        for name in sorted(had - known)
        if not re.fullmatch(r"\d+(-\d+)?", name)  # by place: settings/job.py:hosts_named
    }
    hosts = JobHosts(cluster, config, [*(node.name for node in cluster.nodes), *absent], absent)
    atexit.register(hosts.close)
    join(hosts.network(cluster.here))
    return hosts
