"""A run as the page's blocks: name -> plain columns. Each block is opened by the page when its view is.

run        small, read at once: name, status, findings, totals, what is missing
metrics    rows as columns          timeline   ticks, spans, gaps
index      every response           detail/T   text and tokens of the chosen groups of tick T
config     configuration, job, machine
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llamarl.config import GROUP_BASELINES
from llamarl.errors import DataError, FileError
from llamarl.observability.findings import FLAGS, WINDOW, find_wrong
from llamarl.observability.keys import KEYS, key_order
from llamarl.observability.ledger import imbalance
from llamarl.observability.rollouts import ROLLOUTS_FOLDER, tick_files
from llamarl.observability.summary import RunSummary
from llamarl.observability.trained_tokens import TrainedResponse, read_trained_files, trained_files
from llamarl.report.page import encode_block
from llamarl.report.rollout_index import TickIndex, choose_groups, detail_of_tick, index_columns, index_file
from llamarl.report.run_files import RunFiles, read_run
from llamarl.report.texts import find_tokenizer, piece_reader
from llamarl.report.timeline import channels_of, timeline_columns

__all__ = ["RunReader", "metrics_columns"]

_LINE_TO_BLOCK = 0.06
"""Bytes of a block by bytes of the rollout lines it was made from, to begin with; measured from then on."""
_FILL = 0.97
"""Of the room for responses, what is aimed at: the measure is of other ticks than those that it is applied to."""

_FACTS = {
    "model": "model.path",
    "task": "task.name",
    "algorithm": "algorithm.name",
    "max_staleness": "schedule.max_staleness",
}
"""Name on the page -> key of the configuration."""


@dataclass
class RunReader:
    """Reads one run again and again, at the cost of what has changed."""

    path: Path
    _indexes: dict[Path, tuple[tuple[int, int], TickIndex]] = field(default_factory=dict)
    _details: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def blocks(self, max_bytes: int) -> dict[str, str]:
        """Block name -> encoded text, of at most ``max_bytes`` together unless the numbers alone take more.

        Raises:
            LlamaRLError: A file is there and cannot be read.
        """
        files = read_run(self.path)
        paths = dict(tick_files(self.path / ROLLOUTS_FOLDER))
        indexes = [self._index(tick, path) for tick, path in paths.items()]
        blocks = {
            "metrics": encode_block(metrics_columns(files.rows)),
            "timeline": encode_block(timeline_columns(files.trace, channels_of(files.job))),
            "config": encode_block({"config": files.config, "job": files.job}),
        }
        numbers = encode_block(index_columns(indexes, {}))
        room = max_bytes - len(numbers) - sum(map(len, blocks.values()))
        chosen, details = self._details_within(files, indexes, paths, room)
        blocks |= details
        blocks["index"] = encode_block(index_columns(indexes, chosen) | self._facts(files, indexes))
        blocks["run"] = encode_block(self._run(files, indexes, chosen))
        return blocks

    def _index(self, tick: int, path: Path) -> TickIndex:
        state = _state(path)
        known = self._indexes.get(path)
        if known is None or known[0] != state:
            known = self._indexes[path] = (state, index_file(tick, path))
        return known[1]

    def _details_within(
        self, files: RunFiles, indexes: Sequence[TickIndex], paths: Mapping[int, Path], room: int
    ) -> tuple[dict[int, list[int]], dict[str, str]]:
        """The chosen groups of each tick and their blocks, which take at most ``room`` characters."""
        pieces = piece_reader(find_tokenizer(self.path, str(files.setting("model.path", ""))))
        of_tick, trained = {index.tick: index for index in indexes}, trained_files(self.path)
        ratio = _LINE_TO_BLOCK
        while True:
            chosen = choose_groups(indexes, _FILL * room / ratio)
            blocks: dict[str, str] = {}
            used = lines = 0
            for tick, prompts in chosen.items():
                index = of_tick[tick]
                beside = tuple((path, _state(path)) for path in trained.get(tick, ()))
                key = (paths[tick], _state(paths[tick]), beside, tuple(prompts))
                if key not in self._details:
                    detail = detail_of_tick(tick, paths[tick], prompts, pieces, _trained(path for path, _ in beside))
                    self._details[key] = encode_block(detail)
                blocks[f"detail/{tick}"] = self._details[key]
                used += len(self._details[key])
                wanted = set(prompts)
                lines += sum(n for n, prompt in zip(index.num_bytes, index.prompt, strict=True) if prompt in wanted)
                if used > room:
                    break
            if used <= room:
                return chosen, blocks
            ratio = max(1.1 * ratio, used / max(1, lines))

    def _facts(self, files: RunFiles, indexes: Sequence[TickIndex]) -> dict[str, Any]:
        stale: Counter[tuple[int, int]] = Counter()
        for index in indexes:
            for version, tokens in index.tokens_of_version.items():
                stale[index.tick, index.tick - version] += tokens
        places = sorted(stale)
        return {
            "flag_names": list(FLAGS),
            "unreadable": sum(index.unreadable for index in indexes),
            "staleness": {
                "tick": [tick for tick, _ in places],
                "staleness": [late for _, late in places],
                "tokens": [stale[place] for place in places],
            },
        }

    def _run(
        self, files: RunFiles, indexes: Sequence[TickIndex], chosen: Mapping[int, Sequence[int]]
    ) -> dict[str, Any]:
        totals = RunSummary()
        for row in files.rows:
            totals.add(row)
        findings = find_wrong(
            files.rows,
            files.warnings,
            indexes,
            group_baseline=files.setting("algorithm.advantage", "group_mean") in GROUP_BASELINES,
            max_new_tokens=files.setting("generator.sampling.max_new_tokens"),
            reward=str(files.setting("task.reward") or ""),
            distills=files.setting("algorithm.advantage") == "distillation",
        )
        held_out = _held_out(totals)
        responses = sum(len(index.reward) for index in indexes)
        with_text = 0
        for index in indexes:
            wanted = set(chosen.get(index.tick, ()))
            with_text += sum(prompt in wanted for prompt in index.prompt)
        return {
            "name": files.name,
            "path": str(files.path),
            "status": files.status,
            "ticks": len(files.rows),
            "num_ticks": files.num_ticks,
            "missing": list(files.missing),
            "window": WINDOW,
            "got_worse": totals.got_worse,
            "findings": [{**asdict(f), "title": f.title, "view": f.view} for f in findings],
            "totals": {
                "wall_s": totals.wall_s,
                "first_reward": totals.first.get("reward/mean"),
                "last_reward": totals.last.get("reward/mean"),
                "held_out": held_out,
                "first_held_out": totals.first.get(held_out),
                "last_held_out": totals.last.get(held_out),
                "tokens_generated": totals.tokens_generated,
                "staleness_mean": totals.staleness_mean,
                "staleness_max": totals.staleness_max,
                "idle": totals.idle,
            },
            "facts": {name: files.setting(key) for name, key in _FACTS.items()},
            "responses": responses,
            "responses_with_text": with_text,
            "last_tick_with_text": max(chosen, default=None),
        }


def _held_out(totals: RunSummary) -> str:
    """The key that says how good the policy is on what it was not trained on."""
    if "eval/loss" in totals.last:
        return "eval/loss"
    return "eval/reward_mean" if totals.is_graded else "eval/accuracy"


def _trained(paths: Iterable[Path]) -> dict[tuple[int, int], TrainedResponse]:
    """What the trainer wrote down of a tick; nothing where its file is torn."""
    try:
        return {(one.prompt_index, one.sample_index): one for one in read_trained_files(paths)}
    except DataError:
        return {}


def _state(path: Path) -> tuple[int, int]:
    """By which a file that was changed is known."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror})") from error
    return found.st_mtime_ns, found.st_size


def metrics_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows as columns, what the table of keys says of each, and what each row's ledger lacks (0: it closes)."""
    keys = key_order({key for row in rows for key in row})
    known = {key.name: key for key in KEYS}
    before: Sequence[Mapping[str, Any] | None] = [None, *rows[:-1]] if rows else []
    return {
        "columns": {key: [row.get(key) for row in rows] for key in keys},
        "units": {key: known[key].unit for key in keys if key in known},
        "meanings": {key: known[key].meaning for key in keys if key in known},
        "imbalance": [imbalance(row, earlier) for row, earlier in zip(rows, before, strict=True)],
    }
