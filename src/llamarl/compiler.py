"""Refuses to begin on a GPU where its kernels cannot be compiled, and says where what is compiled lies."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

from llamarl.errors import ConfigError
from llamarl.reading import cache_folder

__all__ = ["check_compiler"]

_SHARED = os.path.join(tempfile.gettempdir(), "torchinductor_")


def check_compiler(user: str, otherwise: str) -> None:
    """Ask for what Triton needs: itself, which torch brings, a C compiler and Python's header.

    What is compiled is kept in the user's own cache folder, unless the environment names another: libraries are loaded
    from there, and torch's own choice is a folder in /tmp that anybody may have made first.

    Args:
        user: What is compiled.
        otherwise: What a recipe can say to do without.

    Raises:
        ConfigError: One is missing, or the folder is another user's or cannot be made. Nothing falls back to other
            kernels unsaid: their bits are others.
    """
    compilers = [os.environ["CC"].split()[0]] if os.environ.get("CC", "").strip() else ["gcc", "clang"]
    if find_spec("triton") is None:
        missing, cure = "Triton is not installed", "pip install triton"
    elif not any(map(shutil.which, compilers)):
        missing, cure = (
            f"there is no C compiler ({', '.join(compilers)})",
            "install gcc, or name one in the variable CC",
        )
    elif not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing, cure = "Python.h is missing", "install Python's headers (apt-get install python3-dev)"
    else:
        for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "torchinductor"), ("TRITON_CACHE_DIR", "triton")):
            named = os.environ.get(variable, _SHARED)
            if named.startswith(_SHARED):  # which torch may have set for itself
                os.environ[variable] = str(_own_folder() / name)
        return
    raise ConfigError(f"{user} are compiled on a GPU, but {missing}: {cure}, or set {otherwise}")


def _own_folder() -> Path:
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        told = f"what is compiled needs {folder}, which cannot be made ({error.strerror})"
        raise ConfigError(f"{told}: set XDG_CACHE_HOME to a folder of your own") from error
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} is another user's: set XDG_CACHE_HOME to a folder of your own")
    return folder
