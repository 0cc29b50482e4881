"""A control group holds what the processes of a box have together."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.environments.sandbox import run
from llamarl.environments.sandbox.limits import BoxLimits
from llamarl.environments.sandbox.memory_group import MemoryGroup, make_memory_group, parent_of_groups
from llamarl.environments.sandbox.run import run_in_box, why_no_box

HELD = """
import os, signal, time
children = []
for _ in range(4):
    child = os.fork()
    if not child:
        kept = bytearray(40 << 20)
        time.sleep(20)
        os._exit(0)
    children.append(child)
    time.sleep(0.1)
killed, status = os.wait()
print("one was killed", status)
for child in children:
    if child != killed:
        os.kill(child, signal.SIGKILL)
"""


def mount(kind: str, top: Path, root: str = "/", options: str = "rw") -> str:
    return f"36 25 0:31 {root} {top} rw,relatime shared:9 - {kind} {kind} {options}\n"


def test_with_version_one_it_is_the_processs_own_folder(tmp_path: Path) -> None:
    own = tmp_path / "jobs" / "7"
    own.mkdir(parents=True)
    (own / "cgroup.procs").touch()
    other = mount("cgroup", tmp_path / "cpu", options="rw,cpu")
    assert (
        parent_of_groups("3:cpu:/\n2:memory:/jobs/7\n0::/\n", other + mount("cgroup", tmp_path, options="rw,memory"))
        == own
    )


def test_inside_a_container_the_mounts_root_is_taken_off(tmp_path: Path) -> None:
    own = tmp_path / "7"
    own.mkdir()
    (own / "cgroup.procs").touch()
    text = mount("cgroup", tmp_path, "/docker/a1", "rw,memory")
    assert parent_of_groups("2:memory:/docker/a1/7\n", text) == own
    assert parent_of_groups("2:memory:/elsewhere\n", text) is None


def test_with_version_two_it_is_the_nearest_one_above_that_hands_memory_down(tmp_path: Path) -> None:
    own = tmp_path / "user.slice" / "shell.scope"
    own.mkdir(parents=True)
    for folder, handed in ((own, ""), (own.parent, "memory pids"), (tmp_path, "cpu memory")):
        (folder / "cgroup.procs").touch()
        (folder / "cgroup.subtree_control").write_text(handed)
    text = mount("cgroup2", tmp_path)
    assert parent_of_groups("0::/user.slice/shell.scope\n", text) == own.parent
    (own.parent / "cgroup.subtree_control").write_text("pids")
    assert parent_of_groups("0::/user.slice/shell.scope\n", text) == tmp_path
    (tmp_path / "cgroup.subtree_control").write_text("hugetlb")
    assert parent_of_groups("0::/user.slice/shell.scope\n", text) is None


def test_where_nothing_counts_memory_there_is_none() -> None:
    assert parent_of_groups("", "") is None
    assert parent_of_groups("0::/\n", "25 1 8:1 / / rw - ext4 /dev/root rw\n") is None


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    made = make_memory_group(100 << 20)
    if made is None:
        pytest.skip("no control group can be made here")
    yield made
    made.remove()


def test_processes_that_hold_too_much_together_are_ended_by_the_kernel(group: MemoryGroup) -> None:
    done = subprocess.run(
        [*group.words, sys.executable, "-I", "-S", "-c", HELD], capture_output=True, text=True, timeout=60.0
    )
    assert "one was killed 9" in done.stdout or done.returncode == -9, done
    assert group.has_killed()


def test_one_that_held_enough_has_killed_nothing_and_is_removed(group: MemoryGroup) -> None:
    subprocess.run([*group.words, "/bin/true"], check=True, timeout=60.0)
    folder = Path(group.words[-1]).parent
    assert folder.exists() and not group.has_killed()
    group.remove()
    group.remove()
    assert not folder.exists()


@pytest.mark.skipif(bool(why_no_box("bwrap")), reason="no bubblewrap")
def test_a_box_is_ended_by_its_group_which_goes_with_it(group: MemoryGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def give(num_bytes: int) -> MemoryGroup:
        asked.append(num_bytes)
        return group

    monkeypatch.setattr(run, "make_memory_group", give)
    found = run_in_box(HELD, limits=BoxLimits(wall_s=20.0, memory_mb=1000, disk_mb=36))
    assert found.limit == "memory"
    assert asked == [1100 << 20]
    assert not Path(group.words[-1]).parent.exists()
