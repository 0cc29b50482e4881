"""Hosts far apart on one machine: network namespaces whose packets this program carries, late and no faster than a link would.

    namespace a: tun ──▶ read ─▶ leaves when the link is free ─▶ arrives a delay later ─▶ write ──▶ tun: namespace b

    python benchmarks/slow_link.py --link 100mbit:50ms --json link.json      # as root: what a ping and a raw socket say of it

For kernels that cannot delay packets themselves (no ``netem``). A link is one way and between two hosts: it serializes packets at
its rate, holds a queue of ``QUEUE_S`` and drops what does not fit, and delivers in order. ``100mbit:50ms`` is 100 Mbit/s each way
and a round trip of 50 ms: 25 ms each way, as ``ping`` would tell. The clock of a packet begins when it is read.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import json
import multiprocessing
import os
import re
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from namespaces import enter

__all__ = ["Link", "far_hosts", "measured_link", "parse_link"]

QUEUE_S = 0.25
"""Of sending time that a link holds before it drops."""
MTU = 9000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_NET = "10.98.0"


@dataclass(frozen=True)
class Link:
    """Between two hosts, the same each way."""

    bytes_per_s: float
    """Infinite: as fast as this program."""
    round_trip_s: float

    @property
    def words(self) -> str:
        rate = "unlimited" if self.bytes_per_s == float("inf") else f"{self.bytes_per_s * 8 / 1e6:g} Mbit/s"
        return f"{rate}, round trip {self.round_trip_s * 1e3:g} ms"


def parse_link(text: str) -> Link:
    """``100mbit:50ms``, ``1gbit:1ms``; ``none`` is a link without limit or delay."""
    if text == "none":
        return Link(float("inf"), 0.0)
    found = re.fullmatch(r"([\d.]+)(k|m|g)bit:([\d.]+)ms", text)
    if not found:
        raise ValueError(f"expected a link such as 100mbit:50ms, got {text!r}")
    number, unit, delay = found.groups()
    return Link(float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit] / 8.0, float(delay) / 1e3)


@contextmanager
def far_hosts(count: int, link: Link) -> Iterator[list[tuple[str, str]]]:
    """(namespace, address) of ``count`` hosts, each pair joined by a link of its own; they are gone afterwards."""
    mark = f"far{os.getpid() % 100_000}"
    hosts = [(f"{mark}h{index}", f"{_NET}.{index + 1}") for index in range(count)]
    carrier = None
    try:
        for name, _ in hosts:
            _run("ip", "netns", "add", name)
            _run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
        ready, told = multiprocessing.Pipe(duplex=False)
        carrier = multiprocessing.get_context("spawn").Process(target=_carry, args=(hosts, link, told), daemon=True)
        carrier.start()
        if not ready.poll(20.0) or ready.recv() != "ready":
            raise OSError("the program that carries packets did not start")
        yield hosts
    finally:
        if carrier is not None:
            carrier.kill()
            carrier.join(10.0)
        for name, _ in hosts:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _carry(hosts: Sequence[tuple[str, str]], link: Link, told: multiprocessing.connection.Connection) -> None:
    """Until it is killed: packets from every namespace's device to the one that they are addressed to."""
    os.setpriority(os.PRIO_PROCESS, 0, -15)  # what it is late by, the link is late by
    devices: list[int] = []
    place_of: dict[bytes, int] = {}
    for place, (name, address) in enumerate(hosts):
        enter(name)
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"far0", _IFF_TUN | _IFF_NO_PI))
        _run("ip", "address", "add", f"{address}/24", "dev", "far0")
        _run("ip", "link", "set", "far0", "mtu", str(MTU), "txqueuelen", "1000", "up")
        devices.append(fd)
        place_of[socket.inet_aton(address)] = place
    told.send("ready")
    source_of = {fd: place for place, fd in enumerate(devices)}
    delay_s, second = link.round_trip_s / 2.0, link.bytes_per_s
    free = [[0.0] * len(devices) for _ in devices]  # when the link from .. to .. has sent what it holds
    travelling: list[tuple[float, int, int, bytes]] = []  # arrives, order, to, packet
    order = 0
    now = time.monotonic
    while True:
        wait = max(0.0, travelling[0][0] - now()) if travelling else 1.0
        readable, _, _ = select.select(devices, (), (), wait)
        for fd in readable:
            source = source_of[fd]
            for _ in range(64):
                try:
                    packet = os.read(fd, 65536)
                except BlockingIOError:
                    break
                sink = place_of.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if sink is None:
                    continue
                at = now()
                starts = max(at, free[source][sink])
                if starts - at > QUEUE_S:
                    continue
                free[source][sink] = leaves = starts + len(packet) / second
                order += 1
                heapq.heappush(travelling, (leaves + delay_s, order, sink, packet))
        at = now()
        while travelling and travelling[0][0] <= at:
            _, _, sink, packet = heapq.heappop(travelling)
            os.write(devices[sink], packet)


def measured_link(hosts: Sequence[tuple[str, str]], nbytes: int = 24 << 20) -> dict[str, float]:
    """What a ping and a raw socket find between the first two hosts: median round trip in ms, Mbit/s of payload."""
    (first, _), (second, address) = hosts[:2]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    told, tells = context.Pipe(duplex=False)
    sender = context.Process(target=_send, args=(second, address, nbytes, theirs), daemon=True)
    sender.start()
    port = ours.recv()
    receiver = context.Process(target=_receive, args=(first, (address, port), nbytes, tells), daemon=True)
    receiver.start()
    if not told.poll(120.0):
        raise OSError("no bytes came over the link")
    ping_s, seconds = told.recv()
    for process in (sender, receiver):
        process.join(10.0)
    return {"ping_ms": ping_s * 1e3, "raw_socket_mbit_per_s": nbytes * 8 / seconds / 1e6}


def _ping_s(address: str, count: int = 15) -> float:
    """Median round trip of ICMP echoes, which the other host's kernel answers."""
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as icmp:
        icmp.settimeout(2.0)
        for sequence in range(count):
            head = struct.pack("!BBHHH", 8, 0, 0, os.getpid() & 0xFFFF, sequence)
            total = sum(struct.unpack("!4H", head))
            total = (total & 0xFFFF) + (total >> 16)
            started = time.monotonic()
            icmp.sendto(head[:2] + struct.pack("!H", ~total & 0xFFFF) + head[4:], (address, 0))
            while True:
                packet = icmp.recv(256)
                if packet[20] == 0 and packet[24:28] == head[4:]:
                    break
            times.append(time.monotonic() - started)
            time.sleep(0.02)
    return statistics.median(times)


def _send(namespace: str, address: str, nbytes: int, told: multiprocessing.connection.Connection) -> None:
    enter(namespace)
    with socket.create_server((address, 0)) as server:
        told.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            connection.sendall(bytes(nbytes // 2))  # while the connection finds its rate
            connection.recv(1)
            connection.sendall(bytes(nbytes))
            connection.recv(1)


def _receive(namespace: str, where: tuple[str, int], nbytes: int, told: multiprocessing.connection.Connection) -> None:
    enter(namespace)
    ping_s = _ping_s(where[0])
    into = memoryview(bytearray(nbytes))
    with socket.create_connection(where) as connection:
        _fill(connection, into[: nbytes // 2])
        connection.sendall(b"x")
        _fill(connection, into[:1])  # from the first byte: the rate, not the round trip
        started = time.monotonic()
        _fill(connection, into[1:])
        told.send((ping_s, time.monotonic() - started))
        connection.sendall(b"x")


def _fill(connection: socket.socket, into: memoryview) -> None:
    while into:
        into = into[connection.recv_into(into) :]


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit:50ms")
    parser.add_argument("--json", help="where to write the results")
    args = parser.parse_args()
    link = parse_link(args.link)
    with far_hosts(2, link) as hosts:
        found = measured_link(hosts)
    print(f"{link.words}: {json.dumps(found)}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"link": link.words, **found}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
