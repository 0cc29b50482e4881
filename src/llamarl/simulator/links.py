"""What distance costs a job: links between hosts, and what orders, payloads and weights take over them. Pure.

    hosts of each executor, links ─▶ Distances: seconds of a message, of a data payload, of a version to the last generator host

A version goes from host to host as :mod:`llamarl.transports.fan_out` seats them, block by block. Hosts of one size of block are a
row of machines through which equal jobs go, each taking a block's time: the last block leaves the h-th after the sum of all their
times and, for each further block, the time of the slowest. A host that feeds two others gives each half of its link.

Left out: first connections, and what TCP needs to find a link's rate.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.errors import PlanError
from llamarl.transports.checksum import BLOCK_BYTES
from llamarl.transports.fan_out import reads_from

__all__ = [
    "NO_LINK",
    "Distances",
    "Link",
    "Links",
    "distances",
    "hand_over_s",
    "parse_link",
    "parse_links",
    "payload_bytes",
]

DATA_ROUND_TRIPS = 2
"""The table of a token's parts, then the part."""
WEIGHT_ROUND_TRIPS = 4
"""The slot's header, its checksums, the first block, the header once more."""
HOP_ROUND_TRIPS = 3
"""What a further host is behind the one before it, a block aside: that host's progress, its checksums, the block."""

SEQUENCE_BYTES = 250
"""A response travels as its arrays and this: what names it and its score, and the rest of a prompt that is shared."""
TOKEN_BYTES = 17
"""Of a response: identity, log-prob, version and mask, and four letters of text."""

_UNITS = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
_FORM = re.compile(r"([\d.]+)(kbit|mbit|gbit)(?::([\d.]+)(us|ms|s))?")


@dataclass(frozen=True, kw_only=True)
class Link:
    """Between two hosts, the same each way."""

    bytes_per_s: float = math.inf
    round_trip_s: float = 0.0

    def pull_s(self, nbytes: float, round_trips: int) -> float:
        """Seconds of a read that asks so often before it has all of its bytes."""
        return round_trips * self.round_trip_s + nbytes / self.bytes_per_s


NO_LINK = Link()
"""Between ranks of one host."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links of a job's hosts."""

    common: Link = NO_LINK
    """Between two hosts that ``pairs`` does not name."""
    pairs: Mapping[frozenset[str], Link] = field(default_factory=dict)

    def between(self, first: str, second: str) -> Link:
        """The one that joins two hosts; ``NO_LINK`` from a host to itself."""
        return NO_LINK if first == second else self.pairs.get(frozenset((first, second)), self.common)


@dataclass(frozen=True, kw_only=True)
class Distances:
    """What a job's links add to its ticks."""

    message_s: Mapping[str, float] = field(default_factory=dict)
    """Executor -> seconds of an order to its farthest rank; of a report too."""
    pull_s: Mapping[str, float] = field(default_factory=dict)
    """Data channel -> seconds in which the slowest sink rank reads its part."""
    weights_s: float = 0.0
    """From the end of the trainer's tick until the last generator host holds the version, messages included: the sink fetches it
    ahead of the tick that needs it."""


def parse_link(text: str) -> Link:
    """``100mbit:50ms``: a rate each way, and the round trip that ``ping`` tells; the latter may be left out.

    Raises:
        PlanError: It is of another form.
    """
    found = _FORM.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        rate = float(found[1]) * _UNITS[found[2]]
        round_trip_s = float(found[3] or 0) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[4] or "s"]
    except ValueError:
        rate, round_trip_s = 0.0, 0.0
    if not rate:
        raise PlanError(f"--link {text!r}: expected a rate and a round trip, such as 100mbit:50ms or 10gbit")
    return Link(bytes_per_s=rate, round_trip_s=round_trip_s)


def parse_links(texts: Sequence[str], hosts: Sequence[str] = ()) -> Links:
    """``100mbit:50ms`` for every pair of hosts, ``a,b=1gbit:1ms`` for one.

    Args:
        hosts: That there are; empty: any name will do.

    Raises:
        PlanError: One is of another form, names a host that there is not, or two speak of the same pair.
    """
    common: Link | None = None
    pairs: dict[frozenset[str], Link] = {}
    for text in texts:
        names, equals, link = text.rpartition("=")
        if not equals:
            if common is not None:
                raise PlanError(f"--link {text!r}: two links for every pair of hosts: write A,B={text} for one pair")
            common = parse_link(link)
            continue
        pair = frozenset(names.split(","))
        if len(pair) != 2 or (hosts and not pair <= set(hosts)):
            raise PlanError(f"--link {text!r}: expected two of the hosts {', '.join(hosts) or 'A, B'} before the =")
        if pair in pairs:
            raise PlanError(f"--link {text!r}: that pair has a link already")
        pairs[pair] = parse_link(link)
    return Links(common=common or NO_LINK, pairs=pairs)


def payload_bytes(sequences: int, tokens: float) -> float:
    """Of a tick's responses on a data channel.

    Args:
        tokens: Of all responses together.
    """
    return sequences * SEQUENCE_BYTES + tokens * TOKEN_BYTES


def hand_over_s(
    sources: Sequence[str], hosts: Sequence[str], links: Links, nbytes: float, *, block_bytes: float = BLOCK_BYTES
) -> list[float]:
    """Seconds from asking until each host holds a version, and has proved it.

    Args:
        sources: Hosts that hold a part of the version each, of one size; the parts travel side by side.
        hosts: In the order in which they are seated; a host that is the only source reads nothing.
        nbytes: Of the version.
    """
    far = [host for host in hosts if set(sources) != {host}]
    blocks = max(1, math.ceil(nbytes / block_bytes))
    block = nbytes / blocks
    before = [reads_from(seat) for seat in range(len(far))]
    readers = Counter(before)
    sums: list[float] = []
    slowest: list[float] = []
    for seat, host in enumerate(far):
        parent = before[seat]
        if parent is None:
            ways = [links.between(source, host) for source in dict.fromkeys(sources)]
            rate = sum(way.bytes_per_s for way in ways)
            way_s = WEIGHT_ROUND_TRIPS * max(way.round_trip_s for way in ways)
            sums.append(way_s + block / rate)
            slowest.append(block / rate)
            continue
        way = links.between(far[parent], host)
        block_s = block * readers[parent] / way.bytes_per_s
        sums.append(sums[parent] + HOP_ROUND_TRIPS * way.round_trip_s + block_s)
        slowest.append(max(slowest[parent], block_s))
    arrivals = dict(zip(far, (s + (blocks - 1) * w for s, w in zip(sums, slowest, strict=True)), strict=True))
    return [arrivals.get(host, 0.0) for host in hosts]


def distances(
    where: Mapping[str, Sequence[str]],
    channels: Sequence[ChannelSpec],
    links: Links,
    *,
    controller: str,
    data_bytes: float,
    weight_bytes: float,
) -> Distances:
    """What the links of a job's hosts add to its ticks.

    Args:
        where: Executor -> the host of each of its ranks.
        channels: Of the job.
        controller: Its host.
        data_bytes: Of a tick's payload on a data channel, all ranks together.
        weight_bytes: Of a version.
    """
    message_s = {
        name: max(links.between(controller, host).round_trip_s / 2.0 for host in hosts) for name, hosts in where.items()
    }
    pull_s: dict[str, float] = {}
    weights_s = 0.0
    for channel in channels:
        sources, sinks = where.get(channel.source), where.get(channel.sink)
        if sources is None or sinks is None:
            continue
        if channel.kind is ChannelKind.WEIGHTS:
            if channel.sink == "generator":
                arrived = hand_over_s(list(dict.fromkeys(sources)), list(dict.fromkeys(sinks)), links, weight_bytes)
                weights_s = message_s[channel.source] + message_s[channel.sink] + max(arrived)
            continue
        parts = (
            len(sinks) // (channel.sink_replicas * channel.sink_stages) if channel.kind is ChannelKind.SCATTER else 1
        )
        each = data_bytes / len(sources) / parts
        pull_s[channel.name] = max(
            sum(links.between(source, sink).pull_s(each, DATA_ROUND_TRIPS) for source in sources) for sink in sinks
        )
    return Distances(message_s=message_s, pull_s=pull_s, weights_s=weights_s)
