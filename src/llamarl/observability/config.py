"""What a run shows and leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic.dataclasses import dataclass

from llamarl.strict import STRICT, refuse

__all__ = ["ObservabilityConfig"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ObservabilityConfig:
    """Console, curves, rollouts and trace of a run. None of it changes a bit of what is learned."""

    console: Literal["auto", "rich", "plain", "none"] = "auto"
    """Live display (rich), one line every few ticks (plain) or nothing. auto takes rich on a terminal, else plain."""

    console_every: int = 0
    """Ticks that one plain line sums up. 0 chooses, so that a run prints about 30 lines."""

    tensorboard: bool = True
    """Write TensorBoard files into ``RUN/tensorboard``."""

    rollouts: bool = True
    """Write prompts, responses, rewards, log-probabilities and versions into ``RUN/rollouts``."""

    rollouts_every: int = 1
    """Trainer ticks from one rollout file to the next. 1 writes every batch."""

    trace: bool = True
    """Write ``RUN/trace.json``, one lane an executor, for https://ui.perfetto.dev or chrome://tracing."""

    wandb: bool = False
    """Also send each row to Weights & Biases; needs the extra ``llamarl[wandb]``. Its own environment variables apply."""

    wandb_project: str = "llamarl"
    """Weights & Biases project of the run."""

    def __post_init__(self) -> None:
        refuse(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if self.console_every < 0:
            yield (
                f"observability.console_every must be >= 0 ticks (0 = chosen by the length of the run), "
                f"got {self.console_every}"
            )
        if self.rollouts_every < 1:
            yield (
                f"observability.rollouts_every must be >= 1 ticks, got {self.rollouts_every}; "
                f"set observability.rollouts = false to write none"
            )
        if self.wandb and not self.wandb_project:
            yield "observability.wandb_project must not be empty while observability.wandb is true"

    def rollouts_due(self, tick: int) -> bool:
        """Whether the batch of ``tick`` (from 0) is written to ``RUN/rollouts``."""
        return self.rollouts and tick % self.rollouts_every == 0
