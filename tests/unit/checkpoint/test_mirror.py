"""The copy of a run's folder in a storage: what is sent and deleted and in which order, and what a storage that fails does to it."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from same_run import contents
from waiting import wait_until

from llamarl.checkpoint import mirror as module
from llamarl.checkpoint.mirror import Mirror, Storage, check_mirror, mirrored, objects_of, plan_upload, restore
from llamarl.checkpoint.snapshot import FileRecord, Manifest, checksum_bytes
from llamarl.checkpoint.storage import RUN_ID_FILE, CheckpointStore, RunIdentity
from llamarl.checkpoint.written import files_below, record_files
from llamarl.config import load_config
from llamarl.errors import CheckpointError, ConfigError
from llamarl.settings.checkpoint import CheckpointConfig, why_no_storage

URL = "memory://bucket/runs/x"


def file(path: str, data: str) -> FileRecord:
    return FileRecord(path=path, num_bytes=len(data), xxh3_128=checksum_bytes(data.encode()))


def held(*files: FileRecord, number: int = 0, **moved: str) -> Manifest:
    run = {"run_id": "r", "writer": "w", "number": number, "objects": moved}
    return Manifest(tick=-1, files=files, run=run)


def by_path(*files: FileRecord) -> dict[str, FileRecord]:
    return {one.path: one for one in files}


# -- the plan --------------------------------------------------------------------------------------------------------


def test_an_empty_mirror_gets_everything_under_its_own_name() -> None:
    assert plan_upload(by_path(file("b", "1"), file("a/c", "2")), None) == ({"a/c": "files/a/c", "b": "files/b"}, [])


def test_what_the_mirror_holds_stays_and_what_is_gone_is_deleted() -> None:
    remote = held(file("old", "1"), file("same", "2"))
    assert plan_upload(by_path(file("same", "2"), file("new", "3")), remote) == (
        {"new": "files/new", "same": "files/same"},
        ["files/old"],
    )


def test_a_changed_file_never_overwrites_the_object_that_the_manifest_names() -> None:
    remote = held(file("rows", "1"), number=6)
    assert plan_upload(by_path(file("rows", "12")), remote) == ({"rows": "versions/7/rows"}, ["files/rows"])


def test_a_file_that_changes_again_goes_back_to_its_own_name_when_that_is_free() -> None:
    remote = held(file("rows", "12"), number=7, rows="versions/7/rows")
    assert plan_upload(by_path(file("rows", "123")), remote) == ({"rows": "files/rows"}, ["versions/7/rows"])


def test_an_unchanged_file_keeps_the_name_that_it_has() -> None:
    remote = held(file("rows", "12"), number=7, rows="versions/7/rows")
    assert plan_upload(by_path(file("rows", "12")), remote) == ({"rows": "versions/7/rows"}, [])


def test_litter_of_torn_uploads_is_deleted_but_not_what_is_named_now() -> None:
    remote = held(file("a", "1"))
    objects, deletes = plan_upload(
        by_path(file("a", "1"), file("b", "2")), remote, ["files/b", "versions/3/rows", "files/a"]
    )
    assert objects == {"a": "files/a", "b": "files/b"}
    assert deletes == ["versions/3/rows"]


# -- a folder, a storage, faults ---------------------------------------------------------------------------------------


class Run:
    """A run's folder that grows as a run's does."""

    def __init__(self, path: Path, run_id: str = "0123") -> None:
        self.path = path
        path.mkdir()
        (path / RUN_ID_FILE).write_text(run_id + "\n")
        (path / "config.toml").write_text("[run]\n")
        (path / ".lock").write_text("7\n")
        (path / "journal").mkdir()
        (path / "journal" / "000").write_text("memory of this machine")
        (path / ".incoming").mkdir()
        (path / ".incoming" / "new-01").write_text("the first half of what comes from another host")
        self.store = CheckpointStore(path / "checkpoints", CheckpointConfig(keep=2))

    @property
    def identity(self) -> RunIdentity:
        return RunIdentity.of(self.path)

    def save(self, tick: int, data: str = "") -> None:
        with open(self.path / "metrics.jsonl", "a") as rows:
            rows.write(f'{{"step": {tick}}}\n')
        folder = self.store.begin(tick)
        (folder / "trainer").mkdir()
        (folder / "trainer" / "state").write_text(data or f"state after {tick} " * 1000)
        self.store.finish(tick, {"trainer rank 0": record_files(folder, files_below(folder))})

    def contents(self) -> dict[str, bytes]:
        """What another machine needs of it."""
        passing = (".lock", "journal", ".incoming")
        return {k: v for k, v in contents(self.path).items() if not k.startswith(passing)}


class Fault:
    """Makes calls of one file system fail, or wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fs: type[Any]) -> None:
        self.away = False
        self.calls: list[tuple[str, str]] = []
        self.hold: threading.Event | None = None
        for name in ("open", "cat_file", "pipe_file", "rm_file", "get_file", "mv"):
            monkeypatch.setattr(fs, name, self._failing(name, getattr(fs, name)))

    def _failing(self, name: str, call: Any) -> Any:
        def failing(fs: Any, path: str, *args: Any, **options: Any) -> Any:
            if self.hold is not None and name == "open":
                assert self.hold.wait(30)
            if self.away:
                raise ConnectionError("no route to host")
            self.calls.append((name, path))
            return call(fs, path, *args, **options)

        return failing


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fault]:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.05)
    yield Fault(monkeypatch, type(memory))
    memory.store.clear()


def objects() -> dict[str, bytes]:
    return {k.removeprefix("/bucket/runs/x/"): v.getvalue() for k, v in fsspec.filesystem("memory").store.items()}


def settle(mirror: Mirror) -> None:
    mirror.wake()
    wait_until(lambda: mirror._done == mirror._asked)


@contextmanager
def mirroring(run: Run, limit_s: float = 20) -> Iterator[Mirror]:
    """From when what the run has so far is there."""
    with mirrored(URL, run.identity, limit_s) as mirror:
        settle(mirror)
        yield mirror


def restored(folder: Path) -> dict[str, bytes]:
    """What the mirror brings to an empty folder."""
    restore(URL, folder)
    return contents(folder)


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_run_comes_back_byte_for_byte_from_its_mirror(tmp_path: Path, scheme: str, fault: Fault) -> None:
    url = URL if scheme == "memory" else f"file://{tmp_path}/storage/x"
    run = Run(tmp_path / "run")
    with mirrored(url, run.identity, 20) as mirror:
        for tick in range(4):
            run.save(tick)
            mirror.wake()
        (run.path / "model").mkdir()
        (run.path / "model" / "weights").write_bytes(bytes(range(256)) * 50_000)  # some chunks
        (run.path / "empty").touch()
    text = restore(url, tmp_path / "back")
    assert contents(tmp_path / "back") == run.contents()
    assert "up to tick 3" in text
    assert [path.name for path in CheckpointStore(tmp_path / "back" / "checkpoints").list()] == [
        "tick_000002",
        "tick_000003",
    ]
    assert CheckpointStore(tmp_path / "back" / "checkpoints").load().tick == 3


def test_the_manifest_is_written_after_what_it_names_and_before_anything_is_deleted(
    tmp_path: Path, fault: Fault
) -> None:
    run = Run(tmp_path / "run")
    run.save(0), run.save(1)
    with mirroring(run):
        fault.calls.clear()
        run.save(2)  # tick 0 goes
    names = [(name, path.rpartition("runs/x/")[2]) for name, path in fault.calls]
    manifest = names.index(("mv", "manifest.json.new"))
    sent = [at for at, (name, path) in enumerate(names) if name == "open" and path.startswith(("files/", "versions/"))]
    gone = [
        at for at, (name, path) in enumerate(names) if name == "rm_file" and path.startswith(("files/", "versions/"))
    ]
    assert max(sent) < manifest < min(gone)
    assert {names[at][1] for at in gone} == {
        "files/checkpoints/tick_000000/manifest.json",
        "files/checkpoints/tick_000000/trainer/state",
        "files/metrics.jsonl",
    }
    assert "versions/2/metrics.jsonl" in objects()


def test_old_checkpoints_leave_no_litter(tmp_path: Path, fault: Fault) -> None:
    run = Run(tmp_path / "run")
    with mirrored(URL, run.identity, 20) as mirror:
        for tick in range(6):
            run.save(tick)
            mirror.wake()
            settle(mirror)
    manifest = Storage(URL).manifest()
    assert manifest is not None and manifest.tick == 5
    assert set(objects()) == {"manifest.json", *objects_of(manifest).values()}
    assert {record.path for record in manifest.files} == set(run.contents())


def test_a_manifest_of_somebody_elses_is_a_file_like_any_other(tmp_path: Path, fault: Fault) -> None:
    run = Run(tmp_path / "run")
    (run.path / "table").mkdir()
    (run.path / "table" / "manifest.json").write_text("{}")
    with mirrored(URL, run.identity, 20) as mirror:
        run.save(3)
        settle(mirror)
    manifest = Storage(URL).manifest()
    assert manifest is not None and manifest.tick == 3
    assert objects()["files/table/manifest.json"] == b"{}"


def test_every_single_moment_of_a_kill_leaves_a_mirror_that_is_whole(tmp_path: Path, fault: Fault) -> None:
    """Each call of the storage in turn is the last one that came through."""
    run = Run(tmp_path / "run")
    run.save(0)
    with mirrored(URL, run.identity, 20):
        pass
    run.save(1)
    states: list[dict[str, bytes]] = []
    memory = fsspec.filesystem("memory")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "pipe_file", "rm_file", "mv"):
            call = getattr(type(memory), name)

            def noting(fs: Any, *args: Any, _call: Any = call, **options: Any) -> Any:
                states.append({k: bytes(v.getvalue()) for k, v in fs.store.items()})
                return _call(fs, *args, **options)

            patch.setattr(type(memory), name, noting)
        run.save(2)  # tick 0 goes, rows change
        with mirrored(URL, run.identity, 20):
            pass
    assert len(states) > 10
    found = set()
    for number, state in enumerate(states):
        memory.store.clear()
        for path, data in state.items():
            memory.pipe_file(path, data)
        restore(URL, tmp_path / str(number))
        newest = CheckpointStore(tmp_path / str(number) / "checkpoints").load()
        assert (tmp_path / str(number) / "metrics.jsonl").read_text().count("\n") >= newest.tick + 1
        found.add(newest.tick)
    assert found == {0, 2}


def test_a_storage_that_is_away_delays_nothing_is_told_of_once_and_caught_up_with(tmp_path: Path, fault: Fault) -> None:
    run = Run(tmp_path / "run")
    told = []
    with mirroring(run) as mirror:
        fault.away = True
        for tick in range(4):
            run.save(tick)
            began = time.monotonic()
            mirror.wake()
            told += mirror.news()
            assert time.monotonic() - began < 0.1
            time.sleep(0.2)
        told += mirror.news()
        assert len(told) == 1 and "no route to host" in told[0] and "The run goes on" in told[0]
        fault.away = False
        settle(mirror)
        assert mirror.news() == ["run.mirror has caught up"]
    assert restored(tmp_path / "back") == run.contents()


def test_a_slow_storage_holds_up_nobody(tmp_path: Path, fault: Fault) -> None:
    run = Run(tmp_path / "run")
    with mirroring(run) as mirror:
        fault.hold = threading.Event()
        run.save(0)
        mirror.wake()
        wait_until(lambda: "checkpoints/tick_000000/trainer/state" in mirror._left)
        assert mirror.news() == []
        fault.hold.set()
        settle(mirror)
        assert mirror.news() == []


def test_a_checkpoint_that_is_removed_while_it_is_sent_is_sent_whole(tmp_path: Path, fault: Fault) -> None:
    run = Run(tmp_path / "run")
    with mirroring(run) as mirror:
        before, fault.hold = mirror._done, threading.Event()
        run.save(0)
        mirror.wake()
        wait_until(lambda: "checkpoints/tick_000000/trainer/state" in mirror._left)
        for tick in (1, 2, 3):
            run.save(tick)
        assert not (run.path / "checkpoints" / "tick_000000").exists()
        fault.hold.set()
        wait_until(lambda: mirror._done > before)
        restore(URL, tmp_path / "back")
        assert CheckpointStore(tmp_path / "back" / "checkpoints").load().tick == 0
    assert restored(tmp_path / "end") == run.contents()


def test_a_storage_away_for_good_ends_in_a_sentence_that_says_what_is_not_there(tmp_path: Path, fault: Fault) -> None:
    run = Run(tmp_path / "run")
    before = {}
    with pytest.raises(CheckpointError) as refused, mirroring(run, 0.5):
        fault.away = True
        run.save(0)
        before = run.contents()
    said = str(refused.value)
    assert "no route to host" in said and f"llamarl train --resume {run.path} --run.mirror {URL}" in said
    assert run.contents() == before  # nothing that is local is lost
    fault.away = False
    with mirrored(URL, run.identity, 20):  # the way out that it names
        pass
    assert restored(tmp_path / "back") == before


def test_what_ended_the_run_is_not_hidden_by_a_mirror_that_lags(
    tmp_path: Path, fault: Fault, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(ZeroDivisionError), mirroring(run, 0.2):
        fault.away = True
        raise ZeroDivisionError
    assert "run.mirror lacks something of" in capsys.readouterr().err


def test_a_storage_that_cannot_be_reached_is_refused_before_anything_runs(
    tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REACHED_S", 0.2)
    fault.away = True
    with pytest.raises(ConfigError, match="cannot be used: ConnectionError: no route to host") as refused:
        Mirror(Storage(URL), Run(tmp_path / "run").identity)
    with pytest.raises(CheckpointError, match="no route to host") as lacking:
        restore(URL, tmp_path / "back")
    assert refused.value.exit_code == lacking.value.exit_code == 1, "a loop that resumes goes on at 1, and ends at 2"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mirror_of_two(tmp_path: Path, fault: Fault) -> Run:
    run = Run(tmp_path / "run")
    with mirrored(URL, run.identity, 20):
        run.save(0), run.save(1)
    return run


def damage(path: str, data: bytes) -> None:
    fsspec.filesystem("memory").pipe_file(f"{URL}/{path}", data)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda data: data[:-1], "is torn: 13999 bytes, 14000 were written"),
        (lambda data: data[:-1] + b"!", "was altered"),
        (None, "is missing"),
    ],
)
def test_a_damaged_object_is_refused_by_name_and_the_rest_is_kept(
    tmp_path: Path, mirror_of_two: Run, change: Any, said: str
) -> None:
    name = "files/checkpoints/tick_000001/trainer/state"
    if change is None:
        fsspec.filesystem("memory").rm_file(f"{URL}/{name}")
    else:
        damage(name, change((mirror_of_two.path / name.removeprefix("files/")).read_bytes()))
    with pytest.raises(CheckpointError) as refused:
        restore(URL, tmp_path / "back")
    assert f"{URL}/{name} {said}" in str(refused.value).replace("\n", " ")
    assert not (tmp_path / "back").exists()
    rest = tmp_path / "back.download"
    shutil.rmtree(rest / "checkpoints" / "tick_000001")  # as the message says
    rest.rename(tmp_path / "back")
    assert CheckpointStore(tmp_path / "back" / "checkpoints").load().tick == 0


def test_a_damaged_manifest_is_refused_by_name(tmp_path: Path, mirror_of_two: Run) -> None:
    whole = objects()["manifest.json"]
    for data in (b"", whole[:100], whole.replace(b"state", b"stats"), b"[]", b"{}", b"\xff"):
        damage("manifest.json", data)
        with pytest.raises(CheckpointError, match=f"{URL}/manifest.json is refused"):
            restore(URL, tmp_path / "back")


@pytest.mark.parametrize(
    "path, moved", [("../outside", {}), ("/etc/x", {}), ("a", {"a": "../../other/object"}), ("a", {"a": 7})]
)
def test_a_manifest_of_a_stranger_reaches_nothing_outside(
    tmp_path: Path, mirror_of_two: Run, path: str, moved: dict[str, str]
) -> None:
    damage("manifest.json", held(file(path, "x"), **moved).to_bytes())
    with pytest.raises(CheckpointError, match="is refused"):
        restore(URL, tmp_path / "back")


def test_a_download_that_was_stopped_is_gone_on_with(tmp_path: Path, mirror_of_two: Run, fault: Fault) -> None:
    partial = tmp_path / "back.download"
    shutil.copytree(mirror_of_two.path / "checkpoints" / "tick_000000", partial / "checkpoints" / "tick_000000")
    (partial / "checkpoints" / "tick_000000" / "trainer" / "state").write_text("half")
    (partial / "of_an_older_manifest").touch()
    fault.calls.clear()
    assert restored(tmp_path / "back") == mirror_of_two.contents()
    brought = {path.rpartition("/files/")[2] for name, path in fault.calls if name == "get_file"}
    assert "checkpoints/tick_000000/trainer/state" in brought and "checkpoints/tick_000000/manifest.json" not in brought


def test_nothing_is_brought_over_what_is_there(tmp_path: Path, mirror_of_two: Run) -> None:
    with pytest.raises(ConfigError, match=f"--resume {mirror_of_two.path}, or choose another --run.dir"):
        restore(URL, mirror_of_two.path)


def test_an_empty_storage_holds_no_run(tmp_path: Path, fault: Fault) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        restore("memory://bucket/nothing", tmp_path / "back")


def test_a_dry_run_says_what_would_come(tmp_path: Path, mirror_of_two: Run) -> None:
    text = restore(URL, tmp_path / "back", dry_run=True)
    assert text.startswith(f"{URL} holds 7 files of ") and text.endswith(
        f"up to tick 1; they go to {tmp_path / 'back'}"
    )
    assert not list(tmp_path.glob("back*"))


def test_a_run_that_was_lost_before_its_first_checkpoint_is_said_to_have_none(tmp_path: Path, fault: Fault) -> None:
    with mirrored(URL, Run(tmp_path / "run").identity, 5.0):
        pass
    assert "without a checkpoint; they go to" in restore(URL, tmp_path / "back", dry_run=True)


def test_a_second_run_is_refused_in_the_same_mirror(tmp_path: Path, mirror_of_two: Run) -> None:
    other = Run(tmp_path / "other", run_id="4567")
    with pytest.raises(ConfigError, match=f"holds another run, of process .*--resume {URL}"):
        Mirror(Storage(URL), other.identity)
    with pytest.raises(ConfigError, match=f"holds another run, of process .*--resume {URL}"):
        check_mirror(URL)
    assert restored(tmp_path / "back") == mirror_of_two.contents()


def test_a_place_with_other_files_is_no_mirror(tmp_path: Path, fault: Fault) -> None:
    damage("files/precious", b"1")
    with pytest.raises(ConfigError, match="holds files that are no run's"):
        Mirror(Storage(URL), Run(tmp_path / "run").identity)
    with pytest.raises(ConfigError, match="holds files that are no run's"):
        check_mirror(URL)
    assert objects() == {"files/precious": b"1"}


def test_a_resume_takes_over_and_the_one_before_ends_its_mirror_and_says_so(tmp_path: Path, fault: Fault) -> None:
    run = Run(tmp_path / "run")
    run.save(0)
    with pytest.raises(CheckpointError, match="was taken over by process"), mirroring(run) as first:
        restore(URL, tmp_path / "back")
        with mirrored(URL, RunIdentity.of(tmp_path / "back"), 20):
            run.save(1)
            first.wake()
            wait_until(lambda: first._ended != "")
            (told,) = first.news()
            assert "The run goes on without its mirror" in told
    restore(URL, tmp_path / "end")
    assert CheckpointStore(tmp_path / "end" / "checkpoints").load().tick == 0


def test_an_older_folder_does_not_take_the_place_of_a_newer_mirror(tmp_path: Path, mirror_of_two: Run) -> None:
    shutil.rmtree(mirror_of_two.path / "checkpoints" / "tick_000001")
    with pytest.raises(ConfigError, match="up to tick 1, .* up to tick 0: go on by"):
        Mirror(Storage(URL), mirror_of_two.identity)
    restore(URL, tmp_path / "back")


def test_a_folder_that_was_lost_does_not_empty_its_mirror(tmp_path: Path, fault: Fault) -> None:
    run = Run(tmp_path / "run")
    run.save(0)
    kept = run.contents()
    with pytest.raises(CheckpointError, match="is not there any more"), mirroring(run) as mirror:
        shutil.rmtree(run.path)
        mirror.wake()
    assert restored(tmp_path / "back") == kept


def test_a_checkpoint_that_was_altered_here_does_not_reach_the_mirror(tmp_path: Path, fault: Fault) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(CheckpointError, match="checkpoints/tick_000000/trainer/state was altered"):
        with mirrored(URL, run.identity, 0.5):
            run.save(0)
            state = run.path / "checkpoints" / "tick_000000" / "trainer" / "state"
            state.write_bytes(b"!" * state.stat().st_size)
    with pytest.raises(ConfigError, match="holds no run"):
        restore(URL, tmp_path / "back")


def test_half_an_object_of_a_killed_upload_is_believed_by_nobody(tmp_path: Path, mirror_of_two: Run) -> None:
    before = mirror_of_two.contents()
    damage("files/checkpoints/tick_000002/trainer/state", b"half")
    damage("files/checkpoints/tick_000009/trainer/state", b"half of one that no run makes again")
    assert restored(tmp_path / "back") == before
    mirror_of_two.save(2)
    with mirrored(URL, mirror_of_two.identity, 20):
        pass
    assert restored(tmp_path / "then") == mirror_of_two.contents()
    assert not [name for name in objects() if "tick_000009" in name]


def test_a_listing_that_lags_costs_litter_and_no_more(
    tmp_path: Path, mirror_of_two: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = {
        "files/gone",
        "files/checkpoints/tick_000001/trainer/state",
    }  # one that was deleted long ago; new ones are not seen
    monkeypatch.setattr(Storage, "listed", lambda storage: stale)
    with mirrored(URL, mirror_of_two.identity, 20):
        mirror_of_two.save(2)
    assert restored(tmp_path / "back") == mirror_of_two.contents()


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["runs/x", "s3:/bucket", "s3://", "http://host/x", "file://runs/x", "simplecache::s3://b/x", "s3:///"]
)
def test_an_address_that_is_none_is_told_what_one_is(url: str) -> None:
    assert "s3://bucket/folder" in why_no_storage(url)


@pytest.mark.parametrize("url", ["s3://key:hunter2@bucket/x", "s3://key@bucket/x", "gs://b/x?token=hunter2"])
def test_a_password_in_an_address_is_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("recipes/tiny.toml", ["--run.mirror", url])
    assert "run.mirror must hold no user, password or query" in str(refused.value)
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        restore(url, tmp_path / "back")
    assert "hunter2" not in str(refused.value)


def test_a_missing_package_is_one_sentence_with_the_line_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_no_storage("s3://b/x") == "needs the package s3fs: pip install 'llamarl[storage]'"
    assert why_no_storage("gs://b/x") == "needs the package gcsfs: pip install gcsfs"
    assert why_no_storage("file:///b/x") == ""
