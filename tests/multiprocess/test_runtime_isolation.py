"""What a job opens to others, and what it leaves behind: nothing that another user can use, no process, no file."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from runtime_fakes import HERE, Config
from tools.chaos.processes import descendants, wait_for_end

from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import JobStart, Order, Runtime
from llamarl.runtime.processes import ProcessRuntime

NOBODY = 65534
LISTENS, LISTENS_TCP = 0x10000, "0A"
RECIPE = HERE.parents[1] / "recipes" / "tiny.toml"


@dataclass(frozen=True)
class Opened:
    """What the processes of a job listen on."""

    unix: tuple[str, ...]
    """Paths; those that begin with ``@`` are abstract."""
    tcp: tuple[tuple[str, int], ...]


def opened_by(pids: Sequence[int]) -> Opened:
    inodes = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(entry))
    unix = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split(maxsplit=7)
        if int(flags, 16) & LISTENS and f"socket:[{inode}]" in inodes:
            unix.append(path[0] if path else "")
    tcp = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS_TCP and f"socket:[{rest[5]}]" in inodes:
                host, port = local.split(":")
                words = [bytes.fromhex(host)[i : i + 4][::-1] for i in range(0, len(host) // 2, 4)]
                family = socket.AF_INET if table == "tcp" else socket.AF_INET6
                tcp.append((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return Opened(tuple(unix), tuple(tcp))


def tried_by_a_stranger(opened: Opened, pids: Sequence[int]) -> dict[str, str]:
    """What a process of another user gets when it knocks at all of it: address -> what happened."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            found = {}
            addresses = [("unix", path.replace("@", "\0", 1)) for path in opened.unix]
            addresses += [("tcp", address) for address in opened.tcp]  # type: ignore[misc]
            for kind, address in addresses:
                found[str(address)] = _knock(socket.AF_UNIX if kind == "unix" else socket.AF_INET, address)
            for pid in pids:
                try:
                    found[f"{pid} files"] = f"{len(os.listdir(f'/proc/{pid}/fd'))} open"
                except OSError as error:
                    found[f"{pid} files"] = type(error).__name__
            os.write(write, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return dict(json.loads(answer))


def _knock(family: int, address: object) -> str:
    with socket.socket(family) as knocking:
        knocking.settimeout(1.0)
        try:
            knocking.connect(address)  # type: ignore[arg-type]
            knocking.sendall(bytes(range(64)))
            return "answers" if knocking.recv(1) else "hangs up"
        except TimeoutError:
            return "silent"
        except OSError as error:
            return type(error).__name__


@pytest.fixture
def local() -> Iterator[Runtime]:
    made = ProcessRuntime(channel_factory=str(HERE))
    yield made
    made.close()


def test_ranks_in_a_process_group_listen_on_the_loopback_only_and_answer_no_stranger(local: Runtime) -> None:
    spec = ExecutorSpec(
        name="reducer", factory=f"{HERE}:Reducer", config=Config(), num_ranks=2, threads=1, process_group="gloo"
    )
    others = descendants(os.getpid())  # what tests before this one left running, a fork server for one
    before = opened_by([os.getpid(), *others])
    local.start(JobStart(executors=[spec], channels=[], deadline_s=120.0))
    pids = [pid for pid in descendants(os.getpid()) if pid not in others]
    mine = opened_by([os.getpid(), *others, *pids])
    opened = Opened(
        tuple(path for path in mine.unix if path not in before.unix), tuple(a for a in mine.tcp if a not in before.tcp)
    )
    assert opened.unix == ()
    assert opened.tcp and {host for host, _ in opened.tcp} == {"127.0.0.1"}, "gloo's, one a rank at least"
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    found = tried_by_a_stranger(opened, pids)
    assert set(found.values()) <= {"silent", "hangs up", "PermissionError", "ConnectionResetError"}, found
    local.fire(Order(executor="reducer", tick=0))
    assert local.wait(60.0).metrics["sum"] == 1.0 + 2.0


def test_a_run_of_the_tiny_recipe_opens_nothing_and_leaves_nothing_when_it_is_killed(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "llamarl.cli.main", "train", str(RECIPE), "--run.dir", str(tmp_path / "run")]
    with open(tmp_path / "output", "wb") as output:
        controller = subprocess.Popen(
            [*command, "--run.num_ticks", "1000", "--run.cores", "2", "--evaluation.num_prompts", "4"],
            stdout=output,
            stderr=output,
            env=os.environ | {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")},
        )
    try:
        until = time.monotonic() + 120.0
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            assert controller.poll() is None and time.monotonic() < until, (tmp_path / "output").read_text()
            time.sleep(0.1)
        pids = [controller.pid, *descendants(controller.pid)]
        opened = opened_by(pids)
        assert opened.unix == ()
        assert {host for host, _ in opened.tcp} <= {"127.0.0.1"}
        if os.geteuid() == 0:
            found = tried_by_a_stranger(opened, pids)
            assert set(found.values()) <= {"silent", "hangs up", "PermissionError", "ConnectionResetError"}, found
    finally:
        controller.kill()
        controller.wait()
    assert not wait_for_end(set(pids), 10.0)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "killed", ["controller", *(pytest.param(who, marks=pytest.mark.long) for who in ("guard", "rank"))]
)
def test_whoever_is_killed_nobody_and_nothing_is_left(tmp_path: Path, killed: str) -> None:
    """Among the processes is one that has left its parent, its session and its signals behind."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    arguments = {
        "configs": {"source": {"trouble": "daemon", "trouble_tick": 0, "step_s": 0.02}},
        "num_ticks": 100_000,
        "step_s": 60.0,
        "run_dir": str(tmp_path),
    }
    controller = subprocess.Popen(
        [sys.executable, str(HERE.parent / "runtime_program.py"), json.dumps(arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    try:
        until = time.monotonic() + 60.0
        while not (tmp_path / "daemon.pid").exists():
            assert controller.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        daemon = int((tmp_path / "daemon.pid").read_text())
        pids = descendants(controller.pid)
        guards = [
            int(pid)
            for task in Path(f"/proc/{controller.pid}/task").iterdir()
            for pid in (task / "children").read_text().split()
        ]
        assert len(guards) == 3 and daemon in pids
        ranks = [pid for pid in pids if pid not in (*guards, daemon)]
        victim = {"controller": controller.pid, "guard": guards[0], "rank": ranks[0]}[killed]
        os.kill(victim, signal.SIGKILL)
        _, err = controller.communicate(timeout=30.0)
    finally:
        controller.kill()
    if killed != "controller":
        assert controller.returncode == 1 and "its process was killed by signal 9 (SIGKILL" in err, err
    left = {daemon} if killed == "guard" else set()  # nothing but its guard held it
    assert not wait_for_end(set(pids) - left, 10.0)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert list(temporary.iterdir()) == []
