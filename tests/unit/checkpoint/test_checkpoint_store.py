"""A checkpoint is all or nothing, whatever ends the process and whatever happens to its bytes."""

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamarl.checkpoint.snapshot import MANIFEST, FileRecord, Manifest, canonical_json, checksum_file
from llamarl.checkpoint.storage import CheckpointStore, saving
from llamarl.checkpoint.written import files_below, record_files
from llamarl.config import validate
from llamarl.errors import CheckpointError, ConfigError
from llamarl.settings.checkpoint import CheckpointConfig


class _Killed(BaseException):
    """Stands for SIGKILL: no ``except Exception`` and no clean-up of ours may run on it."""


def _write(store: CheckpointStore, tick: int, text: str | None = None) -> None:
    partial = store.begin(tick)
    for executor in ("generator", "trainer"):
        folder = partial / executor / "rank_0"
        folder.mkdir(parents=True)
        (folder / "state.bin").write_bytes((text or f"{executor} after {tick}").encode() * 100)
    store.finish(tick, _all_below(partial), {"config_digest": "abc", "threads": {"trainer": 1}})


def _all_below(partial: Path) -> dict[str, tuple[FileRecord, ...]]:
    """What ranks would tell of the files that are there."""
    return {"everyone": record_files(partial, files_below(partial))}


def _names(store: CheckpointStore) -> list[str]:
    return [path.name for path in store.list()]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(keep=0))


def test_what_was_finished_is_loaded_with_its_files_and_its_account_of_the_run(store: CheckpointStore) -> None:
    _write(store, 9)
    checkpoint = store.load()
    assert checkpoint.tick == 9
    assert checkpoint.path == store.folder / "tick_000009"
    assert (checkpoint.path / "trainer" / "rank_0" / "state.bin").read_bytes() == b"trainer after 9" * 100
    assert checkpoint.run == {"config_digest": "abc", "threads": {"trainer": 1}}
    assert [(f.path, f.num_bytes) for f in checkpoint.manifest.files] == [
        ("generator/rank_0/state.bin", 1700),
        ("trainer/rank_0/state.bin", 1500),
    ]
    assert checkpoint.manifest.platform["llamarl"]


def test_an_unfinished_checkpoint_is_never_offered(store: CheckpointStore) -> None:
    _write(store, 1)
    store.begin(2)
    assert _names(store) == ["tick_000001"]
    assert store.load().tick == 1


def test_two_checkpoints_may_be_in_progress_at_once(store: CheckpointStore) -> None:
    first, second = store.begin(4), store.begin(5)
    (first / "a").write_text("4")
    (second / "a").write_text("5")
    store.finish(4, _all_below(first))
    store.finish(5, _all_below(second))
    assert [store.load(t).path.joinpath("a").read_text() for t in (4, 5)] == ["4", "5"]


STATE = "trainer/rank_0/state.bin"


def _replace(file: Path, old: bytes, new: bytes) -> None:
    file.write_bytes(file.read_bytes().replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda path: os.truncate(path / STATE, 7), f"{STATE} is torn: 7 bytes, 1500 were written"),
        (lambda path: _replace(path / STATE, b"after", b"aftes"), f"{STATE} was altered"),
        (lambda path: (path / STATE).unlink(), f"{STATE} is missing"),
        (lambda path: (path / "trainer/more.bin").write_text("x"), "trainer/more.bin was added"),
        (lambda path: (path / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda path: os.truncate(path / MANIFEST, 40), "manifest.json is not whole JSON"),
        (lambda path: _replace(path / MANIFEST, b'"trainer": 1', b'"trainer": 2'), "manifest.json was altered"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_last_good_one_offered(
    store: CheckpointStore, damage: Callable[[Path], object], found: str
) -> None:
    for tick in (1, 2, 3):
        _write(store, tick)
    damage(store.folder / "tick_000003")
    with pytest.raises(CheckpointError) as caught:
        store.load()
    message = str(caught.value)
    assert "tick_000003 is refused" in message
    assert found in message
    assert "the last good one is tick_000002" in message
    assert store.load(2).tick == 2


def test_a_checkpoint_that_cannot_be_read_now_is_not_to_be_removed_first(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: Path) -> tuple[int, str]:
        if "tick_000002" in path.parts:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return checksum_file(path)

    _write(store, 1)
    _write(store, 2)
    monkeypatch.setattr("llamarl.checkpoint.storage.checksum_file", stale)
    again = (
        r"Stale file handle; resume again when its disk can be read\. If it never can: the last good one is tick_000001"
    )
    with pytest.raises(CheckpointError, match=again):
        store.load()


def test_a_folder_that_cannot_be_read_now_is_not_one_without_checkpoints(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(store, 1)
    monkeypatch.setattr(Path, "is_dir", lambda path: False)  # what Python 3.14 answers where nothing can tell
    assert _names(store) == ["tick_000001"]
    monkeypatch.setattr(os, "scandir", lambda path: os.close(-1))
    with pytest.raises(OSError):
        store.list()


def test_a_flip_of_any_single_byte_of_the_manifest_is_found(store: CheckpointStore) -> None:
    _write(store, 3)
    file = store.folder / "tick_000003" / MANIFEST
    whole = file.read_bytes()
    Manifest.from_bytes(whole)
    for position in range(len(whole)):
        with pytest.raises(ValueError):
            Manifest.from_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])


def test_a_renamed_checkpoint_is_refused(store: CheckpointStore) -> None:
    _write(store, 3)
    os.rename(store.folder / "tick_000003", store.folder / "tick_000008")
    with pytest.raises(CheckpointError, match="is of tick 3: the folder was renamed"):
        store.load()


def test_with_no_good_checkpoint_the_message_says_so(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="holds no finished checkpoint: start the run anew"):
        store.load()
    _write(store, 1)
    os.truncate(store.folder / "tick_000001" / STATE, 7)
    with pytest.raises(CheckpointError, match="no other checkpoint of this run is good"):
        store.load()


def test_a_tick_that_was_not_saved_is_answered_with_those_that_were(store: CheckpointStore) -> None:
    _write(store, 1)
    _write(store, 2)
    with pytest.raises(CheckpointError, match="holds no tick_000007; it holds tick_000001, tick_000002"):
        store.load(7)


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig(keep=2))
    for tick in range(5):
        _write(store, tick)
        assert store.load().tick == tick
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tick_000003", "tick_000004"]


def test_retention_never_removes_the_checkpoint_just_finished_for_a_later_one_of_an_abandoned_future(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig(keep=1))
    for tick in (7, 3):
        _write(store, tick)
    assert store.load(3).tick == 3


def test_clean_removes_leftovers_and_on_resume_the_abandoned_future(store: CheckpointStore) -> None:
    for tick in (1, 2, 3):
        _write(store, tick)
    store.begin(4)
    (store.folder / "tick_000000.deleted").mkdir()
    (store.folder / "notes.txt").write_text("the user's own")
    assert store.clean() == ("tick_000000.deleted", "tick_000004.partial")
    assert _names(store) == ["tick_000001", "tick_000002", "tick_000003"]
    assert store.clean(after_tick=1) == ("tick_000002", "tick_000003")
    assert sorted(p.name for p in store.folder.iterdir()) == ["notes.txt", "tick_000001"]


class _Disk:
    """Counts the calls that change the disk; ``fail`` is asked before each, by its number, and may raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail: Callable[[int], None]) -> None:
        self.calls = 0
        for name in ("fsync", "rename", "rmdir", "unlink", "mkdir"):
            monkeypatch.setattr(os, name, self._asking(getattr(os, name), fail))

    def _asking(self, call: Callable[..., Any], fail: Callable[[int], None]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            self.calls += 1
            fail(self.calls - 1)
            return call(*args, **options)

        return step


@pytest.mark.parametrize("same_tick", [False, True], ids=["next tick", "same tick again"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path, same_tick: bool) -> None:
    """Kill before every single call that changes the disk, from begin to the last removal."""
    old_tick = 2 if same_tick else 1
    outcomes = []
    for at in range(200):
        folder = tmp_path / str(at)
        store = CheckpointStore(folder, CheckpointConfig(keep=1))
        _write(store, old_tick, "old")

        def die(call: int, at: int = at) -> None:
            if call >= at:
                raise _Killed

        with pytest.MonkeyPatch.context() as patch:
            _Disk(patch, die)
            try:
                _write(store, 2, "new")
                finished = True
            except _Killed:
                finished = False
        survivor = CheckpointStore(folder, CheckpointConfig(keep=1))
        survivor.clean()
        checkpoint = survivor.load()
        text = (checkpoint.path / "trainer/rank_0/state.bin").read_text()
        assert text in ("old" * 100, "new" * 100), f"killed before call {at}"
        outcomes.append(text[:3])
        assert not [p.name for p in folder.iterdir() if not p.name[-1].isdigit()], "leftovers after clean"
        if finished:
            break
    assert finished and at > 8
    assert outcomes == sorted(outcomes, reverse=True)  # old .. old, new .. new
    assert outcomes[0] == "old" and outcomes[-1] == "new"


@pytest.mark.parametrize("lasting", [False, True], ids=["one call", "all from it on"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ENOENT])
def test_a_disk_that_fails_at_any_call_is_an_error_by_name_and_costs_no_earlier_checkpoint(
    tmp_path: Path, number: int, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nothing dies here, so nothing needs to be flushed
    for at in range(200):
        folder = tmp_path / str(at)
        store = CheckpointStore(folder, CheckpointConfig(keep=1))
        _write(store, 1, "old")
        failed = False

        def refuse(call: int, at: int = at) -> None:
            if call == at or (lasting and call > at):
                raise OSError(number, os.strerror(number))

        with pytest.MonkeyPatch.context() as patch:
            disk = _Disk(patch, refuse)
            partial = folder / "tick_000002.partial"
            try:
                store.begin(2)
                with saving(partial):
                    (partial / "state.bin").write_text("new")
                    written = _all_below(partial)
                store.finish(2, written)
            except CheckpointError as error:
                failed = True
                # Python 3.13 passes over a file that is said to be gone, and is refused its folder
                told = (number, errno.ENOTEMPTY) if number == errno.ENOENT else (number,)
                assert any(os.strerror(cause) in error.cause for cause in told)
        survivor = CheckpointStore(folder, CheckpointConfig(keep=1))
        survivor.clean()
        loaded = survivor.load()
        if loaded.tick == 1:
            assert failed and (loaded.path / "trainer/rank_0/state.bin").read_text() == "old" * 100
        else:
            assert (loaded.path / "state.bin").read_text() == "new"
        store.begin(3)
        store.finish(3, {})  # the disk works again: nothing stands in the way
        assert store.load().tick == 3
        if disk.calls <= at:
            break
    assert not failed and at > 8


def test_a_full_disk_names_the_place_and_leaves_earlier_checkpoints(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(store, 1)
    partial = store.begin(2)
    (partial / "state.bin").write_text("x")
    written = _all_below(partial)
    (partial / MANIFEST).symlink_to("/dev/full")  # every write there fails as on a full disk, and reads never end
    monkeypatch.setattr("llamarl.checkpoint.storage.files_below", lambda folder: iter([folder / "state.bin"]))
    with pytest.raises(CheckpointError) as caught:
        store.finish(2, written)
    monkeypatch.undo()
    message = str(caught.value)
    assert "cannot finish checkpoint tick_000002" in message
    assert str(partial) in message
    assert "No space left on device" in message and "MB free there" in message
    assert "Finished checkpoints are untouched (tick_000001)" in message
    assert "Free some space" in message
    assert [p.name for p in store.folder.iterdir()] == ["tick_000001"]
    assert store.load().tick == 1


def test_a_failed_replacement_puts_the_old_checkpoint_back(store: CheckpointStore) -> None:
    _write(store, 2, "old")
    store.begin(2)
    real = os.rename

    def rename(source, target) -> None:
        if str(source).endswith(".partial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(CheckpointError, match="Input/output error"):
            store.finish(2, {})
    assert (store.load().path / "trainer/rank_0/state.bin").read_text() == "old" * 100
    assert [p.name for p in store.folder.iterdir()] == ["tick_000002"]


def test_finish_without_begin_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="it was not begun"):
        store.finish(3, {})


def test_a_real_write_past_the_limit_while_saving_becomes_a_checkpoint_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # the kernel refuses the rest, as a quota does
        with pytest.raises(CheckpointError, match="cannot save the state of an executor: .*rank_0: File too large"):
            with saving(tmp_path / "trainer" / "rank_0"):
                (tmp_path / "state.bin").write_bytes(b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_library_error_about_a_full_disk_counts_and_others_pass_through(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot save the run's model: .*No space left"):
        with saving(tmp_path, "the run's model"):
            raise RuntimeError("I/O error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match="a bug"):
        with saving(tmp_path):
            raise RuntimeError("a bug")


def test_a_copy_of_a_checkpoint_elsewhere_is_proved_too(store: CheckpointStore, tmp_path: Path) -> None:
    _write(store, 5)
    shutil.copytree(store.folder / "tick_000005", tmp_path / "copy")
    assert store.verify(tmp_path / "copy").tick == 5


# Manifests and settings.


def test_a_manifest_of_another_format_is_refused() -> None:
    data = Manifest(tick=3, files=()).to_bytes().replace(b'"format": 3', b'"format": 1')
    with pytest.raises(ValueError, match="has format 1, this llamarl reads format 3"):
        Manifest.from_bytes(data)


def test_canonical_json_refuses_nan() -> None:
    with pytest.raises(ValueError):
        canonical_json({"a": float("nan")})


@pytest.mark.parametrize(("every", "due"), [(0, [9]), (4, [3, 7, 9]), (5, [4, 9])])
def test_checkpoints_are_due_after_each_full_count_of_ticks_and_at_the_end(every: int, due: list) -> None:
    config = CheckpointConfig(every=every)
    assert [tick for tick in range(10) if config.is_due(tick, 10)] == due


@pytest.mark.parametrize("field", ["every_minutes", "every", "keep"])
def test_negative_settings_are_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint.{field} must be >= 0"):
        validate({"checkpoint": {field: -1}})


def test_an_old_checkpoint_that_a_mirror_still_sends_is_removed_on_nfs_as_far_as_it_can_be_and_later_wholly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(keep=1))
    unlink, is_open = os.unlink, {"state.bin"}

    def of_nfs(path: str, *, dir_fd: int | None = None) -> None:
        folder, name = os.path.split(path)
        if name in is_open:
            os.rename(path, os.path.join(folder, f".nfs{name}"), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        elif name.removeprefix(".nfs") in is_open:
            raise OSError(errno.EBUSY, "Device or resource busy")
        else:
            unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", of_nfs)
    _write(store, 1)
    _write(store, 2)
    assert _names(store) == ["tick_000002"]
    left = {path.name for path in files_below(store.folder / "tick_000001.deleted")}
    assert left == {".nfsstate.bin"}, "what is open, and nothing else"
    is_open.clear()
    _write(store, 3)
    assert sorted(path.name for path in store.folder.iterdir()) == ["tick_000003"]
    assert store.load().tick == 3

    def refused(path: str, *, dir_fd: int | None = None) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", refused)
    with pytest.raises(CheckpointError, match="cannot remove an old checkpoint.*not permitted"):
        _write(store, 4)
