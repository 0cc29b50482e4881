"""A value model that reads packed micro-batches: what the critic's estimates come from."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from llamarl.models.attention import attending
from llamarl.models.stages import Stage
from llamarl.models.value import value_head
from llamarl.trainer.batch import Microbatch

__all__ = ["ValueModel"]


class ValueModel(nn.Module):
    """A decoder with a value head.

    Args:
        stage: Which part of the decoder ``model`` is; None: all of it.

    Raises:
        ModelError: The model has no such head.
    """

    def __init__(self, model: PreTrainedModel, stage: Stage | None = None) -> None:
        super().__init__()
        self.model = model
        self.stage = stage or Stage(model)
        if self.stage.is_last:
            value_head(model)  # refuse one without

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers that are here, first to last."""
        return self.stage.layers

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """By their Hugging Face names."""
        return dict(self.model.named_parameters())

    def forward(self, batch: Microbatch, received: Tensor | None = None) -> Tensor:
        """Value before each trained token, [T], float32, of the whole row where several ranks share it; on another stage than the last, hidden states for the next one, [1, N, H].

        Args:
            received: [1, N, H] of the stage before; None on the first.
        """
        with attending(batch.packed):
            states = self.stage.hidden_states(self.model, batch.input_ids, batch.position_ids, received)
        if not self.stage.is_last:
            return states
        values: Tensor = value_head(self.model)(states[0].index_select(0, batch.positions)).squeeze(-1).float()
        return values if batch.own is None else batch.own.whole(values)
