"""What a judge behind a URL has said, kept so that a tick that is done again gives the same rewards.

RUN/verdicts/NAME-RANK.jsonl   {"question": checksum, "verdict": {...}, "checksum": of these} a line

A server need not say the same twice. A run that is resumed does the ticks since its last checkpoint again; their responses are the
same, bit for bit, so their questions are too, and the verdicts are taken from here. A line that was torn by a crash is not used.
Only scores are kept: what failed may be asked again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llamarl.checkpoint.snapshot import canonical_json, checksum_bytes
from llamarl.executors.asking import Question, Verdict
from llamarl.observability.writing import Patience, append_all

__all__ = ["VerdictLog"]


class VerdictLog:
    """The verdicts of one rank."""

    def __init__(self, path: Path, *, asked_of: Sequence[Any], patience: Patience | None = None) -> None:
        """
        Args:
            patience: With a disk that refuses verdicts; None: none.
            asked_of: Plain values: which judge it is, and how it is asked. What another one said is not taken.
        """
        self._path = path
        self._patience = patience or Patience()
        self._asked_of = list(asked_of)
        self._found: dict[str, Verdict] = {}
        if path.is_file():
            for line in path.read_bytes().split(b"\n"):
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record: Any = json.loads(line)
            checksum = record.pop("checksum")
            if checksum_bytes(canonical_json(record)) == checksum:
                self._found[record["question"]] = Verdict(**record["verdict"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # torn, or not of this release: it is asked again

    def get(self, question: Question) -> Verdict | None:
        """What was said to it; None where nothing was."""
        return self._found.get(self._key(question))

    def keep(self, verdicts: Iterable[tuple[Question, Verdict]]) -> None:
        """Add scores, and return when they are on the disk.

        Raises:
            LlamaRLError: The disk is full or not writable.
        """
        lines = []
        for question, verdict in verdicts:
            if verdict.score is not None:
                key = self._key(question)
                self._found[key] = verdict
                record = {"question": key, "verdict": asdict(verdict)}
                lines.append(json.dumps({**record, "checksum": checksum_bytes(canonical_json(record))}))
        if not lines:
            return
        data = ("\n" + "\n".join(lines) + "\n").encode()  # the line before may be torn

        def write() -> None:
            self._path.parent.mkdir(exist_ok=True)
            with open(self._path, "ab", buffering=0) as file:
                append_all(file.fileno(), data)
                os.fsync(file.fileno())

        self._patience.write(self._path, write)

    def _key(self, question: Question) -> str:
        """Of its words and its place in the run: two responses that read the same are asked about on their own."""
        return checksum_bytes(canonical_json([self._asked_of, question.text, list(question.seed_parts)]))
