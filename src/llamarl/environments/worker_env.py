"""The environment variables of reward workers: what programs need to run, and nothing that may be a secret.

A recipe adds names with ``task.pool.pass_env``. This keeps keys and tokens from code that has no use for them; it is no
sandbox: a judge runs as the same user and reads the files that this user may read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

__all__ = ["PASSED", "unset_names", "worker_environment"]

PASSED = (
    # programs, libraries, folders
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "HOME", "USER", "LOGNAME"),
    *("TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    # language and time
    *("LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR"),
    # the Python installation
    *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONWARNINGS"),
    *("PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONNOUSERSITE"),
    # where certificates lie
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    # devices that this process may use
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    # where models and data lie, and whether the network may be asked for them; no tokens
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HF_ASSETS_CACHE", "HF_ENDPOINT"),
    *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"),
    *("TORCH_HOME", "NLTK_DATA", "TOKENIZERS_PARALLELISM"),
)
"""Names, and patterns with ``*``, that every reward worker gets."""

_DEFAULTS = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def worker_environment(
    environment: Mapping[str, str], pass_env: Sequence[str], import_path: Iterable[str]
) -> dict[str, str]:
    """The variables of a worker.

    Args:
        environment: Of this process.
        pass_env: Further names or patterns that the recipe passes on; also over the numbers of threads, which are 1.
        import_path: Folders that this process imports from.
    """
    return {
        **_matching(environment, PASSED),
        **_DEFAULTS,
        **_matching(environment, pass_env),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in import_path),
        "PYTHONHASHSEED": "0",
    }


def unset_names(environment: Mapping[str, str], pass_env: Sequence[str]) -> list[str]:
    """Names in ``pass_env`` that stand for no variable."""
    return [pattern for pattern in pass_env if not _matching(environment, [pattern])]


def _matching(environment: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if any(fnmatchcase(k, pattern) for pattern in patterns)}
