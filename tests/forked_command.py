"""``python -m llamarl.cli.main`` as a fork of a process that has imported torch: seconds of imports less a call.

What a test of the command line asks of it is the same: arguments, streams that are files, a working folder, an exit status, limits of
its own. Tests of signals, of import-time variables, of a terminal or of the interpreter itself start a Python of their own.
"""

import atexit
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from llamarl.determinism import environment
from llamarl.runtime.fork_server import allow_fork_of_this_process, read_on_import

__all__ = ["ENVIRONMENT", "SERVER", "Started", "as_python", "forking_here", "run_llamarl"]

ENVIRONMENT = read_on_import(environment(1))

TESTS = str(Path(__file__).parent)


class _Preloaded(ForkServerContext):
    def Process(self, *arguments: Any, **options: Any) -> Any:
        """Start the server where it finds the tests' modules, to which Python before 3.14 hands no path."""
        own = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([TESTS, *([own] if own else [])])
        try:
            forkserver.ensure_running()
        finally:
            os.environ.pop("PYTHONPATH")
            if own:
                os.environ["PYTHONPATH"] = own
        return super().Process(*arguments, **options)


SERVER = _Preloaded()
"""Of this test process: for whoever needs processes that have imported torch, models and executors. There is one, so that what it
imports does not depend on who asks first."""
_PRELOADED = [
    "one_thread",
    "forked_command",
    "llamarl.controller.run",
    "llamarl.executors.self_check",
    "llamarl.cli.train",
] + [f"llamarl.executors.{name}" for name in ("critic", "evaluator", "generator", "judge", "reward", "trainer")]
_PRELOADED += ["preloaded"]  # the last
SERVER.set_forkserver_preload(_PRELOADED)


def forking_here() -> Any:
    """For a program that does nothing but start commands: forks of itself, which has imported what the server would."""
    for module in _PRELOADED:
        importlib.import_module(module)
    return multiprocessing.get_context("fork")


def run_llamarl(
    words: Sequence[str],
    *,
    cwd: Path | None = None,
    limit_s: float = 240,
    stdin: str | None = None,
    context: Any = SERVER,
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end.

    Raises:
        subprocess.TimeoutExpired: It took longer; it is killed, and its ranks with it.
    """
    started = Started(words, cwd=cwd, stdin=stdin, context=context)
    try:
        code = started.wait(limit_s)
    finally:
        started.kill()
    return subprocess.CompletedProcess(["llamarl", *words], code, started.out, started.err)


class Started:
    """One command under way; like ``subprocess.Popen`` as far as tests look.

    Args:
        together: What it says on stderr goes where stdout does.
        program: Called in place of ``llamarl``'s own; says the exit status.
        context: Whose process it is a fork of.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        cwd: Path | None = None,
        stdin: str | None = None,
        together: bool = False,
        program: Callable[[], int] | None = None,
        context: Any = SERVER,
    ) -> None:
        self.args = ["llamarl", *words]
        self._keeping = tempfile.TemporaryDirectory(prefix="forked-command-")
        self._folder = Path(self._keeping.name)
        (self._folder / "in").write_text(stdin or "")
        given = (self._folder, list(words), str(cwd or Path.cwd()), {**os.environ, **ENVIRONMENT}, together, program)
        self._child = context.Process(target=_main, args=given)
        self._child.start()
        assert self._child.pid is not None
        self.pid = self._child.pid

    @property
    def returncode(self) -> int | None:
        return self._child.exitcode

    def poll(self) -> int | None:
        return self._child.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._child.join(timeout)
        if self._child.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0, self.out)
        return self._child.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.out, self.err

    def send_signal(self, number: int) -> None:
        if self._child.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._child.kill()
        self._child.join()

    @property
    def out(self) -> str:
        return self._said("out")

    @property
    def err(self) -> str:
        return self._said("err")

    def _said(self, stream: str) -> str:
        file = self._folder / stream
        return file.read_text(errors="replace") if file.exists() else ""


def as_python() -> int:
    """Do what ``python`` does with these words, ``SCRIPT ..`` or ``-m MODULE ..``: a ``program`` of :class:`Started`."""
    words = sys.argv[1:]
    allow_fork_of_this_process()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
    return 0


def _main(
    folder: Path,
    words: list[str],
    cwd: str,
    environment: dict[str, str],
    together: bool,
    program: Callable[[], int] | None,
) -> None:
    for fd, name in enumerate(("in", "out", "err")):
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT | (os.O_APPEND if fd else 0), 0o600)
        os.dup2(file, fd)
        os.close(file)
    if together:
        os.dup2(1, 2)
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
        code = (program or command)()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    atexit._run_exitfuncs()  # multiprocessing's children leave them out
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
