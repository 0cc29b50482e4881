"""What one step knew about itself: counts fixed before the first forward pass, sums that micro-batches add to.

Sums stay on the device and are read once, after the optimizer has been given its work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from llamarl.algorithms.diagnostics import MAXIMA, effective_share
from llamarl.models.experts import expert_metrics
from llamarl.models.parallel import ParallelLayout
from llamarl.trainer.batch import TrainingSequence

__all__ = ["WEIGHT_SUMS", "StepStatistics", "tick_metrics"]

_NOT_AVERAGED = ("loss/policy", "tokens/computed")
"""Sums that already carry the step's weights, and counts."""
_OBSERVED = "observed"
"""Trained tokens that went through the forward pass: what the other sums are averaged over."""
WEIGHT_SUMS = ("responses", "response_weights", "response_weights_squared")
"""Sums over responses (``diagnostics.weight_sums``), of which one metric is made."""
_COUNTS = ("tokens/trained", "tokens/computed", "samples/trained")
"""Metrics that add up over the steps of a tick."""


class StepStatistics:
    """Counts and sums of one optimizer step over all data-parallel ranks."""

    def __init__(
        self, sequences: Sequence[TrainingSequence], policy_version: int, layout: ParallelLayout, device: torch.device
    ) -> None:
        """
        Args:
            sequences: This rank's.
            policy_version: The trainer's at consumption; staleness is this minus a token's own version.
        """
        self._layout = layout
        self._device = device
        self._sums: dict[str, Tensor] = {}
        staleness = np.concatenate([policy_version - s.policy_versions for s in sequences] or [np.zeros(0, np.int64)])
        counts = [sum(len(s.targets) for s in sequences), len(sequences), int(staleness.sum()), len(staleness)]
        totals = layout.sum_over_data(torch.tensor(counts, dtype=torch.int64, device=device)).tolist()
        self.num_tokens: int = totals[0]
        """Trained tokens."""
        self.num_sequences: int = totals[1]
        """Responses with at least one trained token."""
        self._sum_staleness: int = totals[2]
        self.num_aged: int = totals[3]
        """Those of them that a version of the policy sampled."""
        self._num_computed = 0
        self._num_observed = 0
        self._chosen_experts: Tensor | None = None
        self.num_observed = 0.0
        """Tokens over which the means of ``metrics`` were taken, over all ranks; known once it was called."""
        oldest = torch.tensor(int(staleness.max(initial=0)), device=device)
        self._max_staleness = int(layout.max_over_data(oldest).item())

    def add(self, values: Mapping[str, Tensor], *, num_computed: int, num_trained: int) -> None:
        """Add one micro-batch's sums (and maxima), and its numbers of input tokens and of trained tokens."""
        self._num_computed += num_computed
        self._num_observed += num_trained
        for key, value in values.items():
            if key not in self._sums:
                self._sums[key] = value.clone()
            elif key in MAXIMA:
                torch.maximum(self._sums[key], value, out=self._sums[key])
            else:
                self._sums[key] += value

    def add_experts(self, chosen: Tensor | None) -> None:
        """Add how often a micro-batch chose each expert of a sparse model (``Routing.counts``), on
        every rank or on none."""
        if chosen is not None:
            self._chosen_experts = chosen if self._chosen_experts is None else self._chosen_experts + chosen

    def sum_experts_over_stages(self) -> None:
        """Add up what each pipeline stage knows of its own sparse layers; every stage calls it, before ``metrics``."""
        if self._chosen_experts is not None:
            self._chosen_experts = self._layout.sum_over_stages(self._chosen_experts.clone())

    def metrics(self) -> dict[str, float]:
        """Means over the trained tokens that were computed; none where there are no such. One host sync."""
        result = {
            "staleness/mean": self._sum_staleness / max(1, self.num_aged),
            "staleness/max": float(self._max_staleness),
            "tokens/trained": float(self.num_tokens),
            "samples/trained": float(self.num_sequences),
        }
        sums = {"loss/policy": 0.0, "tokens/computed": 0.0}
        if self._sums:
            self._sums["tokens/computed"] = torch.tensor(self._num_computed, device=self._device)
            self._sums[_OBSERVED] = torch.tensor(self._num_observed, device=self._device)
        adding = sorted(key for key in self._sums if key not in MAXIMA)
        largest = sorted(key for key in self._sums if key in MAXIMA)
        if adding:
            added = self._layout.sum_over_data(torch.stack([self._sums[key].double() for key in adding])).tolist()
            self.num_observed = added.pop(adding.index(_OBSERVED))
            observed = max(1.0, self.num_observed)
            adding.remove(_OBSERVED)
            found = dict(zip(adding, added, strict=True))
            if WEIGHT_SUMS[0] in found:
                sums["ratio/effective_samples"] = effective_share(*(found.pop(key) for key in WEIGHT_SUMS))
            for key, value in found.items():
                sums[key] = value if key in _NOT_AVERAGED else value / observed
        if largest:
            maxima = self._layout.max_over_data(torch.stack([self._sums[key].double() for key in largest])).tolist()
            sums.update(zip(largest, maxima, strict=True))
        if not self.num_observed:  # micro-batches without a token, for the sake of the other ranks
            sums = {key: sums[key] for key in _NOT_AVERAGED}
        if self._chosen_experts is not None:
            parts = self._layout.sum_over_context(self._chosen_experts.clone())  # each rank's own tokens
            sums |= expert_metrics(self._layout.sum_over_data(parts).cpu())
        return {**result, **sums}


def tick_metrics(steps: Sequence[StepStatistics]) -> dict[str, float]:
    """Metrics of a tick from those of its optimizer steps; one step's are the tick's own.

    Counts add up, so a token that trains in two passes counts twice. Of maxima the largest counts.
    Means are over all tokens of all steps; ``loss/policy`` is the mean over steps with tokens. With
    several steps come ``staleness/steps_*``: version v holds v * len(steps) optimizer steps, so a
    token of version v in step j of tick k is ``(k - v) * len(steps) + j`` steps old.
    """
    found = [step.metrics() for step in steps]
    if len(steps) == 1:
        return found[0]
    filled = [i for i, step in enumerate(steps) if step.num_tokens]
    result: dict[str, float] = {}
    for key in {key: None for metrics in found for key in metrics}:
        values = [metrics.get(key, 0.0) for metrics in found]
        if key in _COUNTS:
            result[key] = sum(values)
        elif key in MAXIMA or key.endswith("/max"):
            result[key] = max(values)
        elif key == "loss/policy":
            result[key] = sum(values[i] for i in filled) / max(1, len(filled))
        else:
            trained = key == "staleness/mean"
            weights = [float(step.num_aged) if trained else step.num_observed for step in steps]
            result[key] = sum(w * v for w, v in zip(weights, values, strict=True)) / max(1.0, sum(weights))
    ages = [(len(steps) * found[i]["staleness/mean"] + i, steps[i].num_aged) for i in filled]
    result["staleness/steps_mean"] = sum(age * n for age, n in ages) / max(1, sum(n for _, n in ages))
    result["staleness/steps_max"] = max((len(steps) * found[i]["staleness/max"] + i for i in filled), default=0.0)
    return result
