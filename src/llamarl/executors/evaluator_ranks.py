"""Which ranks the evaluator has, who plays which held-out prompt, and how verdicts come together on rank 0.

    rank = replica * tp + tp_rank        evaluation.dp replicas of evaluation.tp ranks; rank 0 of a
    replica has its prompts judged replica r plays prompts r, r + dp, r + 2 dp, ...        by their
    place, whatever the replicas have to do

A response's seed comes from its prompt, so who plays it makes no difference but of rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

from llamarl.config import RunConfig
from llamarl.executors.generator_ranks import rank_weights
from llamarl.models.parallel import ParallelLayout, make_layout, new_group
from llamarl.types import Group
from llamarl.weight_sync.layout import AnyLayout

__all__ = ["EvaluatorRanks", "evaluator_weights"]

T = TypeVar("T")


def evaluator_weights(config: RunConfig) -> AnyLayout | None:
    """What every evaluator rank holds of what is handed over; None without tensor parallelism: each holds all of it."""
    return rank_weights(config, (config.evaluation.tp,) * config.evaluation.dp)


class EvaluatorRanks:
    """This process among the evaluator's."""

    def __init__(self, config: RunConfig, device: str) -> None:
        dp, tp = config.evaluation.dp, config.evaluation.tp
        self._layout = make_layout(fsdp=dp, tp=tp, device=device, keys=("evaluation.dp", "evaluation.tp"))
        self.engine_layout: ParallelLayout | None = self._layout if tp > 1 else None
        """Of the engine; None where it holds the whole model."""
        self._group = None
        if self._layout.num_ranks > 1:
            self._group = new_group(backend="gloo")

    @property
    def judges(self) -> bool:
        """Whether this rank has its replica's responses judged."""
        return self._layout.tp_rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """What this rank's replica plays."""
        return items[self._layout.fsdp_rank :: self._layout.fsdp]

    def together(self, groups: Sequence[Group]) -> list[Group] | None:
        """All replicas' groups in the order of their prompts, on rank 0; None elsewhere. Every rank
        calls it, those that do not judge with nothing."""
        if self._group is None:
            return list(groups)
        found: list[Sequence[Group]] = [()] * self._layout.num_ranks
        dist.gather_object(groups, found if self._layout.rank == 0 else None, dst=0, group=self._group)
        shares = found[:: self._layout.tp]
        order = range(sum(map(len, shares)))
        return [shares[i % len(shares)][i // len(shares)] for i in order] if self._layout.rank == 0 else None
