"""The reward executor: judges every response in a pool of worker processes, and keeps the run's rollouts.

In: ``completions``, or ``rated`` and ``judged`` where models have judged them already; out:
``scored``. A response without a verdict is *failed*, never scored zero. With dynamic sampling,
``scored`` holds the groups chosen for the tick; rollouts and ``reward/*`` still cover every judged
one.

A run in which nearly everything fails teaches nothing: it is asked to stop, with the causes (section ``reward``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.algorithms.dynamic_sampling import rewards_differ
from llamarl.channels.base import ChannelKind
from llamarl.channels.plain_values import from_bytes, to_bytes
from llamarl.channels.samples import Limits
from llamarl.checkpoint.storage import RunIdentity
from llamarl.config import RunConfig
from llamarl.data.curriculum import Outcome, bands, outcomes_of
from llamarl.environments.pool import RewardPool
from llamarl.executors.base import BaseExecutor, ExecutorContext, StepResult
from llamarl.executors.dynamic_sampling import DynamicSampler
from llamarl.executors.judging import add_verdicts, zero_rewards
from llamarl.observability.findings import Causes, few_causes, remedy, too_many_failed
from llamarl.observability.ledger import failed_tokens
from llamarl.observability.rollouts import write_rollouts
from llamarl.observability.writing import Patience
from llamarl.progress import watch
from llamarl.roles import ROLES
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.types import RIGHT, Failure, Group, Score

__all__ = ["JUDGING_SHARE", "RewardExecutor", "count_causes", "failure_cause", "part_means", "reward_metrics"]

JUDGING_SHARE = 0.9
"""Of ``deadlines.step_s``, what judging may take; the samples that are left then are failed, and the run goes on."""
_OUTCOMES, _FAILED = "outcomes", "failed"
"""File of a checkpoint."""


class RewardExecutor(BaseExecutor):
    """Scores groups. Its only state between ticks are the spare groups of dynamic sampling, and the outcomes that are on
    their way to a curriculum."""

    def __init__(self, config: RunConfig, context: ExecutorContext) -> None:
        super().__init__(config, context)
        self._patience: Patience | None = None
        self._failed: list[tuple[float, Mapping[str, int]]] = []
        """Share of failed samples and their causes, of the last ticks."""
        self._stop = ""
        self._told = next((channel for channel in context.writes if channel.kind is ChannelKind.BROADCAST), None)
        self._outcomes: dict[int, list[Outcome]] = {}
        """Of the last ticks, as many as lie on that channel."""
        self._sampler: DynamicSampler | None = None
        if config.dynamic_sampling.enabled:
            self._sampler = DynamicSampler(
                config.algorithm,
                num_wanted=config.schedule.prompts_per_step,
                max_staleness=config.token_staleness_bound,
            )

    def setup(self) -> None:
        if self.config.reward.weight:
            self.pool = RewardPool(self.config.task, seed=self.config.run.seed)
        if self.context.run_dir is not None and self.name in ROLES:  # a further one judges what the first has kept
            self._folder = RunIdentity.of(self.context.run_dir)
            self._patience = Patience(self.config.deadlines.disk_s, writer=str(self.context.incarnation or ""))

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        limit_s = JUDGING_SHARE * self.config.deadlines.step_s
        groups = self.items_of(inputs)
        watch("judging", "response", sum(len(g.responses) for g in groups), lambda: 0)
        groups = self._judged(groups, limit_s=limit_s)
        scored = time.monotonic()
        files: tuple[Path, ...] = ()
        run_dir, patience = self.context.run_dir, self._patience
        if run_dir is not None and patience is not None and self.config.observability.rollouts:
            self._folder.check()
            files = (write_rollouts(run_dir, tick, groups, patience),)
        spans = (("score", started, scored), ("write_rollouts", scored, time.monotonic()))
        metrics = reward_metrics(groups, list(self.config.task.tasks), self.config.algorithm)
        outputs = self._tell(groups, tick)
        failures = few_causes(count_causes(groups))
        self._watch_failures(sum(failures.values()) / max(1, sum(len(g.responses) for g in groups)), failures, tick)
        if self._told is not None:
            metrics |= {f"groups/pass_rate/{band}": float(count) for band, count in bands(self._outcomes[tick]).items()}
        if self._sampler is not None:
            groups, counts = self._sampler.select(groups, tick)
            metrics |= counts
        if self.name not in ROLES:  # it judges once more what the first has judged and counted
            metrics = {f"{self.name}/{key}": value for key, value in metrics.items()}
        return StepResult(
            outputs=self.outputs_of(groups) | outputs,
            metrics=metrics,
            spans=spans,
            failures=failures,
            stop=self._stop,
            files=files,
        )

    def _judged(self, groups: Sequence[Group], *, limit_s: float) -> list[Group]:
        """The task's reward and what models before it said, added up (``executors/judging.py``)."""
        weight = self.config.reward.weight
        return add_verdicts(self.pool.score(groups, limit_s=limit_s) if weight else zero_rewards(groups), weight=weight)

    def _watch_failures(self, share: float, failures: Mapping[str, int], tick: int) -> None:
        """Ask for the end of a run whose samples fail for too long."""
        limits = self.config.reward
        self._failed = [*self._failed, (share, failures)][-limits.max_failed_ticks :]
        if self._stop or not too_many_failed(
            [share for share, _ in self._failed],
            max_fraction=limits.max_failed_fraction,
            max_ticks=limits.max_failed_ticks,
        ):
            return
        causes = Causes()
        for _, found in self._failed:
            causes.add(found)
        first = tick + 1 - limits.max_failed_ticks
        ticks = f"ticks {first} to {tick}" if first < tick else f"tick {tick}"
        self._stop = (
            f"reward: more than {limits.max_failed_fraction:.0%} of the samples of {ticks} have no reward "
            f"(reward.max_failed_fraction, reward.max_failed_ticks = {limits.max_failed_ticks}):\n"
            + "\n".join(f"  {line}" for line in causes.lines())
            + f"\n{remedy(causes.commonest()[0][0])}; the limit is reward.max_failed_fraction."
        )

    def _tell(self, groups: Sequence[Group], tick: int) -> dict[str, Any]:
        """What a curriculum hears of the tick, on its channel if there is one."""
        if self._told is None:
            return {}
        self._outcomes[tick] = outcomes_of(groups)
        self._outcomes.pop(tick - self._told.delay, None)
        return {self._told.name: self._outcomes[tick]}

    def initial_token(self, channel: str, source_tick: int) -> Any:
        if self._told is None or channel != self._told.name:
            return super().initial_token(channel, source_tick)
        return self._outcomes.get(source_tick, [])

    def save(self, folder: Path, tick: int) -> None:
        """Beside these and what failed of late, every verdict is a function of its response."""
        if self._sampler is not None:
            self._sampler.save(folder)
        if self._told is not None:
            (folder / _OUTCOMES).write_bytes(to_bytes(self._outcomes))
        if any(
            share for share, _ in self._failed
        ):  # that it asked for the end is not kept: who resumes has mended what failed
            (folder / _FAILED).write_bytes(to_bytes(self._failed))

    def load(self, folder: Path, tick: int) -> None:
        if self._sampler is not None:
            self._sampler.load(folder, tick, Limits.of_model(self.config.model.path))
        if self._told is not None:
            self._outcomes = from_bytes(memoryview((folder / _OUTCOMES).read_bytes()))
        if (folder / _FAILED).exists():
            self._take_failures(from_bytes(memoryview((folder / _FAILED).read_bytes())))

    def journal(self, tick: int) -> bytes:
        """Spare groups, and what failures and outcomes of the last ticks were."""
        spares = () if self._sampler is None else self._sampler.spares
        return to_bytes({"spares": spares, "failed": self._failed, "stop": self._stop, "outcomes": self._outcomes})

    def restore(self, state: bytes, tick: int) -> None:
        kept = from_bytes(memoryview(bytearray(state)))
        self._take_failures(kept["failed"])
        self._stop = str(kept["stop"])
        self._outcomes = kept["outcomes"]
        if self._sampler is not None:
            self._sampler.take(kept["spares"], tick, Limits.of_model(self.config.model.path))

    def _take_failures(self, kept: Iterable[tuple[float, Mapping[str, int]]]) -> None:
        self._failed = [
            (float(share), {str(cause): int(count) for cause, count in causes.items()}) for share, causes in kept
        ]

    def close(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()


def reward_metrics(
    groups: Sequence[Group], tasks: Sequence[str] = (), algorithm: AlgorithmConfig | None = None
) -> dict[str, float]:
    """``reward/*`` and ``groups/*`` of scored groups; failed samples count as failed and nothing else.

    ``reward/parts/NAME`` is the mean of a named part over the responses that have it.

    Args:
        tasks: Labels of a mixture's tasks, of each of which ``reward/tasks/LABEL/*`` is told.
        algorithm: Says what length and repetitions add, by which groups without a signal go; None: nothing.
    """
    algorithm = algorithm or AlgorithmConfig()
    outcomes = [r.outcome for g in groups for r in g.responses]
    values = [o.value for o in outcomes if isinstance(o, Score)]
    no_signal = sum(not rewards_differ(group, algorithm) for group in groups)
    return {
        "reward/mean": float(np.mean(values)) if values else float("nan"),
        "reward/std": float(np.std(values)) if values else float("nan"),
        "reward/failed": float(sum(isinstance(o, Failure) for o in outcomes)),
        "tokens/failed": float(failed_tokens(groups)),
        "groups/generated": float(len(groups)),
        "groups/no_signal": float(no_signal),
        **{f"reward/{key}": value for key, value in part_means(outcomes).items()},
        **{f"reward/tasks/{task}/{key}": value for task in tasks for key, value in _of_task(groups, task).items()},
    }


def part_means(outcomes: Sequence[Score | Failure | None]) -> dict[str, float]:
    """``parts/NAME``: the mean of each named part over the outcomes that have it, by name."""
    parts: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.parts.items() if isinstance(outcome, Score) else ():
            parts.setdefault(name, []).append(value)
    return {f"parts/{name}": float(np.mean(values)) for name, values in sorted(parts.items())}


def _of_task(groups: Sequence[Group], task: str) -> dict[str, float]:
    mine = [group for group in groups if group.prompt.task == task]
    values = [r.outcome.value for g in mine for r in g.responses if isinstance(r.outcome, Score)]
    return {
        "mean": float(np.mean(values)) if values else float("nan"),
        "accuracy": float(np.mean([value >= RIGHT for value in values])) if values else float("nan"),
        "groups": float(len(mine)),
    }


_MAX_CAUSE = 300
_RAISED = ("exception", "environment")
"""Kinds whose detail is an exception and its place."""


def failure_cause(failure: Failure) -> str:
    """One line: the kind, what was said, and for an exception its place: ``exception: KeyError: 'x'
    at rewards.py:7``."""
    first, *rest = failure.detail.splitlines() or [""]
    place = rest[-1].strip() if rest and rest[-1].lstrip().startswith("at ") else ""
    where = place.partition(": ")[0] if failure.kind in _RAISED else ""
    return f"{failure.kind}: {first[:_MAX_CAUSE]}{where and ' ' + where}"


def count_causes(groups: Iterable[Group]) -> dict[str, int]:
    """Number of failed samples of each cause, the commonest first.

    Exceptions of one type from one line are one cause, shown as the first of them: their texts often hold the sample.
    """
    shown: dict[tuple[str, ...], str] = {}
    counts: Counter[tuple[str, ...]] = Counter()
    for group in groups:
        for response in group.responses:
            if isinstance(response.outcome, Failure):
                key = _key(response.outcome)
                shown.setdefault(key, failure_cause(response.outcome))
                counts[key] += 1
    return {shown[key]: number for key, number in counts.most_common()}


def _key(failure: Failure) -> tuple[str, ...]:
    first, *rest = failure.detail.splitlines() or [""]
    if failure.kind in _RAISED and rest:
        return failure.kind, first.partition(":")[0], rest[-1]
    return failure.kind, first
