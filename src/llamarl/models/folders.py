"""Where a model's folder lies, what its ``config.json`` says, and which of its files go with a trained copy of it. No torch: a
wrong path or a model that is not supported is refused before anything heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from llamarl.errors import FileError, ModelError
from llamarl.models.hub import fetch_model, is_hub_id
from llamarl.models.support import Use, why_unsupported
from llamarl.reading import read_object, user_path

__all__ = ["check_supported", "companion_files", "local_model_path", "read_model_config", "resolve_model_path"]

_ASSETS = Path(__file__).resolve().parent.parent / "assets"

_COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "vocab.*.txt", "merges.txt", "bpe.codes", "dict.txt", "tekken.json",
    "tokenizer.model*", "spiece.model", "sentencepiece*.model", "source.spm", "target.spm", "*.tiktoken",
    "chat_template.jinja", "chat_template.json", "generation_config.json", "tokenization_*.py",
    "preprocessor_config.json", "processor_config.json",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
"""Names that ``transformers`` gives to the files of a tokenizer, and terms under which weights may be passed on."""


def resolve_model_path(
    path: str | Path, *, key: str = "model.path", revision: str = "", weights: bool = True, code: bool = False
) -> Path:
    """Folder of a model; ``bundled:NAME`` names one that ships with llamarl, ``org/name`` one of the Hugging Face Hub, which
    is fetched where no folder has that name.

    Args:
        key: The configuration key to name in the error.
        revision: Branch, tag or commit of a model of the Hub; empty is ``main``.
        weights: Whether a model of the Hub is fetched with its weights.
        code: Whether it is fetched with the code of its tokenizer.

    Raises:
        ModelError: No such folder or model, a model that cannot be fetched, a ``revision`` of a folder, no ``config.json``, or
            something in the folder that is no file.
    """
    text = str(path)
    try:
        folder = _ASSETS / text.removeprefix("bundled:") if text.startswith("bundled:") else user_path(text, key)
    except FileError as error:
        raise ModelError(str(error)) from error
    if os.path.isdir(folder):
        if revision:
            raise ModelError.at(
                key.replace("path", "revision"),
                f": {revision!r} is of a model of the Hugging Face Hub, but {key} {text!r} is a folder here, which has none: "
                f"leave it out, or move the folder away",
                key,
            )
    elif is_hub_id(text):
        folder = fetch_model(text, revision, described_by=_COMPANIONS, key=key, weights=weights, code=code)
    else:
        bundled = sorted(f"bundled:{p.parent.name}" for p in _ASSETS.glob("*/config.json"))
        raise ModelError.at(
            key,
            f": no folder {folder}; give a Hugging Face folder, an id of the Hugging Face Hub (org/name), or one of "
            f"{', '.join(bundled)}",
        )
    if not (folder / "config.json").is_file():
        raise ModelError.at(key, f": {folder} has no config.json, so it is not a Hugging Face model folder")
    for file in os.scandir(folder):  # whoever opens a pipe waits for its other end
        if os.path.exists(file) and not (file.is_file() or file.is_dir()):
            raise ModelError.at(key, f": {file.path} is a pipe, socket or device, expected a file: remove it")
    return folder


def local_model_path(
    path: str, *, key: str = "model.path", revision: str = "", weights: bool = True, code: bool = False
) -> str:
    """The path itself, or the folder of a model that it names by its id on the Hub. Arguments and errors are those of
    ``resolve_model_path``."""
    folder = resolve_model_path(path, key=key, revision=revision, weights=weights, code=code)
    return str(folder) if is_hub_id(path) and not os.path.isdir(path) else path


def companion_files(folder: Path, *, key: str = "model.path") -> list[Path]:
    """The files of a model folder, besides config and weights, that a trained copy of the model needs: known names only.

    A link is followed inside the folder, and from a snapshot of the Hugging Face hub's cache to the blobs beside it. One that
    leads elsewhere could carry any file of this machine into a folder that is passed on.

    Raises:
        ModelError: A file of a known name is such a link, or cannot be read.
    """
    return list(_companions(folder, key))


def _companions(folder: Path, key: str) -> Iterator[Path]:
    inside = folder.resolve()
    homes = [inside]
    if inside.parent.name == "snapshots":  # models--ORG--NAME/snapshots/COMMIT/FILE -> ../../blobs/DIGEST
        homes.append(inside.parent.parent / "blobs")
    for file in sorted(folder.iterdir()):
        if not any(fnmatchcase(file.name, pattern) for pattern in _COMPANIONS):
            continue
        try:
            target = file.resolve()
        except (OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
            raise ModelError.at(key, f": {file} cannot be read: {error}") from error
        if not any(target.is_relative_to(home) for home in homes):
            raise ModelError.at(
                key,
                f": {file} is a link to {target}, outside of the model: its content would be copied into the trained "
                f"model's folder. Put a copy of the file in its place",
            )
        if target.is_file():
            yield file


def read_model_config(path: str | Path, *, key: str = "model.path", weights: bool = True) -> dict[str, Any]:
    """The object of a folder's ``config.json``.

    Args:
        key: The configuration key to name in the error.
        weights: Whether a model of the Hub is fetched with its weights.

    Raises:
        ModelError: No such folder or file, or it holds something else.
    """
    folder = resolve_model_path(path, key=key, weights=weights)
    try:
        return read_object(folder / "config.json")
    except FileError as error:
        raise ModelError.at(key, f": {folder}/config.json is not usable: {error}") from error


def check_supported(path: str | Path, use: Use, *, key: str = "model.path") -> None:
    """Ask ``models.support`` about a model folder.

    Args:
        key: The configuration key to name in the error.

    Raises:
        ModelError: There is no readable ``config.json``, or the model cannot be used so.
    """
    if reason := why_unsupported(read_model_config(path, key=key), use):
        raise ModelError.at(key, f": {reason}")
