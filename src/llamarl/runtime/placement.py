"""Who gets which cores and which device, decided before any process starts. Pure.

CPU threads: an executor's ``threads`` stands as given; ranks with 0 share evenly what the others
leave of the cores, at least one each. All ranks of an executor get the same number, because bits
depend on it. On a machine of up to 4 cores a lone rank that fills cores
(``ExecutorSpec.fills_cores``) gets a thread each, and no share is set apart for it.

CUDA devices: ranks with a device by number get it; the others get the device that fewest ranks have
so far, lowest number first. So executors lie apart while there are devices enough and share devices
when there are not; ranks of one executor never share one, because their collectives could not run.
Two executors of several ranks each are refused on one device unless they are co-located: both would
spin in their collectives there, and its memory would have to hold both.

Executors that take turns (``ColocatedGroup``) count as one among the cores: each that asks for
threads gets all that the others leave. Those of them that give their memory back while they wait
share devices, from cuda:0 on.

A host that takes the place of one that is gone (``stand_in``) is one on which the job, as it was
settled, can be placed with that host's ranks.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorSpec
from llamarl.plural import table
from llamarl.runtime.host_placement import Machine, unlike
from llamarl.settings.trainer import MOST_AT_ONCE

__all__ = [
    "ColocatedGroup",
    "Gpu",
    "Placement",
    "all_gpus",
    "available_cores",
    "available_cuda_devices",
    "available_memory",
    "check_system",
    "core_quota",
    "gpus_here",
    "here",
    "may_have_gpus",
    "memory_limit",
    "place",
    "share_of",
    "stand_in",
]

_GROUPS = Path("/sys/fs/cgroup")
_MOST_S = 120.0
"""Until a process has asked the driver."""

_GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Of drivers, the last of Windows' subsystem for Linux."""


@dataclass(frozen=True)
class ColocatedGroup:
    """Executors of which only one works at a time."""

    members: tuple[str, ...]
    sharing: tuple[str, ...]
    """Those that share devices: each gives back its memory while another works."""

    def among(self, executors: Sequence[ExecutorSpec]) -> ColocatedGroup:
        """Those of the group that are among some executors."""
        names = {spec.name for spec in executors}
        return ColocatedGroup(
            members=tuple(name for name in self.members if name in names),
            sharing=tuple(name for name in self.sharing if name in names),
        )


@dataclass(frozen=True)
class Placement:
    """The executors with ``threads`` and ``device`` settled."""

    executors: tuple[ExecutorSpec, ...]
    cores: int
    colocated: ColocatedGroup | None = None
    hosts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Executor -> the machine of each of its ranks; empty: all are on this one."""
    cores_of: Mapping[str, int] = field(default_factory=dict)
    """Machine -> its cores, of those in ``hosts``."""

    def table(self) -> str:
        """One row a rank, and what a reader should know about sharing."""
        rows = [("executor", "rank", *(["host"] if self.hosts else []), "device", "threads")]
        for spec in self.executors:
            devices = spec.device.split(",")
            for rank in range(spec.num_ranks):
                host = [self.hosts[spec.name][rank]] if self.hosts else []
                device = devices[rank % len(devices)]
                rows.append((spec.name, f"{rank} of {spec.num_ranks}", *host, device, str(spec.threads)))
        return "\n".join([*table(rows), "", *self.notes()])

    def notes(self) -> list[str]:
        """What is shared, in words."""
        if self.hosts:
            return [f"{name}: {note}" for name in self.cores_of for note in self.on_machine(name).notes()]
        members = self.colocated.members if self.colocated is not None else ()
        sharing = self.colocated.sharing if self.colocated is not None else ()
        threads = self._num_threads()
        notes = [f"{_count(threads, 'thread')} on {_count(self.cores, 'core')}"]
        if members:
            notes[0] += f", one at a time of {', '.join(members)}"
        filling = [s.name for s in self.executors if s.fills_cores and s.num_ranks == 1 and s.name not in members]
        own = threads - sum(spec.threads for spec in self.executors if spec.name in filling)
        if filling and own <= self.cores < threads:
            notes[0] += f": {' and '.join(filling)} uses what the others leave"
        elif threads > self.cores:
            notes[0] += ": executors that work at the same time take turns"
        if sharing:
            notes.append(f"{' and '.join(sharing)} are co-located: the one that waits gives its memory back")
        users: dict[str, list[str]] = {}
        for spec in self.executors:
            for device in spec.device.split(","):
                users.setdefault(device, []).append(spec.name)
        for device, names in sorted(users.items()):
            held = [name for name in names if name not in sharing]
            if device.startswith("cuda") and len(names) > 1:
                if len(names) - len(held) > 1:
                    held.append(f"the larger of {' and '.join(sharing)}")
                    must = f"its memory must hold {' and '.join(held)}"
                else:
                    must = "they take turns, and its memory must hold them all"
                notes.append(f"{device} is shared by {', '.join(names)}: {must}")
        return notes

    def by_gpu(self) -> tuple[ExecutorSpec, ...]:
        """The executors with devices that name their machine too (``cuda:0@a``), where they lie on several."""
        if not self.hosts:
            return self.executors
        named = []
        for spec in self.executors:
            devices = spec.device.split(",") * (1 if "," in spec.device else spec.num_ranks)
            places = zip(devices, self.hosts[spec.name], strict=True)
            of_ranks = ",".join(f"{device}@{host}" for device, host in places)
            named.append(replace(spec, device=of_ranks if devices[0].startswith("cuda") else spec.device))
        return tuple(named)

    def _num_threads(self) -> int:
        """At work at the same time."""
        members = self.colocated.members if self.colocated is not None else ()
        threads = sum(spec.threads * spec.num_ranks for spec in self.executors if spec.name not in members)
        return threads + max((s.threads * s.num_ranks for s in self.executors if s.name in members), default=0)

    def on_machine(self, name: str) -> Placement:
        """What of it lies on one machine."""
        executors = []
        for spec in self.executors:
            own = [rank for rank, host in enumerate(self.hosts[spec.name]) if host == name]
            devices = spec.device.split(",")
            if own:
                here = devices[0] if len(devices) == 1 else ",".join(devices[rank] for rank in own)
                executors.append(replace(spec, num_ranks=len(own), device=here))
        group = self.colocated.among(executors) if self.colocated is not None else None
        return Placement(tuple(executors), self.cores_of[name], group)


def check_system() -> None:
    """Raises ConfigError on a system that starts no run."""
    if sys.platform != "linux":
        raise ConfigError(f"runs need Linux, and this is {platform.system()}: a container or virtual machine will do")


def available_cores() -> int:
    """Count the cores that this process may use: those it may run on, or what a container's limit leaves of their time."""
    return int(max(1, min(len(os.sched_getaffinity(0)), core_quota(_own_groups(), _GROUPS))))


def available_memory() -> float:
    """Count the bytes of memory that this process may use: the machine's, or what a container's limit leaves of them."""
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit(_own_groups(), _GROUPS))


def core_quota(own: str, root: Path) -> float:
    """Read how many cores' time the control groups of a process leave it: the least of its group's and all above it.

    Args:
        own: What ``/proc/self/cgroup`` says; a group that is not found below ``root`` is skipped.
        root: Where control groups are mounted, those of version 1 in folders by controller.

    Returns:
        Cores, 2.5 for instance; inf without a limit.
    """

    def of_group(group: Path, first: bool) -> float:
        if not first:
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else math.inf

    return _least(own, root, "cpu", of_group)


def memory_limit(own: str, root: Path) -> float:
    """Read how many bytes of memory the control groups of a process leave it; ``core_quota`` says of which, and of what from."""

    def of_group(group: Path, first: bool) -> float:
        return float(
            (group / ("memory.limit_in_bytes" if first else "memory.max")).read_text("ascii").replace("max", "inf")
        )

    return _least(own, root, "memory", of_group)


def _least(own: str, root: Path, controller: str, of_group: Callable[[Path, bool], float]) -> float:
    """The least limit of a process's group and all above it, in both versions; inf: none is found."""
    found = [math.inf]
    for number, controllers, path in (line.split(":", 2) for line in own.splitlines() if line.count(":") >= 2):
        if number != "0" and controller not in controllers.split(","):
            continue
        mount = root if number == "0" else root / controller
        below = PurePosixPath(path.lstrip("/"))
        for group in (mount / below, *(mount / parent for parent in below.parents)):
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
                found.append(of_group(group, number != "0"))
    return min(found)


def _own_groups() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/self/cgroup").read_text(encoding="utf-8")
    return ""


def available_cuda_devices() -> int:
    """CUDA devices that torch sees. Starts no CUDA context, and imports torch only where there may be one."""
    if not may_have_gpus():
        return 0
    import torch

    return torch.cuda.device_count()


def may_have_gpus() -> bool:
    """False where the system shows no device of NVIDIA's or AMD's: asked of it, since torch takes seconds to say."""
    return any(glob.glob(pattern) for pattern in _GPU_FILES)


def here(*, cores: int | None = None, cuda_devices: int | None = None) -> Machine:
    """This machine.

    Args:
        cores: To share; None takes what this process may use.
        cuda_devices: None asks torch.
    """
    cores = available_cores() if cores is None else cores
    return Machine("", cores, available_cuda_devices() if cuda_devices is None else cuda_devices)


_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_ASK = """
import torch
for i in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(i)
    print(found.total_memory, found.name)
"""


class Gpu(NamedTuple):
    """What one GPU is."""

    kind: str
    """Its name, such as ``NVIDIA H100 80GB HBM3``."""
    memory: float
    """Bytes."""


def gpus_here(executors: Sequence[ExecutorSpec]) -> dict[str, Gpu]:
    """Tell what each GPU of this machine is, where an executor is on one; a process of its own asks, since this one is to
    have no CUDA context.

    Raises:
        ConfigError: The driver does not say.
    """
    if not any(spec.device.startswith("cuda") for spec in executors):
        return {}
    return {f"cuda:{i}": gpu for i, gpu in enumerate(_ask_gpus(os.environ))}


def all_gpus() -> list[Gpu]:
    """Tell what each GPU of this machine is, also those that are hidden from this process, as Ray hides them from one that
    has asked for none. Run on a node.

    Raises:
        ConfigError: The driver does not say.
    """
    return _ask_gpus({name: value for name, value in os.environ.items() if name not in _HIDING})


def _ask_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    command = [sys.executable, "-P", "-c", _ASK]
    try:
        asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_MOST_S)
    except (subprocess.SubprocessError, OSError) as error:
        raise ConfigError(f"the GPUs here do not say what they are: {error}") from error
    if asked.returncode:
        said = (asked.stderr.strip() or f"status {asked.returncode}").splitlines()[-1]
        raise ConfigError(f"the GPUs here do not say what they are: {said}")
    lines = [line.split(" ", 1) for line in asked.stdout.splitlines()]
    return [Gpu(kind, float(size)) for size, kind in lines]


def place(
    executors: Sequence[ExecutorSpec],
    machines: Sequence[Machine],
    where: Mapping[str, Sequence[int]] | None = None,
    *,
    colocated: ColocatedGroup | None = None,
) -> Placement:
    """Settle the threads and devices of ``executors``, machine by machine.

    Args:
        executors: ``threads`` 0 asks for a share of the cores; ``device`` is ``auto`` (CUDA where
            there is one), ``cpu``, ``cuda``, ``cuda:N``, or a comma-separated list with one a rank.
        where: Executor -> the machine of each of its ranks (``host_placement.spread``); None: all are
            on the first.
        colocated: Of a co-located job: who takes turns.

    Raises:
        ConfigError: The request cannot be met. The message lists every mistake, with its machine, and what would mend it.
    """
    mistakes = [
        f"executor {spec.name!r}: num_ranks must be >= 1, got {spec.num_ranks}"
        for spec in executors
        if spec.num_ranks < 1
    ]
    where = {spec.name: (0,) * spec.num_ranks for spec in executors} if where is None else where
    used = sorted({host for ranks in where.values() for host in ranks})
    settled: dict[int, dict[str, ExecutorSpec]] = {}
    for host in used:
        local = [part for spec in executors if (part := _part(spec, where[spec.name], host)) is not None]
        group = colocated.among(local) if colocated is not None else None
        title = f"{machines[host].name}: " if machines[host].name else ""
        try:
            settled[host] = {spec.name: spec for spec in _settle(local, machines[host], group)}
        except ConfigError as error:
            mistakes += [title + line for line in str(error).splitlines()]
    if not mistakes:
        mistakes += [mistake for spec in executors if (mistake := _mixed(spec, where[spec.name], settled))]
    named = any(machines[host].name for host in used)
    if mistakes:
        there = "on these hosts" if named else "here"
        raise ConfigError(f"this job cannot be placed {there}:\n" + "\n".join(f"  - {one}" for one in mistakes))
    return Placement(
        tuple(_whole(spec, where[spec.name], settled) for spec in executors),
        sum(machines[host].cores for host in used),
        colocated,
        hosts={name: tuple(machines[host].name for host in ranks) for name, ranks in where.items()} if named else {},
        cores_of={machines[host].name: machines[host].cores for host in used} if named else {},
    )


def stand_in(
    lost: int,
    placement: Placement,
    machines: Sequence[Machine],
    where: Mapping[str, Sequence[int]],
    *,
    gone: Collection[int],
    allow_unlike: bool = False,
) -> int | None:
    """The machine that takes the place of one that is gone, with all its ranks, each on the device with the same number.

    Alike in what decides bits, with fewest ranks, the first of those on which :func:`place` finds
    room for them; ranks on GPUs go where no other rank is on one. None: there is none.

    Args:
        placement: Of the job, so that threads and devices are given.
        where: Executor -> the machine of each of its ranks, as they are now.
        gone: Machines that take nobody.
    """
    used = Counter(host for ranks in where.values() for host in ranks)

    def fits(host: int) -> bool:
        if host in gone or unlike([machines[lost], machines[host]], allow=allow_unlike):
            return False
        if all(share_of(at, placement.executors, where, machines[at])[1] for at in (lost, host)):
            return False
        moved = {name: [host if at == lost else at for at in ranks] for name, ranks in where.items()}
        try:
            place(placement.executors, machines, moved, colocated=placement.colocated)
        except ConfigError:
            return False
        return True

    return min(filter(fits, range(len(machines))), key=lambda host: (used[host], host), default=None)


def share_of(
    host: int, executors: Sequence[ExecutorSpec], where: Mapping[str, Sequence[int]], machine: Machine
) -> tuple[int, int]:
    """Cores and GPUs that the ranks on a host take of it: a core a thread, where there are so many,
    and GPUs up to the last in use, those behind a rank's own included."""
    threads = gpus = 0
    for spec in executors:
        threads += spec.threads * list(where[spec.name]).count(host)
        devices = spec.device.split(",")
        for device in (devices[rank % len(devices)] for rank, at in enumerate(where[spec.name]) if at == host):
            kind, _, index = device.partition(":")
            if kind == "cuda":
                gpus = max(gpus, int(index or 0) + spec.gpus)
    return min(threads, machine.cores), min(gpus, machine.cuda_devices)


def _part(spec: ExecutorSpec, ranks: Sequence[int], host: int) -> ExecutorSpec | None:
    """The ranks of ``spec`` that lie on ``host``, as an executor of their own."""
    devices = [device.strip() for device in spec.device.split(",")]
    own = [rank for rank, at in enumerate(ranks) if at == host]
    if not own:
        return None
    if len(devices) == spec.num_ranks:  # one a rank
        devices = [devices[rank] for rank in own]
    return replace(spec, num_ranks=len(own), device=",".join(devices))


def _mixed(spec: ExecutorSpec, ranks: Sequence[int], settled: Mapping[int, Mapping[str, ExecutorSpec]]) -> str:
    kinds = {settled[host][spec.name].device.startswith("cuda") for host in ranks}
    if len(kinds) < 2:
        return ""
    return (
        f"executor {spec.name!r}: device {spec.device!r} would be CUDA on some of its hosts and the CPU on others; set it to 'cpu' "
        "or 'cuda', or give it other hosts"
    )


def _whole(spec: ExecutorSpec, ranks: Sequence[int], settled: Mapping[int, Mapping[str, ExecutorSpec]]) -> ExecutorSpec:
    """The executor with what its machines give."""
    left = {host: _each(settled[host][spec.name]) for host in set(ranks)}
    devices = [left[host].pop(0) for host in ranks]
    threads = min(settled[host][spec.name].threads for host in ranks)
    on_cpu = set(devices) == {"cpu"}
    device, fills = devices[0] if on_cpu else ",".join(devices), spec.fills_cores and on_cpu
    return replace(spec, threads=threads, device=device, fills_cores=fills)


def _each(part: ExecutorSpec) -> list[str]:
    devices = part.device.split(",")
    return devices if len(devices) == part.num_ranks else devices * part.num_ranks


def _settle(
    executors: Sequence[ExecutorSpec], machine: Machine, colocated: ColocatedGroup | None
) -> Sequence[ExecutorSpec]:
    """The executors, all on one machine, with threads and devices.

    Raises:
        ConfigError: Has a line for each mistake.
    """
    cores, cuda_devices = machine.cores, machine.cuda_devices
    if cuda_devices:  # who goes onto a GPU fills no cores
        executors = [replace(spec, fills_cores=spec.fills_cores and spec.device != "auto") for spec in executors]
    mistakes = [mistake for spec in executors for mistake in _mistakes(spec, cuda_devices)]
    if cores < 1:
        mistakes.append(f"cores must be >= 1, got {cores}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    threads = _threads(executors, cores, colocated)
    used: Counter[int] = Counter()
    for spec in executors:
        used.update(int(device.removeprefix("cuda:")) for device in _devices(spec) if ":" in device)
    together = colocated.sharing if colocated is not None else ()
    devices: dict[str, str] = {}
    for spec in sorted(executors, key=lambda spec: spec.name not in together):  # those that share come first
        devices[spec.name] = _choose_device(spec, cuda_devices, used, from_first=spec.name in together)
    settled = tuple(replace(spec, threads=threads[spec.name], device=devices[spec.name]) for spec in executors)
    _refuse_crowds(settled, cuda_devices, together)
    return settled


def _mistakes(spec: ExecutorSpec, cuda_devices: int) -> list[str]:
    who = f"executor {spec.name!r}"
    found = []
    if spec.threads < 0:
        found.append(f"{who}: threads must be >= 1, or 0 for a share of the cores, got {spec.threads}")
    devices = _devices(spec)
    for device in devices:
        if not re.fullmatch(r"auto|cpu|cuda|cuda:\d+", device):
            found.append(f"{who}: device {device!r} is unknown, expected auto, cpu, cuda or cuda:N")
        elif ":" in device and (last := int(device.removeprefix("cuda:")) + spec.gpus - 1) >= cuda_devices:
            found.append(f"{who}: there is no cuda:{last}, this machine has {_count(cuda_devices, 'CUDA device')}")
    if len(devices) not in (1, spec.num_ranks):
        found.append(f"{who}: {spec.num_ranks} ranks and {len(devices)} devices, expected one for all or one for each")
    if len(devices) > 1 and not all(":" in device for device in devices):
        found.append(f"{who}: a list names a GPU for each rank (cuda:0,cuda:1), got {spec.device}; name others once")
    elif len(devices) > 1 and len(set(devices)) < len(devices):
        found.append(f"{who}: ranks of one executor cannot share a device, got {spec.device}")
    if devices == ["cuda"] and not cuda_devices:
        found.append(f"{who}: device cuda, but this machine has no CUDA device; set device cpu")
    wants_cuda = devices == ["cuda"] or (devices == ["auto"] and cuda_devices > 0)
    if wants_cuda and 0 < cuda_devices < spec.num_ranks:
        found.append(
            f"{who}: {spec.num_ranks} ranks need as many CUDA devices, this machine has {cuda_devices}; "
            "lower its parallel sizes, or set device cpu"
        )
    if len(devices) == 1 and ":" in devices[0] and spec.num_ranks > 1:
        found.append(f"{who}: {spec.num_ranks} ranks cannot share {devices[0]}; set device cuda, or list one for each")
    return found


def _refuse_crowds(settled: Sequence[ExecutorSpec], cuda_devices: int, together: Sequence[str]) -> None:
    spread = [spec for spec in settled if spec.num_ranks > 1 and spec.device.startswith("cuda")]
    for one, other in combinations(spread, 2):
        shared = sorted(set(_devices(one)) & set(_devices(other)))
        if shared and not {one.name, other.name} <= set(together):
            raise ConfigError(
                f"executors {one.name!r} ({one.num_ranks} ranks) and {other.name!r} ({other.num_ranks} ranks) would share "
                f"{', '.join(shared)}: this machine has {_count(cuda_devices, 'CUDA device')}; lower their ranks to "
                f"{cuda_devices} together, give one device cpu, or set schedule.colocated where it lets them take turns"
            )


def _devices(spec: ExecutorSpec) -> list[str]:
    return [device.strip() for device in spec.device.split(",")]


def _threads(executors: Sequence[ExecutorSpec], cores: int, colocated: ColocatedGroup | None) -> dict[str, int]:
    """Threads of each rank, by executor. All that take turns and ask for a share are one sharer,
    with as many ranks as the largest of them."""
    members = colocated.members if colocated is not None else ()
    filling = {spec.name: cores for spec in executors if spec.name not in members and _fills(spec, cores)}
    executors = [spec for spec in executors if spec.name not in filling]
    beside = [spec for spec in executors if spec.name not in members]
    in_turn = [spec for spec in executors if spec.name in members]
    left = cores - sum(spec.threads * spec.num_ranks for spec in beside)
    ranks = sum(spec.num_ranks for spec in beside if spec.threads == 0)
    units = max((spec.num_ranks for spec in in_turn if spec.threads == 0), default=0)
    if not units:
        left -= max((spec.threads * spec.num_ranks for spec in in_turn), default=0)
    share = max(1, left // (ranks + units)) if ranks + units else 1
    left -= share * ranks
    return filling | {
        spec.name: spec.threads or (max(1, left // spec.num_ranks) if spec in in_turn else share) for spec in executors
    }


def _fills(spec: ExecutorSpec, cores: int) -> bool:
    return spec.fills_cores and spec.threads == 0 and spec.num_ranks == 1 and cores <= MOST_AT_ONCE


def _choose_device(spec: ExecutorSpec, cuda_devices: int, used: Counter[int], *, from_first: bool) -> str:
    devices = _devices(spec)
    if devices == ["auto"]:
        devices = ["cuda"] if cuda_devices else ["cpu"]
    if devices != ["cuda"]:
        return ",".join(devices)
    order = sorted(range(cuda_devices), key=lambda device: 0 if from_first else used[device])  # stable: lowest first
    chosen = order[: spec.num_ranks]
    used.update(chosen)
    return ",".join(f"cuda:{device}" for device in sorted(chosen))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}" if number else f"no {thing}"
