"""Run folders of hosts that share nothing: what ranks wrote is brought, what they need is sent, and nothing is lost or mixed up."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from far_files import FarHost, far_host

from llamarl.checkpoint.snapshot import FileRecord
from llamarl.checkpoint.storage import Checkpoint, CheckpointStore
from llamarl.checkpoint.written import record_files, writer_name
from llamarl.errors import CheckpointError
from llamarl.files.host_folders import FarFolder, HostFolders, files_for_ranks

WHERE = {"generator": (0, 1), "trainer": (0, 1), "reward": (-1,)}


class Two:
    """A controller's run folder, and those of hosts a and b."""

    def __init__(self, run_dir: Path, hosts: list[FarHost]) -> None:
        self.run_dir, self.hosts = run_dir, hosts
        folders = {}
        for number, host in enumerate(hosts):
            client = host.client("ab"[number])
            folders[number] = FarFolder(client, *client.open_run("id"))
        self.far = HostFolders(run_dir, folders, WHERE)
        self.store = CheckpointStore(run_dir / "checkpoints")

    def of(self, number: int) -> Path:
        return self.far.folders[number].path

    def write(self, number: int, path: str, data: bytes) -> FileRecord:
        """As a rank on the host does."""
        return put(self.of(number), path, data)


def put(root: Path, path: str, data: bytes) -> FileRecord:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(data)
    (record,) = record_files(root, [root / path])
    return record


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    (tmp_path / "run").mkdir()
    with contextlib.ExitStack() as stack:
        yield Two(tmp_path / "run", [stack.enter_context(far_host(tmp_path / name)) for name in "ab"])


def _save(two: Two, tick: int) -> dict[str, tuple[FileRecord, ...]]:
    """What ranks on a, on b and on the controller's machine write and tell."""
    partial = two.store.begin(tick)
    name = f"checkpoints/{partial.name}/"
    written: dict[str, tuple[FileRecord, ...]] = {}
    for rank in (0, 1):
        for executor, path in (
            ("generator", f"generator/rank_{rank}/g"),
            ("trainer", f"trainer/state/rank_{rank}.safetensors"),
        ):
            told = two.write(rank, name + path, f"{path} after {tick}".encode() * 50_000)
            written[f"{executor} rank {rank}"] = (replace(told, path=path),)
    written["reward rank 0"] = (replace(put(two.run_dir, f"{name}reward/rank_0/r", b"r"), path="reward/rank_0/r"),)
    return written


def _finished(two: Two) -> Checkpoint:
    written = _save(two, 3)
    two.far.fetch(written, two.run_dir / "checkpoints" / "tick_000003.partial")
    return two.store.finish(3, written, {})


def test_a_checkpoint_of_three_machines_is_finished_whole_and_leaves_nothing_on_the_hosts(two: Two) -> None:
    checkpoint = _finished(two)
    assert [record.path for record in two.store.verify(checkpoint.path).manifest.files] == [
        "generator/rank_0/g",
        "generator/rank_1/g",
        "reward/rank_0/r",
        "trainer/state/rank_0.safetensors",
        "trainer/state/rank_1.safetensors",
    ]
    for number in (0, 1):
        assert not list((two.of(number) / "checkpoints").iterdir())


def test_a_resume_sends_each_rank_its_state_wherever_it_is_now(two: Two, tmp_path: Path) -> None:
    checkpoint = _finished(two)
    with far_host(tmp_path / "c") as other:
        client = other.client("c")
        folder = FarFolder(client, *client.open_run("id"))
        far = HostFolders(two.run_dir, {0: folder}, {"generator": (-1, 0), "trainer": (-1, 0), "reward": (0,)})
        far.send_state(checkpoint.path, checkpoint.manifest.files)
        found = {str(p.relative_to(folder.path)) for p in folder.path.rglob("*") if p.is_file()}
        at = "checkpoints/tick_000003"
        assert found == {
            ".run_id",
            f"{at}/generator/rank_1/g",
            f"{at}/trainer/state/rank_0.safetensors",
            f"{at}/trainer/state/rank_1.safetensors",
            f"{at}/reward/rank_0/r",
        }
        assert (folder.path / at / "generator/rank_1/g").read_bytes() == b"generator/rank_1/g after 3" * 50_000


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("damage", ["removed", "altered"])
def test_a_file_that_is_not_there_as_its_rank_told_is_refused_by_file_and_host(
    two: Two, number: int, damage: str
) -> None:
    written = _save(two, 3)
    path = two.of(number) / f"checkpoints/tick_000003.partial/trainer/state/rank_{number}.safetensors"
    data = path.read_bytes()
    path.unlink()
    if damage == "altered":
        path.write_bytes(b"X" + data[1:])
    with pytest.raises(CheckpointError) as caught:
        two.far.fetch(written, two.run_dir / "checkpoints" / "tick_000003.partial")
    told = "it was altered" if damage == "altered" else "is not there"
    assert f"host {'ab'[number]}: checkpoints/tick_000003.partial/trainer/state/rank_{number}.safetensors" in str(
        caught.value
    )
    assert told in str(caught.value) and str(caught.value).count("\n") == 1
    with pytest.raises(CheckpointError, match="is missing"):
        two.store.finish(3, written)


def test_a_state_that_was_altered_since_is_not_taken_by_the_host(two: Two) -> None:
    checkpoint = _finished(two)
    path = checkpoint.path / "trainer/state/rank_1.safetensors"
    path.write_bytes(b"X" + path.read_bytes()[1:])
    with pytest.raises(CheckpointError, match="rank_1.safetensors: it was altered"):
        two.far.send_state(checkpoint.path, checkpoint.manifest.files)


def test_a_sweep_brings_what_nobody_told_of_once_and_again_when_it_has_grown(two: Two) -> None:
    told = two.write(0, "rollouts/tick_000000.jsonl", b"{}\n")
    two.far.fetch({"generator rank 0": [told]}, two.run_dir)
    two.write(1, "verdicts/judge-0.jsonl", b"one\n")
    two.write(1, "model.partial/half", b"x")
    two.write(1, ".x.partial", b"x")
    two.write(0, "checkpoints/tick_000003.partial/generator/rank_0/g", b"x")
    two.far.sweep()
    assert (two.run_dir / "verdicts/judge-0.jsonl").read_bytes() == b"one\n"
    assert sorted(p.name for p in two.run_dir.iterdir()) == [".incoming", "rollouts", "verdicts"]
    (two.run_dir / "verdicts/judge-0.jsonl").unlink()  # to see whether it is brought again
    (two.run_dir / "rollouts/tick_000000.jsonl").unlink()
    two.far.sweep()
    assert not (two.run_dir / "verdicts/judge-0.jsonl").exists()
    two.write(1, "verdicts/judge-0.jsonl", b"one\ntwo\n")
    two.far.sweep()
    assert (two.run_dir / "verdicts/judge-0.jsonl").read_bytes() == b"one\ntwo\n"
    assert not (two.run_dir / "rollouts/tick_000000.jsonl").exists()


def test_two_hosts_that_use_one_name_do_not_overwrite_each_other_nor_the_controller(two: Two) -> None:
    (two.run_dir / "metrics.jsonl").write_bytes(b"the controller's")
    for number in (0, 1):
        two.write(number, "metrics.jsonl", f"host {number}".encode())
    two.far.sweep()
    assert (two.run_dir / "metrics.jsonl").read_bytes() == b"the controller's"
    assert (two.run_dir / "hosts/a/metrics.jsonl").read_bytes() == b"host 0"
    assert (two.run_dir / "hosts/b/metrics.jsonl").read_bytes() == b"host 1"


def test_what_was_sent_for_ranks_to_read_comes_back_under_its_own_name_once_it_has_grown(two: Two) -> None:
    record = put(two.run_dir, "verdicts/judge-0.jsonl", b"one\n")
    for folder in two.far.folders.values():
        two.far.send_to(folder, [record], two.run_dir)
    two.far.sweep()
    assert not (two.run_dir / "hosts").exists()
    two.write(1, "verdicts/judge-0.jsonl", b"one\ntwo\n")
    two.far.sweep()
    assert (two.run_dir / "verdicts/judge-0.jsonl").read_bytes() == b"one\ntwo\n"


def test_where_things_still_lie_is_told(two: Two) -> None:
    assert two.far.left_at() == f"a: {two.of(0)}; b: {two.of(1)}"


def _records(*paths: str) -> list[FileRecord]:
    return [FileRecord(path=path, num_bytes=0, xxh3_128="") for path in paths]


def test_ranks_need_their_own_files_and_those_beside_them() -> None:
    own = [f"generator/rank_{rank}/g" for rank in range(11)]
    files = _records(*own, "trainer/state/a", *(f"trainer/rank_{rank}/b" for rank in range(3)))
    needed = files_for_ranks(files, [("generator", 1), ("trainer", 2)], {"generator": 11, "trainer": 3})
    assert [record.path for record in needed] == ["generator/rank_1/g", "trainer/state/a", "trainer/rank_2/b"]


def test_ranks_that_are_another_number_now_need_the_files_of_all_that_there_were() -> None:
    files = _records("generator/rank_0/g", "generator/rank_1/g", "trainer/rank_0/b", "trainer/rank_1/b")
    needed = files_for_ranks(files, [("generator", 2), ("trainer", 1)], {"generator": 3, "trainer": 2})
    assert [record.path for record in needed] == ["generator/rank_0/g", "generator/rank_1/g", "trainer/rank_1/b"]


def test_what_came_before_its_report_counted_is_not_asked_for_again_and_a_host_that_is_gone_is_passed_over(
    two: Two,
) -> None:
    record, log = two.write(0, "rollouts/tick_000000.jsonl", b"rows"), two.write(1, "log", b"lines")
    two.far.bring(0, [record])
    assert (two.run_dir / record.path).read_bytes() == b"rows"
    two.far.lose(0)
    two.far.fetch({writer_name("generator", 0): [record]}, two.run_dir)
    late = replace(record, path="rollouts/tick_000001.jsonl")
    with pytest.raises(CheckpointError, match="host a is gone"):
        two.far.fetch({writer_name("generator", 0): [late]}, two.run_dir)
    two.far.sweep()
    assert (two.run_dir / log.path).read_bytes() == b"lines"


def test_what_a_host_has_of_an_attempt_that_did_not_count_is_left_there(two: Two) -> None:
    first, second = (two.write(number, "rollouts/tick_000000.jsonl", b"rows") for number in (0, 1))
    two.far.bring(1, [second])
    two.far.sweep()
    assert first == second and (two.run_dir / first.path).read_bytes() == b"rows"
    assert not (two.run_dir / "hosts").exists()


def test_a_state_that_came_with_its_tick_outlives_its_host_though_the_rank_has_another_one_now(two: Two) -> None:
    where = dict(WHERE)
    far = HostFolders(two.run_dir, two.far.folders, where)
    written = _save(two, 9)
    at = "checkpoints/tick_000009.partial"
    for executor in ("generator", "trainer"):
        far.bring(0, written[f"{executor} rank 0"], at)
    far.lose(0)
    for executor in ("generator", "trainer"):
        where[executor] = (1, 1)
    far.fetch(written, two.run_dir / at)
    assert len(two.store.verify(two.store.finish(9, written, {}).path).manifest.files) == 5
    with pytest.raises(CheckpointError, match="host b: .* is not there"):
        far.fetch({"generator rank 0": written["generator rank 0"]}, two.run_dir / at)


def test_a_state_that_came_with_its_tick_is_there_though_its_rank_is_no_more(two: Two) -> None:
    where = dict(WHERE)
    far = HostFolders(two.run_dir, two.far.folders, where)
    written = _save(two, 3)
    below = two.run_dir / "checkpoints" / "tick_000003.partial"
    far.bring(1, written["generator rank 1"], "checkpoints/tick_000003.partial")
    where["generator"] = (0,)  # one replica from the next tick on
    far.fetch(written, below)
    assert len(two.store.verify(two.store.finish(3, written, {}).path).manifest.files) == 5


def test_a_state_of_a_rank_that_shared_the_runs_folder_is_not_asked_of_the_host_where_it_is_now(two: Two) -> None:
    where = {**WHERE, "generator": (0, 2)}  # the third host shares it
    far = HostFolders(two.run_dir, two.far.folders, where)
    below = two.store.begin(3)
    record = replace(put(below, "generator/rank_1/g", b"state"), path="generator/rank_1/g")
    far.bring(2, [record], f"checkpoints/{below.name}")
    where["generator"] = (0, 1)
    far.fetch({"generator rank 1": [record]}, below)
    assert (below / record.path).read_bytes() == b"state"


def test_a_state_goes_to_the_host_where_its_rank_is_now(two: Two) -> None:
    where = dict(WHERE)
    far = HostFolders(two.run_dir, two.far.folders, where)
    checkpoint = two.run_dir / "checkpoints" / "tick_000001"
    record = put(checkpoint, "generator/rank_0/state", b"carried")
    far.send_state_of("trainer", checkpoint, [record])
    assert not (two.of(1) / "checkpoints" / "tick_000001").exists()
    where["generator"] = (1, 1)
    far.send_state_of("generator", checkpoint, [record])
    assert (two.of(1) / "checkpoints/tick_000001/generator/rank_0/state").read_bytes() == b"carried"
    assert not (two.of(0) / "checkpoints" / "tick_000001").exists()
