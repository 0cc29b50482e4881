"""A box made of Linux's own namespaces, where there is no bubblewrap: a new root, and process 1 in it.

Stands alone, as ``inside`` does: run by path, outside of the box, with ``python -I -S``. Root stays root in the box's first
process alone (the program becomes a user that nobody else is); an ordinary user needs user namespaces.

    new root (a small tmpfs, read-only) = Python and C libraries, bound read-only + /proc + a few of /dev + /tmp, a tmpfs
"""

import ctypes
import json
import os
import signal
import struct
import sys
from typing import Any

__all__ = ["build_root", "main"]

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_KEPT_CAPABILITIES = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 19  # CHOWN, KILL, SETGID, SETUID, SYS_PTRACE
_DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def _check(what: str, result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    _check(f"mount {target}", _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))


def _leave() -> None:
    """New namespaces of every kind; the next child is process 1."""
    spaces = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET | _NEWCGROUP
    if os.geteuid() == 0 and not _libc.unshare(spaces):
        return
    user, group = os.geteuid(), os.getegid()
    _check("unshare", _libc.unshare(spaces | _NEWUSER))
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _make_read_only(path: str) -> None:
    attributes = struct.pack("=QQQQ", _RDONLY | _NOSUID | _NODEV, 0, 0, 0)
    recursive = 0x8000
    if not _libc.syscall(_MOUNT_SETATTR, -100, os.fsencode(path), recursive, attributes, len(attributes)):
        return
    there = os.statvfs(path).f_flag  # an older kernel: flags that are set must stay set
    kept = there & (_NOSUID | _NODEV | _NOEXEC | 1024 | 2048) | (1 << 21 if there & 4096 else 0)
    _mount(None, path, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | kept)


def _bind(source: int, is_folder: bool, target: str) -> None:
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
        open(target, "a").close()
    _mount(f"/proc/self/fd/{source}", target, None, _BIND | _REC)
    os.close(source)


def build_root(spec: dict[str, Any]) -> None:
    """In process 1: the new root, and into it."""
    machine = os.uname().machine
    if machine not in _PIVOT_ROOT:
        raise OSError(f"no box of namespaces on {machine}")
    _mount(None, "/", None, _REC | _PRIVATE)
    devices = [f"/dev/{name}" for name in _DEVICES if os.path.exists(f"/dev/{name}")]
    opened = [
        (path, os.open(path, os.O_PATH | os.O_CLOEXEC), os.path.isdir(path)) for path in [*spec["readable"], *devices]
    ]
    root = "/tmp"
    _mount("box", root, "tmpfs", _NOSUID, "size=4m,nr_inodes=4096,mode=755")
    for path, fd, is_folder in opened:
        _bind(fd, is_folder, root + path)
        if path not in devices:
            _make_read_only(root + path)
    for path, target in spec["links"].items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    for name in ("proc", "tmp"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    os.symlink("/tmp", f"{root}/dev/shm")
    try:
        _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    except OSError:  # refused in containers that hide parts of their own: the box does without
        pass
    size = f"size={spec['disk_mb']}m,nr_inodes={spec['files'] + 8},mode=1777"
    _mount("box", f"{root}/tmp", "tmpfs", _NOSUID | _NODEV, size)
    os.chdir(root)
    _check("pivot_root", _libc.syscall(_PIVOT_ROOT[machine], b".", b"."))
    _check("umount", _libc.umount2(b".", 2))
    os.chdir("/")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    _check("sethostname", _libc.sethostname(b"box", 3))
    kept = _KEPT_CAPABILITIES if os.geteuid() == 0 else 0
    header = struct.pack("=II", 0x20080522, 0)
    _check("capset", _libc.syscall(_CAPSET[machine], header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)))


def main() -> None:
    """``SPEC WANTED STATUS CHANNEL``: the last three go to ``inside.main``."""
    spec = json.loads(sys.argv[1])
    wanted, status, channel = map(int, sys.argv[2:5])
    inside: dict[str, Any] = {"__name__": "inside"}
    with open(os.path.join(os.path.dirname(__file__), "inside.py"), "rb") as file:
        exec(compile(file.read(), "inside.py", "exec"), inside)
    _libc.prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    try:
        _leave()
        first = os.fork()
        if first == 0:
            _libc.prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
            build_root(spec)
            inside["main"](wanted, status, channel)
    except BaseException as error:
        os.write(status, f"failed: {type(error).__name__}: {error}".encode(errors="replace"))
        os._exit(1)
    for fd in (0, 1, 2, wanted, status, *([channel] if channel >= 0 else ())):
        os.close(fd)
    os.waitpid(first, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
