"""What is written of ticks that counted, and what of it is read again after tears, holes and strangers."""

import errno
import json
import os
import pickle
import random
import struct
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.data import DataReceiver, DataSender, check_token
from llamarl.channels.plain_values import encode, from_bytes, to_bytes
from llamarl.channels.samples import ANY, Limits, check_part
from llamarl.runtime.base import Report
from llamarl.runtime.journal import (
    JOURNAL_FOLDER,
    MAX_PIECES,
    Journal,
    Record,
    parse_header,
    read_journal,
    records_of,
    remove_journal,
)
from llamarl.runtime.kept_states import read_state, write_state
from llamarl.runtime.kept_tokens import KeptTokens
from llamarl.transports.checksum import digest
from llamarl.transports.segments import Segment
from llamarl.transports.slots import HEADER_BYTES
from llamarl.types import Group, Prompt, Response, Score, Turn

CHANNEL = ChannelSpec(name="groups", kind=ChannelKind.GATHER, source="source", sink="sink", capacity=1, kept=True)


def group(index: int) -> Group:
    prompt = Prompt(index=index, tokens=np.arange(3, dtype=np.int32), text="1 + 1 =", metadata={"level": 2})
    response = Response(
        prompt_index=index,
        sample_index=0,
        tokens=np.array([7, 8], np.int32),
        behavior_logprobs=np.array([-0.5, np.nan], np.float32),
        policy_versions=np.array([index, -1], np.int32),
        loss_mask=np.array([True, False]),
        text="2",
        finish_reason="stop",
        outcome=Score(value=1.0, parts={"correct": 1.0}),
    )
    return Group(prompt=prompt, responses=(response,))


def write(run_dir: Path, num_ticks: int, *, run_id: str = "mine", saved: int = -1) -> None:
    """Source and sink, each with a journal of its own, do ``num_ticks`` ticks."""
    kept, journal = KeptTokens([CHANNEL], ["source", "sink"], ["source"]), Journal(run_dir, run_id)
    sender = DataSender(CHANNEL, rank=0, num_source_ranks=1, num_sink_ranks=1)
    for tick in range(num_ticks):
        handle = sender.send(tick, [group(tick)])
        segment, state = write_state(f"state after {tick}".encode())
        made = Report(
            executor="source", tick=tick, outputs={"groups": (handle,)}, journal=(state,), metrics={"a": 0.1, "b": float("nan")},
            spans=(("work", 1.0, 2.0),), started_s=1.0, finished_s=2.0, failures={"late": 1}, events=({"tick": tick},),
        )  # fmt: skip
        for report in (made, Report(executor="sink", tick=tick)):
            held = kept.take(report)
            assert held is not None
            journal.append(held)
        segment.close()
    journal.saved(saved)
    sender.close()
    kept.close()
    journal.close(done=False)


def ticks(records: list[Record]) -> list[tuple[str, int]]:
    return [(record.executor, record.tick) for record in records]


BOTH = [(name, tick) for tick in range(3) for name in ("source", "sink")]


def test_what_is_read_is_what_counted_with_token_and_state_in_memory_of_this_process(tmp_path: Path) -> None:
    write(tmp_path, 3)
    records = read_journal(tmp_path, "mine")
    assert ticks(records) == BOTH
    segments: list[Segment] = []
    report = records[2].report(segments, tokens=[CHANNEL], states=True)
    assert (report.executor, report.tick, report.spans, report.failures) == (
        "source",
        1,
        (("work", 1.0, 2.0),),
        {"late": 1},
    )
    assert report.metrics["a"] == 0.1 and np.isnan(report.metrics["b"]) and report.events == ({"tick": 1},)
    assert [read_state(state) for state in report.journal] == [b"state after 1"]
    receiver = DataReceiver(CHANNEL, rank=0, num_source_ranks=1, num_sink_ranks=1)
    (found,) = receiver.receive(report.outputs["groups"], 5.0)
    assert str(found) == str(group(1))
    assert records[2].report(segments, tokens=[], states=False).outputs == {"groups": (None,)}
    assert [record.tells_states for record in records[:2]] == [True, False]
    receiver.close()
    for segment in segments:
        segment.close()


@pytest.mark.parametrize(("trouble", "left"), [("torn", 3), ("altered", 3), ("missing", 3), ("of another run", 0)])
def test_only_a_beginning_of_what_counted_is_read(tmp_path: Path, trouble: str, left: int) -> None:
    write(tmp_path, 3, run_id="other" if trouble == "of another run" else "mine")
    path = tmp_path / JOURNAL_FOLDER / f"{3:012d}"
    data = bytearray(path.read_bytes())
    if trouble == "torn":
        path.write_bytes(data[:-1])
    elif trouble == "altered":
        data[-1] ^= 1
        path.write_bytes(data)
    elif trouble == "missing":
        path.unlink()
    assert ticks(read_journal(tmp_path, "mine")) == BOTH[:left]


def test_a_file_torn_or_altered_at_any_place_ends_what_is_read(tmp_path: Path) -> None:
    """As a machine's death leaves it: cut off, or with its length and other bytes."""
    write(tmp_path, 2)
    path = tmp_path / JOURNAL_FOLDER / f"{2:012d}"
    whole = path.read_bytes()
    start = read_journal(tmp_path, "mine")[2].offset
    places = sorted({*range(0, 30), start - 1, start, start + 1, *range(30, len(whole), 37), len(whole) - 1})
    for place in places:
        path.write_bytes(whole[:place])
        assert ticks(read_journal(tmp_path, "mine")) == BOTH[:2], f"cut at {place}"
        path.write_bytes(whole[:place] + bytes(len(whole) - place))
        if whole[place:].strip(b"\0"):
            assert ticks(read_journal(tmp_path, "mine")) == BOTH[:2], f"zeros from {place}"
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert ticks(read_journal(tmp_path, "mine")) == BOTH[:2], f"altered at {place}"
    path.write_bytes(whole + b"\0")
    assert ticks(read_journal(tmp_path, "mine")) == BOTH[:2]
    path.write_bytes(whole)
    assert ticks(read_journal(tmp_path, "mine")) == BOTH[:4]


def test_what_a_checkpoint_contains_is_removed_and_all_at_the_end(tmp_path: Path) -> None:
    write(tmp_path, 3, saved=0)
    assert ticks(read_journal(tmp_path, "mine")) == BOTH[2:]
    Journal(tmp_path, "mine").close(done=True)
    assert not (tmp_path / JOURNAL_FOLDER).exists()


def test_ticks_are_chosen_from_the_checkpoint_on_and_none_where_one_of_them_is_missing(tmp_path: Path) -> None:
    write(tmp_path, 3)
    records = read_journal(tmp_path, "mine")
    assert ticks(records_of(records, after_tick=0, before_tick=2)) == BOTH[2:4]
    assert records_of(records[4:], after_tick=0, before_tick=9) == []
    assert remove_journal(tmp_path, records[:3]) == 3
    assert ticks(read_journal(tmp_path, "mine")) == BOTH[:3]


HEAD, ENTRY = struct.Struct("<8sQQ"), struct.Struct("<QQQ")


def sealed(pieces: list[bytes]) -> tuple[bytes, int]:
    """A token of one part that holds these pieces, with checksums that fit, and that of its table."""

    def padded(data: bytes) -> bytes:
        return data + bytes(-len(data) % 64)

    part = padded(struct.pack(f"<{len(pieces) + 1}Q", len(pieces), *map(len, pieces))) + b"".join(map(padded, pieces))
    table = ENTRY.pack(0, len(part), digest(part))
    return padded(bytes(HEADER_BYTES) + table) + part, digest(table)


def unsealed(token: bytes) -> list[bytes]:
    """The pieces of a token of one part."""
    (count,) = struct.unpack_from("<Q", token, 128)
    position, pieces = 128 + -(-8 * (count + 1) // 64) * 64, []
    for length in struct.unpack_from(f"<{count}Q", token, 136):
        pieces.append(token[position : position + length])
        position += -(-length // 64) * 64
    return pieces


def put_token(run_dir: Path, pieces: list[bytes]) -> Record:
    """The first record, as somebody writes it who knows how checksums are taken."""
    record = read_journal(run_dir, "mine")[0]
    data = record.path.read_bytes()
    header = json.loads(data[HEAD.size : record.offset])
    (token,) = header["outputs"]["groups"]
    bytes_of_token, token["table_checksum"] = sealed(pieces)
    blobs = [record.blob(number) for number in range(len(header["blobs"]))]
    blobs[token["blob"]] = bytes_of_token
    header["blobs"] = [[len(blob), digest(blob)] for blob in blobs]
    head = json.dumps(header).encode()
    record.path.write_bytes(HEAD.pack(data[:8], len(head), digest(head)) + head + b"".join(blobs))
    return read_journal(run_dir, "mine")[0]


def test_a_pickle_in_a_token_is_refused_whatever_it_names(tmp_path: Path) -> None:
    write(tmp_path, 1)
    pickled: list[pickle.PickleBuffer] = []
    body = pickle.dumps([np.arange(3)], protocol=5, buffer_callback=pickled.append)
    record = put_token(tmp_path, [body, *(bytes(buffer.raw()) for buffer in pickled)])
    with pytest.raises(ValueError):
        record.report([], tokens=[CHANNEL], states=False)


def changed(**values: Any) -> Group:
    """With one of its response, or of its prompt (``prompt_*``), otherwise."""
    whole = group(0)
    of_prompt = {name[7:]: value for name, value in values.items() if name.startswith("prompt_")}
    of_response = {name: value for name, value in values.items() if not name.startswith("prompt_")}
    return Group(prompt=replace(whole.prompt, **of_prompt), responses=(replace(whole.responses[0], **of_response),))


LIMITS = Limits(num_token_ids=64, context=256, num_experts=8)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (changed(tokens=np.array([7, 10**9], np.int32)), "response 0 has the token 1000000000, and the vocabulary 64"),
        (changed(tokens=np.array([7, 64], np.int32)), "response 0 has the token 64"),
        (changed(tokens=np.array([-7, 8], np.int32)), "response 0 has the token -7"),
        (changed(prompt_tokens=np.array([1, -1], np.int32)), "its prompt has the token -1"),
        (changed(prompt_index=-1), "its prompt has a negative index"),
        (changed(sample_index=-2), "response -2 has a negative index"),
        (changed(behavior_logprobs=np.full(2, np.nan, np.float32)), "has a log-prob that is no number"),
        (changed(behavior_logprobs=np.array([-np.inf, 0], np.float32)), "has a log-prob that is no number"),
        (changed(policy_versions=np.array([-1, -1], np.int32)), "was sampled by a policy version outside of 0 .. 0"),
        (changed(policy_versions=np.array([0, -2], np.int32)), "was sampled by a policy version outside of 0 .. 0"),
        (changed(outcome=Score(value=float("nan"))), "has a reward that is no number"),
        (changed(policy_versions=np.array([1, -1], np.int32)), "was sampled by a policy version outside of 0 .. 0"),
        (changed(behavior_logprobs=np.full(2, 3e38, np.float32)), "has a log-prob that is no number"),
        (changed(tokens=np.array([[7], [8]], np.int32)), "response 0 has numbers of its tokens that are no row"),
        (changed(values=np.zeros((2, 1), np.float32)), "response 0 has numbers of its tokens that are no row"),
        (changed(prompt_tokens=np.ones(9999, np.int32)), "its prompt has 9999 tokens, and the model's context is 256"),
        (changed(prompt_tokens=np.ones(255, np.int32)), "response 0 has 2 tokens, and the model's context is 256"),
        (changed(prompt_tokens=np.ones(0, np.int32)), "its prompt has no tokens"),
        (changed(routed_experts=np.full((2, 1, 2), 8, np.uint8)), "names experts that the policy's 8 are not"),
        (changed(routed_experts=np.zeros((2, 2), np.uint8)), "names experts that the policy's 8 are not"),
        (changed(turns=(Turn(start=0, end=3, finish_reason="stop", reply=""),)), "has a turn outside of its 2 tokens"),
        (changed(turns=(Turn(start=1, end=0, finish_reason="stop", reply=""),)), "has a turn outside of its 2 tokens"),
    ],
)
def test_a_sample_that_nobody_can_have_drawn_is_refused_and_its_file_named(
    tmp_path: Path, wrong: Group, told: str
) -> None:
    write(tmp_path, 1)
    pieces = [bytes(piece) for piece in encode([group(0)])]
    segments: list[Segment] = []
    put_token(tmp_path, pieces).report(segments, tokens=[CHANNEL], states=False, limits=LIMITS)
    segments.pop().close()
    record = put_token(tmp_path, [bytes(piece) for piece in encode([wrong])])
    with pytest.raises(ValueError) as raised:
        record.report(segments, tokens=[CHANNEL], states=False, limits=LIMITS)
    assert str(raised.value).startswith(f"{record.path}: group ") and told in str(raised.value)
    assert segments == []


@pytest.mark.parametrize("value", [10**400, np.complex64(1), "1"])
def test_a_reward_that_is_no_real_number_is_none_of_a_sample(value: Any) -> None:
    with pytest.raises(ValueError, match="Score.value holds"):
        from_bytes(memoryview(to_bytes(changed(outcome=Score(value=value)))))


@pytest.mark.parametrize(
    ("kind", "sink", "part", "told"),
    [
        ("gather", "trainer", ["x", 1, None], "'trainer' reads groups, and channel 'groups' holds a str"),
        ("scatter", "reward", [group(0), {"a": 1}], "'reward' reads groups, and channel 'groups' holds a dict"),
        ("gather", "mine", {"a": 1}, "channel 'groups' carries lists of items, and this is a dict"),
        ("gather", "mine", ["x", 1, None], ""),
        ("broadcast", "mine", {"a": 1}, ""),
    ],
)
def test_a_part_is_what_its_channel_carries(kind: str, sink: str, part: Any, told: str) -> None:
    channel = replace(CHANNEL, kind=ChannelKind(kind), sink=sink)
    with pytest.raises(ValueError, match=told) if told else nullcontext():
        check_part(part, channel, 0, ANY)


@pytest.mark.parametrize(
    "field",
    [
        {"started_s": float("nan")},
        {"started_s": -1e308},
        {"spans": [["work", 1.0, float("inf")]]},
        {"spans": [["work", -1e308, 1e308]]},
        {"failures": {"late": -1}},
        {"failures": {"half a \ud800 pair": 1}},
        {"tick": 1 << 63},
        {"metrics": {"a": None}},
        {"metrics": {"\ud800": 1.0}},
    ],
)
def test_a_header_with_times_or_counts_that_are_none_is_refused(tmp_path: Path, field: dict[str, Any]) -> None:
    write(tmp_path, 1)
    record = read_journal(tmp_path, "mine")[0]
    header = json.loads(record.path.read_bytes()[HEAD.size : record.offset])
    parse_header(json.dumps(header).encode())
    with pytest.raises(ValueError):
        parse_header(json.dumps(header | field).encode())


def test_a_pipe_in_a_journal_is_no_record_and_holds_nobody_up(tmp_path: Path) -> None:
    write(tmp_path, 2)
    path = tmp_path / JOURNAL_FOLDER / f"{2:012d}"
    path.unlink()
    os.mkfifo(path)
    assert ticks(read_journal(tmp_path, "mine")) == BOTH[:2]
    Journal(tmp_path, "mine").close(done=False)
    assert remove_journal(tmp_path, read_journal(tmp_path, "mine")) == 2 and not path.exists()


_BAD = [b"-1", b"0", b"18446744073709551616", b"1e999", b"NaN", b"null", b"true", b'""', b'"|O"', b'"<f8"', b'"|V8"', b'"array"',
        b'"object"', b'"Group"', b'"tuple"', b'"bytes"', b'"scalar"', b"[]", b"{}", b"[" * 2000, b"[4611686018427387904]", b"[-1]"]  # fmt: skip


def mutated(data: bytes, chance: random.Random) -> bytes:
    """One to three changes: bytes flipped, cut, said twice, or a JSON value in the place of another."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(changed) + 1)
        end = min(len(changed), start + chance.randint(0, 8))
        match chance.randrange(4):
            case 0:
                changed[start:end] = chance.randbytes(end - start)
            case 1:
                del changed[start:end]
            case 2:
                changed[start:start] = changed[start:end]
            case _:
                cuts = [i for i, byte in enumerate(changed) if byte in b",[]:"] or [0, 0]
                at = chance.randrange(len(cuts))
                changed[cuts[at] + 1 : cuts[min(at + 1, len(cuts) - 1)]] = chance.choice(_BAD)
    return bytes(changed)


def test_a_hundred_thousand_mutated_journals_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    """Each with checksums that fit, so that only what is said can be wrong."""
    write(tmp_path, 1)
    record, chance, refused = read_journal(tmp_path, "mine")[0], random.Random(7), 0
    head = record.path.read_bytes()[HEAD.size : record.offset]
    pieces = unsealed(record.blob(0))
    token, proof = sealed(pieces)
    check_token(token, 1, proof)  # as it is, it is read
    for number in range(100_000):
        try:
            if number % 4 == 0:
                parse_header(mutated(head, chance))
                continue
            at = 0 if chance.random() < 0.8 else chance.randrange(len(pieces))
            token, proof = sealed([*pieces[:at], mutated(pieces[at], chance), *pieces[at + 1 :]])
            check_token(token if number % 8 else mutated(token, chance), 1, proof)
        except ValueError:
            refused += 1
    assert 50_000 < refused < 100_000


def test_what_is_not_held_ends_the_journal_and_says_so(tmp_path: Path) -> None:
    told: list[str] = []
    journal = Journal(tmp_path, "mine", tell=told.append)
    segment, state = write_state(b"elsewhere")
    elsewhere = replace(state, segment=replace(state.segment, pid=1))
    journal.append(Report(executor="source", tick=0, journal=(elsewhere,)))
    journal.append(Report(executor="source", tick=1))
    journal.close(done=False)
    segment.close()
    assert len(told) == 1 and "'source' made at tick 0 is not held" in told[0]
    assert not (tmp_path / JOURNAL_FOLDER).exists()


def written_while(run_dir: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[str]:
    """Two ticks are appended while something of the module is otherwise; what was told."""
    kept, told = KeptTokens([CHANNEL], ["source", "sink"], ["source"]), list[str]()
    sender = DataSender(CHANNEL, rank=0, num_source_ranks=1, num_sink_ranks=1)
    with monkeypatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(f"llamarl.runtime.journal.{name}", value, raising=False)
        journal = Journal(run_dir, "mine", tell=told.append)
        for tick in range(2):
            held = kept.take(
                Report(executor="source", tick=tick, outputs={"groups": (sender.send(tick, [group(tick)]),)})
            )
            assert held is not None
            journal.append(held)
        until = time.monotonic() + 5.0
        while (not told or journal.folder.exists()) and time.monotonic() < until:
            time.sleep(0.01)  # its own thread makes the room
        assert not journal.folder.exists()
    sender.close()
    kept.close()
    journal.close(done=False)
    return told


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ENOENT])
def test_a_disk_that_refuses_it_ends_it_once_and_gets_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write(tmp_path, 1)
    assert read_journal(tmp_path, "mine")

    def refuse(*_: object) -> object:
        raise OSError(number, os.strerror(number))

    (told,) = written_while(tmp_path, monkeypatch, open=refuse)
    assert f"{os.strerror(number)}. A resume begins at the last checkpoint" in told
    assert read_journal(tmp_path, "mine") == []


def test_a_disk_that_is_too_slow_for_it_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (told,) = written_while(tmp_path, monkeypatch, _MAX_BACKLOG_BYTES=10)
    assert "the disk is too slow for it. A resume begins at the last checkpoint" in told


def test_a_header_of_more_pieces_than_may_be_open_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    record = read_journal(tmp_path, "mine")[0]
    header = json.loads(record.path.read_bytes()[HEAD.size : record.offset])
    assert parse_header(json.dumps(header).encode()).blobs
    header["blobs"] += [[0, digest(b"")]] * MAX_PIECES
    with pytest.raises(ValueError, match="blobs"):
        parse_header(json.dumps(header).encode())
