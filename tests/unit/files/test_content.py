"""What a plan names reaches a host that lacks it, by content: once, proved, and under a path of the host's own."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from far_files import FarHost, far_host

from llamarl.errors import TransferError
from llamarl.files.content import Content, content_of, paths_in, provide, same_there, with_paths


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FarHost]:
    with far_host(tmp_path / "b") as found:
        yield found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """As a snapshot of the Hugging Face cache: links to blobs."""
    blobs, folder = tmp_path / "blobs", tmp_path / "model"
    blobs.mkdir()
    (folder / "sub").mkdir(parents=True)
    (blobs / "1").write_bytes(b"w" * 2_000_000)
    (folder / "model.safetensors").symlink_to(blobs / "1")
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "copy.safetensors").symlink_to(blobs / "1")
    return folder


class Provider:
    """A host that has nothing under the controller's paths, and counts what is sent."""

    def __init__(self, host: FarHost, *, has: bool = False) -> None:
        self.client = host.client()
        self.sent: list[str] = []
        self.opened: list[str] = []
        send = self.client.send
        self.client.send = lambda source, record, run, **how: (
            self.sent.append(record.path),
            send(source, record, run, **how),
        )[1]  # type: ignore[method-assign,func-returns-value,misc]
        if not has:
            self.client.holds = lambda path, files: None  # type: ignore[method-assign]

    def provide(self, content: Content) -> Path:
        return provide(self.client, content, self._open)

    def _open(self) -> str:
        if not self.opened:
            self.opened.append(self.client.open_run("id")[0])
        return self.opened[0]


def test_a_host_with_the_same_bytes_under_the_same_path_is_sent_nothing(host: FarHost, model: Path) -> None:
    to = Provider(host, has=True)
    assert to.provide(content_of(model)) == model
    assert not to.sent and not to.opened


def test_of_a_run_whose_samples_are_learned_from_its_rollouts_alone_are_sent(tmp_path: Path) -> None:
    run = tmp_path / "first"
    (run / "rollouts").mkdir(parents=True)
    (run / "rollouts" / "tick_000000.jsonl").write_text("{}\n")
    inside = str(run / "rollouts")
    for named in (str(run), inside):
        assert paths_in({"task": {"rollouts": named}}) == [inside]
        assert with_paths({"task": {"rollouts": named}}, {inside: "/there"}) == {"task": {"rollouts": "/there"}}
    assert paths_in({"task": {"rollouts": ""}}) == []


@pytest.mark.parametrize("damage", ["altered", "removed", "shorter"])
def test_other_bytes_under_the_same_path_are_not_taken_for_it(host: FarHost, model: Path, damage: str) -> None:
    content = content_of(model)
    file = model / "config.json"
    file.unlink()
    if damage != "removed":
        file.write_text("[]" if damage == "altered" else "")
    client = host.client()
    assert client.holds(model, content.files) is None
    assert client.holds(model / "nothing", content.files) is None


def test_a_host_that_has_the_snapshot_in_its_own_cache_is_sent_nothing(
    host: FarHost, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = Path("models--org--name", "snapshots", "0123abcd")
    own = tmp_path / "its" / "hub" / below
    own.parent.mkdir(parents=True)
    model.rename(own)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "its" / "hub"))
    content = content_of(own)
    client = host.client()
    assert client.holds(tmp_path / "the controllers" / below, content.files) == own
    assert (
        client.holds(tmp_path / "the controllers" / "models--org--name" / "snapshots" / "ffff", content.files) is None
    )


def test_files_of_one_size_and_time_need_not_be_read(host: FarHost, model: Path) -> None:
    client = host.client()
    assert same_there(client, model) and same_there(client, model / "config.json")
    seen = [("config.json", 2, (model / "config.json").stat().st_mtime_ns)]
    assert client.same(model, seen)
    assert not client.same(model, [("config.json", 3, seen[0][2])])
    assert not client.same(model, [("config.json", 2, seen[0][2] + 1)])
    assert not client.same(model / "nothing", seen) and not client.same(model, [])


def test_a_folder_is_sent_each_content_once_and_lies_there_whole(host: FarHost, model: Path) -> None:
    to = Provider(host)
    there = to.provide(content_of(model))
    assert sorted(to.sent) == ["config.json", "model.safetensors"], "the copy has the same content"
    assert {p.relative_to(there).as_posix(): p.read_bytes() for p in there.rglob("*") if p.is_file()} == {
        "config.json": b"{}",
        "model.safetensors": b"w" * 2_000_000,
        "sub/copy.safetensors": b"w" * 2_000_000,
    }
    assert there.is_relative_to(host.files.base) and there != model


def test_the_next_run_finds_it_there(host: FarHost, model: Path) -> None:
    first = Provider(host)
    there = first.provide(content_of(model))
    first.client.forget(first.opened[0])
    assert not there.exists()
    (model / "config.json").write_text('{"a": 1}')
    second = Provider(host)
    there = second.provide(content_of(model))
    assert second.sent == ["config.json"] and (there / "config.json").read_text() == '{"a": 1}'


def test_a_file_keeps_its_name(host: FarHost, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward(): ...\n")
    there = Provider(host).provide(content_of(tmp_path / "reward.py"))
    assert there.name == "reward.py" and there.read_text() == "def reward(): ...\n" and there.parent != tmp_path


def test_an_object_that_was_altered_on_the_host_is_sent_again(host: FarHost, model: Path) -> None:
    first = Provider(host)
    first.provide(content_of(model))
    (kept,) = [p for p in (host.files.base / "objects").iterdir() if p.name.endswith("-2000000")]
    os.chmod(kept, 0o644)
    kept.write_bytes(b"x" * 2_000_000)
    second = Provider(host)
    there = second.provide(content_of(model))
    assert second.sent == ["model.safetensors"]
    assert (there / "model.safetensors").read_bytes() == b"w" * 2_000_000


def test_a_file_that_changes_while_it_is_sent_is_refused(host: FarHost, model: Path) -> None:
    content = content_of(model)
    (model / "config.json").write_text("[]")
    with pytest.raises(TransferError, match="host b: config.json: it was altered"):
        Provider(host).provide(content)


def test_a_content_with_a_path_that_leads_out_is_not_placed(host: FarHost, model: Path) -> None:
    content = content_of(model)
    files = tuple(replace(r, path=f"../{r.path}") if r.path == "config.json" else r for r in content.files)
    client = host.client()
    run, _ = client.open_run("id")
    for record in client.lacks(content.files):
        client.send(model / record.path, record, run, as_object=True)
    with pytest.raises(TransferError, match="is no path of a file below"):
        client.place(run, files)


PLAIN = {
    "model": {"path": "models/x"},
    "task": {
        "data": "train.jsonl",
        "eval_data": "",
        "name": "models/x",
        "reward": "rewards/mine.py:exact",
        "rewards": [{"function": "rewards/mine.py:short", "weight": 1.0}, {"function": "package.module:f"}],
        "tasks": {"shop": {"environment": "trl:shop.py:Shop"}, "agent": {"environment": "agent:shop.py:run"}},
    },
    "executors": {"judge": {"factory": "own.py:Judge", "settings": {"model": {"path": "org/hub-id"}}}},
    "run": {"dir": "models/x", "seed": 3},
}
HERE = {"models/x", "train.jsonl", "rewards/mine.py", "shop.py", "own.py"}


def test_a_plan_names_models_data_and_files_of_code_but_neither_packages_nor_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in HERE:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert paths_in(PLAIN) == ["models/x", "train.jsonl", "rewards/mine.py", "shop.py", "own.py"]


def test_a_hosts_plan_differs_in_these_paths_alone() -> None:
    mapped = with_paths(PLAIN, {name: f"/there/{name}" for name in HERE})
    assert mapped["model"]["path"] == "/there/models/x" and mapped["run"] == PLAIN["run"]
    assert mapped["task"] == {
        "data": "/there/train.jsonl",
        "eval_data": "",
        "name": "models/x",
        "reward": "/there/rewards/mine.py:exact",
        "rewards": [{"function": "/there/rewards/mine.py:short", "weight": 1.0}, {"function": "package.module:f"}],
        "tasks": {
            "shop": {"environment": "trl:/there/shop.py:Shop"},
            "agent": {"environment": "agent:/there/shop.py:run"},
        },
    }
    assert mapped["executors"]["judge"] == {
        "factory": "/there/own.py:Judge",
        "settings": {"model": {"path": "org/hub-id"}},
    }
    assert with_paths(PLAIN, {}) == PLAIN


def test_what_python_left_beside_code_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "pack" / "__pycache__").mkdir(parents=True)
    (tmp_path / "pack" / "__pycache__" / "a.pyc").write_bytes(b"x")
    (tmp_path / "pack" / "a.py").write_text("")
    assert [record.path for record in content_of(tmp_path / "pack").files] == ["a.py"]
