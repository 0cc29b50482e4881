"""What it costs to store weights in fewer bits than they were served in: how many fall back to the
base's, and the KL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llamarl.errors import ModelError
from llamarl.models.exported import ExportFacts, Narrowing, write_export
from llamarl.models.loading import load_model
from llamarl.models.sharded_loading import stored_weights
from llamarl.trainer.storage import export_folder
from llamarl.types import Group

__all__ = ["KLText", "export_version", "is_narrower", "measure_kl", "text_of", "texts_of"]

_HELD_BY = {
    "float32": frozenset({"float32", "bfloat16", "float16"}),
    "bfloat16": frozenset({"bfloat16"}),
    "float16": frozenset({"float16"}),
}
_MAX_TEXTS = 8
_MAX_TOKENS_OF_A_TEXT = 64  # bounds the log-probs held at once: 512 rows of the vocabulary


@dataclass(frozen=True, slots=True)
class KLText:
    """Tokens over whose end two models are compared."""

    tokens: Sequence[int]
    first: int
    """Index of the first token that counts, >= 1; those before it are context."""


def is_narrower(dtype: torch.dtype, served_dtype: str) -> bool:
    """Whether ``dtype`` cannot hold every value that ``served_dtype`` does."""
    return served_dtype not in _HELD_BY[str(dtype).removeprefix("torch.")]


def texts_of(groups: Iterable[Group]) -> list[KLText]:
    """The first response of each of the first groups: prompt as context, and the beginning of what was sampled."""
    firsts = (text_of(g.prompt.tokens.tolist(), r.tokens.tolist()) for g in groups for r in g.responses[:1])
    return [text for text in firsts if text is not None][:_MAX_TEXTS]


def text_of(prompt: list[int], response: list[int]) -> KLText | None:
    """A prompt and the beginning of its response; None where one is empty."""
    return KLText([*prompt, *response[:_MAX_TOKENS_OF_A_TEXT]], len(prompt)) if prompt and response else None


def export_version(
    folder: Path,
    model: PreTrainedModel,
    weights: Callable[[], Iterator[tuple[str, Tensor]]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    source: str | Path,
    dtype: torch.dtype,
    served_dtype: str,
    version: int,
    texts: Sequence[KLText],
) -> ExportFacts:
    """Write a version as a Hugging Face folder, and beside it what it lost where it was served in more bits.

    Args:
        weights: Called for each pass over them; then as ``export_folder`` takes them.
        source: The base model, too.
        texts: What the KL is measured on; without any it is not.
    """
    narrowing = None
    with ExitStack() as stack:
        count = None
        if is_narrower(dtype, served_dtype):
            count = _NarrowingCount(stack.enter_context(stored_weights(source, shapes)), served_dtype)
        look = None if count is None else count.look
        export_folder(folder, model, weights(), shapes, source=source, dtype=dtype, look=look)
        if count is not None:
            narrowing = count.result(measure_kl(folder, weights(), texts, served_dtype=served_dtype))
    written = str(dtype).removeprefix("torch.")
    facts = ExportFacts(policy_version=version, dtype=written, served_dtype=served_dtype, narrowing=narrowing)
    write_export(folder, facts)
    return facts


class _NarrowingCount:
    """Compares each weight, as served and as written, with the base model's, while it is written."""

    def __init__(self, base: Callable[[str], Tensor], served_dtype: str) -> None:
        """
        Args:
            base: Reads the base model's weight of a name.
        """
        self._base = base
        self._served = getattr(torch, served_dtype)
        self.num_weights = self.num_equal = self.num_equal_before = 0

    def look(self, name: str, weight: Tensor, written: Tensor) -> None:
        """
        Raises:
            ModelError: A finite weight is too large for the written precision.
        """
        base, served, stored = self._base(name), weight.to(self._served), written
        if not torch.equal(stored.isfinite(), served.isfinite()):
            largest = served[served.isfinite()].float().abs().max().item()
            precision = str(written.dtype).removeprefix("torch.")
            raise ModelError(f"{name} holds {largest:g}, too large for {precision}: export it in bfloat16 or float32")
        self.num_weights += weight.numel()
        self.num_equal += int((stored == base.to(stored.dtype)).sum())
        self.num_equal_before += int((served == base.to(served.dtype)).sum())

    def result(self, kl: tuple[float, int] | None) -> Narrowing:
        """Of all weights so far.

        Args:
            kl: Mean KL a token, and over how many; None: not measured.
        """
        return Narrowing(
            num_weights=self.num_weights,
            num_equal_to_base=self.num_equal,
            num_equal_before=self.num_equal_before,
            kl_per_token=None if kl is None else kl[0],
            num_kl_tokens=0 if kl is None else kl[1],
        )


@torch.no_grad()
def measure_kl(
    written: Path, weights: Iterable[tuple[str, Tensor]], texts: Sequence[KLText], *, served_dtype: str
) -> tuple[float, int] | None:
    """Mean KL(served || written) a token, nats, both models computed in float32 on the CPU; and the number of tokens.

    One model is held at a time, besides the log-probs of the tokens that count.

    Args:
        written: Model folder.
        weights: By parameter name, before they were written.
    """
    if not texts:
        return None
    model = load_model(written, dtype=torch.float32)
    narrow = [_logprobs(model, text) for text in texts]
    parameters = dict(model.named_parameters())
    for name, weight in weights:
        parameters[name].copy_(weight.to(getattr(torch, served_dtype)))
    total, count = 0.0, 0
    for text, narrow_logprobs in zip(texts, narrow, strict=True):
        wide_logprobs = _logprobs(model, text)
        kl = (wide_logprobs.exp() * (wide_logprobs - narrow_logprobs)).sum(dim=-1)
        total += float(kl.double().sum())
        count += len(kl)
    return max(0.0, total / count), count


def _logprobs(model: torch.nn.Module, text: KLText) -> Tensor:
    """[tokens that count, V]"""
    logits = model(torch.tensor([list(text.tokens)])).logits[0, text.first - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)
