"""Decoder layers that ``torch.compile`` fuses in training, on a GPU in half precision.

Norms, rotation, residuals and the gated activation of a layer become a few kernels, forwards and
backwards; products stay the library's, and attention is left out whole: it reads which rows belong
together from beside the call. Code is made once a kind of layer, for any number of tokens, in the
first step's seconds.

Not compiled: models spread over ranks, sparse ones, adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["compile_layers"]

_MOST_CODES = 16
"""Of one process: kinds of layers, with and without gradient."""


def compile_layers(layers: Iterable[nn.Module], attention: str) -> None:
    """Have these layers compiled when rows first come.

    Args:
        attention: Their name in transformers' attention interface.
    """
    import torch._dynamo  # seconds, for nothing elsewhere

    AttentionInterface.register(attention, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[attention]))
    compiled = torch.compile(_layer, dynamic=True, options={"deterministic": True})
    for layer in layers:
        layer.forward = partial(_forward, compiled, ref(layer))


def _forward(compiled: Callable[..., Any], to_layer: Callable[[], nn.Module | None], *args: Any, **kwargs: Any) -> Any:
    with torch._dynamo.config.patch(recompile_limit=_MOST_CODES):
        return compiled(to_layer(), args, kwargs)


def _layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return type(layer).forward(layer, *args, **kwargs)
