"""A recipe, overrides and their mistakes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import RunConfig, apply_overrides, field_help, known_keys, load_config, save_config, validate
from llamarl.errors import ConfigError
from llamarl.strict import Mistakes

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


def lines_of(raw: dict[str, Any], checks: Any = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(raw, checks)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{len(lines)} mistake{'s' * (len(lines) > 1)} in the configuration:"
    return [line.removeprefix("  - ") for line in lines]


def test_mistakes_of_every_kind_and_section_are_listed_together() -> None:
    """Wrong types, values out of range in nested and in outer sections, and sections that do not go together."""
    raw = {
        "schedule": {"prompts_per_step": 16, "weights": "latests"},
        "generator": {"group_size": 0, "dp": 0, "tp": "x", "sampling": {"temperature": -1, "top_p": 3}},
        "trainer": {"minibatches": 17, "fsdp": 17},
        "task": {"pool": {"timeout_s": 0, "num_workers": 0}},
        "run": {"dir": "runs/{seed}", "num_ticks": 0},
    }
    assert sorted(line.split(" ")[0].rstrip(":") for line in lines_of(raw)) == [
        "generator.dp",
        "generator.group_size",
        "generator.sampling.temperature",
        "generator.sampling.top_p",
        "generator.tp",
        "run.dir",
        "run.num_ticks",
        "schedule.prompts_per_step",
        "schedule.weights",
        "task.pool.num_workers",
        "task.pool.timeout_s",
        "trainer.minibatches",
    ]


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"generator": {"max_segments": "2", "oversubscription": 1.5}}, "generator.max_segments: expected an integer"),
        ({"generator": {"max_segmnts": 2, "oversubscription": 1.5}}, "generator.max_segmnts: unknown key"),
        ({"generator": {"max_segments": 0, "oversubscription": 1.5}}, "generator.max_segments must be >= 1"),
        ({"task": {"name": 3, "train_file": "x.jsonl"}}, "task.name: expected text"),
        ({"generator": {"group_size": True}, "trainer": {"selection": {"pairs": 5}}}, "generator.group_size: expected"),
    ],
)
def test_what_only_follows_from_another_mistake_is_not_listed(raw: dict[str, Any], line: str) -> None:
    (only,) = lines_of(raw)
    assert only.startswith(line)


def test_checks_of_the_world_are_asked_beside_other_mistakes_but_not_of_keys_that_failed() -> None:
    def check(config: RunConfig) -> list[str]:
        return [f"model.path: no folder {config.model.path}", f"task.train_file: no file {config.task.train_file}"]

    raw = {"run": {"seed": -1}, "model": {"path": "here"}, "task": {"train_file": 5}}
    assert lines_of(raw, [check]) == [
        "task.train_file: expected text, got 5 (int); text stands in quotes",
        "run.seed must be >= 0, got -1",
        "model.path: no folder here",
    ]


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"run": {"seed": "5"}}, "run.seed: expected an integer, got '5' (str); leave out the quotes"),
        ({"run": {"seed": 5.0}}, "run.seed: expected an integer, got 5.0 (float)"),
        ({"run": {"seed": True}}, "run.seed: expected an integer, got True (bool)"),
        ({"optimizer": {"lr": True}}, "optimizer.lr: expected a number, got True (bool)"),
        ({"observability": {"trace": 1}}, "observability.trace: expected true or false, got 1 (int)"),
        ({"observability": {"trace": "true"}}, "observability.trace: expected true or false, got 'true' (str)"),
        ({"run": {"dir": 5}}, "run.dir: expected text, got 5 (int); text stands in quotes"),
        ({"run": 5}, "run: expected a section with keys such as run.dir, got 5 (int)"),
        ({"algorithm": {"rho": "abc"}}, "algorithm.rho: expected a number or 'none', got 'abc' (str)"),
        (
            {"schedule": {"weights": "latests"}},
            "schedule.weights: expected 'exact' or 'latest', got 'latests' (str); did you mean 'latest'?",
        ),
        (
            {"generator": {"sampling": {"stop_strings": "a"}}},
            "generator.sampling.stop_strings: expected a list of text, got 'a' (str); write ['a']",
        ),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr: input should be a finite number, got nan (float)"),
        ({"run": {"dir": ""}}, "run.dir must name a folder, such as runs/{name}, got ''"),
        (
            {"run": {"dir": "runs/{seed}"}},
            "run.dir may hold braces only as its one placeholder {name}, the recipe's file name; got 'runs/{seed}'",
        ),
        ({"run": {"zzz": 1}}, "run.zzz: unknown key; [run] has dir, seed, num_ticks, runtime, cores"),
        ({"trainer": {"lr": 1}}, "trainer.lr: unknown key; did you mean 'optimizer.lr'?"),
    ],
)
def test_a_wrong_value_is_one_line_with_key_got_expected_and_fix(raw: dict[str, Any], line: str) -> None:
    assert lines_of(raw) == [line]


def test_where_no_key_is_near_the_sections_are_named() -> None:
    (line,) = lines_of({"zzz": 1})
    assert line.startswith("zzz: unknown key; the sections are run, model, task, ")


def test_whole_numbers_are_numbers_and_lists_are_tuples() -> None:
    config = validate({"optimizer": {"lr": 1}, "algorithm": {"rho": 2}, "lora": {"targets": ["q_proj"]}})
    assert (config.optimizer.lr, config.algorithm.rho, config.lora.targets) == (1.0, 2.0, ("q_proj",))


def test_a_flag_without_its_section_is_pointed_to_the_keys_of_that_name() -> None:
    with pytest.raises(ConfigError, match="unexpected argument '--num-ticks': did you mean --run.num_ticks?"):
        load_config(None, ["--num-ticks", "3"])


def test_the_name_of_the_recipe_stands_in_for_its_placeholder(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('run = { dir = "here/{name}/x" }')
    assert load_config(tmp_path / "mine.toml").run.dir == "here/mine/x"


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


def test_mistakes_travel_between_processes_whole() -> None:
    again = pickle.loads(pickle.dumps(Mistakes(["a must be 1", "b must be 2"])))
    assert again.messages == ("a must be 1", "b must be 2") and str(again) == "a must be 1; b must be 2"
