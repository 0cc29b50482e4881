"""A value model that reads packed micro-batches: what the critic's estimates come from."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from llamarl.models.attention import attending
from llamarl.models.decoder import decoder_layers
from llamarl.models.value import value_head
from llamarl.trainer.batch import Microbatch

__all__ = ["ValueModel"]


class ValueModel(nn.Module):
    """A decoder with a value head.

    Raises:
        ModelError: The model has no such head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        value_head(model)  # refuse one without

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers, first to last."""
        return decoder_layers(self.model)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """By their Hugging Face names."""
        return dict(self.model.named_parameters())

    def forward(self, batch: Microbatch) -> Tensor:
        """Value before each trained token, [T], float32."""
        with attending(batch.packed):
            hidden = self.model.base_model(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
            ).last_hidden_state[0]
        return value_head(self.model)(hidden.index_select(0, batch.positions)).squeeze(-1).float()
