"""Decoder layers that ``torch.compile`` fuses, for decode steps under ``engine.attention = "flex"`` on a GPU.

    norm ─ QKV ─ head norms, rotation, cache ─ flex ─ O ─ sum, norm ─ GATE, UP ─ activation ─ DOWN ─ sum

What is written in capitals stays a product of the library's; each of the rest becomes one to three kernels.

- **One function for all layers of a kind.** A layer does not look up its own number: its part of the
  cache comes as arguments, so torch compiles once a kind of layer (two where windows alternate) and
  bucket of rows, and runs it for every such layer.
- **Numbers of rows are constants of the code.** Torch's kernel for decoding, which reads K and V once for all
  heads that share them and cuts long contexts in parts, is taken for a batch of known size alone.
- **Weights and cache are inputs**, so versions are written in place, and so is the cache: K and V must
  not share a storage (``ModelRunner``), or torch copies the second one whole in every layer.
- **No timing decides a sum.** In which order a kernel adds follows from shapes alone, so the bits of a run repeat.

Not compiled: steps that compute prompts, int8 and fp8 products, engines of several ranks.

**Not yet run on a GPU.** What is compiled is counted and held against the layers as they are on the CPU
(``tests/unit/engine/test_compiled_layers.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llamarl.errors import ConfigError
from llamarl.models.decoder import decoder_layers
from llamarl.models.paged_attention import LayerInPlace, current_step

__all__ = ["compile_layers", "compiles_layers"]

_KINDS = 4
"""Of layers, in all engines of a process, for which there is room at each number of rows."""


def compiles_layers(attention: str, device: torch.device, quantization: str, num_ranks: int) -> bool:
    """Whether an engine compiles its layers for padded decode steps."""
    return attention == "flex" and device.type == "cuda" and quantization == "none" and num_ranks == 1


def compile_layers(model: PreTrainedModel, num_buckets: int) -> None:
    """Have the layers compiled in steps whose ``PagedBatch`` says so, each when a number of rows first comes.

    Args:
        num_buckets: Numbers of rows that steps have.
    """
    import torch._dynamo  # seconds, for nothing elsewhere

    compiled = torch.compile(_layer, fullgraph=True, dynamic=False, options={"deterministic": True})
    run = partial(_compiled, compiled, _KINDS * num_buckets)
    for index, layer in enumerate(decoder_layers(model)):
        own: Any = {m.sliding_window for m in layer.modules() if hasattr(m, "sliding_window")}
        windows = [None, *((own or {getattr(model.config.get_text_config(), "sliding_window", None)}) - {None})]
        layer.forward = partial(_forward, layer.forward, partial(run, layer), index, windows)


def _forward(
    plain: Callable[..., Any],
    compiled: Callable[..., Any],
    index: int,
    windows: list[int | None],
    hidden: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    batch = current_step()
    if batch is None or not batch.compiled:
        return plain(hidden, *args, **kwargs)
    return compiled(batch.in_place(index, windows), hidden, args, kwargs)


def _compiled(
    compiled: Callable[..., Any],
    limit: int,
    layer: nn.Module,
    step: LayerInPlace,
    hidden: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    try:
        with torch._dynamo.config.patch(recompile_limit=limit):
            return compiled(layer, step, hidden, args, kwargs)
    except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise ConfigError(
            f'engine.attention is "flex", for which torch compiles {type(layer).__name__}, and its compiler failed '
            f'({type(error).__name__}: {reason}): "auto" needs none'
        ) from error


def _layer(layer: nn.Module, step: LayerInPlace, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return type(layer).forward(layer, hidden, *args, packed_sequences=step, **kwargs)
