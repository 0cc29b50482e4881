"""Models and data sets of the Hugging Face Hub: from an id and a revision to a folder of this machine.

    "org/name", "main" ──huggingface_hub──▶ its cache/models--org--name/snapshots/COMMIT ──▶ a folder like any other

The folder's name is the commit, which a run records: with it, the same bytes are found again without a network, wherever
the branch has moved. Only what is used is fetched: configuration, tokenizer, weights as safetensors; no pickles, and code
only for a tokenizer that the user trusts.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

from llamarl.errors import ModelError

__all__ = ["commit_of", "fetch_dataset", "fetch_model", "is_commit", "is_hub_id"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_TABLES = ("*.parquet", "*.arrow", "*.csv", "*.tsv", "*.json", "*.jsonl", "*.gz", "README.md")
_TIMEOUT_S = 20.0
_MAX_NAMED = 12


def is_hub_id(text: str) -> bool:
    """Whether a text could be the id of a model: ``org/name``."""
    return bool(_HUB_ID.fullmatch(text)) and ".." not in text and "--" not in text


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit, which never moves."""
    return bool(_COMMIT.fullmatch(revision))


def commit_of(folder: Path) -> str:
    """The commit whose files lie in a folder that ``fetch_model`` gave."""
    return folder.name


def fetch_model(
    repo: str, revision: str, *, described_by: tuple[str, ...], key: str, weights: bool = True, code: bool = False
) -> Path:
    """The folder of a model of the Hub, fetched if it is not in the cache. A commit that is there costs no request.

    Args:
        repo: ``org/name``.
        revision: Branch, tag or commit; empty is ``main``.
        described_by: Patterns of files that go with a model, besides configuration and weights.
        key: The configuration key to name in errors.
        weights: Whether the weights are wanted too.
        code: Whether Python files are, for a tokenizer.

    Raises:
        ModelError: It is not there, may not be read, cannot be fetched or is not whole; says what to do.
    """
    patterns = ["config.json", *(name for name in described_by if not name.endswith(".py"))]
    patterns += [*(_WEIGHTS if weights else ()), *(["*.py"] if code else ())]
    folder = _cached(repo, revision, patterns, weights) if is_commit(revision) else None
    if folder is None:
        folder = _ask(repo, revision, patterns, key, "model")
        told = f"{repo} at {revision or 'main'}" + ("" if is_commit(revision) else f", commit {commit_of(folder)}")
        if (missing := _missing(folder, weights)) is not None:
            raise ModelError.at(key, f": {told}, is not whole in {folder}: {missing}")
        _tell(f"{key}: {told}, in {folder}")
    return folder


def fetch_dataset(repo: str, revision: str, *, key: str) -> Path:
    """The folder of a data set's tables of the Hub, fetched if it is not in the cache. Code is never fetched.

    Raises:
        ModelError: As ``fetch_model``.
    """
    folder = _in_cache(repo, revision, list(_TABLES), "dataset") if is_commit(revision) else None
    if folder is None:
        folder = _ask(repo, revision, list(_TABLES), key, "dataset")
        commit = "" if is_commit(revision) else f", commit {commit_of(folder)}"
        _tell(f"{key}: {repo} at {revision or 'main'}{commit}, in {folder}")
    return folder


@cache
def _tell(line: str) -> None:
    """Say a line on stderr, once a process."""
    print(line, file=sys.stderr)


def _not_here(named: str, what: str) -> str:
    """That no folder has the name; where its parent is one, what stands in it: a run or file may be meant, not the Hub."""
    parent, name = Path(named).parent, Path(named).name
    if not parent.is_dir():
        return f"there is no folder {named} here"
    holds = sorted(entry.name for entry in os.scandir(parent) if not entry.name.startswith("."))
    near = difflib.get_close_matches(name, holds, n=1, cutoff=0.6)
    hint = f"; did you mean {parent / near[0]}?" if near else ""
    shown = (
        f"it holds {', '.join(holds[:_MAX_NAMED])}{', ...' if len(holds) > _MAX_NAMED else ''}"
        if holds
        else "it is empty"
    )
    kinds = "run or model" if what == "model" else what
    return f"there is no {kinds} {name} in the folder {parent} ({shown}{hint})"


def _cached(repo: str, commit: str, patterns: list[str], weights: bool) -> Path | None:
    folder = _in_cache(repo, commit, patterns, "model")
    return None if folder is None or _missing(folder, weights) else folder


def _in_cache(repo: str, commit: str, patterns: list[str], kind: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(repo, repo_type=kind, revision=commit, allow_patterns=patterns, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return Path(found)


def _ask(repo: str, revision: str, patterns: list[str], key: str, kind: str) -> Path:
    """The snapshot's folder from the Hub; from the cache where the Hub cannot be reached."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars, tqdm

    where = f"{constants.ENDPOINT}/{'datasets/' * (kind == 'dataset')}{repo}"
    what = "model" if kind == "model" else "data set"
    instead = "or give a Hugging Face folder of this machine" if kind == "model" else "or give files of this machine"
    shown = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is None and sys.stderr.isatty()
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
    except GatedRepoError as error:
        why = (
            f"{repo} is gated: accept its terms at {where}, then log in as who accepted them (hf auth login, or a token in "
            f"HF_TOKEN); {instead}"
        )
        raise ModelError.at(key, f": {why}") from error
    except RevisionNotFoundError as error:
        name = re.sub("(path|data)$", "revision", key)
        raise ModelError.at(
            name, f": {repo} has no revision {revision!r}: give a branch, tag or commit of {where}/commits"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError.at(
            key,
            f": {_not_here(repo, what)}, and {constants.ENDPOINT} has no {what} of that name that you may read: correct "
            f"it; for a private one log in (hf auth login, or a token in HF_TOKEN); {instead}",
        ) from error
    except LocalEntryNotFoundError as error:
        offline = constants.is_offline_mode()
        cause = "HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set" if offline else f"{_cause(error)}"
        begun = (Path(constants.HF_HUB_CACHE) / f"{kind}s--{repo.replace('/', '--')}" / "snapshots").is_dir()
        part = "only a part of it, or another revision, is" if begun else "it is not"
        raise ModelError.at(
            key,
            f": {_not_here(repo, what)}; as a {what} of the Hub, {part} in the cache ({constants.HF_HUB_CACHE}) and the Hub cannot "
            f"be asked: {cause}. Fetch it where there is a network ({_command(repo, revision, kind)}), {instead}",
        ) from error
    except HfHubHTTPError as error:
        raise ModelError.at(
            key, f": {where} cannot be fetched: {_first_line(error)}. Try again; what has come is kept"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(_nearest(Path(constants.HF_HUB_CACHE))).free
            raise ModelError.at(
                key,
                f": no room for {repo} in {constants.HF_HUB_CACHE} ({free / 2**30:.1f} GiB free): make room, or name another "
                f"folder by HF_HUB_CACHE; what has come is kept",
            ) from error
        raise ModelError.at(
            key, f": {repo} cannot be kept in {constants.HF_HUB_CACHE}: {_first_line(error)}"
        ) from error
    except Exception as error:  # of the HTTP library, whose name changes with the Hub client's versions
        raise ModelError.at(
            key,
            f": fetching {where} was cut off: {_first_line(error)}. Try again; what has come is kept",
        ) from error
    finally:
        disable_progress_bars()


def _command(repo: str, revision: str, kind: str) -> str:
    return f"hf download {repo}{' --repo-type dataset' * (kind == 'dataset')}" + (
        f" --revision {revision}" if revision else ""
    )


def _cause(error: BaseException) -> str:
    """What the network said, under the client's own words."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {_first_line(cause)}" if cause is not error else _first_line(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _nearest(folder: Path) -> Path:
    """It, or the folder above it that is there."""
    while not folder.exists():
        folder = folder.parent
    return folder


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
        return f"{len(absent)} of {len(shards)} weight files are missing ({', '.join(absent[:3])}): remove the folder and run again"
    return None
