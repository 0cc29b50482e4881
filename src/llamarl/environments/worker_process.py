"""The pool's side of one worker: its processes, its sockets, and what it is busy with."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from llamarl.determinism import import_folders
from llamarl.environments.messages import MAX_REPLY_BYTES, Answered, Ready, Refused, parse_reply
from llamarl.frames import BrokenFrame, Frames
from llamarl.process_tree import spawn
from llamarl.running_time import running_s
from llamarl.settings.environments import RewardPoolConfig

__all__ = ["Job", "PASSED", "START_TIMEOUT_S", "WorkerProcess", "worker_environment"]

START_TIMEOUT_S = 120.0
"""For a worker to start: interpreter, imports, the task's data."""
_EXIT_WAIT_S = 10.0
_PIECE_BYTES = 1 << 16

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
    passed = {
        **_matching(environment, PASSED),
        **_DEFAULTS,
        **_matching(environment, pass_env),
        "PYTHONPATH": os.pathsep.join(import_path),
        "PYTHONHASHSEED": "0",
    }
    if any(name.lower() in ("http_proxy", "all_proxy") for name in passed):  # which knows no agent's endpoint
        past = passed.get("no_proxy") or passed.get("NO_PROXY") or ""
        past = past if past.strip() == "*" else f"{past},127.0.0.1".lstrip(",")  # all hosts: by itself alone
        passed |= {"no_proxy": past, "NO_PROXY": past}
    return passed


def _matching(environment: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if any(fnmatchcase(k, pattern) for pattern in patterns)}


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker does in one go."""

    number: int
    """No other job of the pool has it."""
    name: Hashable
    """Of what is asked; its answer is kept under it."""
    request: Any
    home: Hashable
    """What its worker holds live from then on; None is nothing."""


class WorkerProcess:
    """A worker and its guard; nothing here blocks but ``stop``, and sending what is more than a socket takes.

    Args:
        number: Its place in the pool.
        hello: The first request: what to judge.
    """

    def __init__(self, number: int, hello: bytes, config: RewardPoolConfig) -> None:
        self.number = number
        self.ready = False
        self.pid: int | None = None
        """Of the process that judges, once it is ready."""
        self.job: Job | None = None
        self.started = running_s()
        self.deadline = self.started + START_TIMEOUT_S
        self.had_more_time = False
        self._frames = Frames(MAX_REPLY_BYTES)
        self._last_words = bytearray()
        self._end: str | None = None
        self._has_ended = self._asked_to_end = False
        self.was_killed = False
        """Whether SIGKILL ended it, or its guard, or a Ctrl-C for the whole job: somebody else's doing. Known after
        :meth:`stop`."""
        self.jobs, jobs = socket.socketpair()
        self.control, control = socket.socketpair()
        fds = (jobs.fileno(), control.fileno())
        with jobs, control:
            environment = worker_environment(os.environ, config.pass_env, import_folders())
            self.guard = spawn("llamarl.environments.worker", fds, environment=environment, stdout=subprocess.DEVNULL)
        self.jobs.setblocking(False)
        self.control.setblocking(False)
        self._send(hello, START_TIMEOUT_S)

    def assign(self, job: Job, request: bytes, timeout_s: float) -> None:
        """Give a job to a worker that has none, and so is reading; returns when all of it is sent."""
        self._send(request, timeout_s)
        self.job = job
        self.started = running_s()
        self.deadline = self.started + timeout_s
        self.had_more_time = False

    def died_idle(self) -> bool:
        """Whether a worker without a job has ended: the kernel closed its socket."""
        try:
            return not self.jobs.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def read(self) -> list[Ready | Refused | Answered]:
        """The replies that are whole with what has come.

        Raises:
            BrokenFrame: What has come is none.
            EOFError: Nothing more will come.
        """
        with contextlib.suppress(BlockingIOError):
            return self._read_piece()
        return []

    def _read_piece(self) -> list[Ready | Refused | Answered]:
        """As ``read``; BlockingIOError where nothing has come."""
        try:
            piece = self.jobs.recv(_PIECE_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            piece = b""
        if not piece:
            raise EOFError
        return [parse_reply(text) for _, text in self._frames.feed(piece)]

    def _send(self, message: bytes, timeout_s: float) -> None:
        """Send a message whole. Where nobody reads any more, the worker's report or deadline will tell."""
        self.jobs.settimeout(timeout_s)
        with contextlib.suppress(OSError):  # TimeoutError among them
            self.jobs.sendall(message)
        self.jobs.setblocking(False)

    def read_rest(self) -> Iterator[Ready | Refused | Answered]:
        """What a worker that has ended still answered."""
        with contextlib.suppress(EOFError, BrokenFrame, BlockingIOError):
            while True:  # a piece may hold no reply's end
                yield from self._read_piece()

    def has_ended(self) -> bool:
        """Read what the guard tells of the worker's output; True once it has ended, and all that it guarded."""
        try:
            piece = self.control.recv(_PIECE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        self._last_words += piece
        self._has_ended = not piece
        return self._has_ended

    def begin_end(self) -> None:
        """Have a worker without a job close what it holds live, and end by itself."""
        with contextlib.suppress(OSError):
            self.jobs.shutdown(socket.SHUT_WR)

    def begin_stop(self) -> None:
        """Have the guard kill the worker and all that it started, without waiting for it."""
        if not self._has_ended:
            self._asked_to_end = True
            self.guard.terminate()

    def stop(self) -> str:
        """End the worker and all that it started; return how it ended and what it last printed. Safe twice."""
        if self._end is None:
            self.begin_stop()
            until = time.monotonic() + _EXIT_WAIT_S
            while not self.has_ended() and time.monotonic() < until:
                time.sleep(0.001)
            try:
                self.guard.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:  # the kernel then kills the worker too
                self.guard.kill()
                self.guard.wait(_EXIT_WAIT_S)
            self.jobs.close()
            self.control.close()
            status = self.guard.returncode
            self.was_killed = status in (-signal.SIGKILL, -signal.SIGINT) and not self._asked_to_end
            how = "killed" if self._asked_to_end else _describe_status(status)
            self._end = "\n".join([how, *self._last_words.decode(errors="replace").splitlines()])
        return self._end


def _describe_status(status: int) -> str:
    if status < 0:
        return f"ended by signal {-status} ({signal.strsignal(-status)})"
    return f"exited with status {status}"
