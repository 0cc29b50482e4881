"""A decoder with a value head: one number a position instead of a vocabulary.

It is transformers' own token-classification model with a single label, so a critic's folder is an ordinary Hugging Face
folder that ``AutoModelForTokenClassification`` loads, head included. From a language model's folder, the body is taken
and the head starts at 0: a fresh critic says 0 everywhere.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForTokenClassification, PreTrainedModel

from llamarl.errors import ModelError
from llamarl.models.folders import check_supported, resolve_model_path
from llamarl.models.loading import decoder_arguments, listed, load_as, load_model_config, quiet
from llamarl.models.sharded_loading import skeleton_of

__all__ = ["HEAD", "load_value_model", "value_head", "value_skeleton"]

HEAD = ("score.weight", "score.bias")
"""What a language model's folder lacks."""


def load_value_model(path: str | Path, *, device: torch.device | str = "cpu", attention: str) -> PreTrainedModel:
    """The value model of a folder in float32 and eval mode: a language model's, or an exported critic's.

    Raises:
        ModelError: Weights are missing, or transformers has no such model of this architecture.
    """
    folder = resolve_model_path(path)
    check_supported(folder, "critic", key="critic.path")
    try:
        with quiet():  # it would warn of the unused output layer and of the new head
            model, lacking = load_as(
                AutoModelForTokenClassification,
                folder,
                dtype=torch.float32,
                attention=attention,
                **decoder_arguments(folder, num_labels=1),
            )
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise ModelError(f"critic.path: cannot load {folder} with a value head: {error}") from error
    if missing := [name for name in lacking if name not in HEAD]:
        raise ModelError(f"critic.path: {folder} lacks {listed(missing, model)}")
    if lacking:
        for parameter in value_head(model).parameters():
            nn.init.zeros_(parameter)
    return model.to(torch.device(device)).eval()


def value_skeleton(path: str | Path, *, attention: str) -> PreTrainedModel:
    """The same without storage for its parameters (``models/sharded_loading.py``).

    Raises:
        ModelError: transformers has no such model of this architecture.
    """
    check_supported(path, "critic", key="critic.path")
    config = load_model_config(path)
    config.num_labels = 1
    try:
        return skeleton_of(AutoModelForTokenClassification, path, config, attention=attention)
    except ValueError as error:
        raise ModelError(f"critic.path: {path} has no form with a value head: {error}") from error


def value_head(model: PreTrainedModel) -> nn.Linear:
    """The layer that turns a hidden state into a value.

    Raises:
        ModelError: The architecture has none under the name that decoders use.
    """
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise ModelError(f"critic.path: {type(model).__name__} has no linear head named 'score': take another model")
    return head
