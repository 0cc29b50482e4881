"""Weights between hosts: the ``tcp`` transport against a raw socket, and one version to many hosts behind limited links.

    python benchmarks/weight_sync_tcp.py --json tcp.json                       # SmolLM2's and a 1B model's bytes, in bf16
    python benchmarks/weight_sync_tcp.py --sections rate --models 135m --repeats 5
    python benchmarks/weight_sync_tcp.py --sections fan_out --hosts 1 2 4 8 --link 200mbit      # as root

``loopback``: two processes that are told they see nothing of each other's memory. ``namespaces`` (as root): two network
namespaces joined by a bridge. In each a raw socket (``sendall`` from the published slot, ``recv_into`` memory in use) and the
transport (open a published version, load it, every block proved) take turns in the same two processes. ``streamed`` is a version
whose copy into the slot begins with the pull. Every process computes on one thread.

``fan_out``: a source and R sinks, each in a network namespace behind a link of ``--link`` each way (``tc``'s token bucket); the time
until the last sink holds the version, all of them reading from the source (``direct``) or each passing it on (``passed_on``).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from harness import claim, paired_ratio, spread, write_report
from namespaces import can_make_hosts, enter, made_hosts
from weight_sync import Processes, free_bytes, llama_parameters, local_tensor

from llamarl.transports.network import Network, join
from llamarl.transports.segment_server import server_here
from llamarl.transports.tcp import TcpSink, TcpSource
from llamarl.weight_sync.layout import MeshLayout
from llamarl.weight_sync.sink import Puller
from llamarl.weight_sync.source import Publisher, WeightsPayload

WAIT_S = 300.0
KEY = os.urandom(32)


def source(pipe: Connection, to_sink: Connection, model: str, namespace: str, network: Network) -> None:
    enter(namespace)
    join(network)
    torch.set_num_threads(1)
    layout = MeshLayout(llama_parameters(model, "bfloat16"), {"rank": 1})
    tensors = {p.parameter: local_tensor(p, fill=True).bfloat16() for p in layout.pieces_of(0)}
    nbytes = sum(t.nbytes for t in tensors.values())
    publisher = Publisher(rank=0, num_source_ranks=1, num_slots=1, transport=TcpSource())
    handle = publisher.publish(WeightsPayload(version=0, tensors=tensors, layout=layout))
    slot = publisher._slots[0]
    assert slot is not None
    memory = slot.buffer.data.numpy().data[:nbytes]
    version = 0
    pipe.send("ready")
    while (what := pipe.recv()) is not None:
        if what == "raw":
            with socket.create_server((network.address, 0), family=socket.AF_INET) as server:
                to_sink.send(server.getsockname())
                connection, _ = server.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.recv(1)
                connection.sendall(memory)
                connection.recv(1)
        elif what in ("transport", "streamed"):
            version += 1
            handle = publisher.publish(
                WeightsPayload(
                    version=version,
                    tensors=tensors,
                    layout=layout,
                    released=threading.Event() if what == "streamed" else None,
                )
            )
            if what == "transport":
                publisher.wait()
            to_sink.send(handle)
            publisher.wait()
        pipe.send(None)
    publisher.close()


def sink(pipe: Connection, from_source: Connection, model: str, namespace: str, network: Network) -> None:
    enter(namespace)
    join(network)
    torch.set_num_threads(1)
    layout = MeshLayout(llama_parameters(model, "bfloat16"), {"rank": 1})
    shapes = {p.parameter: [b - a for a, b in p.box] for p in layout.pieces_of(0)}
    nbytes = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    pool = torch.zeros(nbytes // 2, dtype=torch.bfloat16)  # the raw stream's bytes go where the weights go
    live, at = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        live[name] = pool[at : at + count].view(shape)
        at += count
    puller = Puller(rank=0, num_sink_ranks=1, transport=TcpSink())
    pipe.send("ready")
    while (what := pipe.recv()) is not None:
        if what == "check":
            pipe.send(
                all(torch.equal(live[p.parameter], local_tensor(p, fill=True).bfloat16()) for p in layout.pieces_of(0))
            )
            continue
        assert from_source.poll(WAIT_S)
        if what == "raw":
            where = from_source.recv()
            view = pool.view(torch.uint8).numpy().data
            with socket.create_connection(where) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                started, cpu = time.monotonic(), time.process_time()
                connection.sendall(b"x")
                while view:
                    view = view[connection.recv_into(view) :]
                spent = time.monotonic() - started, time.process_time() - cpu
                connection.sendall(b"x")
        else:
            handle = from_source.recv()
            started, cpu = time.monotonic(), time.process_time()
            puller.open([handle], WAIT_S).load_into(live, layout, WAIT_S)
            spent = time.monotonic() - started, time.process_time() - cpu
        pipe.send(spent)
    puller.close()


def fan_out_source(pipe: Connection, to_sinks: list[Connection], nbytes: int, namespace: str, network: Network) -> None:
    enter(namespace)
    join(network)
    torch.set_num_threads(1)
    weights = torch.arange(nbytes // 4, dtype=torch.float32).view(-1, 1024)
    publishers = {
        what: Publisher(rank=0, num_source_ranks=1, num_slots=1, transport=TcpSource())
        for what in ("direct", "passed_on")
    }
    version = 0
    pipe.send("ready")
    while (what := pipe.recv()) is not None:
        version += 1
        handle = publishers[what].publish(WeightsPayload(version=version, tensors={"w": weights}))
        server = server_here()
        assert server is not None
        before, started = server.sent_bytes, time.monotonic()
        for sink in to_sinks:
            sink.send(handle)
        for sink in to_sinks:
            assert sink.poll(WAIT_S) and sink.recv() == version
        pipe.send({"started": started, "sent": server.sent_bytes - before})
    for publisher in publishers.values():
        publisher.close()


def fan_out_sink(
    pipe: Connection, source: Connection, nbytes: int, rank: int, count: int, namespace: str, network: Network
) -> None:
    enter(namespace)
    join(network)
    torch.set_num_threads(1)
    live = {"w": torch.zeros(nbytes // 4).view(-1, 1024)}
    expected = torch.arange(nbytes // 4, dtype=torch.float32).view(-1, 1024)
    pullers = {
        what: Puller(rank=rank, num_sink_ranks=count, transport=TcpSink(), fan_out=what == "passed_on")
        for what in ("direct", "passed_on")
    }
    pipe.send("ready")
    while (what := pipe.recv()) is not None:
        live["w"].zero_()
        assert source.poll(WAIT_S)
        handle = source.recv()
        pullers[what].open([handle], WAIT_S).load_into(live)
        finished = time.monotonic()
        assert torch.equal(live["w"], expected)
        source.send(handle.version)
        passed_over = sum(mirror.num_passed_over for mirror in pullers[what].slots.mirrors)
        pipe.send({"finished": finished, "passed_over": passed_over})
    for puller in pullers.values():
        puller.close()


def fan_out(count: int, nbytes: int, link: str, repeats: int) -> dict[str, Any]:
    """One version to ``count`` hosts."""
    times: dict[str, list[float]] = {"direct": [], "passed_on": []}
    sent: dict[str, float] = {}
    passed_over = 0
    processes = Processes()
    try:
        with made_hosts(count + 1, rate=link) as hosts:
            places = [(name, Network(space=name, address=address, key=KEY)) for name, address in hosts]
            pipes = [processes.pipe() for _ in range(count)]
            processes.start(fan_out_source, [a for a, _ in pipes], nbytes, *places[0])
            for rank, (_, b) in enumerate(pipes):
                processes.start(fan_out_sink, b, nbytes, rank, count, *places[rank + 1])
            processes.answers()
            for repeat in range(repeats + 1):
                for what in times:
                    source_report, *sinks = processes.ask(what)
                    passed_over += sum(report["passed_over"] for report in sinks)
                    if repeat:  # the first opens connections and takes seats
                        times[what].append(max(report["finished"] for report in sinks) - source_report["started"])
                        sent[what] = source_report["sent"] / nbytes
    finally:
        processes.close()
    result: dict[str, Any] = {"hosts": count, "bytes": nbytes, "link": link, "passed_over": passed_over}
    result |= {what: spread(values) for what, values in times.items()}
    return result | {f"{what}_copies_sent_by_the_source": value for what, value in sent.items()}


@contextlib.contextmanager
def two_places(kind: str) -> Iterator[list[tuple[str, Network]]]:
    """(namespace, place) of a source and a sink that read each other through sockets alone."""
    if kind == "loopback":
        yield [("", Network(space=space, address="127.0.0.1", key=KEY)) for space in "ab"]
        return
    with made_hosts(2) as hosts:
        yield [(name, Network(space=name, address=address, key=KEY)) for name, address in hosts]


def rate(model: str, kind: str, repeats: int) -> dict[str, Any]:
    nbytes = sum(s.nbytes for s in llama_parameters(model, "bfloat16").values())
    times: dict[str, list[float]] = {"raw": [], "transport": [], "streamed": []}
    cpu: dict[str, list[float]] = {"raw": [], "transport": [], "streamed": []}
    processes = Processes()
    a, b = processes.pipe()
    try:
        with two_places(kind) as places:
            processes.start(source, a, model, *places[0])
            processes.start(sink, b, model, *places[1])
            processes.answers()
            for repeat in range(repeats + 1):
                for what in times:
                    seconds, busy = processes.ask(what)[1]
                    if repeat:  # the first touches fresh memory
                        times[what].append(seconds)
                        cpu[what].append(busy)
                    if what != "raw":
                        assert processes.ask("check")[1], "the sink does not hold the source's values"
    finally:
        processes.close()
    result: dict[str, Any] = {"bytes": nbytes}
    result |= {what: spread(values) for what, values in times.items()}
    result |= {f"{what}_GB_per_s": nbytes / result[what]["median"] / 1e9 for what in times}
    result |= {f"{what}_sink_cpu_s_per_GB": spread(values)["median"] / nbytes * 1e9 for what, values in cpu.items()}
    result["rate_over_raw"] = paired_ratio(times["raw"], times["transport"])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write the results")
    parser.add_argument("--sections", nargs="+", default=["rate", "fan_out"], choices=["rate", "fan_out"])
    parser.add_argument("--hosts", nargs="+", type=int, default=[1, 2, 4, 8], help="for fan_out")
    parser.add_argument("--link", default="200mbit", help="for fan_out, each way")
    parser.add_argument("--fan-out-bytes", type=int, default=48 << 20)
    parser.add_argument("--models", nargs="+", default=["135m", "1b"])
    parser.add_argument("--places", nargs="+", default=["loopback", "namespaces"], choices=["loopback", "namespaces"])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    claims = []
    for kind in arguments.places if "rate" in arguments.sections else []:
        if kind == "namespaces" and not can_make_hosts():
            results[kind] = "left out: needs root, ip and tc"
            continue
        for model in arguments.models:
            need = 4 * sum(s.nbytes for s in llama_parameters(model, "bfloat16").values())
            if free_bytes() < need:
                results[f"{kind}_{model}"] = f"left out: needs {need / 1e9:.0f} GB of memory"
                continue
            result = results[f"{kind}_{model}"] = rate(model, kind, arguments.repeats)
            rates = ", ".join(f"{what} {result[f'{what}_GB_per_s']:.2f}" for what in ("raw", "transport", "streamed"))
            print(f"{kind} {model}, {result['bytes'] / 1e6:.0f} MB: GB/s {rates}", flush=True)
            text = f"{model} bf16 over {kind}: tcp, every block proved, over a raw socket"
            claims.append(claim(text, result["rate_over_raw"]["median"], 0.8))
    if "fan_out" in arguments.sections and not can_make_hosts():
        results["fan_out"] = "left out: needs root, ip and tc"
    elif "fan_out" in arguments.sections:
        rows: list[dict[str, Any]] = []
        results["fan_out"] = rows
        for count in arguments.hosts:
            row = fan_out(count, arguments.fan_out_bytes, arguments.link, min(3, arguments.repeats))
            rows.append(row)
            print(
                f"fan_out to {row['hosts']} hosts over {row['link']}: direct {row['direct']['median']:.2f} s, passed on "
                f"{row['passed_on']['median']:.2f} s; the source sent {row['direct_copies_sent_by_the_source']:.2f} and "
                f"{row['passed_on_copies_sent_by_the_source']:.2f} copies; passed over {row['passed_over']}",
                flush=True,
            )
        for row in rows[1:]:
            growth = row["passed_on"]["median"] / rows[0]["passed_on"]["median"]
            text = f"time for {row['hosts']} hosts over that for {rows[0]['hosts']}"
            claims.append(claim(text, growth, 1 + math.log2(row["hosts"] / rows[0]["hosts"]), at_least=False))
    write_report(arguments.json, results, claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())
