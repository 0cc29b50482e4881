"""One worker of a pool: ``python -m llamarl.environments.worker JOBS_FD CONTROL_FD POOL_PID``.

The program forks at once: the parent becomes the worker's guard (see ``process_tree``), the child
judges responses or plays environments, as its first request says (see ``jobs``), in its main
thread, what comes over the socket ``JOBS_FD`` (see ``messages``). It imports no torch, and starts
in about the time that the task's own library takes.

Judges print, fork, exit and close what they find. So standard input is empty, standard output and
error lead to the guard, processes that a judge starts or forks do not inherit the socket, a
forked one that comes back here ends instead of answering, and the worker answers only where its
socket still is its socket.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from llamarl.frames import Frames, frame
from llamarl.process_tree import OutputTail, divide

if TYPE_CHECKING:
    from llamarl.environments.messages import Answered, Ready, Refused
    from llamarl.types import Failure

__all__ = ["main"]

_MAX_MESSAGE = 1500
_MAX_PLACE = 500


class _Pool:
    """The worker's end of the socket."""

    def __init__(self, fd: int, output: int, mark: bytes) -> None:
        self._fd, self._output, self._mark = fd, output, mark
        self._frames, self._requests = Frames(), list[tuple[int, bytes]]()
        os.set_inheritable(fd, False)
        self._identities = {fd: _identify(fd), output: _identify(output), 0: _identify(0)}
        self._pid = os.getpid()
        self._streams: dict[str, Any] = {}
        self.at_end: Callable[[], None] | None = None
        """Called before the process ends because there is no pool any more."""
        os.register_at_fork(after_in_child=self._forked)

    def read(self) -> Any:
        """The next request; ends the process where there is no pool any more."""
        import pickle

        while not self._requests:
            self._check()
            if not (piece := os.read(self._fd, 1 << 20)):
                if self.at_end is not None:
                    self.at_end()
                os._exit(0)
            self._requests += self._frames.feed(piece)
        return pickle.loads(self._requests.pop(0)[1])

    def reply(self, reply: Ready | Refused | Answered) -> None:
        from llamarl.environments.messages import KIND, reply_text

        self._check()
        left = memoryview(frame(KIND, reply_text(reply)))
        while left:
            left = left[os.write(self._fd, left) :]

    def next_sample(self) -> None:
        """Put back what the last judge did to the standard streams, and have the guard forget what it printed."""
        if not self._has(0):
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.set_inheritable(0, True)
            if null != 0:  # the lowest free number may just have been 0
                os.close(null)
        self._check()
        for fd, name in ((1, "stdout"), (2, "stderr")):
            try:
                getattr(sys, name).flush()
            except Exception:  # closed, or an object of the judge's own in its place
                pass
            if _identify(fd) != self._identities[self._output]:
                os.dup2(self._output, fd)
            stream = self._streams.setdefault(name, getattr(sys, name))  # as the user's module left it when imported
            if stream is None or getattr(stream, "closed", False) is True:
                stream = self._streams[name] = open(fd, "w", buffering=1, closefd=False)
            setattr(sys, name, stream)
        os.write(self._output, self._mark)

    def is_own(self) -> bool:
        """False in a process that a judge forked."""
        return os.getpid() == self._pid

    def _check(self) -> None:
        if not (self._has(self._fd) and self._has(self._output)):
            _end(70, "the judge closed the reward worker's connection to the pool")

    def _has(self, fd: int) -> bool:
        """False where a judge closed it, though another file may have its number now."""
        return _identify(fd) == self._identities[fd]

    def _forked(self) -> None:
        for fd in (self._fd, self._output):
            if self._has(fd):
                os.close(fd)


def _identify(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _end(status: int, words: str) -> NoReturn:
    try:
        os.write(2, f"{words}\n".encode())
    except OSError:
        pass
    os._exit(status)


def _limit_memory(limit_mb: int) -> None:
    """Let this process and each that it starts hold at most so much memory of its own; 0 is no limit."""
    if limit_mb:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = limit_mb << 20
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        threading.stack_size(2 << 20)  # a stack counts whole, and an agent's episode has three


def _first_lines(error: BaseException, memory_limit_mb: int) -> str:
    """Type, message and place of an exception, in a few lines: the innermost line of the user's, else of all."""
    from llamarl.environments.messages import plain_text
    from llamarl.import_path import own_line

    try:
        message = str(error)
    except Exception as second:  # the user's exceptions too may raise anything
        message = f"(its text cannot be had: {type(second).__name__})"
    if isinstance(error, MemoryError) and memory_limit_mb:
        message = f"{message} (task.pool.memory_limit_mb = {memory_limit_mb})".lstrip()
    frames = traceback.extract_tb(error.__traceback__)
    place = own_line(error) or "".join(f" at {one.filename}:{one.lineno}: {one.line}" for one in frames[-1:])
    return plain_text(f"{type(error).__name__}: {message}", _MAX_MESSAGE) + plain_text(f"\n {place}", _MAX_PLACE)


def _failed(error: Exception, memory_limit_mb: int) -> Failure:
    from llamarl.environments.functions import NotANumber
    from llamarl.environments.messages import plain_text
    from llamarl.types import Failure

    if isinstance(error, NotANumber):
        return Failure(kind="not_a_number", detail=plain_text(str(error), _MAX_MESSAGE))
    return Failure(kind="exception", detail=_first_lines(error, memory_limit_mb))


def main() -> None:
    """Serve until the pool is gone."""
    jobs, control, pool_pid = (int(argument) for argument in sys.argv[1:4])
    mark = b"\0" + os.urandom(16).hex().encode() + b"\0"  # written where the guard is to forget what came before
    printed, output = os.pipe()
    divide(control, pool_pid, tail=OutputTail(mark, printed), others=(jobs, output))
    os.close(control)
    os.close(printed)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the last lines are there when it crashes
    pool = _Pool(jobs, output, mark)
    # Only now the imports that take time: the guard keeps watch already.
    from llamarl.environments.messages import Answered, Ready, Refused, plain_text
    from llamarl.errors import LlamaRLError

    kind, config, seed = pool.read()
    memory_limit_mb = config.pool.memory_limit_mb
    try:
        _limit_memory(memory_limit_mb)
        from llamarl.environments.jobs import Judge, Player

        work: Any = Judge(config, seed) if kind == "judge" else Player(config)
    except LlamaRLError as error:
        pool.reply(Refused(plain_text(str(error), 4 * _MAX_MESSAGE)))
        return
    except Exception as error:  # user code at import; the pool turns it into its own error
        pool.reply(Refused(_first_lines(error, memory_limit_mb)))
        return
    pool.at_end = getattr(work, "close", None)
    pool.reply(Ready(os.getpid()))
    while True:
        job, request, released = pool.read()
        pool.next_sample()
        retire = False
        try:
            answer = work.answer(request, released)
        except BaseException as error:
            if not pool.is_own():
                if isinstance(error, SystemExit) and isinstance(error.code, int | None):
                    os._exit(error.code or 0)
                traceback.print_exc()
                os._exit(1)
            if not isinstance(error, Exception):  # SystemExit and its like end the worker
                raise
            # The user's code may raise anything: what it was asked for is failed, and the run goes on.
            answer = work.failed(request, _failed(error, memory_limit_mb))
            # Nobody knows what a process that ran out of memory still holds, so it does nothing else.
            retire = isinstance(error, MemoryError)
            del error
        if not pool.is_own():  # a judge's forked child came back from it
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left over would ring in the next sample
        pool.reply(Answered(job, answer, retire))


if __name__ == "__main__":
    main()
