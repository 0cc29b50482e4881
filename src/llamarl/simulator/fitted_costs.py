"""What runs on this machine cost, as straight lines through their own metrics and rollouts. Pure but for reading a run's folder.

    metrics.jsonl: seconds of each role's ticks ─┐
                                                 ├─▶ FittedCosts
    rollouts/: tokens of each response ──────────┘

A generator's tick is ``tick_s + step_s * decode steps + sequence_s * tokens``, a trainer's ``tick_s + token_s * tokens``. Unlike
replicas (``generator.replicas``) have a line for each kind: whose prompts each replica had follows from the shares, and what it took
for them is in the run's ``time/replica_N_s``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.config import RunConfig
from llamarl.errors import LlamaRLError, PlanError
from llamarl.observability.keys import REPLICA_KEY
from llamarl.observability.metrics import read_metrics
from llamarl.reading import parse_json, read_lines
from llamarl.simulator.tick_costs import LinearGeneratorCost, RewardCost, TrainerCost

__all__ = [
    "WARM_UP",
    "LEAST_TICKS",
    "FittedCosts",
    "StageTick",
    "decode_work",
    "fit_kinds",
    "fit_runs",
    "groups_of",
    "lengths_of_replicas",
    "measured_rows",
    "non_negative_line",
]

_MOST_TICKS = 1_000_000
WARM_UP = 2
"""First ticks of a run that a fit leaves out."""
LEAST_TICKS = 4

Rows = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class FittedCosts:
    """What runs on this machine measured, as straight lines."""

    generator: LinearGeneratorCost
    trainer: TrainerCost
    reward: RewardCost
    round_s: float
    """Seconds of a synchronous round that are no executor's tick: messages, hand-over. 0 where no run was synchronous."""
    prompt_tokens: int
    num_ticks: int
    """Measured ticks that went into the fit."""
    kinds: tuple[LinearGeneratorCost, ...] = ()
    """Of unlike replicas the line of each kind, of which ``generator`` is the first; empty: all are alike."""
    errors: Mapping[str, float]
    """Role -> median relative error of the fitted line over those ticks."""
    jitter: Mapping[str, float]
    """Role -> standard deviation of the logarithm of (measured tick / fitted tick), of unlike replicas each by itself."""

    @property
    def of_kinds(self) -> tuple[LinearGeneratorCost, ...]:
        """The line of each kind of replicas: one, where they are alike."""
        return self.kinds or (self.generator,)


def fit_runs(runs: Sequence[tuple[RunConfig, Path]]) -> FittedCosts:
    """Costs from the metrics and rollouts of measured runs.

    Steps are those of the longest response (or of the slots' schedule), so the runs must finish every response in its tick.
    Two runs of different batch sizes tell the terms apart; from one run only their sum is well known.

    Raises:
        PlanError: A run has partial rollouts, too few ticks, or rollouts were not kept; of unlike replicas also where it does not
            say what each of them took, or for which prompts.
    """
    stages: list[StageTick] = []
    rows_t: list[tuple[float, float]] = []
    seconds: dict[str, list[float]] = {"generator": [], "trainer": [], "reward": []}
    round_s: list[float] = []
    prompts: list[int] = []
    if len({len(config.generator.replicas) for config, _ in runs}) > 1:
        raise PlanError("a fit needs runs with as many kinds of generator.replicas each: fit them one by one")
    for config, folder in runs:
        if config.generator.max_segments != 1:
            raise PlanError(
                f"{folder}: a fit needs a run that finishes every response in its tick, and this one has "
                f"generator.max_segments {config.generator.max_segments}: simulate its recipe with the lengths that it measured, "
                f"llamarl simulate {folder / 'config.toml'} --response-tokens file:{folder / 'rollouts'}, or run it with "
                "--generator.max_segments 1 --generator.oversubscription 1.0"
            )
        for row in measured_rows(folder)[WARM_UP:]:
            file = _rollouts_of(folder, int(row.get("step") or 0))
            if not file.is_file():
                continue
            samples = _samples(file)
            lengths, prompt_tokens = _tick_lengths(samples)
            rows_t.append((1.0, float(lengths.sum() + prompt_tokens.sum())))
            for role, found in seconds.items():
                found.append(float(row.get(f"time/{role}_s") or 0.0))
            stages.append(_stage_tick(config, folder, row, samples, lengths))
            prompts.extend(prompt_tokens.tolist())
            if config.schedule.max_staleness == 0:
                ticks = sum(found[-1] for found in seconds.values())
                round_s.append(max(0.0, float(row.get("time/step_s") or 0.0) - ticks))
    if len(stages) < LEAST_TICKS:
        raise PlanError(
            f"a fit needs at least {LEAST_TICKS} ticks after {WARM_UP} of warm-up with their rollouts, got {len(stages)} in "
            f"{', '.join(str(folder) for _, folder in runs)}: let the runs last longer"
        )
    kinds, stage_logs, own_logs = fit_kinds(stages)
    t = non_negative_line(np.array(rows_t), np.array(seconds["trainer"]))
    trainer_logs = _logs(np.array(seconds["trainer"]), np.array(rows_t) @ np.array(t))
    return FittedCosts(
        generator=kinds[0],
        kinds=kinds if runs[0][0].generator.replicas else (),
        trainer=TrainerCost(tick_s=t[0], token_s=t[1]),
        reward=RewardCost(tick_s=float(np.median(seconds["reward"]))),
        round_s=float(np.median(round_s)) if round_s else 0.0,
        prompt_tokens=max(1, round(float(np.mean(prompts)))),
        num_ticks=len(stages),
        errors={
            role: float(np.median(np.abs(np.expm1(-found))))
            for role, found in (("generator", stage_logs), ("trainer", trainer_logs))
        },
        jitter={"generator": float(own_logs.std()), "trainer": float(trainer_logs.std())},
    )


@dataclass(frozen=True, kw_only=True)
class StageTick:
    """A generator's tick as a run measured it."""

    stage_s: float
    """Of all replicas together, from first input to last output."""
    kinds: Sequence[int]
    """[replicas] the kind of each; of alike ones a single entry stands for all."""
    work: Sequence[tuple[float, float]]
    """[replicas] decode steps and tokens."""
    replica_s: Sequence[float]
    """[replicas]"""


def fit_kinds(ticks: Sequence[StageTick]) -> tuple[tuple[LinearGeneratorCost, ...], Rows, Rows]:
    """A line for each kind of replicas, through what each replica took for its own work.

    What a stage takes beyond its slowest replica (messages, publishing what it made) is a part of every kind's tick: the median.

    Returns:
        The lines; [ticks] logarithms of the stage's time by that of the slowest line; [ticks x replicas] the same of each replica.
    """
    rest_s = float(np.median([max(0.0, tick.stage_s - max(tick.replica_s)) for tick in ticks]))
    kinds = np.array([kind for tick in ticks for kind in tick.kinds])
    rows = np.array([(1.0, *work) for tick in ticks for work in tick.work])
    seconds = np.array([replica_s for tick in ticks for replica_s in tick.replica_s])
    fitted = np.zeros(len(seconds))
    lines = []
    for kind in range(int(kinds.max()) + 1):
        own = kinds == kind
        line = non_negative_line(rows[own], seconds[own])
        fitted[own] = rows[own] @ np.array(line)
        lines.append(LinearGeneratorCost(tick_s=line[0] + rest_s, step_s=line[1], sequence_s=line[2]))
    ends = np.cumsum([len(tick.kinds) for tick in ticks])
    slowest = np.array([part.max() for part in np.split(fitted, ends[:-1])]) + rest_s
    return tuple(lines), _logs(np.array([tick.stage_s for tick in ticks]), slowest), _logs(seconds, fitted)


def _logs(seconds: Rows, fitted: Rows) -> Rows:
    return np.log(np.maximum(seconds, 1e-9) / np.maximum(fitted, 1e-9))


def _stage_tick(
    config: RunConfig,
    folder: Path,
    row: Mapping[str, float | int | None],
    samples: Sequence[Mapping[str, Any]],
    lengths: npt.NDArray[np.int64],
) -> StageTick:
    g, stage_s = config.generator, float(row["time/generator_s"] or 0.0)
    if not g.replicas:  # the slowest of them has the longest response, and all have as many
        work = decode_work(lengths.max(), lengths.sum() / g.dp, math.ceil(len(lengths) / g.dp), g.engine.max_sequences)
        return StageTick(stage_s=stage_s, kinds=[0], work=[work], replica_s=[stage_s])
    if config.dynamic_sampling.enabled:
        raise PlanError(
            f"{folder}: with dynamic_sampling the rollouts lack groups that were sampled, so they do not say what each of the "
            "generator.replicas had to do: run it without (--dynamic_sampling.enabled false)"
        )
    tick = int(row.get("step") or 0)
    own = lengths_of_replicas(config, tick, [sample.get("prompt_index") for sample in samples], lengths.tolist())
    if own is None:
        raise PlanError(
            f"{_rollouts_of(folder, tick)} holds not just the prompts that generator.replicas share at this tick, so it does not say "
            "what each of them had to do: fit a run without a generator of your own beside them"
        )
    found = [row.get(REPLICA_KEY.format(replica)) for replica in range(g.num_replicas)]
    replica_s = [float(seconds) for seconds in found if seconds]
    if len(replica_s) < len(found):
        lacks = [REPLICA_KEY.format(replica) for replica, seconds in enumerate(found) if not seconds]
        raise PlanError(
            f"{folder}: metrics.jsonl lacks {', '.join(lacks[:3])} at tick {tick}, what each of the generator.replicas took: the run was "
            f"made before these were recorded. Run it again, or measure its recipe: llamarl plan {folder / 'config.toml'} "
            f"--calibrate, then llamarl simulate {folder / 'config.toml'}"
        )
    kinds = [place for place, kind in enumerate(g.replicas) for _ in range(kind.dp)]
    slots = [g.as_of_kind(kind).engine.max_sequences for kind in kinds]
    return StageTick(
        stage_s=stage_s,
        kinds=kinds,
        work=[decode_work(max(n), sum(n), len(n), most) for n, most in zip(own, slots, strict=True)],
        replica_s=replica_s,
    )


def decode_work(longest: float, tokens: float, sequences: int, slots: int) -> tuple[float, float]:
    """Decode steps and tokens of a replica: steps as its longest response has tokens, or more where slots are fewer than
    responses."""
    return float(max(longest, tokens / slots) if sequences > slots else longest), float(tokens)


def lengths_of_replicas(
    config: RunConfig, tick: int, prompt_indices: Sequence[Any], lengths: Sequence[int]
) -> list[list[int]] | None:
    """[replicas] lengths of the responses that each had to sample at ``tick``; None: a response is of no prompt of this tick, or a
    replica has none.

    Args:
        prompt_indices: Of each response, as the rollouts have it.
        lengths: In tokens.
    """
    replicas = config.dealing.replicas_at(tick)
    own: list[list[int]] = [[] for _ in range(config.dealing.num_replicas)]
    for index, length in zip(prompt_indices, lengths, strict=True):
        place = index - tick * len(replicas) if isinstance(index, int) else -1
        if not 0 <= place < len(replicas):
            return None
        own[replicas[place]].append(length)
    return own if all(own) else None


def non_negative_line(rows: Rows, seconds: Rows) -> list[float]:
    """Coefficients >= 0 of least relative error: of all subsets of columns, the best that has none below 0."""
    weight = 1.0 / np.maximum(seconds, 1e-9)
    best: tuple[float, list[float]] = (math.inf, [0.0] * rows.shape[1])
    for mask in range(1, 1 << rows.shape[1]):
        used = [i for i in range(rows.shape[1]) if mask >> i & 1]
        found, *_ = np.linalg.lstsq(rows[:, used] * weight[:, None], seconds * weight, rcond=None)
        if (found < 0).any():
            continue
        error = float((((rows[:, used] @ found) * weight - 1.0) ** 2).sum())
        if error < best[0]:
            full = np.zeros(rows.shape[1])
            full[used] = found
            best = (error, full.tolist())
    return best[1]


def measured_rows(folder: Path) -> list[dict[str, float | int | None]]:
    """Rows of a run's metrics that have the times of its roles."""
    try:
        return [row for row in read_metrics(folder) if _is_measured(row)]
    except LlamaRLError as error:
        raise PlanError(f"{folder} is no finished run: {error}") from None


def _is_measured(row: Mapping[str, float | int | None]) -> bool:
    """Whether a row has its tick and the times that a fit takes logarithms of."""
    times = (row.get("time/generator_s"), row.get("time/trainer_s"))
    return 0 <= (row.get("step") or 0) < _MOST_TICKS and all(seconds is not None and seconds > 0 for seconds in times)


def _rollouts_of(folder: Path, tick: int) -> Path:
    return folder / "rollouts" / f"tick_{tick:06d}.jsonl"


def _samples(file: Path) -> list[dict[str, Any]]:
    """Samples of a tick, with the keys that are looked at here."""
    records = []
    for where, line in read_lines(file):
        record = parse_json(line, where, big_integers=True, lone_surrogates=True)
        if not isinstance(record, dict) or not all(
            isinstance(record.get(k), list) for k in ("tokens", "prompt_tokens")
        ):
            raise PlanError(f"{where} is not a sample with tokens and prompt_tokens")
        records.append(record)
    if not records:
        raise PlanError(f"{file} is empty, expected one sample a line")
    return records


def _tick_lengths(samples: Sequence[Mapping[str, Any]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(response, prompt) tokens of each sample of a tick."""
    return (
        np.array([len(sample["tokens"]) for sample in samples], dtype=np.int64),
        np.array([len(sample["prompt_tokens"]) for sample in samples], dtype=np.int64),
    )


def groups_of(folder: Path) -> list[tuple[int, ...]]:
    """Response lengths by group, over all ticks."""
    found: dict[tuple[str, int], list[int]] = {}
    for file in sorted((folder / "rollouts").glob("tick_*.jsonl")):
        for sample in _samples(file):
            found.setdefault((file.name, sample["prompt_index"]), []).append(max(1, len(sample["tokens"])))
    return [tuple(lengths) for lengths in found.values()]
