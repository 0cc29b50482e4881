"""Programs that try what no answer to a question needs, and what must become of each in a box with a pid namespace.

Name -> (program, what holds of its result). The limits that they run under are ``LIMITS``; those that would run for ever get
``SHORT``. A program prints what it got hold of: ``caught`` is an attempt that failed, anything else is a hole.
"""

from collections.abc import Callable

from llamarl.environments.sandbox.limits import BoxLimits, BoxResult

__all__ = ["ENDLESS", "HOSTILE", "LIMITS", "SHORT"]

LIMITS = BoxLimits(wall_s=8.0, memory_mb=192, processes=8, disk_mb=2, files=60, output_bytes=1 << 16)
SHORT = BoxLimits(wall_s=0.4, memory_mb=192, processes=8, disk_mb=2, files=60, output_bytes=1 << 16)

Check = Callable[[BoxResult], bool]


def _caught(result: BoxResult) -> bool:
    return result.ok and result.stdout == "caught\n"


def _over(limit: str) -> Check:
    return lambda result: not result.ok and result.limit == limit


def _ended_by(number: int) -> Check:
    return lambda result: result.signal == number and result.status is None


def _attempt(body: str, errors: str = "OSError") -> str:
    indented = "\n".join("    " + line for line in body.strip().splitlines())
    return f"import os, sys, socket, ctypes, resource, signal\ntry:\n{indented}\nexcept ({errors}) as e:\n    print('caught')\n"


ENDLESS: dict[str, str] = {
    "sleeps": "import time\ntime.sleep(1000)",
    "spins": "while True: pass",
    "sleeps deaf to every signal": "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: time.sleep(100)",
    "threads that do not end": "import threading, time\nfor _ in range(4):\n    threading.Thread(target=time.sleep, args=(1000,)).start()",
    "sleeps in a new session of a new group": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\nos.wait()\ntime.sleep(1000)",
    "waits for input that never comes": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "fork bomb of forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "a huge power": "x = 10 ** (10 ** 10)",
    "a bad regular expression": "import re\nre.match('(a+)+$', 'a' * 64 + 'b')",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass",
}  # fmt: skip
"""These end by the clock."""

HOSTILE: dict[str, tuple[str, Check]] = {
    "fork bomb": ("import os, time\nn = 0\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(100)\n        n += 1\n"
                  "except OSError: print('caught' if n < 12 else n)", lambda r: _caught(r) or _over("processes")(r)),
    "threads without end": ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
                            _over("processes")),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", _over("memory")),
    "memory of many": ("import os, time\nfor _ in range(5):\n    if os.fork() == 0: break\nx = bytearray(os.urandom(1 << 20) * 90)\ntime.sleep(30)",
                       _over("memory")),
    "shared memory": (_attempt("import mmap\nx = [mmap.mmap(-1, 64 << 20) for _ in range(20)]\nfor m in x: m[:] = b'x' * (64 << 20)\nprint(len(x))",
                               "OSError, MemoryError"), lambda r: _caught(r) or _over("memory")(r)),
    "memory behind a file descriptor": (_attempt("os.memfd_create('x')\nprint('got one')"), _caught),
    "huge pages pinned in pipes": ("""
import ctypes, fcntl, mmap, os
class Piece(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]
c, held = ctypes.CDLL(None, use_errno=True), 0
pages = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
pages.madvise(mmap.MADV_HUGEPAGE)
start = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + (2 << 20) - 1 & -(2 << 20)
for _ in range(20):
    into = os.pipe()[1]
    fcntl.fcntl(into, 1031, 1 << 20)
    for _ in range(16):
        ctypes.memset(start, 1, 2 << 20)
        held += max(0, c.vmsplice(into, ctypes.byref(Piece(start, 1)), 1, 2))
        pages.madvise(mmap.MADV_DONTNEED)
print(held or 'caught')
""", _caught),
    "megabytes behind sockets": ("""
import socket
held, kept = 0, []
for _ in range(20):
    pair = socket.socketpair()
    kept.append(pair)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
        try: pair[0].setsockopt(socket.SOL_SOCKET, option, 1 << 30)
        except OSError: pass
    pair[0].setblocking(False)
    try:
        while True: held += pair[0].send(bytes(1 << 16))
    except BlockingIOError: pass
print('caught' if held < 20 << 20 else held)
""", _caught),
    "splice and tee": (_attempt("c = ctypes.CDLL(None, use_errno=True)\na, b, e = os.pipe(), os.pipe(), os.pipe()\nos.write(a[1], b'xx')\n"
                                "print('caught' if c.tee(a[0], b[1], 1, 0) < 0 and c.splice(a[0], None, e[1], None, 1, 0) < 0 else 'moved')"), _caught),
    "huge pages": ("print('caught' if 'THP_enabled:\\t0' in open('/proc/self/status').read() else 'has them')", _caught),
    "System V shared memory": (_attempt("c = ctypes.CDLL(None, use_errno=True)\nprint('caught' if c.shmget(0, 1 << 30, 0o1600) < 0 else 'got it')"), _caught),
    "output without end": ("while True: print('x' * 1000)", _over("output")),
    "errors without end": ("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", _over("output")),
    "a huge exception": ("raise ValueError('x' * (1 << 20))", _over("output")),
    "a large file": ("open('big', 'wb').write(b'x' * (8 << 20))", _over("disk")),
    "files that fill the disk": ("for i in range(50): open(str(i), 'wb').write(b'x' * (1 << 19))", _over("disk")),
    "files without end": ("for i in range(10 ** 6): open(str(i), 'w').close()", _over("disk")),
    "folders in folders": ("import os\nfor i in range(10 ** 5):\n    os.mkdir('d'); os.chdir('d')", _over("disk")),
    "reads the users of the machine": (_attempt("print(open('/etc/passwd').read())"), _caught),
    "reads the parent's files": (_attempt("print(open('@SECRET@').read())"), _caught),
    "reads the home folder": (_attempt("print([n for n in os.listdir('/root') if n != '.pyenv'] or 1 / 0)", "OSError, ZeroDivisionError"), _caught),
    "reads its environment": ("import os\nprint('caught' if '@TOKEN@' not in str(os.environ) else os.environ)", _caught),
    "reads the environment of process 1": (_attempt("print(open('/proc/1/environ').read())"), _caught),
    "reads the environment of all others": (
        "import glob, os\nfound = ''\nfor f in glob.glob('/proc/[0-9]*/environ'):\n    try: found += open(f).read()\n    except OSError: pass\n"
        "print('caught' if '@TOKEN@' not in found else 'leaked')", _caught),
    "sees other processes": ("import os\nprint('caught' if sum(n.isdigit() for n in os.listdir('/proc')) <= 2 else os.listdir('/proc'))", _caught),
    "opens what process 1 has open": (_attempt("print(os.listdir('/proc/1/fd'))"), _caught),
    "the root of process 1": (_attempt("print(os.listdir('/proc/1/root'))"), _caught),
    "memory of process 1": (_attempt("open('/proc/1/mem', 'rb')\nprint('opened')"), _caught),
    "network": (_attempt("socket.create_connection(('127.0.0.1', @PORT@), 2)\nprint('connected')"), _caught),
    "network by address": (_attempt("s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('8.8.8.8', 53))\nprint('sent')"), _caught),
    "names": (_attempt("print(socket.getaddrinfo('example.org', 80))"), _caught),
    "an abstract socket of the parent": (_attempt("s = socket.socket(socket.AF_UNIX)\ns.connect('\\0@ABSTRACT@')\nprint('connected')"), _caught),
    "raw and netlink sockets": (_attempt("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\nprint('made')"), _caught),
    "signals the parent": (_attempt("os.kill(@PID@, signal.SIGTERM)\nprint('sent')"), _caught),
    "signals everybody": (_attempt("os.kill(-1, signal.SIGKILL)\nprint('sent')"), _caught),
    "kills process 1": ("import os, signal, time\nfor n in (9, 15, 2, 19, 24, 1, 14, 13):\n    try: os.kill(1, n)\n    except OSError: pass\n"
                        "time.sleep(.1)\nprint('caught')", _caught),
    "limits of process 1": (_attempt("resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))\nprint('set')"), _caught),
    "its own limits": (_attempt("resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nprint('set')", "OSError, ValueError"), _caught),
    "ptrace": ("import ctypes\nprint('caught' if ctypes.CDLL(None).ptrace(16, 1, 0, 0) < 0 else 'attached')", _caught),
    "mounts": ("import ctypes\nc = ctypes.CDLL(None)\nprint('caught' if c.mount(b'x', b'/tmp', b'tmpfs', 0, None) < 0 else 'mounted')", _caught),
    "namespaces of its own": ("import ctypes\nprint('caught' if ctypes.CDLL(None).unshare(0x10000000) < 0 else 'has them')", _caught),
    "becomes root": (_attempt("os.setuid(0)\nprint('root')"), _caught),
    "writes outside": (_attempt("open('/out', 'w')\nprint('written')"), _caught),
    "writes to the Python installation": (_attempt("open(os.__file__, 'a')\nprint('written')"), _caught),
    "writes to a package": (_attempt("open(os.path.join(os.path.dirname(os.__file__), 'x.py'), 'w')\nprint('written')"), _caught),
    "leaves by a link": (_attempt("os.symlink('/etc', 'l')\nprint(open('l/passwd').read())"), _caught),
    "leaves by dots": (_attempt("print(open('../../../../../etc/passwd').read())"), _caught),
    "makes a file of root's": (_attempt("open('s', 'w').write('x')\nos.chown('s', 0, 0)\nprint('made')"), _caught),
    "takes the rights of its folder": ("import os\nopen('x', 'w').close()\nos.chmod('x', 0)\nos.mkdir('d')\nos.chmod('d', 0)\nprint('caught')", _caught),
    "devices": (_attempt("os.mknod('d', 0o60600, os.makedev(254, 0))\nprint('made')"), _caught),
    "looks for devices": ("import os\nprint('caught' if {'null', 'zero', 'full', 'random', 'urandom', 'shm', 'stdin'} >= set(os.listdir('/dev')) else os.listdir('/dev'))", _caught),
    "the kernel's log and settings": (_attempt("open('/proc/sys/kernel/hostname', 'w').write('x')\nprint('written')"), _caught),
    "writes to every descriptor": ("import os\nfor fd in range(3, 300):\n    try: os.write(fd, b'{\"code\": 0}started')\n    except OSError: pass\nprint('caught')\nraise SystemExit(0)", _caught),
    "closes every descriptor": ("import os\nos.closerange(0, 300)\nos._exit(5)", lambda r: r.status == 5 and r.stdout == ""),
    "a child that stays behind": ("import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\nprint('caught')", _caught),
    "a child that holds the output open": ("import subprocess, sys\nsubprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\nprint('caught', flush=True)", _caught),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n): return list(map(f, [n]))\nf(0)", lambda r: not r.ok),
    "deep data": ("x = ()\nfor _ in range(10 ** 6): x = (x,)\nprint(hash(x))", lambda r: not r.ok),
    "a fault": ("import ctypes\nctypes.string_at(0)", _ended_by(11)),
    "aborts": ("import os\nos.abort()", _ended_by(6)),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", _ended_by(9)),
    "exits": ("raise SystemExit(7)", lambda r: r.status == 7),
    "exits at once": ("import os\nos._exit(0)", lambda r: r.ok and r.stdout == ""),
    "says that it started, and how it ended": ("print('started\\n{\"code\": 0}')\nraise SystemExit(4)", lambda r: r.status == 4),
    "imports what runs it": (_attempt("import llamarl.environments.sandbox.run\nprint('imported')", "ImportError"), _caught),
    "puts a module of its own in the library's place": ("import sys, types\nsys.modules['json'] = types.ModuleType('json')\nprint('caught')", _caught),
    "starts another program": (_attempt("import subprocess\nsubprocess.run(['/bin/sh', '-c', 'id'], check=True)\nprint('ran')"), _caught),
    "a timer and an alarm": ("import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(5)", _ended_by(14)),
}  # fmt: skip
"""These end by themselves, or by a limit that is not the clock."""
