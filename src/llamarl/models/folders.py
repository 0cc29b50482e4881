"""Where a model's folder lies, on this machine or the Hugging Face Hub, and what is in it. No torch: a
wrong path or a model that is not supported is refused before anything heavy is imported.

    "org/name", "main" ──huggingface_hub──▶ its cache/models--org--name/snapshots/COMMIT

A snapshot is a folder like any other. Its name is the commit, which a run records: with it, the same
bytes are found again without a network, wherever the branch has moved. Only what is used is fetched:
configuration, tokenizer, weights as safetensors; no pickles, and code only for a tokenizer that the
user trusts.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from llamarl.errors import FileError, ModelError
from llamarl.model_support import Use, why_unsupported
from llamarl.reading import read_object, user_path

__all__ = [
    "check_supported",
    "companion_files",
    "fetch_dataset",
    "hub_name",
    "is_commit",
    "is_hub_id",
    "local_model_path",
    "read_model_config",
    "resolve_model_path",
    "split_revision",
]

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
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_TABLES = ("*.parquet", "*.arrow", "*.csv", "*.tsv", "*.json", "*.jsonl", "*.gz", "README.md")
_TIMEOUT_S = 20.0


def resolve_model_path(path: str | Path, *, key: str = "model.path", weights: bool = True, code: bool = False) -> Path:
    """Folder of a model; ``bundled:NAME`` names one that ships with llamarl, ``org/name`` or
    ``org/name@REVISION`` one of the Hugging Face Hub, which is fetched where no folder has that name.

    Args:
        key: The configuration key to name in the error.
        weights: Whether a model of the Hub is fetched with its weights.
        code: Whether it is fetched with the code of its tokenizer.

    Raises:
        ModelError: No such folder or model, a model that cannot be fetched, no ``config.json``, or
            something in the folder that is no file.
    """
    text = str(path)
    try:
        folder = _ASSETS / text.removeprefix("bundled:") if text.startswith("bundled:") else user_path(text, key)
    except FileError as error:
        raise ModelError(str(error)) from error
    if is_hub_id(text) and not os.path.isdir(folder):
        folder = _fetch_model(*split_revision(text), key=key, weights=weights, code=code)
    elif not os.path.isdir(folder):
        bundled = sorted(f"bundled:{p.parent.name}" for p in _ASSETS.glob("*/config.json"))
        raise ModelError.at(
            key,
            f": no folder {folder}; give a Hugging Face folder, an id of the Hugging Face Hub (org/name), or one of "
            f"{', '.join(bundled)}",
        )
    if (folder / "adapter_config.json").exists():
        raise ModelError.at(
            key,
            f": {folder} holds an adapter (adapter_config.json) of another model: merge the two (peft: "
            "merge_and_unload), and name the result",
        )
    if not (folder / "config.json").is_file():
        hint = f"; its policy is {folder}/model" if (folder / "model" / "config.json").is_file() else ""
        raise ModelError.at(key, f": {folder} has no config.json, so it is not a Hugging Face model folder{hint}")
    for parent, _, names in os.walk(folder):  # whoever opens a pipe waits for its other end
        for file in (Path(parent, name) for name in names):
            if file.exists() and not file.is_file():
                raise ModelError.at(key, f": {file} is a pipe, socket or device, expected a file: remove it")
    _refuse_foreign_code(folder, key)
    return folder


def _refuse_foreign_code(folder: Path, key: str) -> None:
    """Refuse what ``transformers`` would go elsewhere for: compiled kernels of the Hub, which
    ``trust_remote_code=False`` does not keep out."""
    try:
        values = read_object(folder / "config.json")
    except FileError:  # told by those that read more of it
        return
    for name, value in _members(values):
        if name == "configuration_files":
            raise ModelError.at(
                key, f": {folder}/config.json names another file in its place, {name}: remove that line"
            )
        if name == "attribute_map" and value:  # under which any name could stand for those below
            raise ModelError.at(key, f": {folder}/config.json gives its lines other names, {name}: remove that line")
        if name == "transformers_weights" and not str(value).endswith(".safetensors"):
            raise ModelError.at(key, f": {folder}/config.json names weights {value!r:.80}: only safetensors are read")
        if "attn_implementation" in name or "experts_implementation" in name:
            if re.search(r"[^\w-]", json.dumps(value)[1:-1]):
                raise ModelError.at(
                    key, f": {folder}/config.json names code to fetch and run, {name} = {value!r:.80}: remove that line"
                )


def _members(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield every name and value of a JSON object, those inside others too."""
    for name, value in (
        values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    ):
        yield str(name), value
        yield from _members(value)


def local_model_path(path: str, *, key: str = "model.path", weights: bool = True, code: bool = False) -> str:
    """The path itself, or the folder of a model that it names by its id on the Hub. Arguments and errors are those of
    ``resolve_model_path``."""
    folder = resolve_model_path(path, key=key, weights=weights, code=code)
    return str(folder) if is_hub_id(path) and not os.path.isdir(path) else path


def companion_files(folder: Path, *, key: str = "model.path") -> list[Path]:
    """The files of a model folder, besides config and weights, that a trained copy of the model
    needs: known names only.

    A link is followed inside the folder, and from a snapshot of the Hugging Face hub's cache to the
    blobs beside it. One that leads elsewhere could carry any file of this machine into a folder
    that is passed on.

    Raises:
        ModelError: A file of a known name is such a link, or cannot be read.
    """
    inside = folder.resolve()
    homes = [inside]
    if inside.parent.name == "snapshots":  # models--ORG--NAME/snapshots/COMMIT/FILE -> ../../blobs/DIGEST
        homes.append(inside.parent.parent / "blobs")
    found = []
    for file in sorted(folder.iterdir()):
        if not any(fnmatchcase(file.name, pattern) for pattern in _COMPANIONS):
            continue
        target = Path(os.path.realpath(file))
        if os.path.islink(target):
            raise ModelError.at(key, f": {file} cannot be read: it is a link that leads to itself")
        if not any(target.is_relative_to(home) for home in homes):
            raise ModelError.at(
                key,
                f": {file} is a link to {target}, outside of the model: its content would be copied into the trained "
                f"model's folder. Put a copy of the file in its place",
            )
        if target.is_file():
            found.append(file)
    return found


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
    """Ask ``model_support`` about a model folder.

    Args:
        key: The configuration key to name in the error.

    Raises:
        ModelError: There is no readable ``config.json``, or the model cannot be used so.
    """
    if reason := why_unsupported(read_model_config(path, key=key), use):
        raise ModelError.at(key, f": {reason}")


def is_hub_id(text: str) -> bool:
    """Whether a text could be the id of a model or data set of the Hub: ``org/name`` or ``org/name@REVISION``."""
    repo, at, revision = text.partition("@")
    return bool(_HUB_ID.fullmatch(repo)) and ".." not in repo and "--" not in repo and bool(at) == bool(revision)


def split_revision(hub_id: str) -> tuple[str, str]:
    """Split ``org/name@REVISION`` into ``org/name`` and the branch, tag or commit; empty where none
    is named, which is main."""
    repo, _, revision = hub_id.partition("@")
    return repo, revision


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit, which never moves."""
    return bool(_COMMIT.fullmatch(revision))


def hub_name(folder: Path) -> tuple[str, str] | None:
    """Id and commit of the model of which a folder is the Hub's snapshot, in the cache; None of any other folder."""
    home = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not is_commit(folder.name) or not home.startswith("models--"):
        return None
    return home.removeprefix("models--").replace("--", "/"), folder.name


def fetch_dataset(hub_id: str, *, key: str) -> Path:
    """Fetch the tables of a data set of the Hub, if they are not in the cache. Code is never fetched.

    Raises:
        ModelError: As ``_fetch_model``.
    """
    repo, revision = split_revision(hub_id)
    folder = _in_cache(repo, revision, list(_TABLES), "dataset")
    if folder is None:
        folder = _download(repo, revision, list(_TABLES), key, "dataset")
        _tell(f"{key}: {_with_commit(repo, revision, folder)}, in {folder}")
    return folder


def _fetch_model(repo: str, revision: str, *, key: str, weights: bool, code: bool) -> Path:
    """Fetch a model of the Hub, if it is not in the cache. A commit that is there costs no request.

    Raises:
        ModelError: It is not there, may not be read, cannot be fetched or is not whole; says what to do.
    """
    patterns = ["config.json", *(name for name in _COMPANIONS if not name.endswith(".py"))]
    patterns += [*(_WEIGHTS if weights else ()), *(["*.py"] if code else ())]
    folder = _in_cache(repo, revision, patterns, "model")
    if folder is None or _missing(folder, weights):
        folder = _download(repo, revision, patterns, key, "model")
        named = _with_commit(repo, revision, folder)
        if (missing := _missing(folder, weights)) is not None:
            raise ModelError.at(key, f": {named}, is not whole in {folder}: {missing}")
        _tell(f"{key}: {named}, in {folder}")
    return folder


def _with_commit(repo: str, revision: str, folder: Path) -> str:
    commit = "" if is_commit(revision) else f", commit {folder.name}"
    return f"{repo} at {revision or 'main'}{commit}"


@cache
def _tell(line: str) -> None:
    """Say a line on stderr, once a process."""
    print(line, file=sys.stderr)


def _in_cache(repo: str, revision: str, patterns: list[str], kind: str) -> Path | None:
    """The snapshot of a commit in the cache; None for a branch or tag, which may have moved."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not is_commit(revision):
        return None
    try:
        found = snapshot_download(
            repo, repo_type=kind, revision=revision, allow_patterns=patterns, local_files_only=True
        )
    except LocalEntryNotFoundError:
        return None
    return Path(found)


def _download(repo: str, revision: str, patterns: list[str], key: str, kind: str) -> Path:
    """The snapshot's folder from the Hub; from the cache where the Hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars, tqdm

    shown = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is None and getattr(sys.stderr, "isatty", bool)()
    (enable_progress_bars if shown else disable_progress_bars)()
    try:
        return Path(
            snapshot_download(
                repo,
                repo_type=kind,
                revision=revision or None,
                allow_patterns=patterns,
                etag_timeout=_TIMEOUT_S,
                tqdm_class=tqdm,
            )
        )
    except Exception as error:  # also of the HTTP library, whose name changes with the Hub client's versions
        raise _not_fetched(error, repo, revision, key, kind) from error
    finally:
        disable_progress_bars()


def _not_fetched(error: Exception, repo: str, revision: str, key: str, kind: str) -> ModelError:
    """Say why the Hub gave nothing, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    url = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{repo}"
    what, local = ("model", "a Hugging Face folder") if kind == "model" else ("data set", "files")
    login = "(hf auth login, or a token in HF_TOKEN)"
    instead = f"or give {local} of this machine"
    first_line = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    if isinstance(error, GatedRepoError):
        why = f"{repo} is gated: accept its terms at {url}, then log in as who accepted them {login}; {instead}"
    elif isinstance(error, RevisionNotFoundError):
        why = f"{repo} has no revision {revision!r}: give a branch, tag or commit of {url}/commits"
    elif isinstance(error, RepositoryNotFoundError):
        why = (
            f"{_not_here(repo)}, and {constants.ENDPOINT} has no {what} of that name that you may read: correct it; for a "
            f"private one log in {login}; {instead}"
        )
    elif isinstance(error, LocalEntryNotFoundError):
        network = error.__cause__ or error
        cause = f"{type(network).__name__}: {network}".strip().partition("\n")[0].rstrip(".")
        if constants.is_offline_mode():
            cause = "HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set"
        begun = (Path(constants.HF_HUB_CACHE) / f"{kind}s--{repo.replace('/', '--')}" / "snapshots").is_dir()
        part = "only a part of it, or another revision, is" if begun else "it is not"
        command = f"hf download {repo}{' --repo-type dataset' * (kind == 'dataset')}"
        command += f" --revision {revision}" if revision else ""
        why = (
            f"{_not_here(repo)}; as a {what} of the Hub, {part} in the cache ({constants.HF_HUB_CACHE}) and the Hub cannot "
            f"be asked: {cause}. Fetch it where there is a network ({command}), {instead}"
        )
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        why = (
            f"no room for {repo} in {constants.HF_HUB_CACHE}: make room, or name another folder by HF_HUB_CACHE; what has "
            f"come is kept"
        )
    else:
        why = f"fetching {url} into {constants.HF_HUB_CACHE} failed: {first_line}. Try again; what has come is kept"
    return ModelError.at(key, f": {why}")


def _not_here(named: str) -> str:
    """Say that no folder has the name; a run's or file's that is like it may be meant, not the Hub."""
    parent, name = Path(named).parent, Path(named).name
    near = difflib.get_close_matches(name, os.listdir(parent), n=1) if parent.is_dir() else []
    return f"there is no folder {named} here" + (f" (did you mean {parent / near[0]}?)" if near else "")


def _missing(folder: Path, weights: bool) -> str | None:
    """What a snapshot lacks that it must have; None where nothing is missing."""
    if not (folder / "config.json").is_file():
        return "it has no config.json, so it is no model for transformers"
    if not weights or (folder / "model.safetensors").is_file():
        return None
    try:
        index: Any = json.loads((folder / "model.safetensors.index.json").read_bytes())
        shards = sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        return (
            "it has no weights as safetensors (model.safetensors): others, such as *.bin, are programs to be run and are not "
            "read; choose a revision with safetensors, or convert it"
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"model.safetensors.index.json names no shards: {error!r}"
    absent = [name for name in shards if not (folder / str(name)).is_file()]
    if absent:
        return (
            f"{len(absent)} of {len(shards)} weight files are missing ({', '.join(absent[:3])}): remove the folder and run "
            f"again"
        )
    return None
