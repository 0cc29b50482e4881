"""Data channels: items arrive whole, in order, at the right rank, or an error says why not."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_responses import made_group, made_response

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.data import DataReceiver, DataSender, Shares
from llamarl.channels.ends import make_receiver, make_sender
from llamarl.errors import ChannelError, DeadlineExceeded
from llamarl.models.packing import balance
from llamarl.types import Group, Score


def spec(kind: ChannelKind, capacity: int = 1) -> ChannelSpec:
    return ChannelSpec(name="edge", kind=kind, source="left", sink="right", capacity=capacity)


def ends(kind: ChannelKind, sources: int, sinks: int, capacity: int = 1) -> tuple[list[DataSender], list[DataReceiver]]:
    s = spec(kind, capacity)
    kw = {"num_source_ranks": sources, "num_sink_ranks": sinks}
    return [DataSender(s, rank=r, **kw) for r in range(sources)], [DataReceiver(s, rank=r, **kw) for r in range(sinks)]


def group(index: int, length: int) -> Group:
    response = made_response(index=index, tokens=range(length), logprobs=-0.5, text="2", outcome=Score(value=1.0))
    return made_group([response], index=index, tokens=range(3), text="1+1", metadata={"a": [1, 2]})


def test_a_source_of_any_number_of_ranks_is_read_in_their_order() -> None:
    (_, _, _), (receiver,) = ends(ChannelKind.GATHER, 3, 1)
    with pytest.raises(ValueError, match="joins 3 source ranks, got 2 handles"):
        receiver.receive((None, None), 5.0)
    elastic = replace(spec(ChannelKind.GATHER), elastic=True)
    receiver = DataReceiver(elastic, rank=0, num_source_ranks=3, num_sink_ranks=1)
    for sources in (1, 4):
        senders = [DataSender(elastic, rank=r, num_source_ranks=sources, num_sink_ranks=1) for r in range(sources)]
        handles = tuple(s.send(0, [(sources, r)]) for r, s in enumerate(senders))
        assert receiver.receive(handles, 5.0) == [(sources, r) for r in range(sources)]
    with pytest.raises(ValueError, match="got 0 handles"):
        receiver.receive((), 5.0)


@pytest.mark.parametrize("sources", [1, 2, 4])
def test_who_gets_what_of_a_scatter_depends_on_shares_and_not_on_who_had_them(sources: int) -> None:
    shares = [(n, [group(10 * n + i, 5 + (7 * n + 3 * i) % 4) for i in range(3)]) for n in range(4)]
    alone = [
        [[items[i] for i in part] for part in balance([item.num_tokens for item in items], 2, first=first)]
        for first, items in shares
    ]
    senders, receivers = ends(ChannelKind.SCATTER, sources, 2)
    each = 4 // sources
    handles = tuple(s.send(0, Shares(shares[r * each : (r + 1) * each])) for r, s in enumerate(senders))
    for part, receiver in enumerate(receivers):
        found = [item.prompt.index for item in receiver.receive(handles, 5.0)]
        assert found == [item.prompt.index for split in alone for item in split[part]]


def test_broadcast_delivers_rank_zero_only() -> None:
    senders, receivers = ends(ChannelKind.BROADCAST, 2, 2)
    handles = tuple(s.send(0, {"rank": r}) for r, s in enumerate(senders))
    assert handles[1] is None
    assert [r.receive(handles, 5.0) for r in receivers] == [{"rank": 0}, {"rank": 0}]


def test_scatter_balances_by_tokens_and_each_sink_gets_only_its_part() -> None:
    senders, receivers = ends(ChannelKind.SCATTER, 1, 2)
    handles = (senders[0].send(0, [group(0, 5), group(1, 9), group(2, 1), group(3, 4), group(4, 3)]),)
    parts = [[item.prompt.index for item in r.receive(handles, 5.0)] for r in receivers]
    # With three tokens of each prompt: 12 | 8, 8 + 7, 12 + 6, and 4 to the part that has 15.
    assert parts == [[1, 4], [0, 2, 3]]


def test_fewer_items_than_sinks_leaves_empty_parts() -> None:
    senders, receivers = ends(ChannelKind.SCATTER, 1, 3)
    handles = (senders[0].send(0, ["only"]),)
    assert [r.receive(handles, 5.0) for r in receivers] == [["only"], [], []]


def test_groups_arrive_equal_writable_and_independent_of_the_slot() -> None:
    senders, receivers = ends(ChannelKind.GATHER, 1, 1)
    sent = [group(i, 10 + i) for i in range(4)]
    first = receivers[0].receive((senders[0].send(0, sent),), 5.0)
    for tick in range(1, 5):
        senders[0].send(tick, [group(9, 50)])  # overwrites the slot
    for a, b in zip(sent, first, strict=True):
        np.testing.assert_array_equal(a.responses[0].tokens, b.responses[0].tokens)
        np.testing.assert_array_equal(a.responses[0].behavior_logprobs, b.responses[0].behavior_logprobs)
        assert b.responses[0].tokens.dtype == np.int32 and b.responses[0].outcome == Score(value=1.0)
        assert b.prompt.metadata == {"a": [1, 2]}
    first[0].responses[0].tokens[0] = 77


def test_empty_list_and_empty_arrays_travel() -> None:
    senders, receivers = ends(ChannelKind.GATHER, 1, 1)
    assert receivers[0].receive((senders[0].send(0, []),), 5.0) == []
    got = receivers[0].receive((senders[0].send(1, [np.empty(0, np.float32), group(0, 0)]),), 5.0)
    assert got[0].shape == (0,) and len(got[1].responses[0].tokens) == 0


@pytest.mark.parametrize("size", [1, 10_000_000])
def test_handle_is_under_a_kilobyte_whatever_the_payload(size: int) -> None:
    senders, _ = ends(ChannelKind.SCATTER, 1, 64)
    assert len(pickle.dumps(senders[0].send(0, [np.zeros(size, np.uint8)]))) < 1000


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_token_stays_readable_until_capacity_later_ones_were_sent(capacity: int) -> None:
    senders, receivers = ends(ChannelKind.GATHER, 1, 1, capacity)
    handles: list[Any] = []
    for tick in range(4 * capacity):
        handles.append((senders[0].send(tick, [tick, b"x" * (1000 * tick)]),))
        for old in range(max(0, tick - capacity), tick + 1):
            assert receivers[0].receive(handles[old], 5.0)[0] == old
        if tick > capacity:
            with pytest.raises(ChannelError, match=r"'edge'.*tick|gone|closed"):
                receivers[0].receive(handles[tick - capacity - 1], 5.0)


def test_slots_are_reused_not_allocated_anew() -> None:
    senders, _ = ends(ChannelKind.GATHER, 1, 1, capacity=2)
    handles = [senders[0].send(tick, [np.zeros(100_000)]) for tick in range(12)]
    assert len({h.address.nonce for h in handles}) == 3


def test_overwritten_token_names_channel_source_tick_and_remedy() -> None:
    senders, receivers = ends(ChannelKind.GATHER, 1, 1)
    handles = [(senders[0].send(tick, [tick]),) for tick in range(3)]
    with pytest.raises(ChannelError, match=r"'edge'.*tick 0 from 'left' rank 0.*raise the channel's capacity"):
        receivers[0].receive(handles[0], 5.0)


def test_flipped_byte_is_found() -> None:
    senders, receivers = ends(ChannelKind.GATHER, 1, 1)
    handle = senders[0].send(3, [np.arange(1000)])
    memory = senders[0]._slots[handle.slot].data.numpy()
    memory[4000] ^= 1
    with pytest.raises(ChannelError, match=r"tick 3 from 'left' rank 0.*do not match their checksum"):
        receivers[0].receive((handle,), 5.0)
    memory[4000] ^= 1
    np.testing.assert_array_equal(receivers[0].receive((handle,), 5.0)[0], np.arange(1000))


def test_deadline_names_both_ends_and_the_limit() -> None:
    senders, receivers = ends(ChannelKind.GATHER, 1, 1)
    with pytest.raises(DeadlineExceeded, match=r"'right' rank 0 .*tick 4 from 'left' rank 0.*limit 0 s"):
        receivers[0].receive((senders[0].send(4, [1]),), 0.0)


def test_an_item_that_is_no_plain_value_is_named() -> None:
    senders, _ = ends(ChannelKind.GATHER, 1, 1)
    why = r"'left' rank 0 cannot send its token of tick 2: a builtins.function is no plain value"
    with pytest.raises(ChannelError, match=why):
        senders[0].send(2, [lambda: None])


def test_mistakes_of_the_caller_are_value_errors() -> None:
    senders, receivers = ends(ChannelKind.GATHER, 2, 1)
    with pytest.raises(ValueError, match="carries a list"):
        senders[0].send(0, {"not": "a list"})
    handle = senders[0].send(0, [1])
    with pytest.raises(ValueError, match="2 source ranks, got 1"):
        receivers[0].receive((handle,), 5.0)


def test_closed_sender_is_reported_as_gone() -> None:
    senders, receivers = ends(ChannelKind.GATHER, 1, 1)
    handle = senders[0].send(0, [1])
    senders[0].close()
    with pytest.raises(ChannelError, match=r"tick 0 from 'left'.*resume the run"):
        receivers[0].receive((handle,), 5.0)


def test_each_pipeline_stage_gets_every_part_and_tensor_parallel_peers_the_same_one() -> None:
    edge = replace(spec(ChannelKind.SCATTER), sink_replicas=2, sink_stages=3)
    counts = {"num_source_ranks": 1, "num_sink_ranks": 12}  # 3 stages x 2 data ranks x 2 peers
    sender = make_sender(edge, rank=0, **counts)
    handle = sender.send(0, ["a", "b"])
    found = [make_receiver(edge, rank=rank, **counts).receive((handle,), 5.0) for rank in range(12)]
    assert found == [["a"], ["a"], ["b"], ["b"]] * 3
