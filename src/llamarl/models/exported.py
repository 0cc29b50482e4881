"""What an exported folder says of itself: ``llamarl.json`` beside the weights, written last.

It names version and precision of the weights and proves every file by size and checksum, so that a folder that was torn by
a full disk or a kill is told from a whole one. Nothing in it depends on the time or the place: equal runs write equal folders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llamarl.checkpoint.snapshot import canonical_json, checksum_bytes, checksum_file

__all__ = ["EXPORT_FILE", "ExportFacts", "Narrowing", "read_export", "why_incomplete", "write_export"]

EXPORT_FILE = "llamarl.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Narrowing:
    """What it cost to write weights in fewer bits than they were served in."""

    num_weights: int
    num_equal_to_base: int
    """Written weights that equal the base model's in that precision, bit for bit: what they learned is gone."""
    num_equal_before: int
    """The same of the weights as they were served, in the precision that they were served in."""
    kl_per_token: float | None = None
    """Mean KL(served || written), nats a token, both computed in float32; None where it was not measured."""
    num_kl_tokens: int = 0
    """Tokens over which it was measured."""

    def sentence(self) -> str:
        """For a person."""
        text = (
            f"{self.num_equal_to_base / self.num_weights:.1%} of {self.num_weights:,} weights equal the base model's bit for bit "
            f"({self.num_equal_before / self.num_weights:.1%} as served)"
        )
        if self.kl_per_token is None:
            return f"{text}; KL not measured"
        return f"{text}; KL {self.kl_per_token:.3g} nats a token over {self.num_kl_tokens:,} tokens"


@dataclass(frozen=True, kw_only=True)
class ExportFacts:
    """Of an exported model, critic or adapter."""

    policy_version: int
    """Trainer ticks behind the weights."""
    dtype: str
    """Precision of the written weights, a torch dtype's name."""
    served_dtype: str
    """Precision in which the generator computed with them."""
    narrowing: Narrowing | None = None
    """Set where ``dtype`` cannot hold what ``served_dtype`` does."""


def write_export(folder: Path, facts: ExportFacts) -> None:
    """Flush the files of ``folder`` to the disk and write ``llamarl.json`` over them."""
    (folder / EXPORT_FILE).unlink(missing_ok=True)
    files: dict[str, Any] = {}
    for file in sorted(folder.iterdir()):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
        num_bytes, checksum = checksum_file(file)
        files[file.name] = {"bytes": num_bytes, "xxh3_128": checksum}
    body = {"format": _FORMAT, **asdict(facts), "files": files}
    data = canonical_json(body | {"xxh3_128": checksum_bytes(canonical_json(body))})
    with open(folder / EXPORT_FILE, "wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())


def read_export(folder: Path) -> ExportFacts:
    """What ``llamarl.json`` says.

    Raises:
        ValueError: It is missing or not what was written; the text says which.
    """
    return _facts(_body(folder))


def why_incomplete(folder: Path, *, checksums: bool = True) -> str | None:
    """Why ``folder`` is not, file for file, what an export wrote; None if it is.

    Args:
        checksums: Read every byte; False compares names and sizes alone.
    """
    try:
        files = _body(folder)["files"]
        for name, record in files.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != record["bytes"]:
                return f"{name} is torn: {size} bytes, {record['bytes']} were written"
        for name, record in files.items() if checksums else ():
            if checksum_file(folder / name)[1] != record["xxh3_128"]:
                return f"{name} was altered: its checksum differs from the one written"
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _body(folder: Path) -> dict[str, Any]:
    file = folder / EXPORT_FILE
    if not file.is_file():
        raise ValueError(f"{EXPORT_FILE} is missing")
    data = file.read_bytes()
    try:
        body = json.loads(data)
        checksum = body.pop("xxh3_128")
        whole = (
            canonical_json(body | {"xxh3_128": checksum}) == data and checksum_bytes(canonical_json(body)) == checksum
        )
        whole = whole and all(_is_record(name, record) for name, record in body["files"].items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{EXPORT_FILE} is not whole ({error!r})") from error
    if not whole:
        raise ValueError(f"{EXPORT_FILE} was altered (it does not match its own checksum)")
    if body.get("format") != _FORMAT:
        raise ValueError(f"{EXPORT_FILE} has format {body.get('format')!r}, this llamarl reads format {_FORMAT}")
    return dict(body)


def _is_record(name: str, record: Mapping[str, Any]) -> bool:
    return "/" not in name and isinstance(record["bytes"], int) and isinstance(record["xxh3_128"], str)


def _facts(body: Mapping[str, Any]) -> ExportFacts:
    try:
        narrowing = body["narrowing"]
        return ExportFacts(
            policy_version=body["policy_version"],
            dtype=body["dtype"],
            served_dtype=body["served_dtype"],
            narrowing=None if narrowing is None else Narrowing(**narrowing),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{EXPORT_FILE} was altered (entry {error} is missing or of another kind)") from error
