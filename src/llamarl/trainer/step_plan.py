"""Which responses each optimizer step of a tick trains on: pure decisions on counts and advantages, no tensors.

    rows (prompt, response, tokens, advantage) of all ranks ─▶ units ─▶ order, seeded ─▶ cut into steps
                                                              group        uniform          even numbers of units
                                                              pair         by advantage     or a token budget
                                                              response

A unit stays together. Random numbers come from (seed, tick, epoch, unit), so a plan depends neither on which rank holds
what nor on what was drawn before: any layout trains the same steps, and a resume needs no random state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from llamarl.seeding import derive_seed
from llamarl.trainer.config import TrainerConfig

__all__ = ["Row", "StepPlan", "gather_rows", "plan_of_rank", "plan_steps"]

_ORDER = 7
_WEIGHTED_ORDER = 8


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Row:
    """One response that can train. Rows sort by prompt, then response: the same order on every rank."""

    prompt: int
    """Index in the prompt stream."""
    response: int
    """Place among the responses of its group that can train."""
    num_tokens: int
    """Trained tokens, >= 1."""
    advantage: float


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The optimizer steps of one tick."""

    steps: tuple[tuple[tuple[int, int], ...], ...]
    """(prompt, response) of each response of each step, ascending. A step may be empty."""
    num_unused: int
    """Responses that no step trains on."""
    budget_share: float | None
    """Trained tokens of all steps by what their budgets hold; None without a budget."""


@dataclass(frozen=True, slots=True)
class _Unit:
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def weight(self) -> float:
        return sum(abs(row.advantage) for row in self.rows)


def gather_rows(
    own: Sequence[Row],
    *,
    rank: int,
    num_ranks: int,
    sum_over_ranks: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
) -> list[Row]:
    """All ranks' rows, sorted; the same list on every rank.

    Args:
        sum_over_ranks: Adds an array up over the ranks; called twice on each.
    """
    counts = np.zeros(num_ranks)
    counts[rank] = len(own)
    counts = sum_over_ranks(counts)
    start = int(counts[:rank].sum())
    table = np.zeros((int(counts.sum()), 4))
    for i, row in enumerate(own):  # whole numbers below 2**53 and advantages are exact in float64; others add zeros
        table[start + i] = (row.prompt, row.response, row.num_tokens, row.advantage)
    rows = sum_over_ranks(table)
    return sorted(Row(prompt=int(p), response=int(r), num_tokens=int(n), advantage=float(a)) for p, r, n, a in rows)


def plan_steps(rows: Sequence[Row], config: TrainerConfig, *, seed: int, tick: int) -> StepPlan:
    """Optimizer steps of a tick: ``config.epochs`` passes of ``config.minibatches`` steps each.

    Args:
        rows: Of all ranks, sorted.
        seed: The run's.
    """
    units = _units(rows, config)
    budget = config.selection.tokens_per_step
    steps: list[list[_Unit]] = []
    for epoch in range(config.epochs):
        if config.selection.shuffle == "advantage":
            for part, size in enumerate(_even_sizes(len(units), config.minibatches)):
                order = _weighted_order(units, (seed, _WEIGHTED_ORDER, tick, epoch, part))
                steps += _fill(order, 1, budget) if budget else [order[:size]]
        else:
            order = _uniform_order(units, (seed, _ORDER, tick, epoch))
            steps += _fill(order, config.minibatches, budget) if budget else _cut(order, config.minibatches)
    share = sum(unit.num_tokens for step in steps for unit in step) / (budget * len(steps)) if budget else None
    chosen = [sorted((row.prompt, row.response) for unit in step for row in unit.rows) for step in steps]
    used = {key for step in chosen for key in step}
    return StepPlan(steps=tuple(tuple(step) for step in chosen), num_unused=len(rows) - len(used), budget_share=share)


def plan_of_rank(
    prompts: Sequence[int],
    num_tokens: Sequence[int],
    advantages: Sequence[float],
    config: TrainerConfig,
    *,
    seed: int,
    tick: int,
    rank: int,
    num_ranks: int,
    sum_over_ranks: Callable[[np.ndarray], np.ndarray],
) -> tuple[list[list[int]], dict[str, float]]:
    """What one data-parallel rank does in each optimizer step of a tick that all ranks plan together.

    Args:
        prompts, num_tokens, advantages: Of the rank's sequences, the responses of a prompt side by side.
        sum_over_ranks: Element-wise; every rank calls it.

    Returns:
        Indices of its sequences for each step, ascending, so that the responses of a group stay neighbours; and what the
        plan has to say for the metrics.
    """
    own: dict[tuple[int, int], int] = {}
    rows: list[Row] = []
    for i, (prompt, tokens, advantage) in enumerate(zip(prompts, num_tokens, advantages, strict=True)):
        place = rows[-1].response + 1 if rows and rows[-1].prompt == prompt else 0
        rows.append(Row(prompt=prompt, response=place, num_tokens=tokens, advantage=advantage))
        own[prompt, place] = i
    everyone = gather_rows(rows, rank=rank, num_ranks=num_ranks, sum_over_ranks=sum_over_ranks)
    plan = plan_steps(everyone, config, seed=seed, tick=tick)
    metrics = {"samples/unused": float(plan.num_unused)}
    if plan.budget_share is not None:
        metrics["tokens/budget_share"] = plan.budget_share
    return [sorted(own[key] for key in step if key in own) for step in plan.steps], metrics


def _units(rows: Sequence[Row], config: TrainerConfig) -> list[_Unit]:
    groups = [tuple(group) for _, group in groupby(rows, key=lambda row: row.prompt)]
    if config.selection.pairs:
        return [pair for group in groups for pair in _pairs(group)[: config.selection.pairs]]
    if config.selection.tokens_per_step:
        return [_Unit((row,)) for row in rows]
    return [_Unit(group) for group in groups]


def _pairs(group: Sequence[Row]) -> list[_Unit]:
    """Highest advantage with lowest, second highest with second lowest, ...; an odd one in the middle is left out."""
    ordered = sorted(group, key=lambda row: (-row.advantage, row.response))
    return [_Unit((ordered[i], ordered[-1 - i])) for i in range(len(ordered) // 2)]


def _uniform_order(units: Sequence[_Unit], seeds: tuple[int, ...]) -> list[_Unit]:
    return sorted(units, key=lambda unit: (_draw(unit, seeds), unit.rows))


def _weighted_order(units: Sequence[_Unit], seeds: tuple[int, ...]) -> list[_Unit]:
    """Draws without replacement, each with probability proportional to the weights left (Efraimidis and Spirakis 2006):
    descending log(u) / weight. Units of weight 0 have no gradient and are never drawn."""
    drawn = [unit for unit in units if unit.weight > 0]
    return sorted(drawn, key=lambda unit: (-math.log(_uniform(_draw(unit, seeds))) / unit.weight, unit.rows))


def _draw(unit: _Unit, seeds: tuple[int, ...]) -> int:
    """64 random bits of a unit. The rows of one unit never begin another."""
    return derive_seed(*seeds, unit.rows[0].prompt, unit.rows[0].response)


def _uniform(bits: int) -> float:
    """In (0, 1), both ends left out."""
    return ((bits >> 12) + 0.5) * 2.0**-52


def _even_sizes(count: int, parts: int) -> list[int]:
    """Sizes that differ by one at most, larger ones first."""
    return [count // parts + (i < count % parts) for i in range(parts)]


def _cut(order: Sequence[_Unit], parts: int) -> list[list[_Unit]]:
    ends = np.cumsum([0, *_even_sizes(len(order), parts)]).tolist()
    return [list(order[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


def _fill(order: Sequence[_Unit], parts: int, budget: int) -> list[list[_Unit]]:
    """Fill one step after the other, in order, until the next unit does not fit. A unit longer than the budget has a step
    of its own. What no step takes is dropped."""
    filled: list[list[_Unit]] = [[] for _ in range(parts)]
    step, used = 0, 0
    for unit in order:
        if filled[step] and used + unit.num_tokens > budget:
            step, used = step + 1, 0
            if step == parts:
                break
        filled[step].append(unit)
        used += unit.num_tokens
    return filled
