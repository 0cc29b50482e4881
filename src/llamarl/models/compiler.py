"""Refuses to begin on a GPU where its kernels cannot be compiled."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from llamarl.errors import ConfigError

__all__ = ["check_compiler"]


def check_compiler(user: str, otherwise: str = "") -> None:
    """Ask for what Triton needs: itself, which torch brings, and a C compiler.

    Args:
        user: What is compiled.
        otherwise: What a recipe can say to do without.

    Raises:
        ConfigError: One is missing. Nothing falls back to other kernels unsaid: their bits are others.
    """
    if find_spec("triton") is None:
        missing, cure = "Triton is not installed", "pip install triton"
    elif not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        missing, cure = "no C compiler is found", "install gcc (apt-get install gcc) or name one in the variable CC"
    else:
        return
    raise ConfigError(
        f"{user} are compiled on a GPU, but {missing}: {cure}" + (f", or set {otherwise}" if otherwise else "")
    )
