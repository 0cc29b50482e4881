"""Log-probs and entropy of chosen tokens straight from hidden states; [tokens, vocabulary] never exists whole.

    hidden [T, H] ──chunk of C──▶ logits [C, V] ──▶ log-prob [C], entropy [C]; logits dropped
    backward: logits of the same chunk again ──▶ their gradient ──▶ gradients of hidden and weight; dropped

Peak memory of the output layer is two [C, V] buffers, forward and backward, for one more product
with the weight. Tokens that are one chunk save that product: their logits stay from forward to
backward, one [C, V] buffer in between. Where the vocabulary is cut over tensor-parallel ranks, [C,
V / tp] stands for [C, V]: a rank has the logits of its own rows, and maxima, sums and the target's
logit of each token are put together over ranks, as in Megatron-LM's cross-entropy
(arXiv:1909.08053, Sec. 3).

The distribution is the one sampled from: logits pass through the model's own scaling and soft cap,
then the temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llamarl.models.decoder import logit_scale, logit_softcap
from llamarl.models.onednn import linear
from llamarl.models.vocabulary import VocabularyPart

__all__ = ["LogitTransform", "likeliest_tokens", "token_logprobs"]


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """What lies between the output layer's product x and the logits: softcap * tanh(scale * x /
    softcap) / temperature."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be > 0 to train, got {self.temperature}: a greedy choice has no log-probability"
            )

    @classmethod
    def of_model(cls, config: PretrainedConfig, temperature: float) -> LogitTransform:
        """As the architecture does it."""
        return cls(scale=logit_scale(config), softcap=logit_softcap(config), temperature=temperature)

    @property
    def bends(self) -> bool:
        """Whether the gradient by x depends on the logits."""
        return self.softcap is not None

    def forward(self, x: Tensor) -> Tensor:
        """x -> logits, with grad."""
        if self.softcap is None:
            return x * (self.scale / self.temperature)
        return torch.tanh(x * (self.scale / self.softcap)) * (self.softcap / self.temperature)

    def forward_(self, x: Tensor) -> Tensor:
        """x -> logits, in place."""
        if self.softcap is None:
            factor = self.scale / self.temperature
            return x.mul_(factor) if factor != 1.0 else x
        return x.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def backward_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Gradient by logits -> gradient by x, in place; destroys ``logits``, and reads them only
        where the transform ``bends``."""
        if self.softcap is None:
            factor = self.scale / self.temperature
            return grad.mul_(factor) if factor != 1.0 else grad
        slope = logits.mul_(self.temperature / self.softcap).square_().neg_().add_(1.0)
        return grad.mul_(slope).mul_(self.scale / self.temperature)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    *,
    chunk_tokens: int,
    entropy_needs_grad: bool = False,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, nats.

    Args:
        hidden: Last hidden states at the predicting positions, [T, H].
        weight: Output layer, [V, H], or the rows of ``part``.
        bias: [V] or None, or the entries of ``part``.
        targets: Predicted tokens, [T] int64, or several of each position, [T, M].
        chunk_tokens: Rows of logits that exist at once, >= 1. Changes memory, and the result by rounding only.
        entropy_needs_grad: Whether gradient flows through the entropy; costs one more [C, V] buffer.
        part: Of the vocabulary, what this rank holds; all its ranks call with the same tokens. None: it is whole.

    Returns:
        (log-probs, shaped as ``targets``, entropy [T]) in float32, or float64 for float64 inputs.
    """
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden, weight, bias, targets, transform, chunk_tokens, entropy_needs_grad, part
    )
    return found


@torch.no_grad()
def likeliest_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    count: int,
    *,
    below: int,
    chunk_tokens: int,
    part: VocabularyPart | None = None,
) -> Tensor:
    """At each position the ``count`` tokens of the largest logits, [T, count] int64, the likeliest first.

    Args:
        below: Only tokens 0 .. below - 1, of which there are at least ``count``.
        hidden, weight, bias, chunk_tokens, part: As for ``token_logprobs``. What lies between product and logits
            leaves their order.
    """
    found = [torch.empty(0, count, dtype=torch.int64, device=hidden.device)]
    start = 0 if part is None else part.start
    for rows in _chunks(len(hidden), chunk_tokens):
        product = linear(hidden[rows], weight, bias)[:, : max(0, below - start)].float()
        values, tokens = product.topk(min(count, product.shape[1]))
        if part is not None:
            missing = (0, count - values.shape[1])
            values = part.gather(torch.nn.functional.pad(values, missing, value=-torch.inf))
            tokens = part.gather(torch.nn.functional.pad(tokens + start, missing))
            tokens = tokens.gather(-1, values.topk(count).indices)
        found.append(tokens)
    return torch.cat(found)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        chunk_tokens: int,
        entropy_needs_grad: bool,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(targets.shape, dtype=dtype)
        columns, found = _columns(targets), _columns(logprobs)
        logsumexp = hidden.new_empty(len(targets), dtype=dtype)
        entropy = torch.empty_like(logsumexp)
        chunks = _chunks(len(targets), chunk_tokens)
        kept = None  # the logits, if they are not computed again
        for rows in chunks:
            logits = transform.forward_(linear(hidden[rows], weight, bias).to(dtype))
            peak = logits.amax(dim=-1, keepdim=True)
            if part is not None:
                peak = part.max(peak)
            probs = torch.sub(logits, peak).exp_()
            total = probs.sum(dim=-1)
            expected = _row_products(probs, logits)
            if part is None:
                chosen = logits.gather(-1, columns[rows])
            else:
                own, elsewhere = part.rows(columns[rows])
                chosen = logits.gather(-1, own).masked_fill(elsewhere, 0.0)
                sums = part.sum(torch.stack([total, expected, *chosen.unbind(1)]))
                total, expected, chosen = sums[0], sums[1], sums[2:].T
            logsumexp[rows] = peak.squeeze(-1) + total.log()
            found[rows] = chosen - logsumexp[rows, None]
            entropy[rows] = logsumexp[rows] - expected / total
            kept = logits if len(chunks) == 1 and any(ctx.needs_input_grad) else None
            del logits, probs  # before the next chunk's are made
        ctx.kept = kept  # made here and seen by nobody else: backward may write over it
        ctx.save_for_backward(hidden, weight, bias, targets, logsumexp, entropy)
        ctx.transform, ctx.chunk_tokens, ctx.entropy_needs_grad = transform, chunk_tokens, entropy_needs_grad
        ctx.part = part
        if not entropy_needs_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, logsumexp, entropy = ctx.saved_tensors
        dtype = logsumexp.dtype
        columns, grad_columns = _columns(targets), _columns(grad_logprobs)
        grad_hidden = torch.zeros_like(hidden)
        frozen = not ctx.needs_input_grad[1]
        grad_weight: Tensor | None = None
        kept, ctx.kept = ctx.kept, None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=dtype)
        for rows in _chunks(len(targets), ctx.chunk_tokens):
            if (logits := kept) is None:
                logits = ctx.transform.forward_(linear(hidden[rows], weight, bias).to(dtype))
            spent = None if ctx.transform.bends else logits  # its backward pass has no more use for them
            log_probs = torch.sub(logits, logsumexp[rows, None], out=spent)
            own, given = columns[rows], grad_columns[rows]
            of_all = given.sum(dim=1, keepdim=True)
            if ctx.entropy_needs_grad:  # d entropy / d logit = -p * (log p + entropy)
                coefficient = (log_probs + entropy[rows, None]).mul_(grad_entropy[rows, None])
                grad = log_probs.exp_().mul_(coefficient.add_(of_all)).neg_()
                del coefficient
            else:
                grad = log_probs.exp_().mul_(-of_all)
            if ctx.part is not None:
                own, elsewhere = ctx.part.rows(own)
                given = given.masked_fill(elsewhere, 0.0)
            # not scatter_add_: its repeatable form on CUDA reads strides from the host, which then waits
            for column in range(own.shape[1]):  # one by one, for a token may stand in several
                grad[torch.arange(len(own), device=own.device), own[:, column]] += given[:, column].to(dtype)
            grad = ctx.transform.backward_(grad, logits)
            del logits, log_probs
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = linear(grad, weight.t())
            if not frozen:
                part = linear(grad.t(), hidden[rows].t()) if hidden.dtype == dtype else grad.T @ hidden[rows]
                grad_weight = part.to(dtype) if grad_weight is None else grad_weight.add_(part)
                del part
            del grad
        if ctx.part is not None:
            ctx.part.sum(grad_hidden)
        bias_out = None if grad_bias is None else grad_bias.to(bias.dtype)
        if not frozen and grad_weight is None:  # no token
            grad_weight = torch.zeros_like(weight, dtype=dtype)
        weight_out = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, weight_out, bias_out, None, None, None, None, None


def _columns(of_tokens: Tensor) -> Tensor:
    """[T, M]. A view, which no module may return: FSDP2 loses its hook where somebody changes one in place."""
    return of_tokens[:, None] if of_tokens.dim() == 1 else of_tokens


def _row_products(probs: Tensor, logits: Tensor) -> Tensor:
    """[C] sums of the products of rows, without a third [C, V]; destroys ``probs``. A product of so
    many single rows is one block of threads each on a GPU."""
    if probs.device.type == "cpu":
        return torch.bmm(probs[:, None, :], logits[:, :, None]).view(-1)
    return probs.mul_(logits).sum(dim=-1)


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
