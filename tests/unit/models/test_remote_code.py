"""Code in a model folder never runs, whatever is typed or piped in, unless the user's key says so for the tokenizer."""

import ast
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from llamarl.engine.engine import NativeEngine
from llamarl.errors import ModelError
from llamarl.models.folders import resolve_model_path
from llamarl.models.loading import load_model, load_model_config, load_tokenizer
from llamarl.models.reward_model import load_reward_model
from llamarl.models.sharded_loading import make_skeleton
from llamarl.models.value import load_value_model
from llamarl.settings.engine import EngineConfig
from llamarl.weight_sync.model_layouts import model_parameters

SOURCE = Path(__file__).parents[3] / "src" / "llamarl"
_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).write_text("ran")
class Config(LlamaConfig): model_type = "strange"
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
def generate(model, **kwargs): raise AssertionError
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the folders' code writes. Whatever asks on the console is told yes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n" * 100))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "ran"


def folder_with_code(tmp_path: Path, marker: Path, *, known: bool) -> Path:
    """The bundled model with code beside it: of an architecture of its own, or one that transformers knows."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model_path("bundled:tiny"), folder)
    (folder / "code.py").write_text(_CODE.format(marker=str(marker)))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(_CODE.format(marker=str(marker)))
    change(folder / "config.json", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model",
                                             "AutoModelForTokenClassification": "code.Model"})  # fmt: skip
    if not known:
        change(folder / "config.json", model_type="strange", architectures=["Model"])
        change(folder / "tokenizer_config.json", tokenizer_class="Tokenizer",
               auto_map={"AutoTokenizer": [None, "code.Tokenizer"]})  # fmt: skip
    return folder


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_known_architecture_loads_without_the_code_that_its_folder_names(tmp_path: Path, marker: Path) -> None:
    folder = folder_with_code(tmp_path, marker, known=True)
    assert load_model_config(folder).model_type == "llama"
    assert load_tokenizer(folder).vocab_size > 0
    assert type(load_model(folder, dtype=torch.float32, attention="llamarl_packed")).__name__ == "LlamaForCausalLM"
    load_value_model(folder, attention="llamarl_packed")
    make_skeleton(folder, attention="llamarl_packed")
    assert model_parameters(folder)
    NativeEngine(folder, EngineConfig(), tokenizer=load_tokenizer(folder))
    assert not marker.exists()


def test_an_architecture_of_the_folders_own_is_refused_everywhere_without_a_question(
    tmp_path: Path, marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with_code(tmp_path, marker, known=False)
    for load in (
        load_model_config,
        load_tokenizer,
        model_parameters,
        lambda f: load_model(f, dtype=torch.float32),
        lambda f: load_value_model(f, attention="llamarl_packed"),
        lambda f: make_skeleton(f, attention="llamarl_packed"),
    ):
        with pytest.raises(ModelError):
            load(folder)
    assert not marker.exists()
    assert "y/N" not in capsys.readouterr().out


def test_a_tokenizer_of_the_folders_own_runs_only_where_the_user_trusts_it(tmp_path: Path, marker: Path) -> None:
    folder = folder_with_code(tmp_path, marker, known=False)
    change(folder / "config.json", model_type="llama")
    with pytest.raises(
        ModelError, match=r"Python code of that folder \(code.Tokenizer\), which is not run.*trust_remote_code"
    ):
        load_tokenizer(folder)
    assert not marker.exists()
    assert type(load_tokenizer(folder, trust_remote_code=True)).__name__ == "Tokenizer"
    assert marker.read_text() == "ran"


def test_the_folder_of_this_test_would_run_its_code_where_nobody_says_no(tmp_path: Path, marker: Path) -> None:
    folder = folder_with_code(tmp_path, marker, known=False)
    change(folder / "config.json", model_type="llama")
    AutoTokenizer.from_pretrained(folder, local_files_only=True)  # asks, and is told yes
    assert marker.exists()


def test_every_call_that_could_run_a_folders_code_says_whether_it_may() -> None:
    silent = []
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id.startswith("Auto") and node.func.attr.startswith("from_"):
                if "trust_remote_code" not in {keyword.arg for keyword in node.keywords}:
                    silent.append(f"{file}:{node.lineno}")
    assert not silent


@pytest.mark.parametrize(
    "named",
    [
        {"_attn_implementation": "evil/kernel"},
        {"attn_implementation": "paged|evil/msa@main"},
        {"experts_implementation": {"": "evil/kernel:moe"}},
        {"text_config": {"sub_configs": [{"_attn_implementation_internal": "evil/kernel"}]}},
    ],
)
def test_kernels_that_a_folder_names_are_never_fetched(
    named: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.integrations.hub_kernels.is_kernels_available", lambda *_, **__: True)
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", lambda *_, **__: pytest.fail("fetched"))
    folder = tmp_path / "model"
    shutil.copytree(resolve_model_path("bundled:tiny"), folder)
    change(folder / "config.json", **named)
    for load in (
        lambda: load_model(folder, dtype=torch.float32),
        lambda: load_model_config(folder),
        lambda: load_tokenizer(folder),
        lambda: load_value_model(folder, attention="llamarl_packed"),
        lambda: load_reward_model(folder, dtype=torch.float32, device="cpu", attention=None, key="reward_model.path"),
        lambda: model_parameters(folder),
        lambda: make_skeleton(folder, attention="llamarl_packed"),
    ):
        with pytest.raises(ModelError, match="names code to fetch and run"):
            load()
    change(folder / "config.json", **(dict.fromkeys(named) | {"attn_implementation": "flash_attention_2"}))
    assert load_model_config(folder).model_type == "llama"


@pytest.mark.parametrize("place", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("named", ["AutoModelForCTC", "AutoModel", "DiaProcessor", "AutoTokenizer", "pipeline"])
def test_a_tokenizer_of_another_class_is_refused_without_a_question(
    place: str, named: str, tmp_path: Path, marker: Path
) -> None:
    folder = folder_with_code(tmp_path, marker, known=True)
    change(folder / place, tokenizer_class=named, auto_map={named: "code.Model", "AutoTokenizer": "code.Tokenizer"})
    with pytest.raises(ModelError, match="which is no tokenizer"):
        load_tokenizer(folder)
    assert not marker.exists()


def test_a_configuration_that_stands_in_for_config_json_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model_path("bundled:tiny"), folder)
    shutil.copy(folder / "config.json", folder / "config.4.0.0.json")
    change(folder / "config.4.0.0.json", _attn_implementation="evil/kernel")
    change(folder / "config.json", configuration_files=["config.4.0.0.json"])
    with pytest.raises(ModelError, match="names another file in its place"):
        load_model_config(folder)


def test_a_kernel_under_another_name_is_never_fetched(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model_path("bundled:tiny"), folder)
    change(folder / "config.json", attribute_map={})  # says nothing
    load_model_config(folder)
    change(folder / "config.json", attribute_map={"note": "_attn_implementation_internal"}, note="evil/kernel")
    with pytest.raises(ModelError, match="gives its lines other names, attribute_map"):
        load_model_config(folder)


@pytest.mark.parametrize("named", ["sub/p.safetensors", "../p.safetensors", "/p.safetensors"])
def test_weights_lie_in_the_folder_itself_and_no_pipe_at_any_depth(named: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model_path("bundled:tiny"), folder)
    weight_map = dict.fromkeys(load_file(folder / "model.safetensors"), named)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(ModelError, match="is not a file beside it"):
        load_model(folder, dtype=torch.float32)
    (folder / "sub").mkdir()
    os.mkfifo(folder / "sub" / "p.safetensors")
    with pytest.raises(ModelError, match=r"sub/p\.safetensors is a pipe"):
        resolve_model_path(folder)


def test_a_folder_that_is_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    shutil.copytree(resolve_model_path("bundled:tiny"), tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/model"}')
    for _ in range(2):
        with pytest.raises(ModelError, match="holds an adapter"):
            load_model(tmp_path / "model", dtype=torch.float32)
        (tmp_path / "model" / "config.json").unlink(missing_ok=True)  # as peft writes such folders


@pytest.mark.parametrize("place", ["alone", "index", "config"])
def test_weights_that_are_no_safetensors_are_never_read(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("a pickle was read"))
    folder = tmp_path / "model"
    shutil.copytree(resolve_model_path("bundled:tiny"), folder)
    weights = folder / "model.safetensors"
    names = list(load_file(weights))
    weights.rename(folder / "pytorch_model.bin")
    if place == "index":
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "pytorch_model.bin")})
        )
    if place == "config":
        change(folder / "config.json", transformers_weights="pytorch_model.bin")
    with pytest.raises(ModelError):
        load_model(folder, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_a_folder_without_a_vocabulary_is_refused_where_transformers_makes_an_empty_tokenizer(
    kind: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no vocabulary of a tokenizer"):
        load_tokenizer(tmp_path)
    shutil.copy(resolve_model_path("bundled:tiny") / "tokenizer.json", tmp_path)
    assert load_tokenizer(tmp_path)("1")["input_ids"]


def test_what_was_written_is_read_with_its_spaces_whatever_the_folder_asks_for(tmp_path: Path) -> None:
    shutil.copytree(resolve_model_path("bundled:tiny"), tmp_path, dirs_exist_ok=True)
    words = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(words.replace('"#": 4', '"!": 4'))
    change(tmp_path / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer("x != y")["input_ids"]) == "x != y"
