"""What becomes of a run that is gone on with when nodes that it was given are not in the cluster any more. Pure.

    names that no node has now ─▶ layouts without them ─▶ the first that fits is taken

They are left out, as they would have been in the run (``host_placement.stand_in``). Where ranks are changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.host_placement import Machine, Units, spread, stand_in

__all__ = ["layouts", "what_changed", "why_no_room"]

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
    whole: Mapping[str, tuple[int, ...]],
    on: Mapping[str, Sequence[int]],
    there: Mapping[int, Machine],
    *,
    num_hosts: int,
    tensor_parallel: Mapping[str, Units],
    together: Sequence[str] = (),
    allow_unlike: bool = False,
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Executor -> the host of each of its ranks, without hosts that are not there; those to be tried first come first:

    1. as ``whole``, each absent host's ranks together on another, as when it is lost in the run;
    2. each executor on those of its own hosts that are there, or where fewest ranks are;
    3. as if the user had named no places.

    Args:
        whole: Where they would be were all hosts there, as ``spread`` gives it.
        on: As ``hosts.on`` says, by the numbers of all hosts.
        there: Host's number -> what it is made of, for those that are there.
        tensor_parallel: See ``spread``, as for ``together``.
        allow_unlike: Whether hosts may differ in what decides bits.
    """
    gone = [host for host in range(num_hosts) if host not in there]
    if not gone:
        yield dict(whole)
        return
    moved = _with_stand_ins(executors, whole, gone, num_hosts, there, allow_unlike=allow_unlike)
    if moved is not None:
        yield moved
    numbers = sorted(there)
    kept = {name: [host for host in hosts if host in there] for name, hosts in on.items()}
    for left in ({name: hosts for name, hosts in kept.items() if hosts}, {}):
        places = {name: [numbers.index(host) for host in hosts] for name, hosts in left.items()}
        found = spread(executors, len(numbers), places, tensor_parallel=tensor_parallel, together=together)
        yield {name: tuple(numbers[at] for at in ranks) for name, ranks in found.items()}


def _with_stand_ins(
    executors: Sequence[ExecutorSpec],
    whole: Mapping[str, tuple[int, ...]],
    gone: Sequence[int],
    num_hosts: int,
    there: Mapping[int, Machine],
    *,
    allow_unlike: bool,
) -> dict[str, tuple[int, ...]] | None:
    """``whole`` with another host for each that is gone; None where one has none."""
    on_gpus = [spec.name for spec in executors if spec.device.startswith("cuda")]
    in_use = [host for ranks in whole.values() for host in ranks if host in there]
    facts = there[next(iter(in_use), min(there))].facts  # of a host that is gone nobody knows them, but all were alike
    found = dict(whole)
    for lost in gone:
        if not any(lost in ranks for ranks in found.values()):
            continue
        num_gpus = max((found[name].count(lost) for name in on_gpus), default=0)
        absent = Machine(str(lost), cores=0, cuda_devices=num_gpus, facts=facts)
        machines = [there.get(host, absent) for host in range(num_hosts)]
        other = stand_in(lost, machines, found, gone=gone, on_gpus=on_gpus, allow_unlike=allow_unlike)
        if other is None:
            return None
        found = {name: tuple(other if at == lost else at for at in ranks) for name, ranks in found.items()}
    return found


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
