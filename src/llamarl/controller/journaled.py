"""What of a run's journal a resume can go on from: the ticks that had counted since the checkpoint
when the controller died.

    RUN/journal ─▶ read_journal ─▶ up to the next tick that is saved ─▶ does this job do that? ─▶ reports in new memory ─▶ execute

Everybody who told of their state after each tick stands where they were; trainer and critic begin
with the checkpoint and repeat their ticks, as they do when they die alone (docs/survival.md). Ticks
from the next one on whose state is saved are left out: each executor saves its state when it does
that tick.

A journal may be a stranger's: each token that is still to be read is decoded once as its readers will
decode it (:mod:`llamarl.channels.plain_values`) and its samples looked at
(:mod:`llamarl.channels.samples`), and what does not hold is refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.data import DataHandle, check_token
from llamarl.channels.ends import num_parts
from llamarl.channels.samples import ANY, Limits, check_part
from llamarl.checkpoint.written import why_not_whole, writer_name
from llamarl.config import RunConfig
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.errors import ChannelError
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import Report
from llamarl.runtime.children import raise_open_files
from llamarl.runtime.tick_log import JOURNAL_FOLDER, Resumed
from llamarl.runtime.tick_record import (
    OF_HANDLE,
    OF_REPORT,
    Record,
    State,
    Token,
    read_record,
    record_files,
    remove_records,
    write_state,
)
from llamarl.transports.segments import Segment

__all__ = ["load_journal", "read_journal", "report_of"]

_OTHER_FILES = 400
"""Left for all else: pipes and sockets of ranks, what the runtime holds."""


def read_journal(run_dir: Path, run_id: str) -> list[Record]:
    """What counted, in order, up to the first file that is torn or altered; without bytes, of which there may be more
    than memory. Ticks that a checkpoint contains are missing among those of executors that were ahead."""
    found: list[Record] = []
    for path, tick in record_files(run_dir / JOURNAL_FOLDER):
        record = read_record(path, run_id, tick)
        if record is None:
            break
        found.append(record.without_bytes())
    return found


def load_journal(
    run_dir: Path,
    run_id: str,
    graph: Graph,
    config: RunConfig,
    *,
    after_tick: int,
    moved: bool = False,
    limits: Limits = ANY,
) -> Resumed:
    """What the journal holds of the ticks after a checkpoint; what cannot be used of it is removed.

    Args:
        after_tick: Of the checkpoint; -1: there is none.
        moved: Whether the run has another layout or platform now: then nothing of it is used.
        limits: Of the run's samples.
    """
    records = [record for record in read_journal(run_dir, run_id) if record.tick > after_tick]
    if not config.keeps_journal or moved:
        records = []
    num_ticks = config.run.num_ticks
    due = (tick for tick in range(after_tick + 1, num_ticks) if config.checkpoint.is_due(tick, num_ticks))
    before = next(due, num_ticks)
    torn = (record.tick for record in records if record.tick < before and not _files_are_there(run_dir, record))
    # Whatever a tick needs is of its own number or an earlier one, so this, too, is a state that the job can be in.
    before = min(before, *torn, num_ticks)
    chosen = [record for record in records if record.tick < before]
    segments: list[Segment] = []
    reports: tuple[Report, ...] = ()
    try:
        _check(chosen, graph, after_tick + 1, num_ticks)
        max_pieces = (raise_open_files() - _OTHER_FILES) // 2
        reports = _reports(chosen, graph, segments, max_pieces=max_pieces, limits=limits)
    except (ChannelError, ValueError, KeyError, TypeError) as error:
        while segments:
            segments.pop().close()
        print(f"{run_dir}: the journal is of no use, and the run goes on from its checkpoint: {error}", file=sys.stderr)
        chosen = []
    remove_records(run_dir / JOURNAL_FOLDER, chosen)
    return Resumed(reports, segments)


def _files_are_there(run_dir: Path, record: Record) -> bool:
    written = {writer_name(record.executor, rank): files for rank, files in record.files.items()}
    try:
        return not why_not_whole(run_dir, written, patience_s=0.0)
    except OSError:  # a name that no disk takes, say
        return False


def _check(records: Sequence[Record], graph: Graph, first_tick: int, num_ticks: int) -> None:
    """Raises ValueError if this job could not have done that, or could not go on from there."""
    specs = {spec.name: spec for spec in graph.executors}
    told = {record.executor: record.tells_states for record in records}
    for record in records:
        name = record.executor
        if name not in specs or record.tells_states != told[name]:
            raise ValueError(f"{name!r} was another executor then")
        if record.stop:
            raise ValueError(f"{name!r} asked for an end at tick {record.tick}")
        elastic = any(channel.elastic for channel in graph.outputs[name])
        if told[name] and len(record.journal) != specs[name].num_ranks and not elastic:
            raise ValueError(f"{name!r} had {len(record.journal)} ranks")
        channels = {channel.name: channel for channel in graph.outputs[name] if channel.kind is not ChannelKind.WEIGHTS}
        if channels.keys() != record.outputs.keys():
            raise ValueError(f"{name!r} wrote other channels then")
        for channel in channels.values():
            _check_tokens(record.outputs[channel.name], channel, specs)
        if told[name] and any(channel.delay for channel in graph.outputs[name]):
            raise ValueError(f"{name!r} writes a channel with a delay, and does not begin at the checkpoint")
        reads_weights = any(c.kind is ChannelKind.WEIGHTS or c.latest for c in graph.inputs[name])
        if not told[name] and reads_weights:
            raise ValueError(f"{name!r} keeps no journal and reads weights, which are not in it")
    marking = Marking(graph, first_tick=first_tick, num_ticks=num_ticks)
    marking.advance_by((record.executor, record.tick, dict.fromkeys(record.outputs, ())) for record in records)


def _check_tokens(tokens: Sequence[Token | None], channel: ChannelSpec, specs: Mapping[str, ExecutorSpec]) -> None:
    """Raises ValueError unless there is what the channel's readers wait for: one of each source rank, or of the first."""
    parts = num_parts(channel, specs[channel.sink].num_ranks) if channel.kind is ChannelKind.SCATTER else 1
    broadcast = channel.kind is ChannelKind.BROADCAST
    found = [token and (token.source_rank, token.num_parts) for token in (tokens[:1] if broadcast else tokens)]
    many = (len(tokens) == specs[channel.source].num_ranks) or (channel.elastic and bool(tokens))
    if not many or found != [(rank, parts) for rank in range(len(found))]:
        raise ValueError(f"its tokens of channel {channel.name!r} are not those of the ranks of {channel.source!r}")


def _reports(
    records: Sequence[Record], graph: Graph, segments: list[Segment], *, max_pieces: int, limits: Limits
) -> tuple[Report, ...]:
    """Tokens that somebody will read yet, and each executor's last state.

    Raises:
        ValueError: A token holds no plain values or impossible samples, or they are more than ``max_pieces``, each of
            which is a file that is open twice.
    """
    last = {record.executor: record for record in records}
    reports = []
    for record in records:
        wanted = []
        for channel in graph.outputs[record.executor]:
            reader = last.get(channel.sink)
            was_read = reader is not None and reader.tells_states and record.tick + channel.delay <= reader.tick
            if not was_read:
                wanted.append(channel)
        is_last = record is last[record.executor] and record.tells_states
        report = report_of(record, segments, tokens=wanted, states=is_last, limits=limits)
        reports.append(replace(report, files={}))  # they are here, and proved; no host has them now
        if len(segments) > max_pieces:
            raise ValueError(f"it holds more than {max_pieces} pieces, as many as may be open: save more often")
    return tuple(reports)


def report_of(
    record: Record, segments: list[Segment], *, tokens: Sequence[ChannelSpec], states: bool, limits: Limits = ANY
) -> Report:
    """The report that a file holds, with handles that name new memory of this process.

    Args:
        segments: Gets that memory, to be closed when others hold it.
        tokens: Channels whose tokens are wanted; the others' are None.
        states: Whether the states are wanted.
        limits: Of the run's samples.

    Raises:
        ValueError: A token holds something else than plain values, or samples that nobody can have drawn.
    """
    if (whole := read_record(record.path, record.run, record.tick)) is None:
        raise ValueError(f"{record.path} has been altered since it was proved")
    wanted = {channel.name: channel for channel in tokens}

    def in_memory(data: Any) -> State:
        segment, state = write_state(data.data)
        segments.append(segment)
        return state

    def handle_of(token: Token | None, name: str) -> DataHandle | None:
        if token is None or name not in wanted:
            return None
        try:
            for part in check_token(token.data.data, token.num_parts, token.table_checksum):
                check_part(part, wanted[name], record.tick, limits)
        except ValueError as error:
            raise ValueError(f"{record.path}: {error}") from error
        own = {key: getattr(token, key) for key in OF_HANDLE}
        return DataHandle(channel=name, tick=record.tick, address=in_memory(token.data).address, pid=os.getpid(), **own)

    return Report(
        **{key: getattr(record, key) for key in OF_REPORT},
        outputs={name: tuple(handle_of(token, name) for token in of) for name, of in whole.outputs.items()},
        journal=tuple(in_memory(state) for state in whole.journal if state is not None and states),
    )
