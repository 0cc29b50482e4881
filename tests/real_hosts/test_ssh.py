"""The ssh command of docs/hosts.md, on hosts with a real sshd (``make test-hosts``)."""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosted_jobs import FOR_EVER, SMALL, begin, train, wait_for_none_left
from markdown_blocks import blocks_of
from namespace_hosts import why_not
from same_run import assert_same_run
from ssh_hosts import PROGRAMS, SshHosts, ssh_hosts

_WHY_NOT = why_not(*PROGRAMS)
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(_WHY_NOT), reason=f"ssh to namespaces: {_WHY_NOT}")]


def documented() -> list[str]:
    """The words of the page's command."""
    page = Path(__file__).parents[2] / "docs" / "hosts.md"
    found = [block.text for block in blocks_of(page) if "--hosts ssh:a,b,c" in block.text]
    assert len(found) == 1
    return shlex.split(found[0])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Here and on no host: /tmp of a host is its own."""
    with tempfile.TemporaryDirectory(prefix="llamarl-ssh-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def there() -> Iterator[SshHosts]:
    with tempfile.TemporaryDirectory(prefix="llamarl-ssh-", dir="/var/tmp") as made:
        with ssh_hosts(Path(made), 3) as hosts:
            yield hosts


def test_the_command_gives_the_bits_of_one_machine_and_leaves_nothing(folder: Path, there: SshHosts) -> None:
    words = [*documented(), *SMALL, "--run.dir", str(folder / "three")]
    done = subprocess.run(there.as_user(words), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trainer on c" in done.stdout + done.stderr
    wait_for_none_left(there.hosts, workers=True)
    train(folder / "one", "tiny", *SMALL)
    assert_same_run(folder / "one", folder / "three")


def test_a_killed_controller_leaves_no_worker_and_no_ssh(folder: Path, there: SshHosts) -> None:
    words = [*documented(), *SMALL, *FOR_EVER, "--run.dir", str(folder / "killed")]
    controller = begin(there.as_user(words), folder / "killed")
    starters = [pid for pid in children(controller.pid) if (words_of(pid) or [""])[0] == "ssh"]
    assert len(starters) == 3 and all("llamarl" in " ".join(host.commands().values()) for host in there.hosts)
    controller.kill()
    controller.communicate()
    print(f"after the controller was killed all was gone in {wait_for_none_left(there.hosts, workers=True):.1f} s")
    until = time.monotonic() + 5.0
    while left := [pid for pid in starters if words_of(pid)]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("nobody", "host nobody: ssh cannot log in: .*(No route to host|timed out)"),
        ("a-refused", "host a-refused: ssh cannot log in: .*Permission denied"),
        ("a-unknown", "host a-unknown: ssh cannot log in: .*Host key verification failed"),
        ("a-bare", "host a-bare: `llamarl worker --key -` cannot be run there: .*not found.*hosts.command"),
    ],
)
def test_a_host_that_cannot_take_part_is_told_within_seconds(
    folder: Path, there: SshHosts, host: str, told: str
) -> None:
    words = ["llamarl", "train", "tiny", "--hosts", f"ssh:b,{host}", "--run.dir", str(folder / host)]
    began = time.monotonic()
    done = subprocess.run(there.as_user(words), capture_output=True, text=True, timeout=60)
    took_s = time.monotonic() - began
    assert done.returncode != 0 and done.stderr
    last = done.stderr.split("these hosts cannot take part:")[-1]
    assert len(last.strip().splitlines()) == 1, "the other host is not blamed"
    assert re.search(told, last), done.stderr
    print(f"{host}: told after {took_s:.1f} s")
    assert took_s < 30.0, (
        took_s
    )  # the start of the command; 8 s for ssh where nothing answers; room for a loaded machine
    wait_for_none_left(there.hosts, workers=True)


def children(pid: int) -> list[int]:
    """Of any of its threads."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def words_of(pid: int) -> list[str]:
    """Of a process's command; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []
