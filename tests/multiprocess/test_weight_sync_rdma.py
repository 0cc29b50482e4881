"""Weights between two hosts of a Monarch process job, by RDMA buffers (TCP where there is no card)."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarl.errors import DeadlineExceeded, WeightSyncError
from llamarl.weight_sync.sink import Puller
from llamarl.weight_sync.source import Publisher

monarch_actor = pytest.importorskip("monarch.actor")
monarch_job = pytest.importorskip("monarch.job")

WAIT_S = 120
CHUNK_BYTES = 256 << 10


def model(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {"w": torch.randn(700, 500, generator=generator), "v": torch.randn(3, generator=generator)}


class TrainerHost(monarch_actor.Actor):
    """Publishes versions from its host."""

    def __init__(self) -> None:
        from llamarl.transports.rdma import RdmaSource

        source = RdmaSource(chunk_bytes=CHUNK_BYTES)
        self.publisher = Publisher(rank=0, num_source_ranks=1, num_slots=2, transport=source)

    @monarch_actor.endpoint
    def publish(self, version: int, background: bool) -> tuple[Any, int]:
        handle = self.publisher.publish(version, model(version), background=background)
        return handle, os.getpid()

    @monarch_actor.endpoint
    def flip(self, offset: int) -> None:
        slot = self.publisher._slots[0]
        assert slot is not None
        slot.buffer.data[offset] ^= 1


class GeneratorHost(monarch_actor.Actor):
    """Pulls versions on its host."""

    def __init__(self) -> None:
        from llamarl.transports.rdma import RdmaSink

        self.puller = Puller(rank=0, num_sink_ranks=1, transport=RdmaSink())

    @monarch_actor.endpoint
    def load(self, handle: Any, deadline_s: float) -> tuple[str, int, int]:
        """("ok" or the error, version, bytes of the handle)"""
        size = len(pickle.dumps(handle))
        try:
            version = self.puller.open([handle], deadline_s)
            live = {name: torch.zeros_like(t) for name, t in model(0).items()}
            version.load_into(live, deadline_s=deadline_s)
            for name, tensor in model(version.version).items():
                assert torch.equal(live[name], tensor), name
            return "ok", version.version, size
        except (WeightSyncError, DeadlineExceeded) as error:
            return f"{type(error).__name__}: {error}", -1, size


def test_versions_cross_hosts_and_a_flipped_byte_is_refused() -> None:
    here = Path(__file__).resolve()
    paths = [str(here.parents[2] / "src"), str(here.parent), os.environ.get("PYTHONPATH", "")]
    job = monarch_job.ProcessJob({"trainers": 1, "generators": 1}, env={"PYTHONPATH": os.pathsep.join(paths)})
    try:
        hosts = job.state(cached_path=None)
        trainer = hosts.trainers.spawn_procs(per_host={"ranks": 1}).spawn("trainer", TrainerHost)
        generator = hosts.generators.spawn_procs(per_host={"ranks": 1}).spawn("generator", GeneratorHost)
        for version in range(4):
            handle, pid = trainer.publish.call_one(version, version % 2 == 1).get(timeout=WAIT_S)
            outcome, got, size = generator.load.call_one(handle, 60.0).get(timeout=WAIT_S)
            assert (outcome, got) == ("ok", version)
            assert handle.transport.startswith("rdma (") and size < 1000 and pid != os.getpid()
        handle, _ = trainer.publish.call_one(4, False).get(timeout=WAIT_S)
        trainer.flip.call_one(1000).get(timeout=WAIT_S)
        outcome, _, _ = generator.load.call_one(handle, 60.0).get(timeout=WAIT_S)
        assert outcome.startswith("WeightSyncError") and "version 4 from source rank 0" in outcome and "w" in outcome
        trainer.flip.call_one(1000).get(timeout=WAIT_S)
        assert generator.load.call_one(handle, 60.0).get(timeout=WAIT_S)[:2] == ("ok", 4)
    finally:
        job.kill()
