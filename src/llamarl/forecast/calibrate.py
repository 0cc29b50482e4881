"""Four constants of this machine, fitted to a finished run: what a forecast of it then rests on. Reads a run's folder.

    metrics.jsonl: seconds of each role's ticks ─┐      generator's tick = generator_scale · rooflines + decode_step_overhead_s · steps
                                                 ├─▶
    rollouts/: tokens of each response ──────────┘      trainer's tick   = trainer_scale · rooflines + train_step_overhead_s

The rooflines stay, so a fit extrapolates to other batches, lengths, layouts and models the way
named hardware does; the further from the run, the less it knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamarl.config import RunConfig
from llamarl.errors import LlamaRLError, PlanError
from llamarl.forecast.costs import GeneratorLayout, decode_step_s, prefill_s
from llamarl.forecast.hardware import Hardware
from llamarl.forecast.lengths import Lengths, empirical
from llamarl.forecast.model import ModelSpec, find_model
from llamarl.forecast.ticks import TrainerDemand, TrainerLayout, trainer_tick
from llamarl.observability.metrics import read_metrics
from llamarl.reading import parse_json, read_lines
from llamarl.roles import ROLES
from llamarl.settings.executors import GeneratorConfig
from llamarl.tick_schedule import constant_batches, slot_starts

__all__ = ["Fit", "fit_run", "lengths_of_run", "non_negative_line", "replica_layout", "shares_cores", "trainer_layout"]

WARM_UP = 2
"""First ticks of a run that a fit leaves out."""
LEAST_TICKS = 4
_BUSY = 0.5
"""Jitter above which what was measured is named as measured on a busy machine."""
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}

Rows = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a run measured."""

    model: str
    precision: str
    """Of the generator."""
    hardware: Hardware
    """With the four constants, and no estimate left among those that its own job rests on."""
    lengths: Lengths
    prompt_tokens: int
    threads: Mapping[str, int]
    """CPU threads of a generator's and of a trainer's rank; 1 on GPUs."""
    at_once: bool
    """Both roles worked at the same time (staleness above 0), so each tick has what the other's costs it."""
    shares_cores: bool
    """Some of the trainer's threads had the generator's cores, so that what it takes alone is not known."""
    reward_s: float
    """Median of the reward's ticks."""
    num_ticks: int
    jitter: Mapping[str, float]
    """Role -> standard deviation of the logarithm of (measured tick / fitted tick)."""

    def text(self) -> str:
        """One line for people."""
        e = self.hardware.efficiency
        busy = "; the machine was busy: run it again idle" if max(self.jitter.values()) > _BUSY else ""
        threads = f"{self.threads['generator']} + {self.threads['trainer']} threads: " if self.hardware.is_cpu else ""
        return (
            f"{threads}rooflines x {e.generator_scale:.3g} + {e.decode_step_overhead_s * 1e3:.3g} ms a decode step; "
            f"trainer rooflines x {e.trainer_scale:.3g} + {e.train_step_overhead_s * 1e3:.3g} ms a tick; {self.num_ticks} ticks "
            f"differ from that by {self.jitter['generator']:.0%} and {self.jitter['trainer']:.0%}{busy}"
        )


def replica_layout(generator: GeneratorConfig, hardware: Hardware) -> GeneratorLayout:
    """A replica of a recipe's generator; a precision without a rate as the trainer's."""
    known = hardware.device.matmul_flops
    precision: str = generator.quantization
    if precision not in known:
        precision = _PRECISIONS.get(generator.engine.dtype, hardware.device.train_precision)
    if precision not in known:
        precision = hardware.device.train_precision
    return GeneratorLayout(generator.tp, precision)


def trainer_layout(
    config: RunConfig, model: ModelSpec, hardware: Hardware, prompt_tokens: float, response_tokens: float
) -> TrainerLayout:
    """A recipe's trainer.

    Args:
        prompt_tokens, response_tokens: Of a sequence, on average.
    """
    t = config.trainer
    return TrainerLayout(
        tp=t.tp,
        pp=t.pp,
        fsdp=t.fsdp,
        cp=t.cp,
        ep=t.ep,
        micro_batch=max(1, round(t.microbatch_tokens / (prompt_tokens + response_tokens))),
        recompute=t.activation_checkpointing != "none",
    )


def fit_run(config: RunConfig, folder: Path, hardware: Hardware, threads: Mapping[str, int]) -> Fit:
    """The constants of ``hardware`` at which the rooflines give what a finished run took.

    Args:
        hardware: That the run was made on.
        threads: CPU threads of a generator's and of a trainer's rank; 1 on GPUs.

    Raises:
        PlanError: Too few ticks, rollouts were not kept, or replicas of several kinds.
    """
    if len(config.generator.replicas) > 1:
        raise PlanError(f"{folder}: a fit needs replicas of one kind, this run has {len(config.generator.replicas)}")
    model = find_model(config.model.path)
    plain = hardware.with_efficiency(
        generator_scale=1.0, trainer_scale=1.0, decode_step_overhead_s=0.0, train_step_overhead_s=0.0
    )
    generates, trains = (plain.joined(threads[role]) if plain.is_cpu else plain for role in ("generator", "trainer"))
    layout = replica_layout(config.generator, hardware)
    ticks, lengths, prompts = _measured_ticks(folder)
    prompt_tokens = max(1, round(float(np.mean(prompts))))
    demand = TrainerDemand(
        lengths=lengths,
        prompt_tokens=prompt_tokens,
        sequences=config.schedule.prompts_per_step * config.generator.group_size,
        group_size=config.generator.group_size,
    )
    trainer = trainer_layout(config, model, hardware, prompt_tokens, lengths.mean)
    time = trainer_tick(trains, model, trainer, demand)
    token_s = time.of_batch_s / (demand.sequences * demand.mean_tokens)
    decode = np.array([_decode_row(generates, model, layout, config, tick, prompt_tokens) for tick in ticks])
    tokens = [tick.responses.sum() + len(tick.responses) * prompt_tokens for tick in ticks]
    train = np.array([(token_s * count + time.optimizer_s, 1.0) for count in tokens])
    generated = np.array([tick.generator_s for tick in ticks])
    trained = np.array([tick.trainer_s for tick in ticks])
    g, t = _scale_and_rest(decode, generated), _scale_and_rest(train, trained)
    device = replace(
        hardware.device, title=f"{hardware.device.title}, fitted to {folder} ({len(ticks)} ticks)", assumed=False
    )
    fitted = replace(hardware, device=device).with_efficiency(
        generator_scale=g[0], decode_step_overhead_s=g[1], trainer_scale=t[0], train_step_overhead_s=t[1]
    )
    return Fit(
        model=model.name,
        precision=layout.precision,
        hardware=replace(fitted, efficiency=replace(fitted.efficiency, estimates=())),
        lengths=lengths,
        prompt_tokens=prompt_tokens,
        threads=threads,
        at_once=config.schedule.max_staleness > 0,
        shares_cores=shares_cores(config, threads, hardware),
        reward_s=float(np.median([tick.reward_s for tick in ticks])),
        num_ticks=len(ticks),
        jitter={
            role: float(np.log(np.maximum(seconds, 1e-9) / np.maximum(rows @ np.array(line), 1e-9)).std())
            for role, seconds, rows, line in (("generator", generated, decode, g), ("trainer", trained, train, t))
        },
    )


def _decode_row(
    hardware: Hardware, model: ModelSpec, layout: GeneratorLayout, config: RunConfig, tick: _Tick, prompt_tokens: int
) -> tuple[float, float]:
    """Rooflines of what the slowest replica decoded at a tick, and its decode steps.

    A tick of a run that carries responses over decoded other tokens than it delivered: as many as its metrics say.
    """
    g, found = config.generator, (0.0, 0.0)
    groups = (
        tick.responses.reshape(-1, g.group_size) if len(tick.responses) % g.group_size == 0 else tick.responses[:, None]
    )
    replicas = max(1, sum(kind.dp for kind in g.replicas) or g.dp)
    share = tick.generated / tick.responses.sum() if tick.generated else 1.0
    for replica in range(min(replicas, len(groups))):
        own = groups[replica::replicas].reshape(1, -1)
        slots = min(g.engine.max_sequences, own.size)
        start = slot_starts(own, slots)
        runs = constant_batches(own, start, np.zeros_like(start), np.array([math.inf]), slots)
        step = np.asarray(decode_step_s(hardware, model, layout, runs.active, prompt_tokens + runs.written))
        filled = prompt_tokens * own.size / groups.shape[1]
        seconds = float((runs.steps * step).sum()) * share
        seconds += prefill_s(hardware, model, layout, filled, prompt_tokens / 2)
        found = max(found, (seconds, float(runs.steps.sum()) * share))
    return found


def shares_cores(config: RunConfig, threads: Mapping[str, int], hardware: Hardware) -> bool:
    """Whether generator and trainer of a recipe work at once on fewer cores than they have threads."""
    wanted = sum(ROLES[role].num_ranks(config) * each for role, each in threads.items())
    return hardware.is_cpu and config.schedule.max_staleness > 0 and wanted > hardware.device.devices_per_node


def _scale_and_rest(rows: Rows, seconds: Rows) -> list[float]:
    """The line; where ticks are too much alike to tell work from rest, all of their time counts as
    growing with the work, which is the safer half of a guess for larger jobs."""
    line, alone = non_negative_line(rows, seconds), [float(np.median(seconds / rows[:, 0])), 0.0]

    def error(found: list[float]) -> float:
        return float(((rows @ np.array(found) / seconds - 1.0) ** 2).sum())

    return line if line[0] > 0.0 and error(line) < error(alone) / 2.0 else alone


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
        if error < best[0] * (1.0 - 1e-9):
            full = np.zeros(rows.shape[1])
            full[used] = found
            best = (error, full.tolist())
    return best[1]


# -- a run's folder ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Tick:
    """One tick as a run measured it."""

    generator_s: float
    trainer_s: float
    reward_s: float
    generated: float
    """Tokens that the generator sampled in it; 0: not recorded."""
    responses: npt.NDArray[np.int64]
    """[responses] tokens of each that it delivered."""


def _measured_ticks(folder: Path) -> tuple[list[_Tick], Lengths, list[int]]:
    """Ticks after the warm-up, the lengths of all responses, and tokens of their prompts."""
    try:
        rows = read_metrics(folder)
    except LlamaRLError as error:
        raise PlanError(f"{folder} is no finished run: {error}") from None
    ticks, prompts = [], []
    for row in [row for row in rows if _is_measured(row)][WARM_UP:]:
        file = folder / "rollouts" / f"tick_{int(row.get('step') or 0):06d}.jsonl"
        if not file.is_file():
            continue
        samples = _samples(file)
        prompts += [length for length, _ in samples]
        ticks.append(
            _Tick(
                generator_s=float(row["time/generator_s"] or 0.0),
                trainer_s=float(row["time/trainer_s"] or 0.0),
                reward_s=float(row.get("time/reward_s") or 0.0),
                generated=float(row.get("tokens/generated") or 0.0),
                responses=np.array([max(1, length) for _, length in samples], np.int64),
            )
        )
    if len(ticks) < LEAST_TICKS:
        raise PlanError(
            f"a fit needs at least {LEAST_TICKS} ticks after {WARM_UP} of warm-up with their rollouts, got {len(ticks)} in {folder}: "
            "let the run last longer, with observability.rollouts"
        )
    lengths = empirical(np.concatenate([tick.responses for tick in ticks]).tolist(), str(folder))
    return ticks, lengths, prompts


def _is_measured(row: Mapping[str, float | int | None]) -> bool:
    """Whether a row has its tick and the times that a fit takes logarithms of."""
    times = (row.get("time/generator_s"), row.get("time/trainer_s"))
    return 0 <= (row.get("step") or 0) < 1_000_000 and all(seconds is not None and seconds > 0 for seconds in times)


def _samples(file: Path) -> list[tuple[int, int]]:
    """(prompt, response) tokens of each sample of a tick, in the order of their prompts."""
    found: list[tuple[int, int, int]] = []
    for where, line in read_lines(file):
        record: Any = parse_json(line, where, big_integers=True, lone_surrogates=True)
        prompt, tokens = (record.get(key) if isinstance(record, dict) else None for key in ("prompt_tokens", "tokens"))
        if not isinstance(prompt, list) or not isinstance(tokens, list):
            raise PlanError(f"{where} is not a sample with tokens and prompt_tokens")
        index = record.get("prompt_index")
        found.append((index if isinstance(index, int) else 0, len(prompt), len(tokens)))
    if not found:
        raise PlanError(f"{file} is empty, expected one sample a line")
    return [(prompt, response) for _, prompt, response in sorted(found, key=lambda one: one[0])]


def lengths_of_run(folder: Path) -> tuple[Lengths, int] | None:
    """Lengths of responses and mean tokens of prompts that a run kept; None: it kept no rollouts."""
    samples = [sample for file in sorted((folder / "rollouts").glob("tick_*.jsonl")) for sample in _samples(file)]
    if not samples:
        return None
    mean = sum(prompt for prompt, _ in samples) / len(samples)
    return empirical([max(1, response) for _, response in samples], str(folder)), max(1, round(mean))
