"""Which rank goes to which host. Pure: hosts are what their nodes say.

    executors, hosts ─▶ spread: a host for each rank ─▶ placement.place: threads and a device for each

An executor that is given hosts fills them one after the other: tensor-parallel peers stay together
where they can, ranks with neighbouring numbers too, since these talk most. One that is given none
goes whole to the host that has fewest ranks so far and cores to offer; one that may be on GPUs to such a host among those with
enough free ones, else with enough, else with any, where there are some; where no host has enough, it takes free ones of several.
Unlike replicas may be given hosts kind by kind: ``generator_0`` are those of the first kind.

While the job goes on a host may be gone: another takes its place (``placement.stand_in``), and everyone else stays.

When a run goes on and nodes that it was given are not in the cluster any more, ranks go elsewhere
(``layouts``): where they are changes no bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorSpec

__all__ = ["Machine", "Units", "layouts", "spread", "unlike", "what_changed", "why_no_room"]

_ALWAYS_ALIKE = ("llamarl", "python")

Units = int | tuple[tuple[int, int], ...]
"""Ranks with neighbouring numbers that hold one model; of unlike ones, kind by kind: (ranks of one,
how many there are)."""


@dataclass(frozen=True)
class Machine:
    """A host, or this machine where a job has none."""

    name: str
    """Empty: this machine."""
    cores: int
    cuda_devices: int
    facts: Mapping[str, str] = field(default_factory=dict)
    """``determinism.platform_facts``."""


def spread(
    executors: Sequence[ExecutorSpec],
    num_hosts: int,
    on: Mapping[str, Sequence[int]],
    *,
    tensor_parallel: Mapping[str, Units],
    together: Sequence[str] = (),
    cuda_devices: Sequence[int] = (),
    cores: Sequence[int] = (),
) -> dict[str, tuple[int, ...]]:
    """Executor -> the host of each of its ranks.

    Args:
        on: Executor, or kind of its replicas (``generator_0``) -> its hosts, in the order in which they fill.
        tensor_parallel: Executor -> its units; absent: 1.
        together: Executors that share devices: they go where the first of them that is given hosts goes.
        cuda_devices: Of each host; empty: none has any.
        cores: Of each host; empty: all have some. One that offers none, as heads mostly do (``--num-cpus=0``), gets no
            rank that nobody puts there.

    Raises:
        ConfigError: ``on`` names an executor that there is not, or parts those that share devices. Names every mistake.
    """
    names = [spec.name for spec in executors]
    kinds = {
        name: [f"{name}_{kind}" for kind in range(len(units))]
        for name in names
        if isinstance(units := tensor_parallel.get(name, 1), tuple)
    }
    known = [*names, *(kind for name in kinds for kind in kinds[name])]
    mistakes = [
        f"hosts.on.{name}: there is no such executor, there are {', '.join(known)}" for name in on if name not in known
    ]
    shared = {tuple(on[name]) for name in together if name in on}
    if len(shared) > 1:
        mistakes.append(f"{' and '.join(together)} share their devices, so hosts.on must give them the same hosts")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    given = {**on, **{name: next(iter(shared)) for name in together if shared}}
    usable = [host for host in range(num_hosts) if not cores or cores[host]] or range(num_hosts)
    where: dict[str, tuple[int, ...]] = {}
    used: Counter[int] = Counter()
    on_gpus: Counter[int] = Counter()
    is_given = {name for name in names if name in given or any(kind in given for kind in kinds.get(name, ()))}
    for spec in sorted(
        executors, key=lambda spec: spec.name not in is_given
    ):  # stable: those that are given hosts first
        hosts = given.get(spec.name)
        if hosts is None:
            found = (where[name] for name in together if spec.name in together and name in where)
            hosts = next((tuple(dict.fromkeys(ranks)) for ranks in found), None)
        units = tensor_parallel.get(spec.name, 1)
        over: tuple[int, ...] = ()
        if hosts is None:
            over = () if spec.name in is_given else _over_hosts(spec, units, cuda_devices, on_gpus, usable)
            fit = usable if spec.device == "cpu" else _with_gpus(cuda_devices, on_gpus, spec.num_ranks, usable)
            hosts = (min(fit, key=lambda host: used[host]),)
        if over:
            where[spec.name] = over
        elif isinstance(units, int):
            where[spec.name] = _fill(spec.num_ranks, hosts, units)
        else:
            of_kinds = [on.get(kind) for kind in kinds[spec.name]]
            where[spec.name] = _fill_kinds(units, hosts, of_kinds)
        used.update(where[spec.name])
        on_gpus.update(where[spec.name] if spec.device != "cpu" else ())
    return {name: where[name] for name in names}


def _with_gpus(
    cuda_devices: Sequence[int], taken: Mapping[int, int], num_ranks: int, hosts: Sequence[int]
) -> Sequence[int]:
    """The hosts with a GPU for each of so many ranks that nobody has yet; else that others may have; else with any; else all."""
    for least, others in ((num_ranks, taken), (num_ranks, {}), (1, {})):
        if found := [host for host in hosts if cuda_devices and cuda_devices[host] - others.get(host, 0) >= least]:
            return found
    return hosts


def _over_hosts(
    spec: ExecutorSpec, units: Units, cuda_devices: Sequence[int], taken: Mapping[int, int], hosts: Sequence[int]
) -> tuple[int, ...]:
    """Each unit on the first host with free GPUs for it, of an executor for which no host has enough; else empty."""
    if spec.device == "cpu" or not cuda_devices or max(cuda_devices[host] for host in hosts) >= spec.num_ranks:
        return ()
    free = {host: cuda_devices[host] - taken.get(host, 0) for host in hosts}
    found: list[int] = []
    kinds = ((units, spec.num_ranks // units),) if isinstance(units, int) else units
    for size in (size for size, number in kinds for _ in range(number)):
        if (host := next((host for host in free if free[host] >= size), None)) is None:
            return ()
        free[host] -= size
        found += [host] * size
    return tuple(found)


def _fill(num_ranks: int, hosts: Sequence[int], unit: int) -> tuple[int, ...]:
    """Blocks of neighbouring ranks, in whole ``unit``s where there are enough of them for every host."""
    unit = unit if num_ranks % unit == 0 and num_ranks // unit >= len(hosts) else 1
    units = num_ranks // unit
    each, more = divmod(units, len(hosts))
    found: list[int] = []
    for place_in_list, host in enumerate(hosts):
        found += [host] * unit * (each + (place_in_list < more))
    return tuple(found)


def _fill_kinds(
    units: tuple[tuple[int, int], ...], hosts: Sequence[int], of_kinds: Sequence[Sequence[int] | None]
) -> tuple[int, ...]:
    """Kind after kind: one that is given hosts of its own fills these; the others, if there are
    any, together those of the executor.

    Args:
        of_kinds: Each kind's own hosts.
    """
    left = [size for (size, number), own in zip(units, of_kinds, strict=True) if own is None for _ in range(number)]
    total, done = sum(left), 0
    found: list[int] = []
    for (size, number), own in zip(units, of_kinds, strict=True):
        if own is not None:
            found += _fill(size * number, own, size)
            continue
        for _ in range(number):  # a whole replica, where its middle falls if all hosts get as many ranks
            found += [hosts[(2 * done + size) * len(hosts) // (2 * total)]] * size
            done += size
    return tuple(found)


def unlike(machines: Sequence[Machine], *, allow: bool) -> list[str]:
    """What differs among machines that hold ranks or the controller, in words: such differences
    change bits, or prevent the job.

    Args:
        machines: The first is what the others are compared with.
        allow: Whether processors and library versions may differ.
    """
    found = []
    first = machines[0]
    for other in machines[1:]:
        for name in sorted(first.facts.keys() | other.facts.keys()):
            ours, theirs = first.facts.get(name, "absent"), other.facts.get(name, "absent")
            if name == "python" and ours.split(".")[:2] == theirs.split(".")[:2] and allow:
                continue
            if ours != theirs and (name in _ALWAYS_ALIKE or not allow):
                found.append(f"{name}: {first.name} has {ours!r}, {other.name} {theirs!r}")
    return found


_WAYS_OUT = "ray start --address HEAD:PORT; or resume by --cluster here, on this machine."


def why_no_room(absent: Mapping[str, str], named: Sequence[str], trouble: str) -> str:
    """Why a run does not go on without some of its hosts, and what to do.

    Args:
        absent: Host -> why it takes no part.
        trouble: Why its ranks have no place on the others.
    """
    left = ", ".join(name for name in named if name not in absent)
    lines = ["the run was given nodes that are gone, and the others have no room for their ranks:"]
    lines += [f"  - {why}" for why in absent.values()]
    return "\n".join([*lines, trouble, f"Start them again, or others (left are {left}): {_WAYS_OUT}"])


def layouts(
    executors: Sequence[ExecutorSpec],
    on: Mapping[str, Sequence[int]],
    there: Mapping[int, Machine],
    *,
    tensor_parallel: Mapping[str, Units],
    together: Sequence[str] = (),
    allow_unlike: bool = False,
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield, executor by executor, the host of each of its ranks, without hosts that are not there; to be tried in order:

    1. each executor on those of its own hosts that are there, or where fewest ranks are;
    2. as if the user had named no places; where hosts differ, on each kind of them alone.

    Args:
        on: As ``hosts.on`` says, by the numbers of all hosts.
        there: Host's number -> what it is made of, for those that are there.
        tensor_parallel: See ``spread``, as for ``together``.
        allow_unlike: Whether hosts may differ in what decides bits; else only those of one kind get ranks: in (1) like the
            first that is named, in (2) kind by kind, those with most GPUs, and then most hosts, first.
    """
    kinds: list[list[int]] = []
    for host, machine in sorted(there.items()):
        alike = (kind for kind in kinds if not unlike([there[kind[0]], machine], allow=allow_unlike))
        if (kind := next(alike, None)) is None:
            kinds.append(kind := [])
        kind.append(host)
    kept = {name: [host for host in hosts if host in there] for name, hosts in on.items()}
    kept = {name: hosts for name, hosts in kept.items() if hosts}
    tries = [(kept, kind) for kind in kinds if kept and next(iter(kept.values()))[0] in kind]
    kinds.sort(key=lambda kind: (-sum(there[host].cuda_devices for host in kind), -len(kind)))
    for named, numbers in (*tries, *(({}, kind) for kind in kinds)):
        hosts = sorted({*numbers, *(host for own in named.values() for host in own)})
        places = {name: [hosts.index(host) for host in own] for name, own in named.items()}
        found = spread(
            executors,
            len(hosts),
            places,
            tensor_parallel=tensor_parallel,
            together=together,
            cuda_devices=[there[host].cuda_devices for host in hosts],
            cores=[there[host].cores for host in hosts],
        )
        yield {name: tuple(hosts[at] for at in ranks) for name, ranks in found.items()}


def what_changed(
    absent: Mapping[str, str],
    whole: Mapping[str, Sequence[int]],
    now: Mapping[str, Sequence[int]],
    named: Sequence[str],
) -> str:
    """What the user is to know of a job that begins without some of its hosts; empty where all are there.

    Args:
        absent: Host -> why it takes no part.
        whole: Where ranks would be were all hosts there; ``now``: where they are.
        named: All hosts, in the order of their numbers.
    """
    if not absent:
        return ""
    moved = [
        f"{name} on {', '.join(dict.fromkeys(named[host] for host in now[name]))}"
        for name, ranks in whole.items()
        if tuple(ranks) != tuple(now[name])
    ]
    lines = [f"left out: {why}" for why in absent.values()]
    lines.append(f"the run goes on without {', '.join(absent)}: {'; '.join(moved) or 'no rank was to be there'}")
    return "\n".join(lines)
