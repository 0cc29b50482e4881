"""Weights across real processes: pulled bit for bit, refused when the source has died, nothing left behind."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from forked_command import SERVER

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.errors import WeightSyncError
from llamarl.transports.checksum import ChecksumKind, block_digest
from llamarl.weight_sync import source
from llamarl.weight_sync.layout import MeshLayout, ParameterSpec

WAIT_S = 120.0
SPEC = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator", delay=1, capacity=2)
SHAPES = {"embed": (1024, 96), "q": (96, 96), "norm": (96,)}
SPECS = {name: ParameterSpec(shape, "float32") for name, shape in SHAPES.items()}
LAYOUT = MeshLayout(SPECS, {"rank": 1})


def full_model(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def trainer(pipe: Connection) -> None:
    """Sends the versions it is asked for; answers with handles; ends on None."""
    torch.set_num_threads(1)
    sender = WeightsSender(SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1)
    while (version := pipe.recv()) is not None:
        pipe.send(sender.send(version, WeightsPayload(version=version, tensors=full_model(version), layout=LAYOUT)))
    sender.close()


def generator(pipe: Connection) -> None:
    """Loads the versions it gets handles of; answers with its tensors or the error's text; ends on None."""
    torch.set_num_threads(1)
    receiver = WeightsReceiver(SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1)
    live = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    while (handles := pipe.recv()) is not None:
        try:
            version = receiver.receive(handles, WAIT_S)
            version.load_into(live, LAYOUT, WAIT_S)
            pipe.send((version.version, {name: t.numpy().copy() for name, t in live.items()}))
        except WeightSyncError as error:
            pipe.send(str(error))


def dying_trainer(pipe: Connection) -> None:
    """Announces a version, writes two blocks of it and hangs, as a process does that is about to be killed."""
    written = []

    def digest_then_hang(data: torch.Tensor, kind: ChecksumKind) -> int:
        if threading.current_thread().name == "weight-copy":
            written.append(data)
            if len(written) > 2:
                threading.Event().wait()
        return block_digest(data, kind)

    source.block_digest = digest_then_hang
    sender = WeightsSender(SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1)
    tensors = {"w": torch.ones(1 << 20)}
    pipe.recv()
    pipe.send(sender.send(0, WeightsPayload(version=9, tensors=tensors, released=threading.Event())))
    pipe.recv()


class Ranks:
    """Processes that are asked one thing at a time, each answer with a deadline."""

    def __init__(self) -> None:
        self.context = SERVER
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def start(self, target: Any, *args: Any) -> int:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        self.processes.append(process)
        self.pipes.append(ours)
        return len(self.pipes) - 1

    def ask(self, index: int, message: Any) -> Any:
        self.pipes[index].send(message)
        return self.answer(index)

    def answer(self, index: int) -> Any:
        assert self.pipes[index].poll(WAIT_S), f"process {index} gave no answer in {WAIT_S} s"
        return self.pipes[index].recv()

    def kill(self, index: int) -> None:
        os.kill(self.processes[index].pid, signal.SIGKILL)
        self.processes[index].join(WAIT_S)

    def close(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(WAIT_S)
            assert process.exitcode is not None


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    group = Ranks()
    yield group
    group.close()


def test_dead_source_is_named_and_a_restarted_sink_can_pull_what_still_lies_there(ranks: Ranks) -> None:
    sending = ranks.start(trainer)
    first = ranks.start(generator)
    handles = (ranks.ask(sending, 0),)
    assert ranks.ask(first, handles)[0] == 0
    ranks.kill(first)
    second = ranks.start(generator)
    version, got = ranks.ask(second, handles)
    assert version == 0 and got["q"].tobytes() == full_model(0)["q"].numpy().tobytes()
    old, handles = handles, (ranks.ask(sending, 1),)  # lies in a slot that the sink has not opened yet
    shared_before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    ranks.kill(sending)
    error = ranks.ask(second, handles)
    assert "version 1 from source rank 0" in error and "has ended" in error
    assert ranks.ask(second, old)[0] == 0, "what was whole and open when the source died is still served"
    assert not os.path.isdir("/dev/shm") or not {
        n for n in set(os.listdir("/dev/shm")) - shared_before if "llamarl" in n
    }


def test_source_that_dies_in_the_middle_is_named_long_before_the_deadline(ranks: Ranks) -> None:
    sending = ranks.start(dying_trainer)
    handle = ranks.ask(sending, "go")
    receiver = WeightsReceiver(SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1)
    version = receiver.receive((handle,), WAIT_S)
    assert version is not None
    killer = threading.Timer(0.3, ranks.kill, (sending,))
    killer.start()
    started = time.monotonic()
    with pytest.raises(
        WeightSyncError, match=r"version 9 from source rank 0 .*the source has ended.*2 of \d+ blocks written"
    ):
        version.load_into({"w": torch.zeros(1 << 20)}, deadline_s=WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2
    killer.join(WAIT_S)  # two threads that wait for one process may each miss its end
