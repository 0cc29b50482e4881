"""One worker process of the reward pool: ``python -m llamarl.environments.worker LIFELINE_FD``.

It reads pickled requests on its standard input and writes pickled replies on what was its standard output; user code
that prints goes to standard error. It judges in its main thread. It imports no torch, and starts in about the time the
task's own library takes.

The lifeline is a pipe whose other end only the parent holds. When the parent dies, however it dies, the kernel sends
SIGIO to this process group and ends it, even inside a call that never returns to Python.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import signal
import sys
import traceback
from typing import Any, BinaryIO

__all__ = ["main", "pack_message", "read_message", "write_message"]

_LENGTH_BYTES = 8


def read_message(stream: BinaryIO) -> Any:
    """One pickled message.

    Raises:
        EOFError: The other end is gone.
    """
    header = stream.read(_LENGTH_BYTES)
    if len(header) < _LENGTH_BYTES:
        raise EOFError
    body = stream.read(int.from_bytes(header, "little"))
    return pickle.loads(body)


def write_message(stream: BinaryIO, message: Any) -> None:
    """Length, then the pickle."""
    stream.write(pack_message(message))
    stream.flush()


def pack_message(message: Any) -> bytes:
    """A message as it stands on the pipe."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def _die_with_parent(lifeline: int) -> None:
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    if poll.poll(0):  # the parent died before the signal was armed
        os._exit(1)


def _first_lines(error: BaseException) -> str:
    """Type, message and the innermost place of an exception, in a few lines."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"\n  at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return f"{type(error).__name__}: {error}"[:1500] + place[:500]


def main() -> None:
    """Serve until standard input ends."""
    _die_with_parent(int(sys.argv[1]))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    # Only now the imports that take time, so that a parent lost meanwhile takes this process along.
    from llamarl.environments.base import Turn
    from llamarl.environments.factory import make_task
    from llamarl.environments.functions import FunctionTask, NotANumber, as_score
    from llamarl.errors import LlamaRLError

    try:
        config, seed = read_message(requests)
        task = make_task(config, seed)
        if isinstance(task, FunctionTask):
            task.prepare()
    except EOFError:
        return
    except LlamaRLError as error:
        write_message(replies, ("refused", str(error)))
        return
    except Exception as error:  # user code at import; the parent turns it into its own error
        write_message(replies, ("refused", _first_lines(error)))
        return
    write_message(replies, ("ready", None))
    while True:
        try:
            prompt, turns = read_message(requests)
        except EOFError:
            return
        try:
            verdict = task.respond(prompt, turns)
            if isinstance(verdict, Turn):
                raise TypeError("the environment wants another turn, but the episode was ended")
            reply: tuple[str, Any] = ("score", as_score(verdict))
        except NotANumber as error:
            reply = ("not_a_number", str(error))
        except Exception as error:  # a judge may raise anything; the sample is failed, and the run goes on
            reply = ("exception", _first_lines(error))
        write_message(replies, reply)


if __name__ == "__main__":
    main()
