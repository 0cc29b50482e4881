"""Every response of a run in a few numbers each, and the few whose text and tokens the page carries.

    rollouts/tick_*.jsonl ──index_file──▶ TickIndex (columns) ──choose_groups──▶ groups that fit ──detail_of_tick──▶ text, tokens

The first pass reads every line and keeps numbers alone; the second reads again the ticks of which something was chosen.
A line that is torn or no sample is counted and left out.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from llamarl.observability.trained_tokens import TrainedResponse
from llamarl.reading import open_regular
from llamarl.report.texts import flags_of

__all__ = ["TickIndex", "choose_groups", "detail_of_tick", "index_columns", "index_file", "run_lengths"]

_MAX_CAUSE = 300
_MAX_KEY = 200

Pieces = Callable[[Sequence[int]], "list[str] | None"]
"""Token ids -> the text of each; None where no tokenizer is at hand."""


@dataclass(slots=True)
class TickIndex:
    """One rollout file: a column an entry, a sample a position, in the file's order."""

    tick: int
    prompt: list[int] = field(default_factory=list)
    sample: list[int] = field(default_factory=list)
    reward: list[float | None] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    """Response tokens."""
    finish: list[str] = field(default_factory=list)
    failure: list[str] = field(default_factory=list)
    """``kind: detail`` where the reward failed, else empty."""
    task: list[str] = field(default_factory=list)
    oldest: list[int] = field(default_factory=list)
    """Oldest policy version that wrote a token; -1 where none did, as of another model's (``sampled_by``)."""
    newest: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    text_of_prompt: list[str] = field(default_factory=list)
    """The prompt, by which it is known in other ticks: of a long one the beginning, a NUL and a digest of it all."""
    num_bytes: list[int] = field(default_factory=list)
    """Of the line: what its detail will take, about."""
    tokens_of_version: Counter[int] = field(default_factory=Counter)
    """Policy version -> trained tokens that it wrote, in responses that have a reward."""
    unreadable: int = 0

    def groups(self) -> list[tuple[int, range]]:
        """(prompt index, positions) of each group, in order."""
        found, at = [], 0
        for prompt, members in groupby(self.prompt):
            count = len(list(members))
            found.append((prompt, range(at, at + count)))
            at += count
        return found


def index_file(tick: int, path: Path) -> TickIndex:
    """Read a file's numbers.

    Raises:
        FileError: It cannot be read.
    """
    index = TickIndex(tick)
    for line, record in _records(path):
        if record is None or not _add(index, record, len(line)):
            index.unreadable += 1
    return index


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    with open_regular(path, max_bytes=None) as file:
        for line in file:
            if line.strip():
                try:
                    record = json.loads(line.decode("utf-8", "replace"))
                except (ValueError, RecursionError):
                    record = None
                yield line, record if isinstance(record, dict) else None


def _add(index: TickIndex, record: Mapping[str, Any], num_bytes: int) -> bool:
    """Whether the record is a sample; if it is not, nothing is added."""
    try:
        failure, reward = record["failure"], record["reward"]
        cause = f"{failure['kind']}: {failure['detail']}"[:_MAX_CAUSE] if failure else ""
        aged = [] if record.get("sampled_by") else record["segments"]  # another model's tokens have no age
        versions = [int(version) for version, _ in aged]
        text, prompt = str(record["response"]), str(record["prompt"])
        flags = flags_of(text, f"{prompt} {record.get('answer') or ''}", str(record["finish_reason"]))
        trained = [v for v, mask in zip(record["policy_versions"], record["loss_mask"], strict=True) if mask and v >= 0]
        place = int(record["prompt_index"]), int(record["sample_index"])
        value, length = None if reward is None or failure else float(reward), len(record["tokens"])
    except (KeyError, TypeError, ValueError, IndexError):
        return False
    entry = {
        "prompt": place[0],
        "sample": place[1],
        "reward": value,
        "length": length,
        "finish": str(record["finish_reason"]),
        "failure": cause,
        "task": str(record.get("task") or ""),
        "oldest": min(versions, default=-1),
        "newest": max(versions, default=-1),
        "flags": flags,
        "text_of_prompt": _key(prompt),
        "num_bytes": num_bytes,
    }
    for column, cell in entry.items():
        getattr(index, column).append(cell)
    if not cause and not record.get("sampled_by"):
        index.tokens_of_version.update(trained)
    return True


def _key(prompt: str) -> str:
    if len(prompt) <= _MAX_KEY:
        return prompt
    digest = hashlib.blake2b(prompt.encode("utf-8", "replace"), digest_size=6).hexdigest()
    return f"{prompt[:_MAX_KEY]}\0{digest}"


def choose_groups(indexes: Sequence[TickIndex], max_bytes: float) -> dict[int, list[int]]:
    """Tick -> prompt indices of the groups whose text the page carries.

    Whole groups, spread over the ticks: one of each tick before a second of any, the ticks in an order that halves the
    distance between chosen ones again and again; in a tick first groups with a failure or garbage, then those with
    different rewards, then the rest.

    Args:
        max_bytes: Bytes of rollout lines that may be chosen in all.
    """
    queues = {index.tick: _by_interest(index) for index in indexes if index.prompt}
    order = [index.tick for index in _spread([index for index in indexes if index.prompt])]
    chosen: dict[int, list[int]] = {tick: [] for tick in order}
    left = max_bytes
    depth = 0
    while any(len(queue) > depth for queue in queues.values()):
        for tick in order:
            if len(queues[tick]) > depth:
                prompt, size = queues[tick][depth]
                if size <= left:
                    left -= size
                    chosen[tick].append(prompt)
        depth += 1
    return {tick: prompts for tick, prompts in sorted(chosen.items()) if prompts}


def _by_interest(index: TickIndex) -> list[tuple[int, int]]:
    """(prompt index, bytes) of each group, the most telling first."""
    ranked = []
    for position, (prompt, members) in enumerate(index.groups()):
        bad = any(index.failure[i] or index.flags[i] for i in members)
        mixed = len({index.reward[i] for i in members}) > 1
        ranked.append((0 if bad and position % 2 == 0 else 1 if mixed else 2, position, prompt, members))
    ranked.sort(key=lambda item: item[:2])
    return [(prompt, sum(index.num_bytes[i] for i in members)) for _, _, prompt, members in ranked]


def _spread(items: Sequence[TickIndex]) -> list[TickIndex]:
    """First and last, then the middle, then the quarters, .."""
    last = len(items) - 1
    places = (int(i * last / 2**k) for k in range(last.bit_length() + 1) for i in range(2**k + 1))
    return [items[place] for place in dict.fromkeys(places)] if items else []


def detail_of_tick(
    tick: int,
    path: Path,
    prompts: Sequence[int],
    pieces: Pieces,
    trained: Mapping[tuple[int, int], TrainedResponse] | None = None,
) -> dict[str, Any]:
    """Text and tokens of the chosen groups of one file, for the page.

    Args:
        trained: (prompt index, sample index) -> what the trainer made of it, as far as it wrote that down.

    Raises:
        FileError: The file cannot be read.
    """
    wanted = set(prompts)
    groups: dict[int, dict[str, Any]] = {}
    for _, record in _records(path):
        if record is None or record.get("prompt_index") not in wanted or not _add(TickIndex(tick), record, 0):
            continue
        group = groups.setdefault(
            record["prompt_index"],
            {
                "prompt_index": record["prompt_index"],
                "prompt": record["prompt"],
                "answer": record.get("answer"),
                "task": record.get("task"),
                "metadata": record.get("metadata") or {},
                "prompt_tokens": len(record.get("prompt_tokens") or ()),
                "samples": [],
            },
        )
        place = record["prompt_index"], record["sample_index"]
        group["samples"].append(_sample(record, pieces, (trained or {}).get(place)))
    return {"groups": list(groups.values())}


def _sample(record: Mapping[str, Any], pieces: Pieces, trained: TrainedResponse | None) -> dict[str, Any]:
    found = {
        "sample_index": record["sample_index"],
        "text": record["response"],
        "reward": record["reward"],
        "parts": record.get("reward_parts") or {},
        "failure": record["failure"],
        "finish": record["finish_reason"],
        "sampled_by": record.get("sampled_by", ""),
        "ids": record["tokens"],
        "logprobs": [None if x is None else round(x, 3) + 0.0 for x in _logprobs(record)],
        "versions": run_lengths(record["policy_versions"]),
        "mask": run_lengths(record["loss_mask"]),
        "turns": [_turn(turn) for turn in record.get("turns") or () if isinstance(turn, Mapping)],
    }
    texts = pieces(record["tokens"])
    if texts is not None:
        found["pieces"] = texts
        del found["ids"]
    mask = record["loss_mask"]
    found["advantage"] = None if trained is None else trained.advantage
    if trained is not None and sum(map(bool, mask)) == len(trained.policy_logprobs):
        logprobs = iter(trained.policy_logprobs.tolist())
        found["policy_logprobs"] = [round(next(logprobs), 3) + 0.0 if one else None for one in mask]
        clipped = iter(trained.clipped.tolist())
        found["clipped"] = run_lengths([int(bool(one) and next(clipped)) for one in mask])
    return found


def _logprobs(record: Mapping[str, Any]) -> list[float | None]:
    """None throughout where another program wrote the sample without them."""
    return record.get("behavior_logprobs") or [None] * len(record["tokens"])


def _turn(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the policy wrote in one go, and what its environment made of it."""
    return {
        "start": record.get("start"),
        "end": record.get("end"),
        "finish": record.get("finish_reason"),
        "reply": record.get("reply", ""),
        "reward": record.get("reward"),
        "parts": record.get("parts") or {},
        "observation": record.get("observation", ""),
    }


def run_lengths(values: Sequence[int]) -> list[list[int]]:
    """``[4, 4, 5]`` -> ``[[4, 2], [5, 1]]``."""
    return [[int(value), len(list(run))] for value, run in groupby(values)]


def index_columns(indexes: Sequence[TickIndex], chosen: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """The page's block of all responses: columns, with texts that repeat named once."""
    tables: dict[str, dict[Any, int]] = {name: {} for name in ("reward", "finish", "failure", "task", "prompt_text")}

    def number(table: str, value: Any) -> int:
        return tables[table].setdefault(value, len(tables[table]))

    columns: dict[str, list[Any]] = {
        name: [] for name in ("sample", "reward", "length", "finish", "failure", "task", "oldest", "newest", "flags")
    }
    groups: dict[str, list[Any]] = {"tick": [], "prompt": [], "size": [], "text": [], "detail": []}
    number("failure", "")
    for index in indexes:
        with_detail = set(chosen.get(index.tick, ()))
        for prompt, members in index.groups():
            groups["tick"].append(index.tick)
            groups["prompt"].append(prompt)
            groups["size"].append(len(members))
            groups["text"].append(number("prompt_text", index.text_of_prompt[members[0]]))
            groups["detail"].append(int(prompt in with_detail))
        columns["reward"] += [None if value is None else number("reward", value) for value in index.reward]
        for name in ("sample", "length", "flags"):
            columns[name] += getattr(index, name)
        for name in ("finish", "failure", "task"):
            columns[name] += [number(name, value) for value in getattr(index, name)]
        for name in ("oldest", "newest"):  # as staleness
            columns[name] += [index.tick - value if value >= 0 else -1 for value in getattr(index, name)]
    return {"groups": groups, **columns, "tables": {name: list(values) for name, values in tables.items()}}
