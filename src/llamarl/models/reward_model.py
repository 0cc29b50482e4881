"""A frozen classifier that gives a text one number: transformers' own sequence-classification models.

Two ways to compute one, chosen by the table of what is supported (``model_support.py``), never by
what happens to work:

    decoders of the table     the body on packed sequences, the head ``score`` at each one's last token; over several ranks
    any other architecture    the library's own forward on padded batches of similar length, whole on one rank
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from llamarl.errors import ModelError
from llamarl.model_support import why_unsupported
from llamarl.models.folders import read_model_config, resolve_model_path
from llamarl.models.loading import decoder_arguments, listed, load_as, load_model_config, quiet
from llamarl.models.sharded_loading import skeleton_of

__all__ = ["check_reward_model", "is_packed", "last_token", "load_reward_model", "reward_skeleton"]


def is_packed(path: str | Path) -> bool:
    """Whether it is computed on packed sequences."""
    return why_unsupported(read_model_config(path), "reward_model") is None


def check_reward_model(path: str | Path, *, key: str = "reward_model.path") -> None:
    """Refuse what gives no single number. Reads ``config.json`` alone.

    Raises:
        ModelError: It is no sequence-classification model with one label, or of an architecture
            that transformers does not know as one.
    """
    folder = resolve_model_path(path, key=key)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError.at(key, f": {folder}/config.json is not usable: {error}") from error
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError.at(
            key,
            f": transformers has no sequence-classification model of architecture {config.model_type!r}: take another model",
        )
    kinds = read_model_config(folder, key=key).get("architectures") or []
    if kinds and not any("SequenceClassification" in str(kind) for kind in kinds):
        raise ModelError.at(
            key,
            f": {folder} holds {', '.join(map(str, kinds))}, which has no score for a text: name a sequence-classification "
            f"model, such as AutoModelForSequenceClassification with num_labels=1 writes; to ask a language model, let it judge",
        )
    if config.num_labels != 1:
        raise ModelError.at(
            key, f": {folder} has {config.num_labels} labels, a reward is one number: name a model with one label"
        )


def load_reward_model(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str, attention: str | None, key: str
) -> PreTrainedModel:
    """The classifier of a folder, frozen and in eval mode.

    Args:
        attention: Name in transformers' attention interface; None: what the library itself would take.
        key: The configuration key to name in errors.

    Raises:
        ModelError: Weights are missing, its head among them, or do not fit the architecture.
    """
    check_reward_model(path, key=key)
    folder = resolve_model_path(path, key=key)
    try:
        with quiet():
            model, missing = load_as(
                AutoModelForSequenceClassification,
                folder,
                dtype=dtype,
                attention=attention,
                **decoder_arguments(folder, num_labels=1),
            )
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise ModelError.at(key, f": cannot load {folder} as a sequence-classification model: {error}") from error
    if missing:
        raise ModelError.at(key, f": {folder} lacks {listed(missing, model)}")
    model.requires_grad_(False)
    return model.to(torch.device(device)).eval()


def reward_skeleton(path: str | Path, *, attention: str, key: str) -> PreTrainedModel:
    """The same, of those computed on packed sequences, without storage for its parameters
    (``models/sharded_loading.py``).

    Raises:
        ModelError: It gives no single number.
    """
    check_reward_model(path, key=key)
    folder = resolve_model_path(path, key=key)
    model = skeleton_of(AutoModelForSequenceClassification, folder, load_model_config(folder), attention=attention)
    return model.requires_grad_(False)


def last_token(tokens: list[int], config: PretrainedConfig) -> int:
    """Where transformers reads the score of one sequence: at its last token that is not the padding token.

    Where a tokenizer pads with its end token and a text ends with that, this is the token before it.
    """
    padding = config.get_text_config().pad_token_id
    if padding is None:
        return len(tokens) - 1
    return next((i for i in range(len(tokens) - 1, -1, -1) if tokens[i] != padding), 0)
