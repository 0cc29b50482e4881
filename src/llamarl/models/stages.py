"""A decoder cut by its layers into pipeline stages: each keeps its own layers of the model's own
modules, and their names.

    stage 0            embedding ─▶ layers 0 .. a-1 ─▶ hidden states
    stage k            hidden states ─▶ layers a .. b-1 ─▶ hidden states
    the last stage     hidden states ─▶ layers b .. n-1 ─▶ final norm, output layer

The model's own forward pass runs on every stage, over a list of layers that is as long as before:
layers of other stages are replaced by modules without parameters that hand on what they are given.
The one before a stage's first layer puts the received hidden states there, so whatever the model
does between embedding and layers (scaling, say) is done once, on stage 0; the one after its last
layer takes them out. A layer's index, its mask and its parameters' names stay what they are in the
whole model.

What stands before and after the layers is read from the model's own pipeline plan. A tied weight is
held by the first stage and by the last, under its one name.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llamarl.errors import ModelError
from llamarl.model_support import why_unsupported
from llamarl.models.attention import PackedSequences, attending
from llamarl.models.decoder import decoder_layers
from llamarl.models.sizes import layers_of_stages

__all__ = ["Stage", "check_stages", "cut_into_stage"]


class _Elsewhere(nn.Module):
    """In the place of a layer that another stage holds: hands on what it is given, and has the
    layer's plain attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        own = vars(self)
        for name, value in vars(layer).items():
            if name not in own and isinstance(value, str | int | float | bool):  # such as the kind of its attention
                setattr(self, name, value)
        self.hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden_states


class _Entry(_Elsewhere):
    """Before a stage's first layer: gives what was received."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        assert self.hidden is not None, "nothing was received"
        return self.hidden


class _Exit(_Elsewhere):
    """After a stage's last layer: keeps what is to be sent."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        self.hidden = hidden_states
        return hidden_states


class Stage:
    """Which part of a decoder is here, and the way through it. The whole decoder is the only stage of one."""

    def __init__(self, model: PreTrainedModel, index: int = 0, num_stages: int = 1) -> None:
        self.index, self.num_stages = index, num_stages
        layers = decoder_layers(model)
        self.layers = [layer for layer in layers if not isinstance(layer, _Elsewhere)]
        """Those that are here, first to last."""
        self._entry = next((layer for layer in layers if isinstance(layer, _Entry)), None)
        self._exit = next((layer for layer in layers if isinstance(layer, _Exit)), None)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def hidden_states(
        self, model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, received: Tensor | None = None
    ) -> Tensor:
        """Hidden states after this stage's layers, [1, N, H]; on the last stage after the final norm.

        Args:
            input_ids, position_ids: [1, N]; on every stage.
            received: [1, N, H] of the stage before; None on the first.
        """
        assert (received is None) == self.is_first, "every stage but the first takes hidden states, and needs them"
        inputs = {"input_ids": input_ids}
        if received is not None:
            assert self._entry is not None
            self._entry.hidden = received
            inputs = {"inputs_embeds": received.detach()}
        found: Tensor = model.base_model(**inputs, position_ids=position_ids, use_cache=False).last_hidden_state
        if self._entry is not None:
            self._entry.hidden = None
        if self._exit is not None:
            assert self._exit.hidden is not None
            found, self._exit.hidden = self._exit.hidden, None
        return found


def cut_into_stage(model: PreTrainedModel, index: int, num_stages: int) -> Stage:
    """Keep one stage of ``model``, in place. Call it before ``apply_tensor_parallel``.

    Raises:
        ModelError: The architecture has no plan that is carried out here, or fewer layers than stages.
    """
    if num_stages == 1:
        return Stage(model)
    if reason := why_unsupported(model.config.to_dict(), "pipeline"):
        raise ModelError(f"trainer.pp = {num_stages}: {reason}; set trainer.pp to 1")
    base: nn.Module = model.base_model
    layers = decoder_layers(model)
    plan = list(getattr(base.config, "base_model_pp_plan", None) or ())
    places = getattr(base, "layers", None)
    if "layers" not in plan or not isinstance(places, nn.ModuleList) or list(places) != layers:
        raise ModelError(f"{type(model).__name__} has no plan that cuts it into stages: set trainer.pp to 1")
    if num_stages > len(layers):
        raise ModelError(
            f"trainer.pp = {num_stages} is more than the {len(layers)} layers of this model: each stage needs one; set "
            f"trainer.pp to at most {len(layers)}"
        )
    own = layers_of_stages(len(layers), num_stages)[index]
    kinds = {own.start - 1: _Entry, own.stop: _Exit}
    for i, layer in enumerate(layers):
        if i not in own:
            places[i] = kinds.get(i, _Elsewhere)(layer)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and embedding.weight is head.weight
    for name in plan:
        module, before = getattr(base, name), plan.index(name) < plan.index("layers")
        if name == "layers" or not any(True for _ in module.parameters()):
            continue
        if before and index > 0 and not (tied and index == num_stages - 1 and module is embedding):
            setattr(base, name, None)
        elif not before and index < num_stages - 1:
            setattr(base, name, nn.Identity())
    for name, module in list(model.named_children()):  # the output layer, or the head of a value model
        if module is not base and index < num_stages - 1 and any(True for _ in module.parameters()):
            setattr(model, name, None)
    return Stage(model, index, num_stages)


@torch.no_grad()
def check_stages(model: PreTrainedModel, num_stages: int) -> None:
    """Prove on a few tokens that stages compute what the whole model does, and hold all of its parameters.

    Args:
        model: A small copy of the architecture.
        num_stages: Of the real model; the copy is cut into as many as it has layers for.

    Raises:
        ModelError: They do not: this architecture cannot be cut so.
    """
    num_stages = min(num_stages, len(decoder_layers(model)))
    packed = PackedSequences.of([0, 5, 8])
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    positions = packed.position_ids(model.device)
    held: list[str] = []
    received: Tensor | None = None
    with attending(packed):
        whole = Stage(model).hidden_states(model, ids, positions)
        for index in range(num_stages):
            part = copy.deepcopy(model)
            stage = cut_into_stage(part, index, num_stages)
            received = stage.hidden_states(part, ids, positions, received)
            held += [name for name, _ in part.named_parameters()]
    missing = _missing(held, [name for name, _ in model.named_parameters()])
    if missing or received is None or not torch.allclose(received, whole, rtol=1e-4, atol=1e-4):
        why = f"no stage holds {missing[0]}" if missing else "stages compute other hidden states than the whole"
        raise ModelError(f"trainer.pp: {type(model).__name__} cannot be cut into stages: {why}; set trainer.pp to 1")


def _missing(held: Sequence[str], names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in held]
