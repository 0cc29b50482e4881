"""The record of a tick: what it made, in a form that outlives its process, and on a disk the controller too.

    in shared memory   Report: handles and states name segments, whose bytes their checksums prove
    in RUN/journal     Record: magic, checksum │ the report as plain values, and each segment's bytes

One file a report, encoded as data channels encode what they carry
(:mod:`llamarl.channels.plain_values`): JSON, then the bytes that it names, each once. A file that was
cut off or altered anywhere is refused.

What is read may come from a stranger, with checksums that fit: each field is validated here, what is
in a token where it is decoded (:mod:`llamarl.controller.journaled`).
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import re
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import AfterValidator, Field, TypeAdapter

from llamarl.channels.plain_values import from_bytes, padded
from llamarl.checkpoint.snapshot import FileRecord
from llamarl.errors import ChannelError, FileError
from llamarl.reading import open_regular
from llamarl.runtime.base import Report
from llamarl.transports.checksum import digest
from llamarl.transports.remote_segment import copy_of
from llamarl.transports.segments import HEADER_BYTES, Segment, SegmentHandle, is_elsewhere, open_segment

__all__ = [
    "MAX_STATE_BYTES",
    "OF_HANDLE",
    "OF_REPORT",
    "Record",
    "State",
    "Token",
    "next_number",
    "parse_record",
    "read_record",
    "read_state",
    "record_files",
    "remove_records",
    "write_record",
    "write_state",
]

MAX_STATE_BYTES = 64 << 20
"""What is larger is not kept: its rank is not brought up again."""
_MAGIC = b"lrljrnl3"
_HEAD = struct.Struct("<8sQ")
"""Magic, digest of all that follows."""
_NAME = re.compile(r"(\d{12})-(\d{1,12})", re.ASCII)
"""Of a file: its number, in the order in which reports counted, and its tick."""


@dataclass(frozen=True, slots=True)
class State:
    """Where the state of a rank after a tick lies, in memory that outlives its process once the controller holds it."""

    address: SegmentHandle
    nbytes: int
    checksum: int


def write_state(state: bytes | memoryview) -> tuple[Segment, State]:
    """A segment of this process that holds ``state``.

    Raises:
        ChannelError: There is no memory for it.
    """
    segment = Segment(max(1, len(state)))
    segment.bytes[: len(state)] = np.frombuffer(state, np.uint8)
    return segment, State(segment.handle, len(state), digest(state))


def read_state(state: State, deadline_s: float = 60.0) -> bytes:
    """What was written.

    Args:
        deadline_s: Where it lies on another host.

    Raises:
        ChannelError: It is not there any more, or not what it was.
        DeadlineExceeded: It did not come in time.
    """
    away = is_elsewhere(state.address)
    segment = copy_of(state.address, deadline_s) if away else open_segment(state.address)
    try:
        data = bytes(segment.bytes[: state.nbytes])
    finally:
        segment.close()
    if digest(data) != state.checksum:
        raise ChannelError(f"a kept state of {state.nbytes} bytes does not match its checksum; resume the run")
    return data


def _is_bytes(value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 1:
        raise ValueError("it is no bytes")
    return value


def _is_text(value: Any, default: Callable[[Any], Any] | None = None) -> Any:
    """Raises ValueError unless JSON can say it, and somebody can write that: nobody can half a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, default=default).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    return value


_Count = Annotated[int, Field(ge=0, lt=1 << 40)]
_Checksum = Annotated[int, Field(ge=0, lt=1 << 64)]
_Time = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]
_Bytes = Annotated[Any, AfterValidator(_is_bytes)]
_Json = Annotated[dict[str, Any], AfterValidator(_is_text)]


@dataclass(frozen=True, kw_only=True)
class Token:
    """One source rank's share of one token of a data channel."""

    source_rank: _Count
    sequence: _Count
    slot: _Count
    num_parts: _Count
    table_checksum: _Checksum
    data: _Bytes
    """Of its segment."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One file, proved and validated."""

    path: Path = Path()
    run: str
    outputs: dict[str, tuple[Token | None, ...]]
    """Channel -> one a source rank."""
    journal: tuple[_Bytes | None, ...]
    """Each rank's state after the tick."""
    executor: str
    tick: _Count
    metrics: dict[str, float]
    started_s: _Time
    finished_s: _Time
    spans: tuple[tuple[str, _Time, _Time], ...]
    stop: str
    failures: dict[str, _Count]
    events: tuple[_Json, ...]
    files: dict[_Count, tuple[FileRecord, ...]]
    controller_bytes: _Count

    @property
    def tells_states(self) -> bool:
        """Whether each rank's state after the tick is in it."""
        return bool(self.journal) and all(state is not None for state in self.journal)

    def without_bytes(self) -> Record:
        """What it says, with nothing in place of the bytes of tokens and states."""
        nothing = np.empty(0, np.uint8)
        outputs = {
            name: tuple(token and dataclasses.replace(token, data=nothing) for token in of)
            for name, of in self.outputs.items()
        }
        journal = tuple(None if state is None else nothing for state in self.journal)
        return dataclasses.replace(self, outputs=outputs, journal=journal)


_RECORD = TypeAdapter(Record)
OF_REPORT = tuple(field.name for field in dataclasses.fields(Record)[4:])
"""What a record says as its report does."""
OF_HANDLE = tuple(field.name for field in dataclasses.fields(Token)[:-1])
"""What a token says as its handle does."""


def write_record(folder: Path, number: int, report: Report, run_id: str) -> None:
    """Write a file.

    Args:
        report: Its handles, and its states, name descriptors of this process.

    Raises:
        OSError: The disk does not take it.
    """

    def bytes_of(address: SegmentHandle) -> npt.NDArray[np.uint8]:
        mapped = mmap.mmap(address.fd, HEADER_BYTES + address.size, prot=mmap.PROT_READ)
        return np.frombuffer(mapped, np.uint8, offset=HEADER_BYTES)

    def token_of(handle: Any) -> dict[str, Any]:
        return {name: getattr(handle, name) for name in OF_HANDLE} | {"data": bytes_of(handle.address)}

    said = {name: getattr(report, name) for name in OF_REPORT} | {
        "run": run_id,
        "files": {rank: [dataclasses.asdict(file) for file in files] for rank, files in report.files.items()},
        "outputs": {name: [handle and token_of(handle) for handle in of] for name, of in report.outputs.items()},
        "journal": [state and bytes_of(state.address)[: state.nbytes] for state in report.journal],
    }
    folder.mkdir(exist_ok=True)
    proof = xxhash.xxh3_64()
    with open(folder / f"{number:012d}-{report.tick}", "wb") as file:
        file.write(bytes(_HEAD.size))
        for view in padded(said):
            proof.update(view)
            file.write(view)
        file.seek(0)
        file.write(_HEAD.pack(_MAGIC, proof.intdigest()))


def record_files(folder: Path) -> list[tuple[Path, int]]:
    """Files of the journal with their ticks, in order; nothing is opened."""
    if not folder.is_dir():
        return []
    named = ((path, _NAME.fullmatch(path.name)) for path in sorted(folder.iterdir()) if not path.is_dir())
    return [(path, int(name[2])) for path, name in named if name is not None]


def next_number(folder: Path) -> int:
    """Of the next file."""
    return max((int(path.name.partition("-")[0]) + 1 for path, _ in record_files(folder)), default=0)


def remove_records(folder: Path, keep: Collection[Record] = ()) -> None:
    """Remove all files but those that are kept."""
    kept = {record.path for record in keep}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path not in kept and not path.is_dir():
            path.unlink()


def read_record(path: Path, run_id: str, tick: int) -> Record | None:
    """Read and prove a file; None if it is torn, altered, or says to be of another run or tick."""
    try:
        with open_regular(path, max_bytes=None) as file:
            magic, checksum = _HEAD.unpack(file.read(_HEAD.size))
            body = memoryview(file.read())
        if magic != _MAGIC or digest(body) != checksum:
            return None
        record = dataclasses.replace(parse_record(body), path=path)
    except (FileError, ValueError, struct.error):
        return None
    return record if (record.run, record.tick) == (run_id, tick) else None


def parse_record(body: memoryview) -> Record:
    """Parse and validate what follows on a file's head.

    Raises:
        ValueError: It is no record.
    """
    said = from_bytes(body)
    _is_text(said, default=lambda _: None)
    record: Record = _RECORD.validate_python(said)
    return record
