"""The vocabulary over tensor-parallel ranks: each holds its rows of the embedding and of the output layer, tied or not.

    tokens ─▶ rows of this rank, zero for the others' ─▶ sum over ranks ─▶ hidden states, whole on every rank
    hidden states ─▶ output layer ─▶ this rank's slice of the logits

Nobody puts the slices together. The trainer sums exponentials over ranks (``trainer/logprobs.py``),
the engine draws over them (``engine/cut_sampler.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from llamarl.errors import ModelError
from llamarl.models.collectives import SumOverRanks
from llamarl.models.sizes import why_vocabulary_not_cut

__all__ = ["VocabularyPart", "cut_vocabulary", "vocabulary_part"]


@dataclass(frozen=True)
class VocabularyPart:
    """Tokens ``start .. stop`` of the vocabulary lie on this rank of ``group``."""

    start: int
    stop: int
    group: dist.ProcessGroup

    def rows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each token among this rank's, 0 where another rank holds it; and whether another does."""
        elsewhere = (tokens < self.start) | (tokens >= self.stop)
        return (tokens - self.start).masked_fill(elsewhere, 0), elsewhere

    def sum(self, part: Tensor) -> Tensor:
        """Over the ranks, in place."""
        dist.all_reduce(part, group=self.group)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """Those of all ranks, of equal shapes, along the last dimension, in the ranks' order."""
        parts = [torch.empty_like(part) for _ in range(self.group.size())]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def max(self, part: Tensor) -> Tensor:
        """Over the ranks, in place."""
        dist.all_reduce(part, op=dist.ReduceOp.MAX, group=self.group)
        return part


def cut_vocabulary(model: PreTrainedModel, *, rank: int, num_ranks: int, group: dist.ProcessGroup) -> dict[str, int]:
    """Keep this rank's rows of embedding and output layer, of those that the model has here, in
    place; ``torch.chunk``'s parts.

    Returns:
        Names of the parameters that were cut, tied ones once -> size of the vocabulary.

    Raises:
        ModelError: The vocabulary is too small for so many ranks.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [module for module in (embedding, head) if isinstance(module, nn.Module)]
    size = max((len(parameter) for module in ends for parameter in module.parameters(recurse=False)), default=0)
    if not size:  # a pipeline stage between the first and the last
        return {}
    if reason := why_vocabulary_not_cut(size, num_ranks):
        raise ModelError(f"{type(model).__name__}: {reason}")
    step = -(-size // num_ranks)
    part = VocabularyPart(rank * step, min(size, (rank + 1) * step), group)
    kept: list[tuple[nn.Parameter, nn.Parameter]] = []
    for module in ends:
        for name, parameter in list(module.named_parameters(recurse=False)):
            assert len(parameter) == size, f"{name} has {len(parameter)} rows, the vocabulary {size}"
            own = next((new for old, new in kept if old is parameter), None)
            if own is None:
                rows = parameter.detach()[part.start : part.stop].clone()
                own = nn.Parameter(rows, requires_grad=parameter.requires_grad)
                kept.append((parameter, own))
            module._parameters[name] = own
    if isinstance(embedding, nn.Embedding):
        _look_up_over_ranks(embedding, part)
    if isinstance(head, nn.Linear):
        head.out_features = part.stop - part.start
        head.vocabulary = part  # type: ignore[assignment]
    names = (name for name, parameter in model.named_parameters() if any(parameter is new for _, new in kept))
    return dict.fromkeys(names, size)


def vocabulary_part(model: PreTrainedModel) -> VocabularyPart | None:
    """Of the output layer's rows, those of this rank; None: all."""
    return getattr(model.get_output_embeddings(), "vocabulary", None)


def _look_up_over_ranks(embedding: nn.Embedding, part: VocabularyPart) -> None:
    original = embedding.forward
    embedding.num_embeddings = part.stop - part.start
    if embedding.padding_idx is not None:  # the row that learns nothing
        inside = part.start <= embedding.padding_idx < part.stop
        embedding.padding_idx = embedding.padding_idx - part.start if inside else None  # type: ignore[assignment]

    def forward(tokens: Tensor) -> Tensor:
        rows, elsewhere = part.rows(tokens)
        return SumOverRanks.apply(original(rows).masked_fill(elsewhere[..., None], 0.0), part.group)

    embedding.forward = forward  # type: ignore[method-assign, assignment]
