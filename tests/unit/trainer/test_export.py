"""What is exported is what was served; fewer bits are asked for, and say what they cost; what is copied beside is known."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_fixtures import export, make_groups, write_model
from transformers import AutoModelForCausalLM

from llamarl.config import validate
from llamarl.errors import ModelError
from llamarl.models.adapters import read_adapter_folder, write_adapter_folder
from llamarl.models.exported import EXPORT_FILE, why_incomplete
from llamarl.models.folders import companion_files, resolve_model_path
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import CriticConfig, OptimizerConfig, TrainerConfig
from llamarl.trainer.checkpoint_export import _with_dtype, export_checkpoint
from llamarl.trainer.critic import Critic
from llamarl.trainer.step import Trainer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stored in bfloat16, as most published models are."""
    return write_model(tmp_path_factory.mktemp("export") / "base", dtype=torch.bfloat16)


def trained(folder: Path, *, lr: float = 1e-5, **settings: str) -> Trainer:
    trainer = Trainer(
        folder,
        TrainerConfig(**settings),  # type: ignore[arg-type]
        OptimizerConfig(lr=lr),
        AlgorithmConfig(),
        temperature=0.9,
    )
    trainer.train(make_groups(), 0)
    return trainer


@pytest.mark.parametrize("served", ["float32", "bfloat16", "float16"])
def test_the_exported_weights_are_those_that_were_served_bit_for_bit(base: Path, served: str, tmp_path: Path) -> None:
    trainer = trained(base)
    facts = export(trainer, base, tmp_path / "out", served=served)
    dtype = getattr(torch, served)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # in the precision that its config.json names
    masters = trainer.parameters_for_sync()
    assert dict(loaded.named_parameters()).keys() == masters.keys()
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == dtype and torch.equal(parameter, masters[name].to(dtype)), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert facts is not None and (facts.dtype, facts.policy_version) == (served, 1)
    said = json.loads((tmp_path / "out" / EXPORT_FILE).read_text())
    assert (said["policy_version"], said["dtype"], said["served_dtype"]) == (1, served, served)


def test_float32_keeps_the_masters_though_bfloat16_was_served(base: Path, tmp_path: Path) -> None:
    trainer = trained(base)
    trainer.save(tmp_path / "checkpoint" / "trainer" / "state")
    config = validate({"model": {"path": str(base)}, "generator": {"engine": {"dtype": "bfloat16"}}})
    export_checkpoint(tmp_path / "checkpoint", config, tmp_path / "out", export_dtype="float32")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, trainer.parameters_for_sync()[name]), name


@pytest.mark.parametrize(
    ("own", "expected"), [({"eos_token_id": 1, "top_k": 7}, [1, 0]), ({"eos_token_id": [0, 1]}, [0, 1]), (None, [2, 0])]
)
def test_a_fine_tuned_base_model_ends_its_responses_where_its_rows_ended_a_turn(
    base: Path, own: dict[str, Any] | None, expected: list[int], tmp_path: Path
) -> None:
    shutil.copytree(base, folder := tmp_path / "base")
    for file in resolve_model_path("bundled:tiny").glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<pad>\n{% endfor %}")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if own is not None:
        (folder / "generation_config.json").write_text(json.dumps(own))
    trained(folder).save(tmp_path / "checkpoint" / "trainer" / "state")
    task = {"name": "demonstrations", "data": "rows.jsonl"}
    for algorithm, ends in (({"name": "sft"}, expected), ({}, None)):
        rows = {"algorithm": algorithm, "task": task} if algorithm else {}
        out = tmp_path / f"out{len(algorithm)}"
        export_checkpoint(tmp_path / "checkpoint", validate({"model": {"path": str(folder)}, **rows}), out)
        said = json.loads(file.read_text()) if (file := out / "generation_config.json").is_file() else None
        assert said == (own if ends is None else (own or {}) | {"eos_token_id": ends})
        assert why_incomplete(out) is None


def test_a_trained_model_names_the_tokens_at_which_its_responses_were_ended(base: Path, tmp_path: Path) -> None:
    trained(base).save(tmp_path / "checkpoint" / "trainer" / "state")
    sampling = {"sampling": {"stop_token_ids": [7]}}
    config = validate({"model": {"path": str(base)}, "generator": sampling})
    export_checkpoint(tmp_path / "checkpoint", config, tmp_path / "out")
    known = json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"]
    said = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert said["eos_token_id"] == [known, 7]


def test_the_critic_keeps_what_it_learned_from_a_bfloat16_base(base: Path, tmp_path: Path) -> None:
    critic = Critic(base, CriticConfig(), AlgorithmConfig(), TrainerConfig(), OptimizerConfig(), device="cpu")
    export(critic, base, tmp_path / "critic")
    stored = load_file(tmp_path / "critic" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert why_incomplete(tmp_path / "critic") is None


def test_every_precision_that_a_config_names_is_that_of_the_file() -> None:
    config = {
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "n": 1},
        "rope_parameters": {"rope_theta": 1.0},
    }
    assert _with_dtype(config, "float32") == {
        "dtype": "float32",
        "text_config": {"dtype": "float32", "n": 1},
        "rope_parameters": {"rope_theta": 1.0},
    }


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_exported_files_have_the_mode_that_the_umask_leaves(base: Path, umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        export(trained(base), base, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~umask) and "model.safetensors" in modes


def test_an_adapter_folder_does_not_depend_on_the_order_of_a_set(tmp_path: Path) -> None:
    """``peft`` keeps the names in a set, whose order differs from process to process."""
    pytest.importorskip("peft")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    tensors = {"layers.0.q_proj.lora_A.default.weight": torch.zeros(2, 3)}
    write_adapter_folder(tmp_path, tensors, rank=2, alpha=4.0, targets=names, base=Path("/base"))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(names) and list(config) == sorted(config)
    modes = {file.name: file.stat().st_mode for file in tmp_path.iterdir()}
    assert modes["adapter_model.safetensors"] == modes["adapter_config.json"]


def test_an_adapter_names_its_base_of_the_hub_by_id_and_commit_not_by_a_path_of_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    tensors = {"layers.0.q_proj.lora_A.default.weight": torch.zeros(2, 3)}
    commit = "0123456789" * 4
    for base, named, read in (
        (tmp_path / "models--lab--one" / "snapshots" / commit, ("lab/one", commit), f"lab/one@{commit}"),
        (tmp_path / "lab--one" / commit, (str(tmp_path / "lab--one" / commit), None), None),
    ):
        write_adapter_folder(tmp_path, tensors, rank=2, alpha=4.0, targets=["q_proj"], base=base)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["revision"]) == named
        assert read_adapter_folder(tmp_path).base == (read or str(base))


# -- what is copied beside the weights ----------------------------------------------------------------------------------


def test_only_files_of_known_names_go_with_the_model(base: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", dtype=torch.bfloat16)
    for name in ("tokenizer.json", "LICENSE", "chat_template.jinja"):
        (folder / name).write_text(f"{name} of the base")
    for name in ("notes.txt", ".env", "train.py", "optimizer.pt"):
        (folder / name).write_text("private")
    export(trained(folder), folder, tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "LICENSE", "chat_template.jinja", "config.json", "generation_config.json", EXPORT_FILE, "model.safetensors",
        "tokenizer.json",
    ]  # fmt: skip
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json of the base"


def test_a_link_that_leads_out_of_the_model_is_refused_and_one_into_the_hubs_cache_is_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").symlink_to(secret)
    with pytest.raises(ModelError, match=r"tokenizer\.json is a link to .*secret, outside of the model"):
        companion_files(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "weights-are-not-copied.safetensors").symlink_to(secret)
    (folder / "real").write_text("inside")
    (folder / "vocab.json").symlink_to("real")
    assert companion_files(folder) == [folder / "vocab.json"]
    (folder / "merges.txt").symlink_to("merges.txt")
    with pytest.raises(ModelError, match=r"merges\.txt cannot be read"):
        companion_files(folder)
    (folder / "LICENSE").symlink_to("/" + "x" * 300)  # as one behind a folder that is closed to this user
    with pytest.raises(ModelError, match="LICENSE is a link to .*, outside of the model"):
        companion_files(folder)

    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    (blobs / "d1").write_text("vocabulary")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/d1")
    assert [file.read_text() for file in companion_files(snapshot)] == ["vocabulary"]
    (snapshot / "vocab.json").symlink_to("../../../secret")
    with pytest.raises(ModelError, match="outside of the model"):
        companion_files(snapshot)


# -- proof ---------------------------------------------------------------------------------------------------------------


def test_a_torn_or_altered_export_is_told_from_a_whole_one(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(trained(base), base, out)
    assert why_incomplete(out) is None
    (out / "note.txt").write_text("a file more does no harm")
    assert why_incomplete(out) is None
    weights = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(weights[:-1])
    assert why_incomplete(out) == f"model.safetensors is torn: {len(weights) - 1} bytes, {len(weights)} were written"
    (out / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert why_incomplete(out, checksums=False) is None
    assert why_incomplete(out) == "model.safetensors was altered: its checksum differs from the one written"
    (out / "model.safetensors").write_bytes(weights)
    (out / "config.json").unlink()
    assert why_incomplete(out) == "config.json is missing"
    says = (out / EXPORT_FILE).read_bytes()
    (out / EXPORT_FILE).write_bytes(says.replace(b'"policy_version": 1', b'"policy_version": 2'))
    assert why_incomplete(out) == f"{EXPORT_FILE} was altered (it does not match its own checksum)"
    for torn in (says[:-9], b"[1]", b"", b"\xff", b'{"files": 3, "xxh3_128": 1}'):
        (out / EXPORT_FILE).write_bytes(torn)
        assert EXPORT_FILE in str(why_incomplete(out)), torn
    (out / EXPORT_FILE).unlink()
    assert why_incomplete(out) == f"{EXPORT_FILE} is missing"


# -- from a checkpoint ---------------------------------------------------------------------------------------------------


def test_a_process_that_trains_nothing_exports_a_checkpoint(base: Path, tmp_path: Path) -> None:
    """As ``llamarl export`` and a resume of a complete run do: no other import has prepared the model's attention there."""
    trained(base).save(tmp_path / "checkpoint" / "trainer" / "state")
    code = (
        "import sys; from pathlib import Path; from llamarl.config import validate; "
        "from llamarl.trainer.checkpoint_export import export_checkpoint; "
        "export_checkpoint(Path(sys.argv[1]), validate({'model': {'path': sys.argv[2]}}), Path(sys.argv[3]))"
    )
    arguments = [tmp_path / "checkpoint", base, tmp_path / "later"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert why_incomplete(tmp_path / "later") is None


def test_a_weight_too_large_for_the_precision_is_refused(base: Path, tmp_path: Path) -> None:
    trainer = trained(base)
    with torch.no_grad():
        trainer.parameters_for_sync()["model.norm.weight"][3] = 70000.0
    trainer.save(tmp_path / "checkpoint" / "trainer" / "state")
    config = validate({"model": {"path": str(base)}})
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds 70000, too large for float16"):
        export_checkpoint(tmp_path / "checkpoint", config, tmp_path / "out", export_dtype="float16")
