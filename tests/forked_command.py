"""``python -m llamarl.cli.main`` as a fork of a process that has imported torch: seconds of imports less a call.

What a test of the command line asks of it is the same: arguments, streams that are files, a working folder, an exit status, limits of
its own. Tests of signals, of import-time variables, of a terminal or of the interpreter itself start a Python of their own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llamarl.runtime.determinism import environment
from llamarl.runtime.fork_here import read_on_import

__all__ = ["ENVIRONMENT", "run_llamarl"]

ENVIRONMENT = read_on_import(environment(1))

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "one_thread",
    "forked_command",
    "llamarl.controller.run",
    "llamarl.executors.self_check",
    "llamarl.cli.train",
] + [
    f"llamarl.executors.{name}"
    for name in ("critic", "evaluator", "generator", "judge", "reference", "reward", "trainer")
]


def run_llamarl(
    words: Sequence[str], *, cwd: Path | None = None, limit_s: float = 240, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end.

    Raises:
        subprocess.TimeoutExpired: It took longer; it is killed, and its ranks with it.
    """
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="forked-command-") as name:
        folder = Path(name)
        (folder / "in").write_text(stdin or "")
        child = _CONTEXT.Process(
            target=_main, args=(folder, list(words), str(cwd or Path.cwd()), {**os.environ, **ENVIRONMENT})
        )
        child.start()
        try:
            child.join(limit_s)
            if child.exitcode is None:
                raise subprocess.TimeoutExpired(["llamarl", *words], limit_s, (folder / "out").read_bytes())
        finally:
            child.kill()
            child.join()
        out, err = ((folder / stream).read_text(errors="replace") for stream in ("out", "err"))
        return subprocess.CompletedProcess(["llamarl", *words], child.exitcode, out, err)


def _main(folder: Path, words: list[str], cwd: str, environment: dict[str, str]) -> None:
    for fd, name in enumerate(("in", "out", "err")):
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT | (os.O_APPEND if fd else 0), 0o600)
        os.dup2(file, fd)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (
        open(0, closefd=False),
        open(1, "w", encoding="utf-8", closefd=False),
        open(2, "w", encoding="utf-8", closefd=False, buffering=1),
    )
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, cwd)  # as python -m does
    sys.argv = ["llamarl", *words]
    from llamarl.cli.main import command

    try:
        code = command()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    atexit._run_exitfuncs()  # multiprocessing's children leave them out
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
