"""Decoder layers that ``torch.compile`` fuses, on a GPU.

    norm ─ QKV ─ head norms, rotation ─ ATTENTION ─ O ─ sum, norm ─ GATE, UP ─ activation ─ DOWN ─ sum

What is written in capitals stays a kernel of its own: the library's products, and attention with its
cache as one operator (``models/paged_attention.py``). Each of the rest becomes one to three kernels.

- **One function for all layers of a kind and all steps.** Rows are a variable of the code, so torch
  compiles twice a kind of layer, for one row and for more, in seconds each; a layer does not look
  up its own number: the step holds it.
- **Weights are inputs**, so versions are written in place.
- **No timing decides a sum, and no run's first step.** Torch fits to the first rows that it sees in
  which order code for any number of rows adds; those are the same in every run (``FIRST_ROWS``), and
  nothing is compiled later. So bits repeat, whatever a run or its resume begins with.
- **What torch makes lies in llamarl's cache folder**, which only its user can write to.

Not compiled: int8 products, sparse layers, engines of several ranks, models in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import nn
from torch.fx.experimental import _config as shape_config
from transformers import PreTrainedModel

from llamarl.errors import ConfigError
from llamarl.models.decoder import decoder_layers
from llamarl.models.paged_attention import current_step

__all__ = ["FIRST_ROWS", "compile_layers", "compiles_layers", "compiling"]

FIRST_ROWS = (512, 1)
"""For which layers are compiled: for more than one row, and for one."""
_MOST_KINDS = 8
"""Of layers, in all engines of a process, for each of which there is code for one row and for more."""
_open: ContextVar[bool] = ContextVar("open", default=False)


def compiles_layers(in_place: bool, dtype: torch.dtype, num_ranks: int) -> bool:
    """Whether an engine compiles its layers: one that reads its blocks in place, for a model that is not so small that
    it computes in float32, whose run would wait longer for the compiler than the steps are shorter."""
    return in_place and dtype != torch.float32 and num_ranks == 1


def compile_layers(model: PreTrainedModel) -> None:
    """Have the decoder layers compiled for the rows that come under ``compiling``."""
    import torch._dynamo  # seconds, for nothing elsewhere

    options: dict[str, Any] = {"deterministic": True, "compile_threads": 1}
    compiled = torch.compile(_layer, fullgraph=True, dynamic=True, backend=_backend, options=options)
    for index, layer in enumerate(decoder_layers(model)):
        # a layer that held itself would keep its weights until Python looks for circles
        layer.forward = partial(_forward, compiled, ref(layer), index)


@contextmanager
def compiling() -> Iterator[None]:
    """Let code be made, which is refused at any other time: it would follow from what a run does."""
    token = _open.set(True)
    try:
        with (
            torch._dynamo.config.patch(recompile_limit=2 * _MOST_KINDS),
            # sizes that are equal by chance, such as the first rows and a head's width, are not one size
            shape_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
            # code that was kept is looked up without the rows that it was fitted to
            torch.compiler.config.patch(cache_key_tag=f"llamarl, rows {FIRST_ROWS}"),  # type: ignore[attr-defined]
        ):
            yield
    finally:
        _open.reset(token)


def _backend(graph: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor import compile_fx

    if not _open.get():
        raise RuntimeError(
            "a step came with rows, or settings of torch (threads, precision of products, determinism), for which "
            "nothing was compiled before the first one, so its bits would depend on the run"
        )
    try:
        return cast(Callable[..., Any], compile_fx.compile_fx(graph, list(inputs), config_patches=options))
    except torch._dynamo.exc.SkipFrame as error:  # bfloat16 on a card before Ampere: torch would not say what to do
        raise RuntimeError(str(error)) from error


def _forward(
    compiled: Callable[..., Any], to_layer: Callable[[], nn.Module | None], index: int, *args: Any, **kwargs: Any
) -> Any:
    layer, batch = to_layer(), current_step()
    assert layer is not None
    if batch is None:
        return _layer(layer, args, kwargs)
    batch.layer = index
    try:
        return compiled(layer, args, kwargs)
    except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
        reason = " ".join(str(error).split("\n\n")[0].split())
        raise ConfigError(
            f"torch compiles {type(layer).__name__} for this GPU, and its compiler failed "
            f'({type(error).__name__}: {reason}): engine.attention = "copied" needs none'
        ) from error


def _layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return type(layer).forward(layer, *args, **kwargs)
