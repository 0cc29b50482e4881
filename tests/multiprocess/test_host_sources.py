"""Workers that a job starts itself, with programs that stand in for ssh, srun and scontrol: key by standard input, ended with it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llamarl.errors import ConfigError
from llamarl.runtime.config import HostsConfig
from llamarl.runtime.hosts.connection import WorkerKey, ask
from llamarl.runtime.hosts.gathering import gather
from llamarl.runtime.hosts.sources import open_workers, why_ended
from llamarl.transports.run_key import KEY_BYTES

COMMAND = shlex.join([sys.executable, "-m", "llamarl.cli.main", "worker", "--bind", "127.0.0.1"])

SSH = """#!/bin/sh
while [ "$1" = -T ] || [ "$1" = -o ]; do [ "$1" = -o ] && shift; shift; done
echo "Welcome to $1"
[ "$1" = broken ] && exit 255
shift
exec sh -c "$*"
"""
SCONTROL = "#!/bin/sh\n[ \"$*\" = 'show hostnames n[3-4]' ] && printf 'n3\\nn4\\n'\n"
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = [word for word in sys.argv[1:]]
count = next(int(word.partition("=")[2]) for word in words if word.startswith("--ntasks="))
command = words[next(i for i, word in enumerate(words) if not word.startswith("--")) :]
tasks = [
    subprocess.Popen(command, stdin=subprocess.PIPE, env={{**os.environ, "SLURM_NODEID": str(count - 1 - n)}})
    for n in range(count)
]
while data := os.read(0, 4096):
    for task in tasks:
        task.stdin.write(data)
        task.stdin.flush()
for task in tasks:
    task.stdin.close()
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("ssh", SSH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def listening(command: str) -> list[str]:
    listed = subprocess.run(["pgrep", "-af", "llamarl.cli.main worker"], capture_output=True, text=True)
    return [line for line in listed.stdout.splitlines() if command in line]


def wait_until_gone(mark: str) -> None:
    until = time.monotonic() + 10.0
    while left := listening(mark):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_ssh_starts_workers_that_end_with_the_job(programs: Path) -> None:
    mark = "--space ssh-test"
    config = HostsConfig(workers=("a", "b"), start="ssh", command=f"{COMMAND} {mark}")
    made = open_workers(config)
    try:
        assert [worker.name for worker in made.workers] == ["a", "b"]
        inventories, _ = ask(made.workers, WorkerKey(made.key))
        assert {one.space for one in inventories} == {"ssh-test"}
        lines = listening(mark)
        assert lines and not any(made.key.hex() in line for line in lines), "a key never stands on a command line"
        assert len(made.key) == KEY_BYTES
    finally:
        made.close()
    wait_until_gone(mark)


def test_a_host_that_cannot_be_started_is_named_and_the_others_are_ended(programs: Path) -> None:
    mark = "--space ssh-broken"
    config = HostsConfig(workers=("a", "broken"), start="ssh", command=f"{COMMAND} {mark}")
    with pytest.raises(ConfigError, match="these hosts cannot take part:\n  - host broken: ssh cannot log in"):
        gather(config, WorkerKey, tell=print)
    wait_until_gone(mark)


def test_a_resume_goes_on_with_the_hosts_that_ssh_reaches(programs: Path) -> None:
    mark = "--space ssh-resume"
    config = HostsConfig(workers=("broken", "a"), start="ssh", command=f"{COMMAND} {mark}", absent_after_s=0.5)
    told: list[str] = []
    found = gather(config, WorkerKey, begun_with=("broken", "a"), tell=told.append)
    try:
        assert [worker.name for worker in found.workers.workers] == ["a"]
        assert found.absent["broken"].startswith("host broken: ssh cannot log in")
        assert found.inventories[0].space == "ssh-resume" and len(found.workers.started) == 1
    finally:
        found.workers.close()
    wait_until_gone(mark)


def test_slurm_gives_the_hosts_of_the_allocation_in_its_order(programs: Path) -> None:
    mark = "--space slurm-test"
    config = HostsConfig(start="slurm", command=f"{COMMAND} {mark}")
    made = open_workers(config, {"SLURM_JOB_NODELIST": "n[3-4]"})
    try:
        assert [worker.name for worker in made.workers] == ["n3", "n4"]
        ask(made.workers, WorkerKey(made.key))
    finally:
        made.close()
    wait_until_gone(mark)


def test_a_slurm_that_does_not_answer_or_is_not_there_is_named(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.runtime.hosts.sources._SCONTROL_S", 0.2)
    (programs / "scontrol").write_text("#!/bin/sh\nexec sleep 60\n")
    config, allocation = HostsConfig(start="slurm"), {"SLURM_JOB_NODELIST": "n[3-4]"}
    with pytest.raises(ConfigError, match=r"`scontrol show hostnames 'n\[3-4\]'`: no answer within 0.2 s"):
        open_workers(config, allocation)
    monkeypatch.setenv("PATH", str(programs / "nothing"))
    with pytest.raises(ConfigError, match="`scontrol .*`: No such file or directory"):
        open_workers(config, allocation)


def test_why_a_worker_did_not_come_is_said_with_what_to_do_about_it() -> None:
    ssh = ["ssh", "-T", "b", "llamarl worker --key -"]
    refused = why_ended(ssh, 255, ["root@b: Permission denied (publickey).\r\n"])
    assert refused.startswith(
        "ssh cannot log in: root@b: Permission denied (publickey). (`ssh -o BatchMode=yes b true`"
    )
    lacking = why_ended(ssh, 127, ["bash: line 1: llamarl: command not found\n"])
    assert lacking.startswith("`llamarl worker --key -` cannot be run there: bash: line 1: llamarl: command not found")
    several = ["slurmstepd-n1: error: execve(): /x/llamarl: No such file or directory\n"] * 3 + [
        "srun: error: task 0\n"
    ] * 9
    started = why_ended(["srun", "--overlap", "/x/llamarl", "worker"], 2, several)
    assert started.count("No such file") == 1 and "srun: error" not in started and "hosts.command" in started
    assert why_ended(ssh, 1, []) == "`llamarl worker --key -` ended with code 1 before its worker listened"


def test_outside_an_allocation_slurm_is_refused() -> None:
    with pytest.raises(ConfigError, match="no Slurm allocation"):
        open_workers(HostsConfig(start="slurm"), {})


def test_without_a_key_running_workers_are_refused_with_how_to_copy_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scp -p HOST:"):
        open_workers(HostsConfig(workers=("a",), key=str(tmp_path / "none")))


def test_a_starter_that_is_killed_takes_its_workers_with_it(programs: Path) -> None:
    mark = "--space ssh-killed"
    program = (
        "import time; from llamarl.runtime.config import HostsConfig; from llamarl.runtime.hosts.sources import open_workers\n"
        f"made = open_workers(HostsConfig(workers=('a',), start='ssh', command={f'{COMMAND} {mark}'!r}))\n"
        "print('up', flush=True); time.sleep(100)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None and starter.stdout.readline() == "up\n" and listening(mark)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    wait_until_gone(mark)
