"""Running a program that nobody trusts: pure data in, pure data out.

    run_in_box("print(6 * 7)", limits=BoxLimits(wall_s=2)).stdout   # "42\\n"

    this process ──job──▶ bubblewrap ──▶ inside (process 1 of the box) ──▶ the program
         ▲  └─ ends everything by closing a pipe ────┘                        │
         └──────────── output, cut at a limit ◀───────────────────────────────┘

A box (``bwrap``) has a fresh folder in memory, the Python installation (read-only), no network, a
pid namespace of its own, and limits. ``plain`` is no box but a process with limits and a filter of
system calls, taken only where a user asks for it by name. Either ends with the program, when a
limit is met, when this function is left in whatever way, and with this process. What each holds and
does not hold: docs/code.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from llamarl.environments.sandbox.limits import BoxFailed, BoxLimits, BoxResult, Limit, limit_in_words
from llamarl.environments.sandbox.memory_group import make_memory_group
from llamarl.linux_calls import SEAL_CONTENT, new_memory, seal
from llamarl.running_time import running_s

__all__ = [
    "Installation",
    "Kind",
    "Program",
    "find_installation",
    "run_in_box",
    "run_together",
    "why_no_box",
    "without_nested",
]

Kind = Literal["bwrap", "plain"]

_EXIT_WAIT_S = 5.0
_START_S = 30.0
"""A box may take so long to come up: the machine's time, not the program's."""
_STARTED = b"started\n"
_PIECE = 1 << 16
_FIRST_PROCESS_MB = 64
"""For the box's own processes, which its group counts too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one box runs."""

    source: str
    """Python, run as ``main.py`` of the box's folder, which is where it starts."""
    stdin: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files of the folder: relative name -> text."""
    channel: int = -1
    """A descriptor of this process that becomes the program's descriptor 3; negative is none."""
    limits: BoxLimits = BoxLimits()
    may_hide: bool = False
    """Whether it may let nobody look into its memory. All that it has mapped counts then."""


def run_in_box(
    program: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    limits: BoxLimits = BoxLimits(),  # noqa: B008
    kind: Kind = "bwrap",
) -> BoxResult:
    """Run a Python program in a box of its own.

    Args:
        stdin: Its standard input, UTF-8.
        files: Relative name -> text, in the folder where it starts.

    Raises:
        BoxFailed: There is no such box here, or it did not come up. Whatever the program does is a result.
    """
    return run_together([Program(source=program, stdin=stdin, files=files or {}, limits=limits)], kind)[0]


def run_together(
    programs: Sequence[Program], kind: Kind = "bwrap", *, close: Sequence[socket.socket] = ()
) -> list[BoxResult]:
    """Run programs at once, each in a box; when the first one ends, the others are ended.

    Args:
        close: Channels of which this process keeps no copy once the boxes have theirs.

    Raises:
        BoxFailed: As ``run_in_box``.
    """
    boxes: list[_Box] = []
    with selectors.DefaultSelector() as selector:
        try:
            for place, program in enumerate(programs):
                boxes.append(_Box(program, kind, place))
                boxes[-1].register(selector)
            for channel in close:
                channel.close()
            while not boxes[0].ended:
                nearest = min(box.deadline for box in boxes if not box.ended)
                for key, _ in selector.select(max(0.0, nearest - running_s())):
                    if key.fd in selector.get_map():  # its box has not just been stopped
                        key.data(selector)
                for box in boxes:
                    box.check_deadline(selector)
        finally:
            for box in boxes:
                box.end(selector)
    return [box.result() for box in boxes]


class _Box:
    """One box and this process's ends of its pipes. Nothing blocks but ``end``, for as long as processes take to go."""

    def __init__(self, program: Program, kind: Kind, place: int) -> None:
        self._limits = limits = program.limits
        self._kind = kind
        self._folder = tempfile.mkdtemp(prefix="llamarl-box-") if kind == "plain" else None
        self._output: dict[int, bytearray] = {}
        self._status = bytearray()
        self._over: Limit | None = None
        self._broke = False
        """Its first process ended without a word, and nobody had ended it."""
        self.ended = False
        self.wall_s: float | None = None
        self.started = running_s()
        self.deadline = self.started + _START_S
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as passed:
            on_error.callback(self._remove_folder)
            pipes = [os.pipe() for _ in range(4)]
            (self._out, stdout), (self._err, stderr), (wanted, self._wanted), (self._said, status) = pipes
            for fd in (self._out, self._err, self._wanted, self._said):
                on_error.callback(os.close, fd)
                os.set_blocking(fd, False)
            for fd in (stdout, stderr, wanted, status):
                passed.callback(os.close, fd)
            user = _user(place)
            if self._folder is not None and user is not None:
                os.chown(self._folder, user, user)
            stdin = _sealed(program.stdin.encode("utf-8", "surrogatepass"))
            passed.callback(os.close, stdin)
            job = _sealed(_job(program, kind, self._folder or "/tmp", user))
            passed.callback(os.close, job)
            fds = (job, wanted, status, program.channel)
            self._group = make_memory_group((limits.memory_mb + limits.disk_mb + _FIRST_PROCESS_MB) << 20)
            join = self._group.words if self._group is not None else ()
            if self._group is not None:
                on_error.callback(self._group.remove)
            try:
                command = _command(kind, limits, fds)
                if not os.access(command[0], os.X_OK):  # a shell in front would say it in its own words
                    raise FileNotFoundError(f"{command[0]} cannot be run")
                self._process = subprocess.Popen(
                    [*join, *command],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    env={},
                    pass_fds=[fd for fd in fds if fd >= 0],
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                raise BoxFailed(f"the {kind} box cannot be started: {error}") from error
            on_error.pop_all()
        self._output = {self._out: bytearray(), self._err: bytearray()}

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have ``selector`` say when there is something to do."""
        for fd in (self._out, self._err):
            selector.register(fd, selectors.EVENT_READ, lambda selector, fd=fd: self._read_output(selector, fd))
        selector.register(self._said, selectors.EVENT_READ, self._read_status)

    def check_deadline(self, selector: selectors.BaseSelector) -> None:
        """End it where its time is over."""
        if not self.ended and running_s() >= self.deadline:
            self._stop(selector, "time")

    def end(self, selector: selectors.BaseSelector) -> None:
        """End it and wait until all its processes are gone. Safe twice."""
        if self.wall_s is not None:
            return
        self._stop(selector, None)
        try:
            self._process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:  # its first process ends with it
            self._process.kill()
            self._process.wait(_EXIT_WAIT_S)
        for fd in (self._out, self._err):
            self._drain(fd)
            os.close(fd)
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._said, _PIECE):
                self._status += piece
        os.close(self._said)
        self._remove_folder()
        if self._group is not None:
            if self._group.has_killed():
                self._over = self._over or "memory"
            self._group.remove()
        self.wall_s = running_s() - self.started

    def result(self) -> BoxResult:
        """What became of the program; after ``end``.

        Raises:
            BoxFailed: It was never started.
        """
        texts = [bytes(self._output[fd][: self._limits.output_bytes]).decode(errors="replace") for fd in self._output]
        started, mark, rest = bytes(self._status).partition(_STARTED)
        if started or not mark:
            cause = (
                started.decode(errors="replace") or texts[1].strip()[-500:] or f"exit status {self._process.returncode}"
            )
            if self._over == "time":
                cause = f"not ready after {_START_S:.0f} s{cause and ': ' + cause}"
            raise BoxFailed(f"the {self._kind} box did not start: {cause}")
        if rest.startswith(b"failed: "):
            raise BoxFailed(f"the {self._kind} box broke: {rest.decode(errors='replace')}")
        if self._broke and self._over is None:
            raise BoxFailed(f"the {self._kind} box broke: its first process was killed from outside")
        said: dict[str, Any] = json.loads(rest) if rest.endswith(b"}") else {}
        code = None if self._over else said.get("code")
        limit = self._over or said.get("limit")
        if limit is None and code is not None and code != 0:
            limit = limit_in_words(texts[1]) or ("disk" if code == -25 else "time" if code == -24 else None)
        return BoxResult(
            status=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            stdout=texts[0],
            stderr=texts[1],
            wall_s=self.wall_s or 0.0,
            limit=limit,
        )

    def _stop(self, selector: selectors.BaseSelector, limit: Limit | None) -> None:
        if self.ended:
            return
        self.ended = True
        self._over = self._over or limit
        for fd in (self._out, self._err, self._said):
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(fd)
        os.close(self._wanted)  # its first process ends now, and all others with it

    def _read_output(self, selector: selectors.BaseSelector, fd: int) -> None:
        piece = os.read(fd, _PIECE)
        if not piece:
            selector.unregister(fd)
        self._output[fd] += piece
        if len(self._output[fd]) > self._limits.output_bytes:
            self._stop(selector, "output")

    def _read_status(self, selector: selectors.BaseSelector) -> None:
        piece = os.read(self._said, _PIECE)
        known = _STARTED in self._status
        self._status += piece
        if not known and _STARTED in self._status:
            self.started = running_s()
            self.deadline = self.started + self._limits.wall_s
        if not piece:
            self._broke = self._status.endswith(_STARTED)
            self._stop(selector, None)

    def _drain(self, fd: int) -> None:
        """What was still in the pipe."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(fd, _PIECE):
                self._output[fd] += piece
                if len(self._output[fd]) > self._limits.output_bytes:
                    self._over = self._over or "output"
                    return

    def _remove_folder(self) -> None:
        if self._folder is not None:
            _remove(self._folder)


def _sealed(data: bytes) -> int:
    """Make a file in memory that can be read from its beginning, and never changed."""
    fd = new_memory("box")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    seal(fd, SEAL_CONTENT)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _remove(folder: str) -> None:
    """A folder and all in it, whatever rights its owner took away."""
    for path, names, _ in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                os.chmod(os.path.join(path, name), 0o700, follow_symlinks=False)
    shutil.rmtree(folder, ignore_errors=True)


_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
"""Where the C library and its loader lie."""


@dataclass(frozen=True, slots=True)
class Installation:
    """What is bound into a box."""

    python: str
    """The interpreter, not the link to it that a virtual environment has."""
    packages: tuple[str, ...]
    """Folders of installed packages, put behind the standard library."""
    readable: tuple[str, ...]
    """Files and folders, none inside another."""
    links: tuple[tuple[str, str], ...]
    """Symbolic links at the top, such as /lib, and what they say."""


@cache
def find_installation() -> Installation:
    """Of the interpreter that runs this."""
    python = os.path.realpath(sys.executable)
    packages = dict.fromkeys(os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    base = {name: sys.base_prefix for name in ("base", "platbase", "installed_base", "installed_platbase")}
    stdlib = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    libraries = [os.path.join(os.path.dirname(os.path.dirname(python)), name) for name in ("lib", "lib64")]
    if library := sysconfig.get_config_var("LIBDIR"):
        libraries.append(library)
    links, readable = [], [python, *packages, *stdlib, *libraries]
    for path in _SYSTEM:
        if os.path.islink(path):
            links.append((path, os.readlink(path)))
        else:
            readable.append(path)
    return Installation(python, tuple(packages), without_nested(filter(os.path.exists, readable)), tuple(links))


def without_nested(paths: Iterable[str]) -> tuple[str, ...]:
    """Without those that lie inside another, in order of their names."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths}):
        if not any(path.startswith(outer + "/") for outer in kept):
            kept.append(path)
    return tuple(kept)


def _job(program: Program, kind: Kind, folder: str, user: int | None) -> bytes:
    """What ``inside`` is told."""
    installation = find_installation()
    for name in program.files:
        if os.path.isabs(name) or ".." in name.split("/") or name == "main.py":
            raise ValueError(f"file {name!r} must have a relative name inside the box's folder, other than main.py")
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment["PYTHONPATH"] = os.pathsep.join(installation.packages)
    shared_count = kind == "plain" and user is None or not _counts_by_namespace()
    job = {
        "files": {"main.py": program.source, **program.files},
        "argv": [installation.python, "-s", "-S", "-B", "-X", "utf8", "-X", "int_max_str_digits=0", "main.py"],
        "python": installation.python,
        "environment": environment,
        "folder": folder,
        "plain": kind == "plain",
        "may_hide": program.may_hide,
        "uid": user,
        "others": _tasks_of(os.getuid()) if shared_count and user is None else 1,
        "limits": asdict(program.limits),
    }
    return json.dumps(job).encode()


def _command(kind: Kind, limits: BoxLimits, fds: tuple[int, int, int, int]) -> list[str]:
    """The words that start a box.

    Args:
        fds: ``inside.main``'s arguments.

    Raises:
        BoxFailed: The user that a plain box's program becomes cannot reach this Python.
        FileNotFoundError: There is no bubblewrap.
    """
    installation, script = find_installation(), Path(__file__).with_name("inside.py")
    if kind == "plain":
        own = [path for path in installation.readable if path not in installation.packages]
        if os.geteuid() == 0 and (hidden := hidden_folder([installation.python, *own])):
            raise BoxFailed(
                f"the plain box runs programs as a user without rights, who may not enter {hidden}, where this Python "
                f"({installation.python}) lies: use one outside of it (/usr, /opt), or chmod o+x {hidden}"
            )
        return [installation.python, "-I", "-S", "-B", str(script), *map(str, fds)]
    found = shutil.which("bwrap")
    if found is None:
        raise FileNotFoundError("bubblewrap (bwrap) is not installed")
    words = [found, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "box"]
    if os.geteuid() == 0:  # stays root in the first process, which makes the program another user
        words += ["--cap-drop", "ALL"]
        for name in ("CHOWN", "KILL", "SETGID", "SETUID", "SYS_PTRACE"):
            words += ["--cap-add", f"CAP_{name}"]
    else:
        words += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    parents = {str(folder) for path in (*installation.readable, "/dev/null") for folder in Path(path).parents} - {"/"}
    for folder in sorted(parents):  # bubblewrap would let root alone enter them
        words += ["--perms", "0755", "--dir", folder]
    for path in installation.readable:
        words += ["--ro-bind", path, path]
    for path, target in installation.links:
        words += ["--symlink", target, path]
    words += ["--proc", "/proc", "--symlink", "/tmp", "/dev/shm", "--symlink", "/proc/self/fd/0", "/dev/stdin"]
    for name in ("null", "full", "random", "urandom"):  # of zero one can map memory that nobody can count
        words += ["--dev-bind-try", f"/dev/{name}", f"/dev/{name}"]
    words += ["--perms", "1777", "--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp", "--remount-ro", "/"]
    words += ["--chdir", "/tmp", installation.python, "-I", "-S", "-B", "-c", script.read_text(encoding="utf-8")]
    return [*words, *map(str, fds)]


def hidden_folder(paths: Iterable[str]) -> Path | None:
    """The first folder on the way to any of them that a stranger may not enter."""
    folders = (folder for path in paths for folder in reversed(Path(path).parents))
    return next((folder for folder in folders if not folder.stat().st_mode & stat.S_IXOTH), None)


def box_user(uid_map: str, process: int, place: int) -> int:
    """A user id that nobody else has, for the program of a box that root starts.

    Args:
        uid_map: What ``/proc/self/uid_map`` says: which ids there are here.
        process: With ``place``, makes it another one for each box at a time: the kernel counts
            their processes apart, and keeps the memory of one from the other.
    """
    lines = [[int(word) for word in line.split()] for line in uid_map.splitlines()]
    most = max((first + count for first, _, count in lines), default=1)
    number = 4 * process + place
    if most > 1 << 31:
        return 1_000_000_000 + number
    if most > 60_000:
        return 30_000 + number % 30_000
    return most - 1 - place


def _user(place: int) -> int | None:
    """Who the program becomes where root starts it."""
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return box_user(file.read(), os.getpid(), place)


def _counts_by_namespace() -> bool:
    """Whether the kernel counts a user's processes in each user namespace apart (Linux 5.14)."""
    version = os.uname().release.split(".")
    return (int(version[0]), int("".join(filter(str.isdigit, version[1])) or 0)) >= (5, 14)


def _tasks_of(user: int) -> int:
    """Processes and threads that a user has on this machine."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
    return total


@cache
def why_no_box(kind: Kind) -> str:
    """Empty where boxes of a kind work here, else why not. Tried once a process, with a program
    that tells the answer."""
    try:
        found = run_together([Program(source="print(6 * 7)", limits=BoxLimits(wall_s=20.0))], kind)[0]
    except BoxFailed as error:
        return str(error)
    return "" if (found.status, found.stdout) == (0, "42\n") else f"a program in it ended so: {found}"
