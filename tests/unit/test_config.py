"""A recipe, overrides and their mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.config import apply_overrides, field_help, known_keys, load_config, save_config, validate
from llamarl.errors import ConfigError

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.name)
def test_recipes_that_ship_are_valid(recipe: Path) -> None:
    assert load_config(recipe).run.num_ticks >= 1


def test_the_resolved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(None, ["--schedule.max_staleness", "3", "--generator.sampling.stop_strings", '["\\n", "a b"]'])
    save_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config


def test_overrides_parse_toml_values_and_fall_back_to_text() -> None:
    merged = apply_overrides(
        {"run": {"seed": 1, "dir": "x"}},
        ["--run.seed", "7", "--model.path=my/folder", "--task.options", "{ min_terms = 2 }", "--a.b-c", "true"],
    )
    assert merged == {
        "run": {"seed": 7, "dir": "x"},
        "model": {"path": "my/folder"},
        "task": {"options": {"min_terms": 2}},
        "a": {"b_c": True},
    }


def test_an_override_does_not_change_the_recipe_it_is_merged_into() -> None:
    raw = {"run": {"seed": 1}}
    apply_overrides(raw, ["--run.seed", "2"])
    assert raw == {"run": {"seed": 1}}


@pytest.mark.parametrize("words", [["resume"], ["--seed", "1"], ["--run.seed"], ["--run.seed.x", "1"]])
def test_malformed_overrides_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        apply_overrides({"run": {"seed": 1}}, words)


def test_all_mistakes_are_listed_at_once_each_with_its_key() -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"run": {"seed": -1, "num_tick": 3}, "schedule": {"max_staleness": "many"}, "optimizers": {}})
    message = str(caught.value)
    assert "run.num_tick: unknown key; did you mean 'run.num_ticks'?" in message
    assert "schedule.max_staleness: " in message and "got 'many' (str)" in message
    assert "optimizers: unknown key; did you mean 'optimizer'?" in message


def test_a_known_key_in_the_wrong_section_is_pointed_home() -> None:
    with pytest.raises(ConfigError, match="run.max_staleness: unknown key; did you mean 'schedule.max_staleness'"):
        validate({"run": {"max_staleness": 1}})


def test_oversubscription_needs_segments() -> None:
    with pytest.raises(ConfigError, match="generator.oversubscription must be between 1 and max_segments"):
        validate({"generator": {"oversubscription": 1.5}})


def test_a_group_of_one_is_refused_only_where_the_baseline_needs_a_group() -> None:
    with pytest.raises(ConfigError, match="generator.group_size is 1"):
        validate({"generator": {"group_size": 1}})


def test_keys_that_outside_checks_rely_on_exist() -> None:
    wanted = """run.dir run.seed run.num_ticks model.path schedule.max_staleness schedule.weights
        schedule.prompts_per_step generator.group_size generator.max_segments generator.quantization trainer.fsdp
        trainer.tp algorithm.name checkpoint.every""".split()
    assert set(wanted) <= set(known_keys())


def test_every_key_is_explained() -> None:
    unexplained = [key for key, info in known_keys().items() if not (info.description or "").strip()]
    assert unexplained in ([], ["generator.sampling"]), unexplained
    assert "--schedule.max_staleness  (default 1)" in field_help()


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["--schedule.max_staleness", "1"], "set max_staleness to 0 and weights to 'exact'"),
        (["--schedule.weights", "latest"], "set max_staleness to 0 and weights to 'exact'"),
        (["--trainer.device", "cpu"], "set both to 'auto', 'cpu' or 'cuda'"),
        (["--generator.device", "cuda:1"], "set both to 'auto', 'cpu' or 'cuda'"),
        (["--generator.kv_on_update", "keep"], "set it to 'recompute'"),
        (["--generator.engine.name", "vllm"], "set it to 'native'"),
        (["--lora.rank", "4", "--lora.hand_over", "adapter"], "set it to 'merged'"),
        (["--schedule.transport", "cuda_ipc"], "set it to 'auto'"),
    ],
)
def test_what_cannot_be_co_located_is_refused_with_the_fix(overrides: list[str], fix: str) -> None:
    together = ["--schedule.max_staleness", "0", "--schedule.colocated", "true"]
    assert load_config(None, together).schedule.colocated
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*together, *overrides])
    assert "schedule.colocated" in str(caught.value) and fix in str(caught.value)
