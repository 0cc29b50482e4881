"""Models of the Hub: which files come, which commit they are of, and what is said where they do not come."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, serving_here
from huggingface_hub import constants

from llamarl.errors import ModelError
from llamarl.models.folders import resolve_model_path

NAME = "lab/tiny"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"\x01" * 3000,
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"raise SystemExit",
    "onnx/model.onnx": b"of another program",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving_here(monkeypatch, tmp_path) as hub:
        yield hub


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def refused(name: str = NAME, **asked: str | bool) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model_path(name, **asked)  # type: ignore[arg-type]
    return str(caught.value)


def test_configuration_tokenizer_and_safetensors_come_and_neither_pickles_nor_code(hub: Hub) -> None:
    commit = hub.commit(NAME, FILES)
    folder = resolve_model_path(NAME)
    assert folder.name == commit
    assert sorted(f.name for f in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "pytorch_model.bin" not in hub.fetched()


def test_a_run_of_a_like_name_is_told_before_the_hub_is_named(hub: Hub, tmp_path: Path) -> None:
    for run in ("mine", "tiny"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    words = refused("runs/tyny")
    assert "there is no folder runs/tyny here (did you mean runs/tiny?)" in words
    assert words.index("did you mean") < words.index(hub.url)


def test_where_a_model_lies_is_told_once(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    commit = hub.commit(NAME, FILES)
    for _ in range(3):
        resolve_model_path(NAME)
    assert capsys.readouterr().err.count(commit) == 2  # the commit and its folder, in one line


def test_weights_come_only_where_they_are_wanted_and_code_only_where_it_is_trusted(hub: Hub) -> None:
    hub.commit(NAME, FILES)
    folder = resolve_model_path(NAME, weights=False)
    assert sorted(f.name for f in folder.iterdir()) == ["config.json", "tokenizer.json"]
    assert "modeling_tiny.py" in {f.name for f in resolve_model_path(NAME, code=True).iterdir()}


def test_a_commit_is_found_again_after_its_branch_has_moved_and_without_a_request(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hub.commit(NAME, FILES)
    resolve_model_path(NAME)
    second = hub.commit(NAME, FILES | {"config.json": b'{"model_type": "qwen2"}'})
    hub.asked.clear()
    assert resolve_model_path(f"{NAME}@{first}").name == first
    assert hub.asked == []
    assert resolve_model_path(NAME).name == second
    go_offline(monkeypatch)
    assert resolve_model_path(f"{NAME}@{first}").name == first
    assert resolve_model_path(NAME).name == second  # what main was when the Hub was last asked


def test_a_branch_and_a_tag_are_other_files_than_main(hub: Hub) -> None:
    hub.commit(NAME, FILES)
    other = hub.commit(NAME, FILES | {"tokenizer.json": b"{ }"}, branch="v2")
    assert resolve_model_path(f"{NAME}@v2").name == other


def test_a_folder_of_that_name_comes_first_unless_a_revision_is_named(hub: Hub, tmp_path: Path) -> None:
    commit = hub.commit(NAME, FILES)
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / NAME / "config.json").write_text("{}")
    assert resolve_model_path(NAME) == Path(NAME)
    assert hub.asked == []
    assert resolve_model_path(f"{NAME}@main").name == commit


def test_what_is_not_there_not_reachable_or_not_allowed_is_told_apart(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no folder lab/none here" in (words := refused("lab/none")) and "correct it" in words
    hub.commit(NAME, FILES)
    assert f"model.path: {NAME} has no revision 'v9'" in refused(f"{NAME}@v9")
    hub.gated.add(NAME)
    assert f"{NAME} is gated: accept its terms at {hub.url}/{NAME}" in (words := refused()) and "HF_TOKEN" in words
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    assert "the Hub cannot be asked: ConnectError" in (words := refused("lab/other"))
    assert "hf download lab/other" in words
    go_offline(monkeypatch)
    assert "the Hub cannot be asked: HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set" in refused("lab/other")


def test_half_of_a_model_in_the_cache_is_no_model_offline_and_is_completed_online(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    shards = {name: b"\x02" * 2000 for name in index["weight_map"].values()}
    described = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    commit = hub.commit(NAME, described | shards)
    folder = resolve_model_path(NAME)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with monkeypatch.context() as offline:
        go_offline(offline)
        assert "only a part of it, or another revision, is in the cache" in refused(f"{NAME}@{commit}")
    assert (resolve_model_path(f"{NAME}@{commit}") / "model-00002-of-00002.safetensors").is_file()


def test_a_transfer_that_breaks_off_is_taken_up_again(hub: Hub) -> None:
    hub.commit(NAME, FILES)
    hub.cut["model.safetensors"] = 1000
    try:
        resolve_model_path(NAME)
    except ModelError as error:
        assert "Try again; what has come is kept" in str(error)
    assert (resolve_model_path(NAME) / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_full_disk_and_pickles_alone_say_what_to_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("lab/old", {name: FILES[name] for name in ("config.json", "pytorch_model.bin")})
    assert "it has no weights as safetensors (model.safetensors)" in refused("lab/old")
    hub.commit("lab/gguf", {"model.gguf": b""})
    assert "it has no config.json" in refused("lab/gguf")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.commit(NAME, FILES)
    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    assert f"no room for {NAME} in" in (words := refused()) and "HF_HUB_CACHE" in words


# Names and folders of models.


def test_an_id_of_the_hub_that_cannot_be_asked_is_answered_with_the_command_that_fetches_it() -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model_path("nobody/no-such-model")
    assert "no folder nobody/no-such-model here" in str(caught.value)
    assert "hf download nobody/no-such-model)" in str(caught.value)


@pytest.mark.parametrize("path", ["/no/such", "a/b/c", "./models/x", "models", "bundled:none", "~/models"])
def test_what_can_be_no_id_gets_no_such_command(path: str) -> None:
    with pytest.raises(ModelError, match="bundled:tiny") as caught:
        resolve_model_path(path)
    assert "hf download" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [("x" * 5000, "file name too long"), ("a\0b", "NUL character"), ("~nobody-here/x", "no home folder"), ("\ud800", "not UTF-8")],
    ids=["long", "nul", "home", "surrogate"],
)  # fmt: skip
def test_a_name_that_nothing_can_have_is_refused(path: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        resolve_model_path(path)


def test_a_loop_of_links_and_a_pipe_among_the_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ModelError, match="too many levels of symbolic links"):
        resolve_model_path(tmp_path / "loop")
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors is a pipe, socket or device"):
        resolve_model_path(tmp_path)


def test_the_folder_of_a_run_is_answered_with_that_of_its_policy(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    with pytest.raises(ModelError, match=f"; its policy is {tmp_path}/model"):
        resolve_model_path(tmp_path)
