"""Hugging Face folders in and out. Trainer and generator load the same decoder module through here.

Of a folder that holds a model in several parts (text and images), the text decoder alone is loaded,
under the names that it has when it stands alone: what is trained, handed over and exported is a
text model.

A model's own code is never run: its architecture is one of transformers' own. Every call says
``trust_remote_code=False``, because without a value transformers asks on the console, where a pipe may answer. Only a
tokenizer may bring code, where the user said so (``model.trust_remote_code``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers import __version__ as transformers_version
from transformers.utils import logging as transformers_logging

import llamarl
from llamarl.errors import FileError, ModelError
from llamarl.model_support import Use, text_part
from llamarl.models.folders import check_supported, resolve_model_path
from llamarl.reading import cache_folder, read_object

transformers_logging.disable_progress_bar()  # three processes would draw three bars into one console

_CONFIG_FILES = ("config.json", "generation_config.json")
_WEIGHT_FILES = ("model.safetensors.index.json",)
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_PROBE = "It's 2023, isn't it?\n\n  x1 = 3.14159 * (40 + 2)\t# naïve, 中文"

__all__ = [
    "cache_shape",
    "context_length",
    "decoder_arguments",
    "listed",
    "load_as",
    "load_model",
    "load_model_config",
    "load_tokenizer",
    "open_tensors",
    "parameter_shapes",
    "quiet",
    "record_of_check",
    "resolve_model_path",
    "stored_files",
    "use_of",
]


def load_model_config(path: str | Path) -> PretrainedConfig:
    """The decoder's configuration, without weights.

    Raises:
        ModelError: It is not usable, or of an architecture that transformers does not know.
    """
    folder = resolve_model_path(path)
    with _reading(folder, f"{folder}/config.json is not usable", _CONFIG_FILES):
        _check_known(folder)
        whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text = whole.get_text_config(decoder=True)
        if text is not whole:
            text.tie_word_embeddings = getattr(whole, "tie_word_embeddings", True)  # the whole model's decision
        return text


def _check_known(folder: Path) -> None:
    values = read_object(folder / "config.json")
    kind = values.get("model_type")
    if isinstance(kind, str) and kind and kind not in CONFIG_MAPPING:
        code = "; its folder brings code of its own (auto_map), which is never run" if values.get("auto_map") else ""
        raise ModelError.at(
            "model.path",
            f": {folder}: architecture {kind!r} is not one of those that transformers "
            f"{transformers_version} knows{code}",
        )


def decoder_arguments(path: str | Path, **settings: Any) -> dict[str, Any]:
    """What ``from_pretrained`` must be told to take the text decoder alone out of a folder, with ``settings`` in its
    configuration; these alone where it is alone there."""
    folder = resolve_model_path(path)
    if text_part(values := read_object(folder / "config.json")) is values:
        return settings
    config = load_model_config(folder)
    config.update(settings)  # of a configuration that it is given, ``from_pretrained`` takes none apart
    with torch.device("meta"):
        body = AutoModel.from_config(config, trust_remote_code=False)
    alone = next(name for name, _ in body.named_parameters())
    names = stored_files(folder)
    stored = [name for name in names if name.endswith(f".{alone}")]
    found = [name for name in stored if re.search(r"language|text|decoder", name)] or stored
    if len(found) != 1:
        raise ModelError.at(
            "model.path",
            f": {folder} holds {len(found)} tensors that may be {alone} of its {config.model_type}, expected 1",
        )
    prefix = found[0].removesuffix(alone)
    mapping = {f"^{re.escape(prefix)}": f"{_body_name(config)}."}
    heads = [name for name in names if name.endswith(".lm_head.weight")]
    mapping |= {f"^{re.escape(head)}$": "lm_head.weight" for head in heads}
    return {"config": config, "key_mapping": mapping}


def _body_name(config: PretrainedConfig) -> str:
    """Under which name the decoder's body stands in its language model."""
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return str(model.base_model_prefix)


def stored_files(path: str | Path) -> dict[str, Path]:
    """Name of each tensor in a model folder -> the safetensors file that holds it.

    Raises:
        ModelError: The index or a file is not usable.
    """
    folder = resolve_model_path(path)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ModelError(f"model.path: {index} has no weight_map of file names")
        if away := [file for file in weight_map.values() if Path(file).name != file]:
            raise ModelError(f"model.path: {index} names {away[0]!r:.80}, which is not a file beside it")
        if not single.is_file():  # which transformers reads where there are both
            return {name: folder / file for name, file in weight_map.items()}
    found: dict[str, Path] = {}
    for file in [single] if single.is_file() else sorted(folder.glob("*.safetensors")):
        with open_tensors(file) as tensors:
            found |= {name: file for name in tensors.keys()}
    return found


@contextlib.contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file, by ``safe_open``.

    Raises:
        ModelError: It is not one.
    """
    try:
        opened = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"model.path: {file} is not a usable safetensors file: {error}") from error
    with opened as tensors:
        yield tensors


def context_length(path: str | Path) -> int | None:
    """Tokens that a model can hold at once; None where its folder does not say."""
    length = getattr(load_model_config(path).get_text_config(), "max_position_embeddings", None)
    return None if length is None else int(length)


def cache_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """(layers, key-value heads, features of a head): what one token keeps for later ones, twice.

    Latent attention keeps what its latents become, keys and values of every head, at the width of the wider ones.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    if getattr(text, "qk_nope_head_dim", None):
        return (
            int(text.num_hidden_layers),
            int(heads),
            max(text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim),
        )
    shared = getattr(text, "num_key_value_heads", None) or getattr(text, "num_kv_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(text.num_hidden_layers), int(shared), int(head_dim)


def parameter_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a model's parameters, tied ones once, by its configuration alone: a model of the Hub may have
    no weights here yet.

    Raises:
        ModelError: Its configuration is not usable.
    """
    config = load_model_config(path)
    with _reading(resolve_model_path(path), f"{path}/config.json is not usable", _CONFIG_FILES), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def record_of_check(config: PretrainedConfig, *, generated: bool, trained: bool) -> Path:
    """The file that says that an architecture has passed ``executors/self_check.py`` with these libraries and this
    code, in these uses; it is there once it has."""
    values = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version", "dtype")}
    versions = [transformers_version, torch.__version__, llamarl.__version__, str((generated, trained))]
    digest = hashlib.sha256(json.dumps([values, versions], sort_keys=True, default=str).encode())
    for room in ("models", "engine", "trainer", "executors"):
        for file in sorted((Path(llamarl.__file__).parent / room).glob("*.py")):
            digest.update(file.read_bytes())
    return cache_folder() / "architectures" / digest.hexdigest()[:32]


def use_of(attention: str | None) -> Use:
    """What a model is loaded for, by the attention that it gets: the engine's is its own."""
    return "generate" if attention == "llamarl_paged" else "train"


def load_model(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", attention: str | None = None
) -> PreTrainedModel:
    """The causal language model of a folder, in eval mode, on ``device``.

    Args:
        attention: Name registered in transformers' attention interface (``llamarl_paged``,
            ``llamarl_packed``); None: what transformers itself would take, of which not every
            architecture has all.

    Raises:
        ModelError: The architecture is not supported, or weights are missing or do not fit it.
    """
    folder = resolve_model_path(path)
    check_supported(folder, use_of(attention))
    with _reading(folder, f"cannot load {folder}", _CONFIG_FILES + _WEIGHT_FILES):
        of_decoder = decoder_arguments(folder)
        with quiet() if of_decoder else contextlib.nullcontext():  # it would list every tensor of the other parts
            model, missing = load_as(AutoModelForCausalLM, folder, dtype=dtype, attention=attention, **of_decoder)
    if of_decoder:
        model._weight_conversions = None  # its names are its own from here on, also where it is written
    if missing:
        raise ModelError(f"model.path: {folder} lacks {listed(missing, model)}")
    return model.to(torch.device(device)).eval()


def load_as(
    kind: Any, folder: Path, *, dtype: torch.dtype, attention: str | None, **settings: Any
) -> tuple[Any, list[str]]:
    """Load a folder as one of transformers' auto classes; the model, and the tensors that it lacks.

    transformers fills those with random numbers: whoever calls refuses them, or sets them.
    """
    if strange := sorted({file.name for file in stored_files(folder).values() if file.suffix != ".safetensors"}):
        raise ModelError(f"model.path: {folder} has weights in {', '.join(strange[:3])}: only safetensors are read")
    model, found = kind.from_pretrained(
        folder,
        use_safetensors=True,  # others are programs to be run
        dtype=dtype,
        attn_implementation=attention,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        **settings,
    )
    return model, sorted(found["missing_keys"])


def listed(missing: list[str], model: PreTrainedModel) -> str:
    """Say how many tensors of a model are missing, and which."""
    shown = f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}"
    return f"{len(missing)} tensors of {type(model).__name__}: {shown}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers says errors alone."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _has_vocabulary(folder: Path) -> bool:
    patterns = ("tokenizer.json", "vocab*", "*.model*", "*.tiktoken", "tekken.json", "*.spm", "bpe.codes", "dict.txt")
    return any(
        fnmatchcase(file.name, p) for file in folder.iterdir() for p in patterns if "safetensors" not in file.name
    )


def _tokenizer_code(folder: Path) -> str:
    """What the folder names as the code of its tokenizer; empty where it names none."""
    try:
        named = read_object(folder / "tokenizer_config.json", big_integers=True).get("auto_map") or {}
    except FileError:
        return ""
    code = named.get("AutoTokenizer", "") if isinstance(named, dict) else named
    return ", ".join(str(c) for c in code if c) if isinstance(code, list | tuple) else str(code)


def _refuse_other_classes(folder: Path) -> None:
    """Refuse a class for the tokenizer that is none: ``transformers`` would load whatever it is, and ask
    on the console whether its code may run."""
    for name in ("tokenizer_config.json", "config.json"):
        if not (folder / name).is_file():
            continue
        named = read_object(folder / name, big_integers=True).get("tokenizer_class")
        found = getattr(transformers, named, None) if isinstance(named, str) else None
        is_tokenizer = isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)
        if found is not None and not is_tokenizer and not hasattr(found, "_backends"):  # of a library that is not there
            raise ModelError(f"model.path: {folder / name} names {named!r:.60} as its tokenizer, which is no tokenizer")


def _as_its_file_says(tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of ``tokenizer.json``. For many classes transformers 5 takes the vocabulary alone out of it, and
    cuts text by rules of its own: github.com/huggingface/transformers/issues/45488 and 45920."""
    file = folder / "tokenizer.json"
    known = type(tokenizer) is PreTrainedTokenizerFast or not type(tokenizer).__module__.startswith("transformers.")
    if known or not file.is_file():
        return tokenizer
    of_file = Tokenizer.from_file(str(file))
    of_file.no_truncation()
    of_file.no_padding()
    expected = of_file.encode(_PROBE, add_special_tokens=False).ids
    read = None
    if hasattr(tokenizer, "backend_tokenizer"):
        with contextlib.suppress(Exception):  # the library's plain one: the vocabulary lacks what the class counts on
            read = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    if read == expected:
        return tokenizer
    loaded: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    left_to_class: dict[str, Any] = {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if name not in loaded.special_tokens_map and isinstance(token, str) and of_file.token_to_id(token) is not None
    }
    loaded.add_special_tokens(left_to_class)  # such as the end
    return loaded


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside a model.

    Args:
        trust_remote_code: Whether it may be Python code of the folder, which then runs in this process.

    Raises:
        ModelError: There is none, or it is such code and may not run.
    """
    folder = resolve_model_path(path)
    with _reading(folder, f"{folder} has no usable tokenizer", _CONFIG_FILES + _TOKENIZER_FILES):
        try:
            _refuse_other_classes(folder)
            by_class = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
            tokenizer = _as_its_file_says(by_class, folder)
            tokenizer.clean_up_tokenization_spaces = False  # Llama 3's folders ask for "x != y" to be read as "x!= y"
            read: set[int] = set(tokenizer("1", add_special_tokens=False)["input_ids"])
            tokenizer("1")  # a setting of a wrong kind ends where it is first used
            if not read - {tokenizer.unk_token_id} and not _has_vocabulary(folder):  # transformers makes an empty one
                raise ModelError(
                    f"model.path: {folder} has no vocabulary of a tokenizer (tokenizer.json, or vocab.json and merges.txt, or "
                    "tokenizer.model): copy the tokenizer's files of the model that it was made from"
                )
            return tokenizer
        except (ValueError, OSError, KeyError) as error:
            if not trust_remote_code and (code := _tokenizer_code(folder)):
                raise ModelError(
                    f"model.path: the tokenizer of {folder} is Python code of that folder ({code}), which is not run. If you have "
                    f"read it and trust who wrote it, set model.trust_remote_code to true (llamarl generate: --trust-remote-code); "
                    f"it then runs with all your rights"
                ) from error
            raise


@contextlib.contextmanager
def _reading(folder: Path, what: str, objects: tuple[str, ...]) -> Iterator[None]:
    """Around what transformers reads of a folder that anybody may have written.

    Args:
        objects: The JSON objects among those files; each is read first, so that a malformed one is named.

    Raises:
        ModelError: A file is malformed, or the library refuses what is in it.
    """
    try:
        for name in objects:
            if (folder / name).is_file():
                # transformers writes 10**30 for "no limit on the length" into tokenizer_config.json
                read_object(folder / name, big_integers=name in _TOKENIZER_FILES)
        yield
    except ModelError:
        raise
    except Exception as error:  # any value of a wrong kind ends wherever the library first uses it
        raise ModelError(f"model.path: {what}: {str(error) or repr(error)}") from error
