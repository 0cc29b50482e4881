"""Which modules a fork server imports for a run's model, by its folder alone."""

from pathlib import Path

from llamarl.controller.prepare import modules_of_model


def test_a_models_code_is_named_by_its_config() -> None:
    assert modules_of_model("bundled:tiny")[0] == "transformers.models.llama.modeling_llama"


def test_a_folder_that_says_nothing_and_a_model_of_the_hub_are_not_asked_for(tmp_path: Path) -> None:
    assert modules_of_model(str(tmp_path)) == ()
    (tmp_path / "config.json").write_text('{"model_type": "granite-moe"}')
    assert modules_of_model(str(tmp_path))[0] == "transformers.models.granite_moe.modeling_granite_moe"
    assert modules_of_model("nobody/model") == ()
