"""Hugging Face folders in and out. Trainer and generator load the same decoder module through here.

``trust_remote_code`` stays off: a folder whose architecture transformers does not know is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from llamarl.errors import ModelError
from llamarl.models.attention import check_attention_supported
from llamarl.models.folders import resolve_model_path

transformers_logging.disable_progress_bar()  # three processes would draw three bars into one console

__all__ = ["context_length", "load_model", "load_model_config", "load_tokenizer", "resolve_model_path"]


def load_model_config(path: str | Path) -> PretrainedConfig:
    """The architecture's configuration, without weights."""
    folder = resolve_model_path(path)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"model.path: {folder}/config.json is not usable: {error}") from error


def context_length(path: str | Path) -> int | None:
    """Tokens that a model can hold at once; None where its folder does not say."""
    length = getattr(load_model_config(path).get_text_config(), "max_position_embeddings", None)
    return None if length is None else int(length)


def load_model(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", attention: str = "sdpa"
) -> PreTrainedModel:
    """The causal language model of a folder, in eval mode, on ``device``.

    Args:
        attention: Name registered in transformers' attention interface (``llamarl_paged``, ``llamarl_packed``, ``sdpa``).

    Raises:
        ModelError: Weights are missing or do not fit the architecture, or ours does not know its attention.
    """
    folder = resolve_model_path(path)
    if attention.startswith("llamarl_"):
        check_attention_supported(load_model_config(folder))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, local_files_only=True, output_loading_info=True
        )
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise ModelError(f"model.path: cannot load {folder}: {error}") from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):  # transformers would fill them with random numbers
        raise ModelError(
            f"model.path: {folder} lacks {len(missing)} tensors of its architecture: {', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''}"
        )
    return model.to(torch.device(device)).eval()


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside a model."""
    folder = resolve_model_path(path)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"model.path: {folder} has no usable tokenizer: {error}") from error
