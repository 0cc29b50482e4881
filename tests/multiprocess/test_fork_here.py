"""A command that forks its own fork server: the fork is like a new process, and imports nothing a second time."""

import json
import subprocess
import sys
from typing import Any

import pytest

from llamarl.determinism import rank_environment
from llamarl.runtime.fork_server import ready

_PROGRAM = """
import asyncio, json, os, signal, socket, sys, types
from pathlib import Path
from llamarl.runtime import fork_server
from llamarl.runtime.fork_server import ForkServer
from llamarl.determinism import rank_environment

OURS, IMPORTED_BEFORE, THREADS, SEEN = json.loads(sys.argv[1])

def words(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\\0", b" ").decode().split()

def name(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()

def descriptors(pid):
    return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in sorted(map(int, os.listdir(f"/proc/{pid}/fd")))]

async def look():
    secret = open("/dev/zero")
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    environment = {**rank_environment(THREADS), "SEEN": SEEN}
    server = ForkServer(("colorsys", "no_such_module_here"), environment, may_be_a_fork=True)
    ours, theirs = socket.socketpair()
    child = await asyncio.wait_for(server.fork("generator 3", theirs.fileno(), 1, 2), 30)
    theirs.close()
    ours.settimeout(30)
    rank = int(ours.recv(4096)[9:])
    with open(f"/proc/{rank}/status") as status:
        caught = int(next(line for line in status if line.startswith("SigCgt")).split()[1], 16)
    told = {
        "imported_here": "colorsys" in sys.modules,
        "server": words(server._process.pid),
        "names": [name(child.pid), name(rank)],
        "descriptors": descriptors(rank),
        "catches_usr1": bool(caught >> (signal.SIGUSR1 - 1) & 1),
    }
    ours.close()
    await asyncio.wait_for(child.code(), 30)
    server.kill()
    told["left"] = [pid for pid in (rank, child.pid, server._process.pid) if Path(f"/proc/{pid}").exists()]
    print(json.dumps(told))

if IMPORTED_BEFORE:
    sys.modules["torch"] = types.ModuleType("torch")  # whether it is there is all that anybody asks
if OURS:
    fork_server.allow_fork_of_this_process()
asyncio.run(look())
"""


def look(*, ours: bool, torch_before: bool = False, threads: int = 1, seen: str = "here") -> dict[str, Any]:
    environment = {k: v for k, v in rank_environment(1).items() if not k.startswith(("OMP_", "MKL_", "OPENBLAS_"))}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps([ours, torch_before, threads, seen])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_server_of_a_command_is_its_fork_and_ranks_are_like_new_processes() -> None:
    told = look(ours=True)
    assert told["imported_here"] and told["server"][1] == "-c", "nothing was started anew"
    assert told["names"] == ["llamarl-guard", "generator 3"]
    assert "/dev/zero" not in told["descriptors"], "what the command has open is not the rank's"
    assert told["descriptors"][0] == "/dev/null", "a rank reads no terminal"
    assert not told["catches_usr1"]
    assert told["left"] == []


@pytest.mark.parametrize("case", [{"ours": False}, {"ours": True, "torch_before": True, "threads": 2}])
def test_who_may_not_be_forked_starts_a_server(case: dict[str, Any]) -> None:
    """Somebody else's process, and one in which torch was imported for another number of threads."""
    told = look(**case)
    assert "llamarl.runtime.fork_server" in told["server"] and not told["imported_here"]
    assert told["names"] == ["llamarl-guard", "generator 3"] and told["left"] == []


def test_a_process_of_tests_is_nobodys_to_fork() -> None:
    assert not ready((), rank_environment(1))
