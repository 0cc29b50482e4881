"""The hosts of one job: asked what they are, given ranks, and told to the ranks as the network that they are on.

[hosts] ─▶ workers (run already, or started) ─▶ inventories ─▶ which host each rank gets ─▶ launchers, networks
"""

from __future__ import annotations

import atexit
import ipaddress
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llamarl.channels.base import ChannelSpec
from llamarl.checkpoint.platform import joint_facts, platform_facts
from llamarl.config import RunConfig
from llamarl.controller.host_places import HostPlaces
from llamarl.controller.job_files import JobFiles, folder_answers, open_job_files
from llamarl.errors import ConfigError, LlamaRLError
from llamarl.executors.base import ExecutorSpec
from llamarl.roles import present_roles
from llamarl.runtime.absent_hosts import layouts, what_changed, why_no_room
from llamarl.runtime.config import HERE, HostsConfig, hosts_named, parse_ports
from llamarl.runtime.host_placement import Machine, given_again, place_on_hosts, respread, spread, unlike
from llamarl.runtime.hosts.connection import WorkerKey
from llamarl.runtime.hosts.gathering import gather
from llamarl.runtime.hosts.inventory import Inventory
from llamarl.runtime.hosts.launcher import HostLauncher
from llamarl.runtime.hosts.sources import Workers
from llamarl.runtime.journal import Resumed
from llamarl.runtime.placement import ColocatedGroup, Placement, available_cores, available_cuda_devices
from llamarl.runtime.processes import ProcessRuntime
from llamarl.transports.network import Network, TlsFiles, this_space
from llamarl.transports.run_key import new_key
from llamarl.transports.segment_wire import client_tls

__all__ = ["JobHosts", "key_for", "open_hosts", "pair_lines", "unreachable"]


@dataclass
class JobHosts:
    """Hosts that have said what they are, and the key of the one run that they are for."""

    workers: Workers
    inventories: Sequence[Inventory]
    here: str
    """Address of the controller's machine towards them."""
    key: WorkerKey
    config: RunConfig
    named: Sequence[str]
    """All hosts of the job, as the user calls them; those that are in ``absent`` take no part."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Hosts that the job begins without -> why."""
    run_key: bytes = field(default_factory=new_key, repr=False)
    """Of this run alone: its ranks have it from the controller, by connections that have proved the workers' key."""
    where: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Executor -> the host of each rank, once :meth:`place` has been called."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Versions and processors of the machines that hold ranks, once :meth:`place` has been called."""
    launcher: HostLauncher | None = None
    """Once :meth:`runtime` has been called."""
    machines: Sequence[Machine] = ()
    """The hosts, once :meth:`place` has been called."""
    on_gpus: Collection[str] = ()
    """Executors on GPUs, likewise."""
    controllers: Machine | None = None
    """The controller's machine, likewise."""
    placement: Placement | None = None
    """Of its executors, likewise."""
    places: HostPlaces | None = None
    """Once :meth:`runtime` has been called."""
    news: str = ""
    """What the user is to know of hosts that are absent, likewise."""

    def place(self, executors: Sequence[ExecutorSpec], colocated: ColocatedGroup | None) -> Placement:
        """Give every rank a host, and there cores and a device. What becomes of ranks of absent hosts is in ``news``.

        Raises:
            ConfigError: It cannot be done; every mistake is named.
        """
        config, named = self.config, list(self.named)
        hosts = [
            Machine(worker.name, one.cores, one.cuda_devices, one.facts)
            for worker, one in zip(self.workers.workers, self.inventories, strict=True)
        ]
        on = {executor: self._given_of_all(executor) for executor in config.hosts.on}
        there = {named.index(host.name): host for host in hosts}
        together = colocated.sharing if colocated is not None else ()
        tensor_parallel = {role.name: role.units(config) for role in present_roles(config) if role.section}
        whole = spread(executors, len(named), on, tensor_parallel=tensor_parallel, together=together)
        trouble: ConfigError | None = None
        for where in layouts(
            executors,
            whole,
            on,
            there,
            num_hosts=len(named),
            tensor_parallel=tensor_parallel,
            together=together,
            allow_unlike=config.hosts.allow_unlike,
        ):
            try:
                placement = self._fit(where, executors, hosts, colocated)
            except ConfigError as error:
                trouble = trouble or error
            else:
                self.news = what_changed(self.absent, whole, where, named)
                return placement
        assert trouble is not None, "there is a layout"
        if not self.absent:
            raise trouble
        raise ConfigError(why_no_room(self.absent, named, str(trouble))) from trouble

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
        config = self.config
        self.controllers = here = Machine(
            HERE, config.run.cores or available_cores(), available_cuda_devices(), platform_facts()
        )
        numbers = {-1: -1, **{self.named.index(host.name): place for place, host in enumerate(hosts)}}
        self.where = {name: tuple(numbers[host] for host in ranks) for name, ranks in layout.items()}
        used = sorted({host for ranks in self.where.values() for host in ranks})
        machines = {-1: here, **dict(enumerate(hosts))}
        self.facts = joint_facts([machines[host].facts for host in used])
        found = unlike([here, *hosts], allow=True)
        if not config.hosts.allow_unlike:
            more = unlike([machines[host] for host in used], allow=False)
            found += [line for line in more if line not in found]
        if found:
            listed = "\n".join(f"  - {line}" for line in found)
            raise ConfigError(
                "the machines of this job differ in what decides the bits of a run, or whether they understand each other:\n"
                f"{listed}\nLeave some of them out, or make them alike; other processors and libraries (not another llamarl, nor "
                "Python 3.11 beside 3.12) are accepted with hosts.allow_unlike = true: to rounding, no longer bit for bit."
            )
        if trouble := unreachable({machines[host].name: self._address(host) for host in used}):
            raise ConfigError(trouble)
        placement = place_on_hosts(executors, here, hosts, self.where, colocated=colocated)
        self.machines, self.placement = hosts, placement
        self.on_gpus = [spec.name for spec in placement.executors if spec.device.startswith("cuda")]
        return placement

    def place_again(
        self, executors: Sequence[ExecutorSpec], spec: ExecutorSpec
    ) -> tuple[ExecutorSpec, tuple[int, ...]]:
        """Where the ranks of an executor go that shall be another number, and what each gets there. Nothing is changed yet.

        Args:
            executors: Of the job, as :meth:`place` settled them.
            spec: With the number of ranks that it shall have, and threads settled.

        Raises:
            ConfigError: No host has room.
        """
        assert self.launcher is not None and self.controllers is not None, "ranks are another number in a job that runs"
        ranks = respread(
            spec,
            executors,
            self.machines,
            self.where,
            given=self._given(spec.name),
            gone=set(self.launcher.lost),
            on_gpus=self.on_gpus,
            allow_unlike=self.config.hosts.allow_unlike,
        )
        wanted = [spec if one.name == spec.name else one for one in executors]
        placed = place_on_hosts(wanted, self.controllers, self.machines, {**self.where, spec.name: ranks})
        return next(one for one in placed.executors if one.name == spec.name), ranks

    def why_unreached(self, executor: str, ranks: Sequence[int], sources: Sequence[tuple[str, int]]) -> str:
        """Which hosts that get ranks of an executor for the first time do not reach what these read, in words; takes some seconds
        at most.

        Args:
            sources: Addresses and ports.
        """
        assert self.launcher is not None, "ranks are another number in a job that runs"
        return self.launcher.why_unreached({*ranks} - {*self.where[executor], -1}, sources)

    def move(self, executor: str, ranks: tuple[int, ...]) -> None:
        """From now on its ranks, when they are started next, are on these hosts."""
        self.where[executor] = ranks

    def settings_again(self, executor: str, hosts: HostsConfig) -> HostsConfig:
        """The section with which a resume finds room for as many ranks of an executor as it has now."""
        given = given_again(self.where[executor], self._given(executor))
        by_place = self.config.hosts.start == "slurm"  # another allocation has other names
        named = tuple(str(host) if by_place and host >= 0 else self.names([host]) for host in given)
        absent = [self.named[host] for host in self._given_of_all(executor) if host >= 0]
        named += tuple(name for name in absent if named and name in self.absent)
        return replace(hosts, on={**hosts.on, executor: named}) if named else hosts

    def names(self, ranks: Sequence[int]) -> str:
        """The machines of ranks, for people."""
        return ", ".join(HERE if host < 0 else self.workers.workers[host].name for host in ranks)

    def spaces(self) -> dict[str, str]:
        """Machine -> whose memory is within reach there."""
        return {HERE: this_space()} | {
            worker.name: one.space for worker, one in zip(self.workers.workers, self.inventories, strict=True)
        }

    def network(self, host: int) -> Network:
        """A process on one of the hosts, or on the controller's machine (-1)."""
        if host >= 0:
            one = self.inventories[host]
            return Network(space=one.space, address=one.address, key=self.run_key, ports=one.ports, tls=one.tls)
        ports = parse_ports(self.config.hosts.port_range) if self.config.hosts.port_range else (0, 0)
        return Network(
            space=this_space(), address=self.here, key=self.run_key, ports=ports, tls=_tls_files(self.config)
        )

    def open_files(
        self, run_dir: Path, run_id: str, executors: Sequence[ExecutorSpec], load_from: Path | None
    ) -> JobFiles:
        """Settle how files go between the run's folder and the hosts that :meth:`place` chose, and send what their ranks read.

        Raises:
            CheckpointError, TransferError: A file is not as it was written, or a host cannot take it.
        """
        used = {host for ranks in self.where.values() for host in ranks if host >= 0}
        if self.config.recovery.max_restarts:  # any of them may have to take the place of another
            used |= set(range(len(self.workers.workers)))
        files = open_job_files(
            run_dir,
            run_id,
            {host: self.workers.workers[host] for host in sorted(used)},
            self.key,
            self.where,
            own_folders=self.config.hosts.run_folder == "own",
        )
        try:
            files.send_content(executors)
            files.send_saved(load_from)
        except BaseException:
            files.hurry()
            files.end()
            raise
        return files

    def folder_lines(self, run_dir: Path) -> list[str]:
        """Which hosts see the place where the run's folder will be, for people; found out by files that are removed again."""
        if self.config.hosts.run_folder == "own":
            return ['hosts.run_folder = "own": every host gets a folder of its own, files travel']
        place = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
        used = [
            self.workers.workers[host] for host in sorted({h for ranks in self.where.values() for h in ranks if h >= 0})
        ]
        try:
            answers = folder_answers(place, used, self.key)
        except LlamaRLError as error:
            return [f"whether hosts share it is not known: {error}"]
        return [
            f"{name}: shared, ranks write into it" if not why else f"{name}: not shared ({why}), files travel"
            for name, why in answers.items()
        ]

    def runtime(
        self, files: JobFiles | None = None, *, restarts: bool = False, resumed: Resumed | None = None
    ) -> ProcessRuntime:
        """Processes on the hosts that :meth:`place` chose.

        Args:
            files: As :meth:`open_files` made them.
            restarts: See ``ProcessRuntime``, as for ``resumed``. This process has joined the job's network.
        """
        on_hosts = {name: ranks for name, ranks in self.where.items() if ranks[0] >= 0}
        on_lost = files.lose if files is not None else lambda host: None
        specs = self.placement.executors if self.placement is not None else ()
        self.launcher = launcher = HostLauncher(
            self.workers.workers, self.where, self.key, on_lost, spares=restarts, specs=specs
        )
        self.places = places = HostPlaces(
            self.where,
            self.machines,
            self.on_gpus,
            launcher,
            files,
            self.network,
            allow_unlike=self.config.hosts.allow_unlike,
            told_s=2 * self.config.deadlines.host_silence_s,
        )
        return ProcessRuntime(
            collective_timeout_s=self.config.deadlines.collective_s,
            launchers=dict.fromkeys(on_hosts, launcher),
            networks={name: [self.network(host) for host in ranks] for name, ranks in self.where.items()},
            places=places,
            restarts=restarts,
            resumed=resumed,
        )

    def clocks(self) -> dict[str, tuple[float, float]]:
        """Host -> how far its clock is ahead of the controller's, and by how much that may be wrong; seconds."""
        return self.launcher.offsets() if self.launcher is not None else {}

    def summary(self) -> str:
        """Where the executors are, for people."""
        lines = [f"{executor} on {self.names(list(dict.fromkeys(ranks)))}" for executor, ranks in self.where.items()]
        return "; ".join([*lines, *([f"without {', '.join(self.absent)}"] if self.absent else [])])

    def close(self) -> None:
        """End the workers that this job has started. Idempotent."""
        self.workers.close()
        atexit.unregister(self.close)

    def _given(self, executor: str) -> tuple[int, ...]:
        """The hosts on which the user wants an executor, of those that take part; empty: any."""
        numbers = {worker.name: number for number, worker in enumerate(self.workers.workers)}
        given = [HERE if host < 0 else self.named[host] for host in self._given_of_all(executor)]
        return tuple(-1 if name == HERE else numbers[name] for name in given if name not in self.absent)

    def _given_of_all(self, executor: str) -> tuple[int, ...]:
        """The same by the numbers of all hosts that are named."""
        words = self.config.hosts.on.get(executor)
        if words is None:
            return ()
        try:
            return hosts_named(words, self.named)
        except ValueError as error:
            raise ConfigError(f"hosts.on.{executor}: {error}") from error

    def _address(self, host: int) -> str:
        return self.here if host < 0 else self.inventories[host].address


def open_hosts(config: RunConfig, begun: RunConfig | None = None) -> JobHosts | None:
    """The hosts that a configuration names, asked what they are; None where it names none.

    Args:
        begun: Of the run that is gone on with: it may do so without some of the hosts that this names.

    Raises:
        ConfigError: Some cannot take part, and must; each is named with its reason.
    """
    if not config.hosts.wanted:
        return None
    same = begun is not None and begun.hosts.start == config.hosts.start
    found = gather(
        config.hosts,
        lambda key: key_for(config, key),
        begun_with=begun.hosts.workers if begun is not None and same else (),
        tell=lambda line: print(line, file=sys.stderr),
    )
    hosts = JobHosts(found.workers, found.inventories, found.here, found.key, config, found.named, found.absent)
    atexit.register(hosts.close)
    return hosts


def key_for(config: RunConfig, key: bytes) -> WorkerKey:
    """By which a run's controller may use workers that hold ``key``."""
    files = _tls_files(config)
    return WorkerKey(key, client_tls(files) if files is not None else None, config.deadlines.host_silence_s)


def unreachable(addresses: Mapping[str, str]) -> str:
    """Why machines of a job could not reach each other, if that can be known: one has said an address that only it can use.

    Args:
        addresses: Machine -> its address towards the controller.
    """
    alone = [name for name, address in addresses.items() if ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if not alone or len(alone) == len(addresses):
        return ""
    return (
        f"{', '.join(alone)}: reached by the loopback, where {', '.join(name for name in addresses if name not in alone)} cannot "
        "reach it: let its worker listen on its address in the network (--bind ADDRESS) and name that"
    )


def pair_lines(
    channels: Sequence[ChannelSpec], hosts: Mapping[str, Sequence[str]], spaces: Mapping[str, str]
) -> list[str]:
    """How payloads of each channel travel between each pair of machines, a line a channel.

    Args:
        hosts: Executor -> the machine of each of its ranks.
        spaces: Machine -> whose memory is within reach there.
    """
    lines = []
    for channel in channels:
        pairs = {
            (source, sink): "shared memory" if spaces[source] == spaces[sink] else "tcp"
            for source in hosts[channel.source]
            for sink in hosts[channel.sink]
        }
        ways = (f"{source} to {sink} {way}" for (source, sink), way in pairs.items())
        lines.append(f"{channel.name} ({channel.source} to {channel.sink}): {', '.join(ways)}")
    return lines


def _tls_files(config: RunConfig) -> TlsFiles | None:
    hosts = config.hosts
    if not hosts.tls_cert:
        return None
    return TlsFiles(
        certificate=Path(hosts.tls_cert).expanduser().resolve(),
        private_key=Path(hosts.tls_key).expanduser().resolve(),
        authority=Path(hosts.tls_ca).expanduser().resolve(),
    )
