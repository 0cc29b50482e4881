"""The policy as the trainer computes it: packed tokens in, log-prob and entropy of the trained tokens out.

    Microbatch ──decoder, sequences kept apart──▶ hidden [N, H] ──predicting positions──▶ [T, H] ──▶ log-probs, entropy [T]

One module around decoder and output layer, so that FSDP2 gathers the output layer's weight for the product that this
file makes of it, and [tokens, vocabulary] never exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from llamarl.errors import ConfigError, ModelError
from llamarl.models.attention import PackedSequences, attending, current_packing
from llamarl.models.decoder import decoder_layers
from llamarl.models.experts import Routing, current_routing, num_experts, watch_experts, watching
from llamarl.models.stages import Stage
from llamarl.models.value import value_head
from llamarl.models.vocabulary import vocabulary_part
from llamarl.trainer.batch import Microbatch
from llamarl.trainer.logprobs import LogitTransform, likeliest_tokens, token_logprobs

__all__ = ["Policy", "TokenScores", "ValueModel", "check_output_layer"]


class TokenScores(NamedTuple):
    """What the policy says of the T trained tokens of a micro-batch."""

    logprobs: Tensor
    """Nats, [T], of the whole row where several ranks share it. On another pipeline stage than the last: hidden states
    for the next one, [1, N, H]."""
    entropy: Tensor
    """Nats, [T]; empty on another stage than the last."""
    logits: Callable[[], Tensor]
    """Computes the logits sampled from, [T, V], with grad (``Policy.logits``)."""
    top_tokens: Tensor | None = None
    """[T, k] int64: further tokens of each position, the micro-batch's or the ``Policy.top_k`` likeliest."""
    top_logprobs: Tensor | None = None
    """[T, k] theirs, nats."""


class Policy(nn.Module):
    """A causal language model that answers with log-probs."""

    def __init__(
        self,
        model: PreTrainedModel,
        transform: LogitTransform,
        *,
        chunk_tokens: int,
        entropy_needs_grad: bool,
        stage: Stage | None = None,
        experts: Sequence[nn.Module] | None = None,
    ) -> None:
        """
        Args:
            stage: Which part of the decoder ``model`` is; None: all of it.
            experts: What ``watch_experts`` gave of the whole model; None: it is called here.
        """
        super().__init__()
        self.model = model
        self.stage = stage or Stage(model)
        self.transform = transform
        self.chunk_tokens = chunk_tokens
        self.entropy_needs_grad = entropy_needs_grad
        self.top_k = 0
        """How many of each position's likeliest tokens to name; of a teacher."""
        self.top_below = 0
        """Only tokens below this one are named."""
        experts = watch_experts(model) if experts is None else experts
        self.num_sparse_layers = len(experts)
        """Of all stages."""
        self.num_experts = num_experts(experts[0]) if experts else 0

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers that are here, first to last."""
        return self.stage.layers

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by their Hugging Face names, tied ones once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def forward(self, batch: Microbatch, received: Tensor | None = None) -> TokenScores:
        """Log-prob and entropy of each trained token of the micro-batch.

        Args:
            received: [1, N, H] of the stage before; None on the first.
        """
        routing = current_routing()
        if batch.experts is not None:
            routing = routing or Routing(self.num_sparse_layers)
            routing.recorded = batch.experts
        with attending(batch.packed), watching(routing):
            states = self.stage.hidden_states(self.model, batch.input_ids, batch.position_ids, received)
        if not self.stage.is_last:
            return TokenScores(states, states.new_empty(0), self._no_logits)
        hidden = states[0].index_select(0, batch.positions)
        head = self.model.get_output_embeddings()
        weight, bias = head.weight, getattr(head, "bias", None)  # as FSDP2 has gathered them now
        part = vocabulary_part(self.model)
        top = batch.top_tokens
        if self.top_k:
            rows: dict[str, Any] = {"below": self.top_below, "chunk_tokens": self.chunk_tokens, "part": part}
            top = likeliest_tokens(hidden, weight, bias, self.top_k, **rows)
        logprobs, entropy = token_logprobs(
            hidden,
            weight,
            bias,
            batch.targets if top is None else torch.cat([batch.targets[:, None], top], dim=1),
            self.transform,
            chunk_tokens=self.chunk_tokens,
            entropy_needs_grad=self.entropy_needs_grad,
            part=part,
        )

        def logits() -> Tensor:
            product = nn.functional.linear(hidden, weight, bias)
            return self.transform.forward(product.float() if product.dtype != torch.float64 else product)

        if batch.own is not None:
            logprobs, entropy = batch.own.whole(logprobs), batch.own.whole(entropy)
        scores = TokenScores(logprobs, entropy, logits if part is None and batch.own is None else self._no_logits)
        if top is None:
            return scores
        return scores._replace(logprobs=logprobs[:, 0], top_tokens=top, top_logprobs=logprobs[:, 1:])

    @staticmethod
    def _no_logits() -> Tensor:
        raise ConfigError("the loss asks for logits, of which a rank has a part: set trainer.tp and trainer.cp to 1")

    def checkpoint_activations(self, every: int) -> None:
        """Recompute every ``every``-th layer in the backward pass instead of keeping its activations."""
        for layer in self.layers[::every]:
            original = layer.forward

            def forward(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                packing, routing = current_packing(), current_routing()

                def redo(*args: Any, **kwargs: Any) -> Any:
                    with attending(packing), watching(routing):
                        return original(*args, **kwargs)

                return checkpoint(redo, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

            layer.forward = forward  # type: ignore[method-assign]


class ValueModel(nn.Module):
    """A decoder with a value head.

    Raises:
        ModelError: The model has no such head.
    """

    num_sparse_layers = num_experts = 0
    """Nobody asks which experts it chooses."""

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
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
        with attending(batch.packed):
            states = self.model.base_model(**inputs).last_hidden_state
        values: Tensor = value_head(self.model)(states[0].index_select(0, batch.positions)).squeeze(-1)
        return values.to(torch.float32, copy=True)  # no view: see ``logprobs._columns``


@torch.no_grad()
def check_output_layer(model: PreTrainedModel, transform: LogitTransform) -> None:
    """Prove on a few tokens that ``transform`` is all that the architecture does after its output layer.

    Raises:
        ModelError: The model's own logits differ, so its log-probs would be wrong.
    """
    device = model.device
    packed = PackedSequences.of([0, 3])
    ids = torch.arange(3, device=device)[None] % model.config.get_text_config().vocab_size
    inputs = {"input_ids": ids, "position_ids": packed.position_ids(device), "use_cache": False}
    with attending(packed):
        hidden = model.base_model(**inputs).last_hidden_state
        theirs = model(**inputs).logits.float() / transform.temperature
    head = model.get_output_embeddings()
    ours = transform.forward_(nn.functional.linear(hidden, head.weight, getattr(head, "bias", None)).float())
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        raise ModelError(
            f"{type(model).__name__} changes its logits in a way that the trainer does not know"
            f" (largest difference {(ours - theirs).abs().max():.3g}): this architecture cannot be trained"
        )
