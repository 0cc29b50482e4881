"""Data channels across real processes: groups arrive whole; a source that was killed is named."""

import multiprocessing as mp
import os
import signal
from multiprocessing.connection import Connection

import numpy as np
import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.data import DataReceiver, DataSender
from llamarl.errors import ChannelError

WAIT_S = 120.0
SPEC = ChannelSpec(name="completions", kind=ChannelKind.GATHER, source="generator", sink="reward")


def items(tick: int) -> list[np.ndarray]:
    return [np.arange(tick * 1000 + i, dtype=np.int64) for i in range(20)]


def source(pipe: Connection) -> None:
    sender = DataSender(SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1)
    while (tick := pipe.recv()) is not None:
        pipe.send(sender.send(tick, items(tick)))


def test_items_cross_processes_and_a_killed_source_is_named() -> None:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=source, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    receiver = DataReceiver(SPEC, rank=0, num_source_ranks=1, num_sink_ranks=1)

    def ask(tick: int) -> tuple[object, ...]:
        ours.send(tick)
        assert ours.poll(WAIT_S)
        return (ours.recv(),)

    for tick in range(5):
        got = receiver.receive(ask(tick), WAIT_S)
        assert len(got) == 20
        for a, b in zip(got, items(tick), strict=True):
            np.testing.assert_array_equal(a, b)
    unread = ask(100)  # larger than its slot: a segment that the receiver has not opened yet
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(WAIT_S)
    with pytest.raises(
        ChannelError, match=rf"tick 100 from 'generator' rank 0 \(process {process.pid}\).*resume the run"
    ):
        receiver.receive(unread, WAIT_S)
    receiver.close()
