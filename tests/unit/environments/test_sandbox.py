"""Hostile programs in every kind of box that this machine has: each ends, and nothing else notices."""

import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile_programs import ENDLESS, HOSTILE, LIMITS, SHORT
from waiting import wait_until

from llamarl import running_time
from llamarl.environments.code import CodeOptions, judge_program
from llamarl.environments.sandbox import inside, run
from llamarl.environments.sandbox.inside import syscall_filter
from llamarl.environments.sandbox.limits import BoxFailed, BoxLimits, limit_in_words
from llamarl.environments.sandbox.run import (
    Installation,
    Kind,
    Program,
    box_user,
    run_in_box,
    run_together,
    why_no_box,
    without_nested,
)
from llamarl.process_tree import adopt_orphans

SYSTEM_PYTHON = "/usr/bin/python3"
TOKEN = "only-the-parent-knows-this"


@pytest.fixture
def kind() -> Kind:
    if why := why_no_box("bwrap"):
        pytest.skip(f"no bwrap box here: {why}")
    return "bwrap"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    """A plain box; where root's Python lies in a folder that only root may enter, the system's Python runs in it."""
    if why_no_box("plain"):
        real = os.path.realpath(SYSTEM_PYTHON)
        if not os.path.exists(real):
            pytest.skip(f"no plain box here: {why_no_box('plain')}")
        monkeypatch.setattr(run, "find_installation", lambda: Installation(real, (), (), ()))
    yield "plain"


@pytest.fixture(autouse=True, scope="module")
def _orphans_come_here() -> None:
    adopt_orphans()  # so that a process that outlived its box would be a child of this one


def test_time_for_which_the_whole_job_was_stopped_is_none_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, stopped = [1000.0], list[str | None]()
    monkeypatch.setattr(running_time, "_time", running_time.RunningTime(lambda: now_s[0]))
    box = object.__new__(run._Box)
    box.ended, box.deadline = False, running_time.running_s() + 5.0
    box._stop = lambda selector, limit: stopped.append(limit)  # type: ignore[method-assign]
    found = []
    for step_s in (1.5, 60.0, 1.5, 1.5, 1.5):  # a minute of SIGSTOP, or of a paused container
        now_s[0] += step_s
        with selectors.DefaultSelector() as selector:
            box.check_deadline(selector)
        found.append(len(stopped))
    assert found == [0, 0, 0, 0, 1] and stopped == ["time"]


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as own:  # other tests beside this one make boxes too
        os.chmod(own, 0o755)  # plain boxes of other users lie in it
        monkeypatch.setattr(tempfile, "tempdir", own)
        yield from _nothing_is_left()


def _nothing_is_left() -> Iterator[None]:
    before = children(), set(os.listdir(tempfile.gettempdir())), open_files()
    yield
    until = time.monotonic() + 2.0
    while children() - before[0] and time.monotonic() < until:
        time.sleep(0.005)
    assert children() - before[0] == set()
    assert {n for n in set(os.listdir(tempfile.gettempdir())) - before[1] if n.startswith("llamarl-box")} == set()
    assert open_files() == before[2]


def children() -> set[str]:
    return {
        number
        for task in os.listdir("/proc/self/task")
        for number in Path(f"/proc/self/task/{task}/children").read_text().split()
    }


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the parent has, for programs to reach for."""
    secret = tmp_path_factory.mktemp("secret") / "token.txt"
    secret.write_text(TOKEN)
    secret.chmod(0o644)
    name = f"llamarl-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + name)
        abstract.listen()
        os.environ["LLAMARL_TEST_TOKEN"] = TOKEN
        yield {
            "@SECRET@": str(secret),
            "@TOKEN@": TOKEN,
            "@PORT@": str(server.getsockname()[1]),
            "@ABSTRACT@": name,
            "@PID@": str(os.getpid()),
        }
        del os.environ["LLAMARL_TEST_TOKEN"]


def filled(program: str, outside: dict[str, str]) -> str:
    for word, value in outside.items():
        program = program.replace(word, value)
    return program


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_gets_nowhere(name: str, kind: Kind, outside: dict[str, str]) -> None:
    program, holds = HOSTILE[name]
    result = run_in_box(filled(program, outside), limits=LIMITS, kind=kind)
    assert holds(result), result
    assert result.limit != "time", result


@pytest.mark.parametrize("name", ENDLESS)
def test_a_program_without_end_is_ended_by_the_clock(name: str, kind: Kind) -> None:
    result = run_in_box(ENDLESS[name], limits=SHORT, kind=kind)
    assert (result.status, result.signal, result.limit) == (None, None, "time")
    assert SHORT.wall_s <= result.wall_s < SHORT.wall_s + 2


def test_a_program_runs_with_its_input_and_files(kind: Kind) -> None:
    program = (
        "import helper\nprint(helper.twice(int(input())), open('data/a.txt').read(), len(open('/dev/stdin').read()))"
    )
    files = {"helper.py": "def twice(x): return 2 * x", "data/a.txt": "héllo"}
    result = run_in_box(program, stdin="21\n", files=files, limits=LIMITS, kind=kind)
    assert (result.status, result.stdout, result.stderr, result.limit) == (0, "42 héllo 3\n", "", None)


def test_much_input_and_output_pass_whole(kind: Kind) -> None:
    text = "x" * 3_000_000
    result = run_in_box("print(input())", stdin=text, limits=BoxLimits(output_bytes=1 << 22), kind=kind)
    assert result.stdout == text + "\n"


def test_output_is_cut_at_its_limit_and_what_is_no_text_is_replaced(kind: Kind) -> None:
    limits = replace(LIMITS, output_bytes=4)
    assert run_in_box("print('abcdefgh')", limits=limits, kind=kind).stdout == "abcd"
    assert run_in_box("import sys; sys.stdout.buffer.write(b'a\\xff')", limits=limits, kind=kind).stdout == "a�"


def test_two_boxes_at_once_see_neither_each_others_files_nor_processes(kind: Kind) -> None:
    program = "import os, time\nopen('mine', 'w').close()\ntime.sleep(.1)\nprint(sorted(os.listdir('.')), len([n for n in os.listdir('/proc') if n.isdigit()]))"
    results = run_together([Program(source=program, limits=LIMITS), Program(source=program + "\ntime.sleep(60)")], kind)
    assert results[0].stdout == "['main.py', 'mine'] 2\n"
    assert (results[1].status, results[1].signal) == (None, None)  # ended with the first


def test_common_modules_work_in_a_box(kind: Kind) -> None:
    program = """
import asyncio, collections, dataclasses, datetime, decimal, hashlib, heapq, itertools, json, math, multiprocessing, random, re
import sqlite3, statistics, string, subprocess, sys, tempfile, threading, typing, unittest, uuid
async def main(): await asyncio.sleep(0); return 3
def child(q): q.put(5)
print(asyncio.run(main()), hashlib.sha256(b'').hexdigest()[:4], len(uuid.uuid4().hex))
with tempfile.TemporaryFile() as f: f.write(b'x')
t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()
q = multiprocessing.get_context('fork').SimpleQueue(); p = multiprocessing.get_context('fork').Process(target=child, args=(q,))
p.start(); print(q.get()); p.join()
print(subprocess.run([sys.executable, '-S', '-c', 'print(1)'], capture_output=True, text=True).stdout)
"""
    result = run_in_box(program, kind=kind, limits=BoxLimits(wall_s=20.0))
    assert result.stdout == "3 e3b0 32\nthread\n5\n1\n\n", result


def test_a_box_ends_when_its_caller_is_interrupted(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: object, selector: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llamarl.environments.sandbox.run._Box.check_deadline", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_in_box("import time\ntime.sleep(60)", kind=kind)


def test_a_box_ends_with_the_process_that_started_it(kind: Kind) -> None:
    before = children()
    code = f"from llamarl.environments.sandbox.run import run_in_box\nrun_in_box('import time; print(1); time.sleep(60)', kind={kind!r})"
    caller = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: has_program(caller.pid))
    until = time.monotonic() + 20
    caller.kill()
    caller.wait()  # and that nothing is left, the fixture proves
    while children() - before and time.monotonic() < until:
        with_orphan = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
        if with_orphan is None:
            time.sleep(0.01)


def has_program(caller: int) -> bool:
    for number in below(str(caller)):
        try:
            if b"main.py" in Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


def below(number: str) -> list[str]:
    try:
        found = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    except OSError:
        return []
    return found + [deeper for child in found for deeper in below(child)]


@pytest.mark.parametrize(
    "name", ["memory", "huge pages pinned in pipes", "megabytes behind sockets", "huge pages", "fork bomb", "output without end", "a large file", "network", "raw and netlink sockets", "signals the parent",
             "ptrace", "mounts", "namespaces of its own", "memory behind a file descriptor", "a child that stays behind",
             "writes to every descriptor", "reads the environment of all others", "exits at once", "a fault"],
)  # fmt: skip
def test_a_plain_box_holds_what_it_promises(name: str, plain: Kind, outside: dict[str, str]) -> None:
    program, holds = HOSTILE[name]
    result = run_in_box(filled(program, outside), limits=LIMITS, kind=plain)
    assert holds(result), result


def test_memory_of_a_process_that_lets_nobody_look_into_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an ordinary user sees one that has called prctl(PR_SET_DUMPABLE, 0)."""
    program = "x = bytearray(64 << 20); print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"

    def refused(path: str, *how: Any) -> Any:
        if path.endswith(("smaps_rollup", "maps")):
            raise PermissionError(path)
        return open(path, *how)

    monkeypatch.setattr(inside, "open", refused, raising=False)
    try:
        for count in (inside._own_bytes, inside._shared_bytes):  # all that it has mapped, for want of better
            assert 64 << 20 <= count([str(child.pid)]) < 512 << 20
    finally:
        child.kill()
        child.wait()
    assert inside._own_bytes([str(child.pid)]) == 0


SHARED = """
import mmap, os, time
try:
    mmap.mmap(-1, 4096)
except PermissionError:  # where a system call can be refused
    print('refused', flush=True)
zero = os.open('/dev/zero', os.O_RDWR)
for _ in range(6):
    kept = mmap.mmap(zero, 50 << 20)
    for place in range(0, 50 << 20, 4096):
        kept[place] = 1
    if not os.fork():
        time.sleep(20)
        os._exit(0)
    kept.close()
time.sleep(10)
"""


def test_memory_that_processes_share_counts_also_where_no_page_table_has_it(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "make_memory_group", lambda num_bytes: None)
    found = run_in_box(SHARED, limits=BoxLimits(wall_s=15.0, memory_mb=128), kind=kind)
    assert found.stdout == "refused\n"
    if kind == "plain":
        assert found.limit == "memory"
    else:
        assert "No such file or directory: '/dev/zero'" in found.stderr


WITHOUT_LEADERS = """
import ctypes, os, threading, time
def work():
    time.sleep(0.3)
    kept = bytearray(60 << 20)
    time.sleep(20)
for _ in range(6):
    if os.fork() == 0:
        threading.Thread(target=work).start()
        ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)
time.sleep(20)
"""


def test_memory_of_processes_whose_first_thread_has_ended_counts(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "make_memory_group", lambda num_bytes: None)
    found = run_in_box(WITHOUT_LEADERS, limits=BoxLimits(wall_s=15.0, memory_mb=160), kind=kind)
    assert found.limit == "memory", found


REFUSED_CALLS = """
import ctypes, os, socket
libc, file = ctypes.CDLL(None, use_errno=True), os.open('main.py', os.O_RDONLY)
try:
    os.sendfile(socket.socketpair()[0].fileno(), file, 0, 2)
except PermissionError:
    print('sendfile')
for number in (294, 444, 222) if os.uname().machine == 'x86_64' else (26, 444, 107):  # inotify, Landlock, timers
    print(libc.syscall(number, 0, 0, 0), ctypes.get_errno())
"""


def test_calls_that_hold_memory_which_no_process_has_are_refused(kind: Kind) -> None:
    assert run_in_box(REFUSED_CALLS, kind=kind).stdout == "sendfile\n" + 3 * "-1 1\n"


SHOOTS = """
import fcntl, os, socket
one, other = socket.socketpair()
for command, value in ((8, int(open('victim').read())), (10, 9), (15, b'\\0' * 8)):  # F_SETOWN, F_SETSIG, F_SETOWN_EX
    try:
        fcntl.fcntl(one, command, value)
    except PermissionError:
        print('refused')
fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
other.send(b'x')
"""


def test_a_descriptors_signals_reach_no_other_process(plain: Kind) -> None:
    found = run_in_box(SHOOTS.replace("open('victim').read()", repr(str(os.getpid()))), kind=plain)
    assert found.stdout == 3 * "refused\n" and found.status == 0, found


PAGE_TABLES = """
import ctypes, os, time
map_at = ctypes.CDLL(None).mmap
map_at.restype, map_at.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *4 * [ctypes.c_long]]
os.fork()
for number in range(12_000):  # a page that is read, alone in its GiB, holds nothing but two pages of tables
    ctypes.string_at(map_at(0x100000000000 + (number << 30), 4096, 1, 0x22, -1, 0), 1)
time.sleep(10)
"""


def test_tables_of_pages_count(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "make_memory_group", lambda num_bytes: None)
    found = run_in_box(PAGE_TABLES, limits=BoxLimits(wall_s=15.0, memory_mb=128), kind=kind)
    assert found.limit == "memory", found


HIDES = """
import ctypes, os, shutil, subprocess, sys, time
shutil.copy(os.path.realpath(sys.executable), 'own')
os.chmod('own', 0o111)
print(ctypes.CDLL(None).prctl(4, 0, 0, 0, 0), flush=True)
takes = 'import time; kept = bytearray(60 << 20); time.sleep(20)'
for _ in range(6):
    subprocess.Popen(['./own', '-I', '-c', takes], env={**os.environ, 'PYTHONHOME': sys.base_prefix})
time.sleep(10)
"""


def test_memory_that_processes_of_an_ordinary_user_hide_counts_for_their_box() -> None:
    said = as_nobody(
        "from llamarl.environments.sandbox import run\nfrom llamarl.environments.sandbox.limits import BoxLimits\n"
        "run.make_memory_group = lambda num_bytes: None\n"
        f"done = run.run_in_box({HIDES!r}, limits=BoxLimits(wall_s=15.0, memory_mb=160, disk_mb=64), kind='bwrap')\n"
        "print(done.limit, done.stdout)"
    )
    assert said.stdout == "memory -1\n\n", said


@pytest.mark.parametrize("name", ["sleeps", "sleeps deaf to every signal", "sleeps in a new session of a new group"])
def test_a_plain_box_ends_by_the_clock(name: str, plain: Kind) -> None:
    assert run_in_box(ENDLESS[name], limits=SHORT, kind=plain).limit == "time"


READS_MEMORY = r"""
import glob, re
def scramble(x):
    for folder in glob.glob('/proc/[0-9]*'):
        try:
            maps, memory = open(folder + '/maps').read(), open(folder + '/mem', 'rb', 0)
        except OSError:
            continue
        for line in maps.splitlines():
            first, last = (int(word, 16) for word in line.split()[0].split('-'))
            try:
                memory.seek(first)
                found = re.search(rb'assert scramble\(%d\) == (-?\d+)' % x, memory.read(min(last - first, 32 << 20)))
            except (OSError, OverflowError, ValueError):
                continue
            if found:
                return int(found[1])
    return 0
"""
TESTS = ["assert scramble(2) == 81234567", "assert scramble(11) == -40506"]


def test_in_a_plain_box_of_roots_the_tests_cannot_be_read_from_other_processes_memory(plain: Kind) -> None:
    if os.geteuid() != 0:
        pytest.skip("an ordinary user's is the next test")
    verdict = judge_program(READS_MEMORY, TESTS, CodeOptions(memory_mb=1024, box=plain))
    assert (verdict.num_passed, verdict.compiled, verdict.limit) == (0, True, None)


PLAIN_USERS_JUDGE = """
import json, sys, tempfile
from llamarl.settings.environments import TaskConfig
from llamarl.environments.factory import make_task
from llamarl.types import Prompt
import numpy as np
program, tests = json.loads(sys.stdin.read())
with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
    print(json.dumps({"question": "q", "tests": tests}), file=file, flush=True)
    options = {"box": "plain", "memory_mb": 1024}
    task = make_task(TaskConfig(name="code", data=file.name, eval_fraction=0.0, options=options), 0)
    task.prepare()
    prompt = Prompt(index=0, tokens=np.zeros(0, np.int32), text="q", metadata=dict(task.item("train", 0).metadata))
    score = task.respond(prompt, [f"```python\\n{program}\\n```"])
    print(score.value, score.parts["compiled"], sum(n for name, n in score.parts.items() if name.endswith("_limit")))
"""


def test_in_a_plain_box_of_an_ordinary_user_neither_tests_nor_judge_can_be_read_from_memory() -> None:
    said = as_nobody(PLAIN_USERS_JUDGE, stdin=json.dumps([READS_MEMORY, TESTS]))
    assert said.stdout == "0.0 1.0 0.0\n", said


def test_an_ordinary_user_has_boxes_too(kind: Kind) -> None:
    program = HOSTILE["fork bomb"][0] + "\nprint(os.getuid(), sorted(os.listdir('/')))"
    code = (
        "from llamarl.environments.sandbox.run import *\nfrom llamarl.environments.sandbox.limits import BoxLimits\n"
        f"print(run_in_box({program!r}, limits=BoxLimits(wall_s=8.0, processes=8), kind={kind!r}).stdout)"
    )
    said = as_nobody(code)
    assert said.stdout.startswith("caught\n1000 ["), said
    assert "home" not in said.stdout


def as_nobody(code: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """What another user's Python does, as far as one is there that this user's root may start."""
    if os.geteuid() != 0:
        python: str = sys.executable
        user: dict[str, Any] = {}
    else:
        python = os.path.realpath(SYSTEM_PYTHON)
        user = {"user": 65534, "group": 65534, "extra_groups": []}
    packages = [str(Path(run.__file__).parents[3]), sysconfig.get_path("purelib")]
    environment = {"PYTHONPATH": os.pathsep.join(packages), "PYTHONDONTWRITEBYTECODE": "1"}

    def start(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-c", code],
            cwd="/",
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            **user,
        )

    if not os.path.exists(python) or start("import llamarl.environments.code").returncode:
        pytest.skip("no Python that another user could run this with")
    return start(code)


def test_a_box_that_does_not_come_up_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_command", lambda *_: ["/bin/false"])
    with pytest.raises(BoxFailed, match="the bwrap box did not start: exit status 1"):
        run_in_box("print(1)", kind="bwrap")
    monkeypatch.setattr(run, "_command", lambda *_: ["/nowhere/bwrap"])
    with pytest.raises(BoxFailed, match="cannot be started"):
        run_in_box("print(1)", kind="bwrap")


def test_a_box_whose_first_process_is_killed_from_outside_is_no_result(
    plain: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = run._Box._read_status

    def killed(self: run._Box, selector: selectors.BaseSelector) -> None:
        really(self, selector)
        if not self.ended:
            self._process.kill()

    monkeypatch.setattr(run._Box, "_read_status", killed)
    before = children()
    with pytest.raises(BoxFailed, match="the plain box broke: its first process was killed from outside"):
        run_in_box("import time; time.sleep(20)", kind=plain)
    for orphan in children() - before:  # it came to this process
        assert os.waitstatus_to_exitcode(os.waitpid(int(orphan), 0)[1]) == -9


def test_a_plain_box_is_never_taken_in_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.shutil, "which", lambda name: None)
    with pytest.raises(BoxFailed, match="bwrap.* is not installed"):
        run_in_box("print(1)")


def test_a_python_that_the_plain_boxs_user_cannot_reach_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / "home"
    (hidden / "bin").mkdir(parents=True)
    os.chmod(tmp_path, 0o755)
    os.chmod(hidden, 0o700)
    python = shutil.copy(os.path.realpath(sys.executable), hidden / "bin" / "python3")
    for folder in tmp_path.parents:
        if not folder.stat().st_mode & 0o001:
            hidden = folder  # pytest's own
    assert run.hidden_folder(["/usr/lib", str(python)]) == hidden
    assert run.hidden_folder(["/usr/lib"]) is None
    monkeypatch.setattr(run, "find_installation", lambda: Installation(str(python), (), (), ()))
    if os.geteuid() == 0:  # an ordinary user's program stays that user
        with pytest.raises(BoxFailed) as raised:
            run_in_box("print(1)", kind="plain")
        assert f"who may not enter {hidden}, where this Python ({python}) lies" in str(raised.value)
        assert str(raised.value).endswith(f"or chmod o+x {hidden}")


def test_files_stay_inside_the_folder(kind: Kind) -> None:
    for name in ("/etc/x", "../x", "main.py"):
        with pytest.raises(ValueError, match="relative name"):
            run_in_box("", files={name: "x"}, kind=kind)


def test_a_boxs_user_is_one_that_nobody_has() -> None:
    assert box_user("         0          0 4294967295\n", 77, 0) == 1_000_000_308
    assert box_user("         0          0 4294967295\n", 77, 1) == 1_000_000_309  # the box of the tests beside it
    assert box_user("0 100000 65536\n", 10_000, 1) == 40_001


def test_folders_inside_others_are_left_out() -> None:
    assert without_nested(["/usr/lib/python3", "/usr/lib", "/usr/lib64", "/opt//x/"]) == (
        "/opt/x",
        "/usr/lib",
        "/usr/lib64",
    )


def test_an_installation_is_whole_files_of_this_python() -> None:
    found = run.find_installation()
    assert os.path.exists(found.python) and not os.path.islink(found.python)
    assert any(os.__file__.startswith(folder) for folder in found.readable)
    assert not {"/", "/home", "/root", "/etc", os.path.expanduser("~"), os.getcwd()} & set(found.readable)


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        ("Traceback\nMemoryError", "memory"),
        ("OSError: [Errno 28] No space left on device: 'x'\n", "disk"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "processes"),
        ("object type name: MemoryError\nobject repr     : MemoryError()\nlost sys.stderr\n", "memory"),
        ("ValueError: MemoryError", None),
        ("", None),
    ],
)
def test_the_last_line_of_a_traceback_tells_the_limit(words: str, limit: str | None) -> None:
    assert limit_in_words(words) == limit


def test_a_filter_is_of_whole_instructions_and_unknown_machines_have_none() -> None:
    strong, weak = syscall_filter("x86_64", None), syscall_filter("x86_64", 7)
    assert strong is not None and weak is not None and len(weak) > len(strong)
    assert len(strong) % 8 == len(weak) % 8 == 0
    assert syscall_filter("riscv64", None) is None
