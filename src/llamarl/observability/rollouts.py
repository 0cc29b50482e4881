"""``rollouts/tick_000012.jsonl``: every sample of a batch with its history, one JSON object a line, group by group.

The executor that holds the batch writes it, so that payloads never pass through the controller. The
same batch gives the same bytes; a file is there whole or not at all. Numbers are exact: a float32
is written as the shortest text that reads back to it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.errors import DataError, FileError
from llamarl.observability.writing import Patience, writes
from llamarl.reading import open_regular, parse_json
from llamarl.types import Failure, Group, Prompt, Response, Score, Turn

__all__ = [
    "ROLLOUTS_FOLDER",
    "Rollout",
    "cut_after",
    "read_rollouts",
    "remove_partial",
    "rollout_ticks",
    "rollouts_in",
    "tick_files",
    "write_rollouts",
]

ROLLOUTS_FOLDER = "rollouts"

_NAME = re.compile(r"tick_(\d{6,})\.(?:jsonl|.+\.npz)")


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sample as it was written."""

    tick: int
    prompt: str
    answer: str | None
    task: str
    response: Response
    """Everything that the trainer saw of it."""
    advantage: float | None = None
    """That the trainer used, as ``trained/`` holds it; None where it is not known."""
    prompt_tokens: npt.NDArray[np.int32]
    """[P] token ids."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's task data."""


def remove_partial(run_dir: Path) -> None:
    """Remove what processes that were ended in the middle of a file have left of it; nobody writes now."""
    with contextlib.suppress(OSError):  # the folder may be out of reach: that is why the run ends
        for path in run_dir.glob("*/.tick_*.partial"):
            path.unlink(missing_ok=True)


def write_rollouts(run_dir: Path, tick: int, groups: Sequence[Group], patience: Patience | None = None) -> Path:
    """Write the batch of ``tick``; returns the file.

    Args:
        patience: With a disk that refuses it; None: none.

    Raises:
        LlamaRLError: The disk is full or not writable; no part of the file is left.
    """
    records = (_record(tick, group.prompt, response) for group in groups for response in group.responses)
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    data = io.BytesIO()  # bytes.join would hold all lines beside the whole: a tick may be of GBs
    data.writelines(line.encode("utf-8", "backslashreplace") for line in lines)
    path = run_dir / ROLLOUTS_FOLDER / f"tick_{tick:06d}.jsonl"
    (patience or Patience()).replace(path, data.getbuffer())
    return path


def tick_files(folder: Path) -> list[tuple[int, Path]]:
    """(tick, file) of every file of a tick in ``rollouts`` or ``trained``, in order; none where
    there is no such folder."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found)


def cut_after(folder: Path, tick: int) -> None:
    """Remove the files of later ticks: a run that goes on from ``tick`` writes them anew.

    Raises:
        LlamaRLError: The folder is not writable.
    """
    for found, path in tick_files(folder):
        if found > tick:
            with writes(path):
                path.unlink()


def read_rollouts(folder: str | os.PathLike[str], tick: int | None = None) -> Iterator[Rollout]:
    """Samples of one tick, or of all, in order.

    Args:
        folder: A run's folder or its ``rollouts``.

    Raises:
        DataError: No such file, or a line that is not a sample; the message names file and line.
    """
    place = rollouts_in(folder)
    ticks = rollout_ticks(place)
    files = [(found, path) for found, path in tick_files(place) if tick is None or found == tick]
    if not files:
        raise DataError(f"{place} holds no rollouts of tick {tick}: it has those of ticks {ticks[0]} to {ticks[-1]}")
    for found, path in files:
        with open_regular(path, max_bytes=None) as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}, line {number}"
                try:
                    if line.strip():
                        yield _parse(found, parse_json(line, where, big_integers=True, lone_surrogates=True))
                except FileError as error:
                    raise DataError(str(error)) from error
                except (ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
                    raise DataError(f"{where} is not a sample: {error!r}") from error


def rollout_ticks(folder: str | os.PathLike[str]) -> list[int]:
    """Ticks that have rollouts, in order.

    Args:
        folder: A run's folder or its ``rollouts``.

    Raises:
        DataError: It has none.
    """
    place = rollouts_in(folder)
    if not (ticks := [tick for tick, _ in tick_files(place)]):
        raise DataError(f"{place} holds no rollouts: run with observability.rollouts = true")
    return ticks


def rollouts_in(folder: str | os.PathLike[str]) -> Path:
    """Where a run's folder has its rollouts; else the folder itself."""
    place = Path(folder)
    return place / ROLLOUTS_FOLDER if (place / ROLLOUTS_FOLDER).is_dir() else place


def _segments(response: Response) -> list[list[int]]:
    """[version, tokens] for each stretch of tokens that one version wrote, in order."""
    written = response.policy_versions[response.policy_versions >= 0]
    return [[int(version), len(list(run))] for version, run in groupby(written.tolist())]


def _record(tick: int, prompt: Prompt, response: Response) -> dict[str, Any]:
    outcome = response.outcome
    return {
        "tick": tick,
        "prompt_index": prompt.index,
        "sample_index": response.sample_index,
        "task": prompt.task,
        "prompt": prompt.text,
        "response": response.text,
        "answer": prompt.answer,
        "reward": outcome.value if isinstance(outcome, Score) else None,
        "reward_parts": dict(sorted(outcome.parts.items())) if isinstance(outcome, Score) else {},
        "failure": {"kind": outcome.kind, "detail": outcome.detail} if isinstance(outcome, Failure) else None,
        "finish_reason": response.finish_reason,
        "segments": _segments(response),
        "prompt_tokens": prompt.tokens.tolist(),
        "tokens": response.tokens.tolist(),
        "behavior_logprobs": _shortest(response.behavior_logprobs),
        "policy_versions": response.policy_versions.tolist(),
        "loss_mask": response.loss_mask.astype(int).tolist(),
        "metadata": dict(prompt.metadata),
        **({"sampled_by": response.sampled_by} if response.sampled_by else {}),
        **({"turns": [asdict(turn) for turn in response.turns]} if response.turns else {}),
    }


def _parse(tick: int, record: Mapping[str, Any]) -> Rollout:
    outcome: Score | Failure | None = None
    if record["failure"] is not None:
        outcome = Failure(kind=record["failure"]["kind"], detail=record["failure"]["detail"])
    elif record["reward"] is not None:
        outcome = Score(value=float(record["reward"]), parts=record["reward_parts"])
    logprobs = [math.nan if x is None else x for x in record.get("behavior_logprobs") or [None] * len(record["tokens"])]
    response = Response(
        prompt_index=record["prompt_index"],
        sample_index=record["sample_index"],
        tokens=np.array(record["tokens"], dtype=np.int32),
        behavior_logprobs=np.array(logprobs, dtype=np.float32),
        policy_versions=np.array(record["policy_versions"], dtype=np.int32),
        loss_mask=np.array(record["loss_mask"], dtype=np.bool_),
        text=record["response"],
        finish_reason=record["finish_reason"],
        sampled_by=record.get("sampled_by", ""),
        outcome=outcome,
        turns=tuple(Turn(**turn) for turn in record.get("turns", ())),
    )
    return Rollout(
        tick=tick,
        prompt=record["prompt"],
        answer=record["answer"],
        task=record["task"],
        response=response,
        prompt_tokens=np.array(record["prompt_tokens"], dtype=np.int32),
        metadata=record["metadata"],
    )


def _shortest(values: npt.NDArray[np.float32]) -> list[float | None]:
    """The float64s with the fewest digits that round to these float32s; None for NaN."""
    return [None if math.isnan(value) else value for value in map(float, values.astype(str))]
