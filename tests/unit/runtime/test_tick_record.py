"""What is written of ticks that counted, and what of it is read again after tears, holes and strangers."""

import errno
import os
import pickle
import random
import struct
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_responses import made_group, made_response
from waiting import wait_until

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.data import DataReceiver, DataSender, check_token
from llamarl.channels.plain_values import encode, from_bytes, to_bytes
from llamarl.channels.samples import ANY, Limits, check_part
from llamarl.controller.journaled import read_journal, report_of
from llamarl.runtime.base import Report, SetupReport
from llamarl.runtime.tick_log import JOURNAL_FOLDER, TickLog
from llamarl.runtime.tick_record import Record, parse_record, read_state, remove_records, write_state
from llamarl.transports.checksum import digest
from llamarl.transports.segments import Segment
from llamarl.transports.slots import HEADER_BYTES
from llamarl.types import Group, Score, Turn

CHANNEL = ChannelSpec(name="groups", kind=ChannelKind.GATHER, source="source", sink="sink", capacity=1, kept=True)


def group(index: int) -> Group:
    response = made_response(
        index=index, tokens=[7, 8], logprobs=[-0.5, np.nan], versions=[index, -1], mask=[True, False], text="2",
        outcome=Score(value=1.0, parts={"correct": 1.0}),
    )  # fmt: skip
    return made_group([response], index=index, tokens=range(3), text="1 + 1 =", metadata={"level": 2})


def log_in(run_dir: Path, run_id: str = "mine", tell: Callable[[str], None] = print) -> TickLog:
    """Of a job whose source tells of its state."""
    log = TickLog(run_dir / JOURNAL_FOLDER, run_id, tell=tell)
    log.begin([CHANNEL], {name: SetupReport(executor=name) for name in ("source", "sink")}, ["source"])
    return log


def write(run_dir: Path, num_ticks: int, *, run_id: str = "mine", saved: int = -1) -> None:
    """Source and sink do ``num_ticks`` ticks."""
    log = log_in(run_dir, run_id)
    sender = DataSender(CHANNEL, rank=0, num_source_ranks=1, num_sink_ranks=1)
    for tick in range(num_ticks):
        handle = sender.send(tick, [group(tick)])
        segment, state = write_state(f"state after {tick}".encode())
        made = Report(
            executor="source", tick=tick, outputs={"groups": (handle,)}, journal=(state,), metrics={"a": 0.1, "b": float("nan")},
            spans=(("work", 1.0, 2.0),), started_s=1.0, finished_s=2.0, failures={"late": 1}, events=({"tick": tick},),
        )  # fmt: skip
        for report in (made, Report(executor="sink", tick=tick)):
            held = log.take(report)
            assert held is not None
            log.append(held)
        segment.close()
    log.saved(saved)
    sender.close()
    log.close()


def path_of(run_dir: Path, number: int) -> Path:
    (path,) = (run_dir / JOURNAL_FOLDER).glob(f"{number:012d}-*")
    return path


def ticks(records: list[Record]) -> list[tuple[str, int]]:
    return [(record.executor, record.tick) for record in records]


BOTH = [(name, tick) for tick in range(3) for name in ("source", "sink")]


def test_what_is_read_is_what_counted_with_token_and_state_in_memory_of_this_process(tmp_path: Path) -> None:
    write(tmp_path, 3)
    num_open = len(os.listdir("/proc/self/fd"))
    records = read_journal(tmp_path, "mine")
    assert ticks(records) == BOTH and len(os.listdir("/proc/self/fd")) == num_open  # there may be thousands
    segments: list[Segment] = []
    report = report_of(records[2], segments, tokens=[CHANNEL], states=True)
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
    assert report_of(records[2], segments, tokens=[], states=False).outputs == {"groups": (None,)}
    assert [record.tells_states for record in records[:2]] == [True, False]
    receiver.close()
    for segment in segments:
        segment.close()


def test_what_counted_is_read_of_this_run_alone(tmp_path: Path) -> None:
    write(tmp_path, 3)
    assert ticks(read_journal(tmp_path, "mine")) == BOTH
    assert read_journal(tmp_path, "other") == []


def test_a_file_torn_or_altered_at_any_place_ends_what_is_read(tmp_path: Path) -> None:
    """As a machine's death leaves it: cut off, or with its length and other bytes."""
    write(tmp_path, 2)
    path = path_of(tmp_path, 2)
    whole = path.read_bytes()
    places = sorted({*range(0, 100), *range(100, len(whole), 37), len(whole) - 1})
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
    log_in(tmp_path).close(done=True)
    assert not (tmp_path / JOURNAL_FOLDER).exists()


def test_all_files_but_those_that_are_kept_are_removed(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (tmp_path / JOURNAL_FOLDER / "000000000000").touch()  # of an earlier version
    records = read_journal(tmp_path, "mine")
    assert ticks(records) == BOTH
    remove_records(tmp_path / JOURNAL_FOLDER, records[:3])
    assert ticks(read_journal(tmp_path, "mine")) == BOTH[:3]
    assert sorted(path.name for path in (tmp_path / JOURNAL_FOLDER).iterdir()) == [r.path.name for r in records[:3]]


def test_a_file_under_another_tick_ends_what_is_read(tmp_path: Path) -> None:
    write(tmp_path, 2)
    path = path_of(tmp_path, 2)
    assert path.name == "000000000002-1"
    path.rename(path.with_name("000000000002-2"))
    assert ticks(read_journal(tmp_path, "mine")) == BOTH[:2]


HEAD, ENTRY = struct.Struct("<8sQ"), struct.Struct("<QQQ")


def framed_as(*pieces: bytes) -> bytes:
    """A part that holds these pieces."""
    lengths = struct.pack(f"<{len(pieces) + 1}Q", len(pieces), *map(len, pieces))
    return b"".join(data + bytes(-len(data) % 64) for data in (lengths, *pieces))


def sealed(pieces: list[bytes]) -> tuple[bytes, int]:
    """A token of one part that holds these pieces, with checksums that fit, and that of its table."""

    part = framed_as(*pieces)
    table = ENTRY.pack(0, len(part), digest(part))
    control = bytes(HEADER_BYTES) + table
    return control + bytes(-len(control) % 64) + part, digest(table)


def unframed(part: bytes) -> list[bytes]:
    """The pieces of a part."""
    (count,) = struct.unpack_from("<Q", part)
    position, pieces = -(-8 * (count + 1) // 64) * 64, []
    for length in struct.unpack_from(f"<{count}Q", part, 8):
        pieces.append(part[position : position + length])
        position += -(-length // 64) * 64
    return pieces


def unsealed(token: bytes) -> list[bytes]:
    """The pieces of a token of one part."""
    return unframed(token[128:])


def body_of(record: Record) -> bytes:
    return record.path.read_bytes()[HEAD.size :]


def put(record: Record, said: dict[str, Any]) -> Record:
    """The record, as somebody writes it who knows how checksums are taken."""
    body = to_bytes(said)
    record.path.write_bytes(HEAD.pack(record.path.read_bytes()[:8], digest(body)) + body)
    return read_journal(record.path.parents[1], "mine")[0]


def put_token(run_dir: Path, pieces: list[bytes]) -> Record:
    """The first record with another token."""
    record = read_journal(run_dir, "mine")[0]
    said = from_bytes(memoryview(body_of(record)))
    (token,) = said["outputs"]["groups"]
    data, token["table_checksum"] = sealed(pieces)
    token["data"] = np.frombuffer(data, np.uint8)
    return put(record, said)


def test_a_pickle_in_a_token_is_refused_whatever_it_names(tmp_path: Path) -> None:
    write(tmp_path, 1)
    pickled: list[pickle.PickleBuffer] = []
    body = pickle.dumps([np.arange(3)], protocol=5, buffer_callback=pickled.append)
    record = put_token(tmp_path, [body, *(bytes(buffer.raw()) for buffer in pickled)])
    with pytest.raises(ValueError):
        report_of(record, [], tokens=[CHANNEL], states=False)


def changed(**values: Any) -> Group:
    """With one of its response, or of its prompt (``prompt_*``), otherwise."""
    whole = group(0)
    of_prompt = {name[7:]: value for name, value in values.items() if name.startswith("prompt_")}
    of_response = {name: value for name, value in values.items() if not name.startswith("prompt_")}
    return Group(prompt=replace(whole.prompt, **of_prompt), responses=(replace(whole.responses[0], **of_response),))


def named(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """A teacher's likeliest tokens, with log-probs."""
    return {"top_tokens": tokens, "top_logprobs": np.zeros(tokens.shape, np.float32)}


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
        (changed(**named(np.full((2, 1), 64, np.int32))), "response 0 has the token 64, and the vocabulary 64"),
        (changed(**named(np.zeros(2, np.int32))), "response 0 has likeliest tokens that are no table"),
        (changed(top_tokens=np.zeros((2, 1), np.int32)), "response 0 has likeliest tokens that are no table"),
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
    report_of(put_token(tmp_path, pieces), segments, tokens=[CHANNEL], states=False, limits=LIMITS)
    segments.pop().close()
    record = put_token(tmp_path, [bytes(piece) for piece in encode([wrong])])
    with pytest.raises(ValueError) as raised:
        report_of(record, segments, tokens=[CHANNEL], states=False, limits=LIMITS)
    assert str(raised.value).startswith(f"{record.path}: group ") and told in str(raised.value)
    assert segments == []


def test_a_recorded_sample_may_be_of_a_later_version_of_the_run_that_drew_it() -> None:
    recorded = changed(policy_versions=np.array([57, -1], np.int32), sampled_by="rollouts")
    check_part([recorded], CHANNEL, 0, LIMITS)


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
        {"events": ({"\ud800": 1},)},
        {"events": ({"a": group(0)},)},
        {"journal": ("state",)},
        {"journal": (np.zeros((2, 2), np.uint8),)},
        {"outputs": {"groups": (np.zeros(2, np.uint8),)}},
    ],
)
def test_a_record_with_times_counts_or_bytes_that_are_none_is_refused(tmp_path: Path, field: dict[str, Any]) -> None:
    write(tmp_path, 1)
    record = read_journal(tmp_path, "mine")[0]
    said = from_bytes(memoryview(body_of(record)))
    assert parse_record(memoryview(to_bytes(said))).executor == "source"
    with pytest.raises(ValueError):
        parse_record(memoryview(to_bytes(said | field)))


def test_bytes_of_a_record_have_one_place_in_it(tmp_path: Path) -> None:
    write(tmp_path, 1)
    count, *lengths = struct.unpack_from("<3Q", body := body_of(read_journal(tmp_path, "mine")[0]))
    assert count == 3 and b'"|u1",[13],1]' in body  # text, token, the state of 13 bytes
    assert lengths[0] > 0
    with pytest.raises(ValueError, match="named twice"):
        parse_record(memoryview(body.replace(b'"|u1",[13],1]', b'"|u1",[13],0]')))


def test_a_pipe_in_a_journal_is_no_record_and_holds_nobody_up(tmp_path: Path) -> None:
    write(tmp_path, 2)
    path = path_of(tmp_path, 2)
    path.unlink()
    os.mkfifo(path)
    assert ticks(read_journal(tmp_path, "mine")) == BOTH[:2]
    log_in(tmp_path).close()
    remove_records(tmp_path / JOURNAL_FOLDER, read_journal(tmp_path, "mine"))
    assert ticks(read_journal(tmp_path, "mine")) == BOTH[:2] and not path.exists()


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
    text, *others = unframed(body := body_of(record))
    assert framed_as(text, *others) == body
    pieces = unsealed(others[0])
    token, proof = sealed(pieces)
    check_token(token, 1, proof)  # as it is, it is read
    for number in range(100_000):
        try:
            if number % 4 == 0:
                parse_record(memoryview(framed_as(mutated(text, chance), *others)))
                continue
            at = 0 if chance.random() < 0.8 else chance.randrange(len(pieces))
            token, proof = sealed([*pieces[:at], mutated(pieces[at], chance), *pieces[at + 1 :]])
            check_token(token if number % 8 else mutated(token, chance), 1, proof)
        except ValueError:
            refused += 1
    assert 50_000 < refused < 100_000


def test_what_is_not_held_ends_the_journal_and_says_so(tmp_path: Path) -> None:
    told: list[str] = []
    log = log_in(tmp_path, tell=told.append)
    segment, state = write_state(b"elsewhere")
    elsewhere = replace(state, address=replace(state.address, pid=1))
    log.append(Report(executor="source", tick=0, journal=(elsewhere,)))
    log.append(Report(executor="source", tick=1))
    log.close()
    segment.close()
    assert len(told) == 1 and "'source' made at tick 0 is not held" in told[0]
    assert not (tmp_path / JOURNAL_FOLDER).exists()


def written_while(run_dir: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[str]:
    """Two ticks are appended while something of the modules is otherwise; what was told."""
    told: list[str] = []
    sender = DataSender(CHANNEL, rank=0, num_source_ranks=1, num_sink_ranks=1)
    with monkeypatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(f"llamarl.runtime.{name.replace('__', '.')}", value, raising=False)
        log = log_in(run_dir, tell=told.append)
        for tick in range(2):
            segment, state = write_state(b"state")
            handle = sender.send(tick, [group(tick)])
            held = log.take(Report(executor="source", tick=tick, outputs={"groups": (handle,)}, journal=(state,)))
            segment.close()
            assert held is not None
            log.append(held)
        wait_until(lambda: told and not (run_dir / JOURNAL_FOLDER).exists(), 5.0, "the room that its thread makes")
    sender.close()
    log.close()
    return told


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ENOENT])
def test_a_disk_that_refuses_it_ends_it_once_and_gets_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write(tmp_path, 1)
    assert read_journal(tmp_path, "mine")

    def refuse(*_: object) -> object:
        raise OSError(number, os.strerror(number))

    (told,) = written_while(tmp_path, monkeypatch, tick_record__open=refuse)
    assert f"{os.strerror(number)}. A resume begins at the last checkpoint" in told
    assert read_journal(tmp_path, "mine") == []


def test_a_disk_that_is_too_slow_for_it_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (told,) = written_while(tmp_path, monkeypatch, tick_log__MAX_BACKLOG_BYTES=-1)
    assert "the disk is too slow for it. A resume begins at the last checkpoint" in told


def test_a_tick_that_is_larger_than_what_may_wait_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.runtime.tick_log.MAX_BACKLOG_BYTES", 10)
    log = log_in(tmp_path)
    segment, state = write_state(b"a state of more bytes")
    held = log.take(Report(executor="source", tick=0, journal=(state,)))
    assert held is not None
    log.append(held)
    segment.close()
    log.close()
    assert [record.executor for record in read_journal(tmp_path, "mine")] == ["source"]
