"""The two-host section of ``benchmarks/weight_sync.py``: actors on two hosts of a Monarch process job, and a raw stream.

The job's two hosts are processes of this machine and talk over unix sockets, so its figure says nothing about a network."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from monarch.actor import Actor, endpoint
from monarch.job import ProcessJob

from llamarl.transports.rdma import RdmaSink, RdmaSource
from llamarl.weight_sync.sink import Puller
from llamarl.weight_sync.source import Publisher

WAIT_S = 300


def tensors_of(nbytes: int) -> dict[str, torch.Tensor]:
    """Four equal matrices."""
    return {f"w{i}": torch.arange(nbytes // 16, dtype=torch.float32).view(-1, 1024) + i for i in range(4)}


class TrainerHost(Actor):
    """Publishes on its host."""

    def __init__(self, nbytes: int) -> None:
        torch.set_num_threads(1)
        self.tensors = tensors_of(nbytes)
        self.publisher = Publisher(rank=0, num_source_ranks=1, num_slots=1, transport=RdmaSource())

    @endpoint
    def publish(self, version: int) -> Any:
        return self.publisher.publish(version, self.tensors)


class GeneratorHost(Actor):
    """Pulls on its host."""

    def __init__(self, nbytes: int) -> None:
        torch.set_num_threads(1)
        self.expected = tensors_of(nbytes)
        self.live = {name: torch.zeros_like(t) for name, t in self.expected.items()}
        self.puller = Puller(rank=0, num_sink_ranks=1, transport=RdmaSink())

    @endpoint
    def load(self, handle: Any) -> tuple[float, bool]:
        started = time.monotonic()
        self.puller.open([handle], WAIT_S).load_into(self.live, deadline_s=WAIT_S)
        seconds = time.monotonic() - started
        return seconds, all(torch.equal(self.live[name], t) for name, t in self.expected.items())


def raw_stream(nbytes: int) -> float:
    """Seconds for ``nbytes`` over a loopback TCP connection, both ends in this process."""
    server = socket.create_server(("127.0.0.1", 0))
    received = bytearray(nbytes)

    def drain() -> None:
        connection, _ = server.accept()
        view, at = memoryview(received), 0
        while at < nbytes:
            at += connection.recv_into(view[at:])
        connection.close()

    thread = threading.Thread(target=drain, daemon=True)
    payload = memoryview(bytes(nbytes))
    thread.start()
    client = socket.create_connection(server.getsockname())
    started = time.monotonic()
    client.sendall(payload)
    thread.join(WAIT_S)
    seconds = time.monotonic() - started
    client.close()
    server.close()
    return seconds


def two_hosts(nbytes: int, repeats: int) -> dict[str, Any]:
    """Hand ``nbytes`` from one host's trainer to the other's generator, verified, beside a raw stream of as many bytes."""
    here = Path(__file__).resolve()
    paths = [str(here.parents[1] / "src"), str(here.parent), os.environ.get("PYTHONPATH", "")]
    job = ProcessJob({"trainers": 1, "generators": 1}, env={"PYTHONPATH": os.pathsep.join(paths)})
    pulled, streamed, correct = [], [], True
    try:
        hosts = job.state(cached_path=None)
        trainer = hosts.trainers.spawn_procs(per_host={"ranks": 1}).spawn("trainer", TrainerHost, nbytes)
        generator = hosts.generators.spawn_procs(per_host={"ranks": 1}).spawn("generator", GeneratorHost, nbytes)
        for version in range(repeats + 1):
            handle = trainer.publish.call_one(version).get(timeout=WAIT_S)
            seconds, same = generator.load.call_one(handle).get(timeout=WAIT_S)
            correct = correct and same
            if version > 0:
                pulled.append(seconds)
                streamed.append(raw_stream(nbytes))
    finally:
        job.kill()
    return {
        "transport": handle.transport,
        "bytes": nbytes,
        "verified": correct,
        "pull_GB_per_s": nbytes / statistics.median(pulled) / 1e9,
        "raw_stream_GB_per_s": nbytes / statistics.median(streamed) / 1e9,
        "runs": len(pulled),
    }
