"""A recipe, overrides and their mistakes."""

import pickle
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import (
    RunConfig,
    _merge,
    _parse_overrides,
    begun_in,
    changed_keys,
    field_help,
    known_keys,
    load_config,
    read_settings,
    save_config,
    to_plain,
    validate,
)
from llamarl.controller.begun import begun_config
from llamarl.controller.begun_settings import differences
from llamarl.errors import ConfigError, Mistake
from llamarl.reading import with_paths_from
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
    words = ["--run.seed", "7", "--model.path=my/folder", "--task.options", "{ min_terms = 2 }", "--a.b-c", "true"]
    merged = _merge({"run": {"seed": 1, "dir": "x"}}, _parse_overrides(words))
    assert merged == {
        "run": {"seed": 7, "dir": "x"},
        "model": {"path": "my/folder"},
        "task": {"options": {"min_terms": 2}},
        "a": {"b_c": True},
    }


def test_an_override_does_not_change_the_recipe_it_is_merged_into() -> None:
    raw = {"run": {"seed": 1}}
    _merge(raw, _parse_overrides(["--run.seed", "2"]))
    assert raw == {"run": {"seed": 1}}


@pytest.mark.parametrize("words", [["resume"], ["--seed", "1"], ["--run.seed"], ["--run.seed.x", "1"]])
def test_malformed_overrides_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        _merge({"run": {"seed": 1}}, _parse_overrides(words))


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
        ({"task": {"name": 3, "data": "x.jsonl"}}, "task.name: expected text"),
        ({"task": {"rewards": ["mine.py:right"]}}, "task.rewards.0: expected a section with keys such as"),
        (
            {"schedule": {"prompts_per_step": True}, "trainer": {"minibatches": 17}},
            "schedule.prompts_per_step: expected",
        ),
    ],
)
def test_what_only_follows_from_another_mistake_is_not_listed(raw: dict[str, Any], line: str) -> None:
    (only,) = lines_of(raw)
    assert only.startswith(line)


def test_what_a_mistake_looks_at_is_data_whatever_its_words_say() -> None:
    """Two checks with the same words: only the one that names the faulty key as looked at follows from it."""

    def check(config: RunConfig) -> list[Mistake]:
        text = "does not go with run.seed"
        return [Mistake("model.path", text), Mistake("task.options", text, ("run.seed",))]

    assert [line.split(" ")[0] for line in lines_of({"run": {"seed": -1}}, [check])] == ["run.seed", "model.path"]


@pytest.mark.parametrize(
    ("raw", "keys"),
    [
        ({"executors": {"a": {"factory": "x"}, "b": {"ranks": "2"}}, "run": {"seed": -1}}, ["a.factory", "b.ranks:"]),
        ({"executors": {"a": 5}}, ["a:"]),
        ({"executors": {"a": {"reads": ["b c"], "writes": [3]}}}, ["a.reads", "a.writes[0]:"]),
        ({"executors": {"a": {"settings": {"algorithm": "sft"}}}}, ["a.settings:"]),
        ({"executors": {"a": {"factory": "a:B", "settings": {"algorithm": {"name": ["sft"]}}}}}, ["a.settings:"]),
    ],
)
def test_every_key_of_an_own_executor_is_named_whole(raw: dict[str, Any], keys: list[str]) -> None:
    assert {f"executors.{key}" for key in keys} <= {line.split(" ")[0] for line in lines_of(raw)}


def test_the_range_of_a_key_is_told_once_by_help_and_by_its_mistake() -> None:
    """By hand: ``top_p`` is above 0 and at most 1; ``dp`` is an integer above 0, ``lr`` a number above 0."""
    told = field_help()
    for key, wrong, limits in (
        ("generator.sampling.top_p", 0, "in (0, 1]"),
        ("generator.dp", 0, ">= 1"),
        ("optimizer.lr", 0.0, "> 0"),
        ("optimizer.beta1", 1, "in [0, 1)"),
    ):
        *path, last = key.split(".")
        raw: dict[str, Any] = {last: wrong}
        for section in reversed(path):
            raw = {section: raw}
        (line,) = lines_of(raw)
        assert line.startswith(f"{key} must be {limits}, got ") and f"--{key}  (default" in told
        assert f", {limits})" in told.split(f"--{key}  ")[1].splitlines()[0]


def test_checks_of_the_world_are_asked_beside_other_mistakes_but_not_of_keys_that_failed() -> None:
    def check(config: RunConfig) -> list[Mistake]:
        return [
            Mistake("model.path", f": no folder {config.model.path}"),
            Mistake("task.data", f": no file {config.task.data}"),
        ]

    raw = {"run": {"seed": -1}, "model": {"path": "here"}, "task": {"data": 5}}
    assert lines_of(raw, [check]) == [
        "run.seed must be >= 0, got -1 (Every random choice of the run derives from it)",
        "task.data: expected text, got 5 (int); text stands in quotes",
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
        (
            {"observability": {"trace": "true"}},
            "observability.trace: expected true or false, got 'true' (str); leave out the quotes",
        ),
        ({"run": {"dir": 5}}, "run.dir: expected text, got 5 (int); text stands in quotes"),
        ({"run": 5}, "run: expected a section with keys such as run.dir, got 5 (int)"),
        ({"algorithm": {"rho": "abc"}}, "algorithm.rho: expected a number or 'none', got 'abc' (str)"),
        (
            {"schedule": {"weights": "latests"}},
            "schedule.weights: expected 'exact' or 'latest', got 'latests' (str); did you mean 'latest'?",
        ),
        (
            {"generator": {"sampling": {"stop_strings": "a"}}},
            "generator.sampling.stop_strings: expected a list of text, got 'a' (str); write [\"a\"], on a command line '[\"a\"]'",
        ),
        (
            {"task": {"rewards": {"function": "a.py:f"}}},
            "task.rewards: expected a list of tables, each headed by the name in two brackets, [[ ]], got "
            "{'function': 'a.py:f'} (dict)",
        ),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr must be a finite number, got nan (Peak learning rate)"),
        ({"run": {"dir": ""}}, "run.dir must name a folder, such as runs/{name}, got ''"),
        (
            {"run": {"dir": "runs/{seed}"}},
            "run.dir may hold braces only as its one placeholder {name}, the recipe's file name; got 'runs/{seed}'",
        ),
        ({"run": {"zzz": 1}}, "run.zzz: unknown key; [run] has dir, mirror, seed, num_ticks, epochs, runtime, cores"),
        ({"trainer": {"lr": 1}}, "trainer.lr: unknown key; did you mean 'optimizer.lr' or 'critic.lr'?"),
        (
            {"generator": {"sampling": {"stop_token_ids": [3, -1]}}},
            "generator.sampling.stop_token_ids must be >= 0, got -1 (A response ends with one of these tokens, besides those "
            "of the model's own tokenizer and generation config)",
        ),
    ],
)
def test_a_wrong_value_is_one_line_with_key_got_expected_and_fix(raw: dict[str, Any], line: str) -> None:
    assert lines_of(raw) == [line]


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("run.num_tick", "did you mean 'run.num_ticks'?"),
        ("optimizers", "did you mean 'optimizer'?"),
        ("generator.max_new_tokens", "did you mean 'generator.sampling.max_new_tokens'?"),
        ("learning_rate", "TRL's learning_rate is optimizer.lr (docs/from_trl.md)"),
        ("generator.num_generations", "TRL's num_generations is generator.group_size (docs/from_trl.md)"),
        ("algorithm.beta", "TRL's beta is algorithm.kl_coef (docs/from_trl.md)"),
        ("output_dir", "TRL's output_dir is run.dir (docs/from_trl.md)"),
        (
            "actor_rollout_ref.rollout.n",
            "verl's actor_rollout_ref is model, generator, trainer, optimizer, algorithm (docs/from_verl.md)",
        ),
        ("run.total_training_steps", "verl's total_training_steps is run.num_ticks (docs/from_verl.md)"),
        ("algorithm.delta", "TRL's delta has no counterpart here"),
    ],
)
def test_a_key_is_found_by_its_last_word_and_by_the_names_of_other_programs(key: str, advice: str) -> None:
    *path, last = key.split(".")
    raw: dict[str, Any] = {last: 1}
    for part in reversed(path):
        raw = {part: raw}
    (line,) = lines_of(raw)
    assert line.endswith(f": unknown key; {advice}")


def test_where_no_key_is_near_the_sections_are_named() -> None:
    (line,) = lines_of({"zzz": 1})
    assert line.startswith("zzz: unknown key; the sections are run, model, task, ")


def test_whole_numbers_are_numbers_and_lists_are_tuples() -> None:
    config = validate({"optimizer": {"lr": 1}, "algorithm": {"rho": 2}, "lora": {"targets": ["q_proj"]}})
    assert (config.optimizer.lr, config.algorithm.rho, config.lora.targets) == (1.0, 2.0, ("q_proj",))


def test_a_flag_without_its_section_is_pointed_to_the_keys_of_that_name() -> None:
    with pytest.raises(ConfigError, match="unexpected argument '--num-ticks': did you mean --run.num_ticks?"):
        load_config(None, ["--num-ticks", "3"])
    with pytest.raises(ConfigError, match="unexpected argument '--max_steps': TRL's max_steps is run.num_ticks"):
        load_config(None, ["--max_steps", "3"])


def test_a_section_as_a_flag_is_pointed_to_what_names_its_thing() -> None:
    """Not to a key of another section that ends in that word (judge.model), and its value is no second mistake."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["--model", "org/name", "--task", "gsm8k", "--reward", "f.py:g"])
    assert str(caught.value).splitlines() == [
        "unexpected argument '--model': did you mean --model.path?",
        "unexpected argument '--task': did you mean --task.name?",
        "unexpected argument '--reward': did you mean --task.reward?",
    ]


def test_the_name_of_the_recipe_stands_in_for_its_placeholder(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('run = { dir = "here/{name}/x" }')
    assert load_config(tmp_path / "mine.toml").run.dir == "here/mine/x"


def test_oversubscription_needs_segments() -> None:
    with pytest.raises(ConfigError, match="generator.oversubscription must be between 1 and max_segments"):
        validate({"generator": {"oversubscription": 1.5}})


def test_a_group_of_one_is_refused_only_where_the_baseline_needs_a_group() -> None:
    with pytest.raises(ConfigError, match="generator.group_size is 1"):
        validate({"generator": {"group_size": 1}})


def test_every_key_is_explained() -> None:
    unexplained = [key for key, info in known_keys().items() if not (info.description or "").strip()]
    assert unexplained in ([], ["generator.sampling"]), unexplained
    assert "--schedule.max_staleness  (default 1, >= 0)" in field_help()


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["--schedule.max_staleness", "1"], "set max_staleness to 0 and weights to 'exact'"),
        (["--schedule.weights", "latest"], "set max_staleness to 0 and weights to 'exact'"),
        (["--trainer.device", "cpu"], "set both to 'auto', 'cpu' or 'cuda'"),
        (["--generator.device", "cuda:1"], "set both to 'auto', 'cpu' or 'cuda'"),
        (["--generator.engine.name", "vllm"], "set it to 'native'"),
        (["--lora.rank", "4", "--lora.hand_over", "adapter"], "set it to 'merged'"),
    ],
)
def test_what_cannot_be_co_located_is_refused_with_the_fix(overrides: list[str], fix: str) -> None:
    together = ["--schedule.max_staleness", "0", "--schedule.colocated", "true"]
    assert load_config(None, together).schedule.colocated
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*together, *overrides])
    assert "schedule.colocated" in str(caught.value) and fix in str(caught.value)


def test_mistakes_travel_between_processes_whole() -> None:
    found = (Mistake("a", "must be 1", ("b",)), Mistake("b", ": no file"))
    again = pickle.loads(pickle.dumps(Mistakes(found)))
    assert again.found == found and str(again) == "a must be 1; b: no file"
    error = pickle.loads(pickle.dumps(ConfigError("two", mistakes=found)))
    assert error.mistakes == found and str(error) == "two"


def test_a_word_that_means_another_thing_in_each_section_is_no_hint() -> None:
    """``name`` stands in several sections: none of them is what was meant."""
    (line,) = lines_of({"checkpoint": {"name": "last"}})
    assert line.startswith("checkpoint.name: unknown key; [checkpoint] has every_minutes, ") and "task" not in line


def test_an_optional_dependency_is_used_by_some_code() -> None:
    root = Path(__file__).resolve().parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = "\n".join(
        file.read_text() for folder in ("src", "examples", "tests/browser") for file in (root / folder).rglob("*.py")
    )
    for extra, packages in extras.items():
        for package in packages if extra != "dev" else ():
            name = re.split("[><=;]", package)[0].replace("-", ".")
            assert re.search(
                rf"import {name}|from {name}|import_module\(\"{name}|find_spec\(\"{name}|importorskip\(\"{name}|_STORAGES = .*\"{name}\"",
                code,
            ), f"{extra}: {name}"


@pytest.mark.parametrize("key", ["generator.sampling.temperature", "evaluation.temperature"])
@pytest.mark.parametrize(("temperature", "fits"), [("0.005", False), ("0.01", True), ("2", True), ("2.5", False)])
def test_vllm_samples_between_two_temperatures(key: str, temperature: str, fits: bool) -> None:
    given = ["--generator.engine.name", "vllm", f"--{key}", temperature]
    if fits:
        assert load_config(None, given).generator.engine.name == "vllm"
        return
    with pytest.raises(ConfigError, match=f"{key} is {temperature}, but generator.engine.name is 'vllm'.* 0.01 and 2"):
        load_config(None, given)
    load_config(None, given[2:])


def test_vllm_evaluates_greedily() -> None:
    load_config(None, ["--generator.engine.name", "vllm", "--evaluation.temperature", "0"])


def test_changed_keys_are_those_that_are_not_at_their_defaults() -> None:
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "tiny.toml"
    config = load_config(recipe, ["--schedule.max_staleness", "3", "--optimizer.beta1", "0.9"])
    changed, num_default = changed_keys(config)
    assert changed["schedule"]["max_staleness"] == 3 and "beta1" not in changed["optimizer"]
    assert num_default > 100 and {} not in changed.values()
    flat = {f"{section}.{key}": value for section, table in changed.items() for key, value in table.items()}
    assert load_config(None, flat) == config  # nothing that says something else was left out


def test_files_that_a_recipe_names_lie_beside_it_and_those_of_the_command_line_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("my task")
    (folder / "model").mkdir(parents=True)
    for name in ("q.jsonl", "r.py", "tools.py", "steps", "recipe.toml"):
        (folder / name).touch()
    (tmp_path / "here.jsonl").touch()
    text = """
        model.path = "model"
        algorithm.name = "r.py:loss"
        observability.sinks = ["r.py:Sink", "package.module:Sink"]
        hosts.cluster = "tools.py:Mine://10.0.0.1:80"
        task = [
            { name = "function", data = "q.jsonl", rewards = [{ function = "r.py:score" }, { function = "s.py:score" }] },
            { name = "steps", environment = "in_text:tools.py:tools" },
            { name = "math", data = "org/name", eval_data = "here.jsonl" },
        ]
    """
    (folder / "recipe.toml").write_text(text)
    found = read_settings(folder / "recipe.toml")
    assert found["model"]["path"] == "my task/model" and found["algorithm"]["name"] == "my task/r.py:loss"
    assert found["observability"]["sinks"] == ["my task/r.py:Sink", "package.module:Sink"]
    assert found["hosts"]["cluster"] == "my task/tools.py:Mine://10.0.0.1:80"
    first, second, third = found["task"]["mixture"]
    assert first["data"] == "my task/q.jsonl"
    assert first["rewards"] == [{"function": "my task/r.py:score"}, {"function": "s.py:score"}]
    assert (second["name"], second["environment"]) == ("steps", "in_text:my task/tools.py:tools")
    assert (third["data"], third["eval_data"]) == ("org/name", "here.jsonl")
    assert read_settings(folder / "recipe.toml", ["--model.path", "model"])["model"]["path"] == "model"
    monkeypatch.chdir(folder)
    assert read_settings("recipe.toml")["model"]["path"] == "model"
    Path(".run_id").touch()  # what a run has written down counts from where it was started
    assert read_settings(Path.cwd() / "recipe.toml")["model"]["path"] == "model"


def test_data_that_a_reward_of_ones_own_judges_need_no_name_of_a_task() -> None:
    own = {"data": "q.jsonl", "reward": "r.py:f"}
    assert validate({"task": own}).task.name == "function"
    assert validate({"task": {**own, "name": "math"}}).task.name == "math"
    assert validate({"task": {"reward": "r.py:f"}}).task.name == "steps"
    tasks = validate({"task": [{**own, "label": "a"}, {"label": "b"}]}).task.tasks
    assert {label: task.name for label, task in tasks.items()} == {"a": "function", "b": "steps"}


def test_what_is_judged_with_a_stand_in_is_no_second_mistake() -> None:
    """Two names that do not go together: what the default name makes of the data is not the user's mistake."""
    with pytest.raises(ConfigError) as raised:
        validate({"task": {"name": "math", "data": "q.jsonl"}, "algorithm": {"name": "sft"}})
    assert [mistake.key for mistake in raised.value.mistakes] == ["task.name"]


def test_a_runs_own_configuration_is_read_from_anywhere_as_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = tmp_path / "began"
    run_dir = began / "runs" / "one"
    run_dir.mkdir(parents=True)
    (began / "mine.py").write_text("def loss(batch, config): ...\n")
    (run_dir / ".run_id").write_text("one\n")
    monkeypatch.chdir(began)
    config = validate({"algorithm": {"name": "mine.py:loss"}})
    save_config(config, run_dir / "config.toml", begun_in(run_dir / "config.toml"))
    assert load_config("runs/one/config.toml").algorithm.name == "mine.py:loss"
    monkeypatch.chdir(tmp_path)
    elsewhere = load_config(run_dir / "config.toml")
    assert elsewhere.algorithm.name == f"{began}/mine.py:loss"
    save_config(elsewhere, run_dir / "config.toml", begun_in(run_dir / "config.toml"))  # as a resume from there does
    assert begun_in(run_dir / "config.toml") == began
    assert differences(to_plain(config), to_plain(elsewhere), began) == []
    (changed,) = differences(to_plain(config), to_plain(validate({"algorithm": {"name": "other.py:loss"}})), began)
    assert changed.key == "algorithm.name"


def test_samples_that_a_runs_configuration_names_are_found_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "runs" / "old" / "rollouts").mkdir(parents=True)
    for named in ("runs/old", "runs/old/rollouts"):
        assert with_paths_from(tmp_path, {"task": {"rollouts": named}}) == {"task": {"rollouts": f"{tmp_path}/{named}"}}


def test_a_recipe_named_again_from_its_own_folder_is_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, run_dir = tmp_path / "task", tmp_path / "runs" / "one"
    task.mkdir()
    run_dir.mkdir(parents=True)
    (task / "q.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n' * 4)
    (task / "recipe.toml").write_text('[task]\ndata = "q.jsonl"\n')
    (run_dir / ".run_id").write_text("one\n")
    monkeypatch.chdir(tmp_path)
    begun = validate({"algorithm": {"name": "sft"}, "task": {"name": "demonstrations", "data": "task/q.jsonl"}})
    save_config(begun, run_dir / "config.toml", tmp_path)
    monkeypatch.chdir(task)
    found = begun_config(Path("../runs/one"), read_settings("recipe.toml"))
    assert found.task.data == f"{task}/q.jsonl"  # config.toml says that paths count from tmp_path
    assert differences(to_plain(begun), to_plain(found), tmp_path) == []
    moved = validate({**to_plain(begun), "task": {**to_plain(begun)["task"], "data": "q.jsonl"}})
    assert differences(to_plain(moved), to_plain(found), tmp_path / "gone") == []  # on another machine
