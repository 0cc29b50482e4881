"""What becomes of a job when hosts that it names do not answer as it begins. Pure.

    who does not answer, and why ─▶ verdict: go on, wait, refuse ─▶ layouts without them ─▶ the first that fits is taken

A host that the user names for the first time may be misspelt, so it must answer. One that the run had before is a host that is gone:
it is waited for, and then left out, as it would have been in the run (``host_placement.stand_in``). Where ranks are changes no bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.config import HERE
from llamarl.runtime.host_placement import Machine, Units, spread, stand_in

__all__ = ["Absence", "Verdict", "layouts", "verdict", "what_changed", "why_no_room", "why_refused"]


@dataclass(frozen=True)
class Absence:
    """A host that takes no part."""

    name: str
    """As the user calls it."""
    why: str
    """Names the host too."""
    refuses: bool = False
    """It answers, and takes no orders by this key or certificate: waiting mends nothing."""


class Verdict(Enum):
    """What to do about hosts that do not take part."""

    GO_ON = "go on with the others"
    WAIT = "ask them again"
    REFUSE = "the job cannot begin"


def verdict(absent: Sequence[Absence], num_hosts: int, *, begun_with: Collection[str], left_s: float) -> Verdict:
    """Whether a job begins without some of its hosts.

    Args:
        num_hosts: That it names.
        begun_with: Names of those that the run had before; empty: it is new.
        left_s: For which they are waited for yet.
    """
    if not absent:
        return Verdict.GO_ON
    if any(one.name not in begun_with for one in absent):
        return Verdict.REFUSE
    if left_s > 0 and not all(one.refuses for one in absent):
        return Verdict.WAIT
    return Verdict.REFUSE if len(absent) >= num_hosts else Verdict.GO_ON


def why_refused(absent: Sequence[Absence], *, begun_with: Collection[str], waited_s: float) -> str:
    """Why a job whose verdict is ``REFUSE`` does not begin, and what to do.

    Args:
        waited_s: For how long they were waited for.
    """
    lines = ["these hosts cannot take part:", *(f"  - {one.why}" for one in absent)]
    if all(one.name in begun_with for one in absent):
        lines.append(f"None of the run's hosts is left, after {waited_s:g} s (hosts.absent_after_s). {_ways_out(())}")
    elif begun_with:
        names = ", ".join(one.name for one in absent if one.name not in begun_with)
        lines.append(f"The run has not had {names} before, so the name may be wrong: no resume goes on without it.")
    return "\n".join(lines)


def why_no_room(absent: Mapping[str, str], named: Sequence[str], trouble: str) -> str:
    """Why a run does not go on without some of its hosts, and what to do.

    Args:
        absent: Host -> why it takes no part.
        trouble: Why its ranks have no place on the others.
    """
    lines = ["these hosts do not answer, and the others have no room for their ranks:"]
    lines += [f"  - {why}" for why in absent.values()]
    return "\n".join([*lines, trouble, _ways_out([name for name in named if name not in absent], spare=True)])


def _ways_out(left: Sequence[str], *, spare: bool = False) -> str:
    others = ",".join([*left, *(["SPARE"] if spare else [])]) or "NAME,NAME"
    return f"Start them again (`llamarl worker`), or resume on others: --hosts {others}, or --hosts {HERE} for this machine."


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
    """Executor -> the host of each of its ranks, -1 for the controller's machine, without hosts that are not there; those to be tried
    first come first:

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
    kept = {name: [host for host in hosts if host in there or host < 0] for name, hosts in on.items()}
    for left in ({name: hosts for name, hosts in kept.items() if hosts}, {}):
        places = {name: [numbers.index(host) if host >= 0 else -1 for host in hosts] for name, hosts in left.items()}
        found = spread(executors, len(numbers), places, tensor_parallel=tensor_parallel, together=together)
        yield {name: tuple(numbers[at] if at >= 0 else -1 for at in ranks) for name, ranks in found.items()}


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
        whole: Where ranks would be were all hosts there; ``now``: where they are; -1 is the controller's machine.
        named: All hosts, in the order of their numbers.
    """
    if not absent:
        return ""
    names = {-1: HERE, **dict(enumerate(named))}
    moved = [
        f"{name} on {', '.join(dict.fromkeys(names[host] for host in now[name]))}"
        for name, ranks in whole.items()
        if tuple(ranks) != tuple(now[name])
    ]
    lines = [f"left out: {why}" for why in absent.values()]
    lines.append(f"the run goes on without {', '.join(absent)}: {'; '.join(moved) or 'no rank was to be there'}")
    return "\n".join(lines)
