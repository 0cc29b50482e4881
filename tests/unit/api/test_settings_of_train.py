"""Words, sections and dotted keys of ``llamarl.train`` become a recipe's settings."""

from pathlib import Path

import numpy
import pytest
import tomli_w

import llamarl
from llamarl.api.settings import dotted, run_config
from llamarl.config import read_settings, to_plain, validate
from llamarl.controller.begun import begun_config
from llamarl.errors import ConfigError


def test_words_sections_and_dotted_keys_are_one_tree() -> None:
    given = dotted(
        {
            "model": Path("a/b"),
            "num_ticks": 3,
            "optimizer": {"lr": 1e-4},
            "task": {"options": {"min_terms": 2}},
            "generator": {"sampling": {"stop_strings": ("x",)}},
            "schedule.max_staleness": 0,
        }
    )
    assert given == {
        "model.path": "a/b",
        "run.num_ticks": 3,
        "optimizer.lr": 1e-4,
        "task.options": {"min_terms": 2},
        "generator.sampling.stop_strings": ["x"],
        "schedule.max_staleness": 0,
    }


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"optimiser": {}}, "did you mean 'optimizer'"), ({"optimizer": 3}, "is a section, so give a mapping"), ({"zzz": 1}, "num_ticks"),
     ({"num_train_epochs": 1}, "TRL's num_train_epochs is run.epochs"), ({"lr": 1}, "did you mean optimizer.lr or critic.lr")],
)  # fmt: skip
def test_a_word_that_names_nothing_is_refused_with_advice(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        dotted(settings)


def test_without_a_folder_the_first_free_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_config("tiny", {}).run.dir == "runs/tiny"
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny-2").mkdir()
    assert run_config("tiny", {}).run.dir == "runs/tiny-3"
    assert run_config("tiny", {"dir": "runs/tiny"}).run.dir == "runs/tiny"
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "recipe.toml").write_text('[run]\ndir = "~/runs/tiny"\n')
    assert run_config("recipe.toml", {}).run.dir == "~/runs/tiny-3"


def test_the_recipe_may_be_given_by_its_name() -> None:
    with pytest.raises(ConfigError, match="'tinny': no such file, .* did you mean tiny?"):
        llamarl.train(recipe="tinny")


def test_what_is_said_comes_before_the_recipe() -> None:
    config = run_config("tiny", {"generator": {"sampling": {"temperature": 0.5}}, "seed": 7})
    assert (config.generator.sampling.temperature, config.generator.sampling.max_new_tokens) == (0.5, 80)
    assert (config.run.seed, config.generator.group_size) == (7, 8)


def test_a_reward_with_data_makes_a_function_task(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (tmp_path / "r.py").write_text("def f(prompt, response, answer):\n    return 0.0\n")
    config = run_config(None, {"data": tmp_path / "q.jsonl", "reward": f"{tmp_path}/r.py:f"})
    assert config.task.name == "function"
    assert run_config("tiny", {"reward": f"{tmp_path}/r.py:f"}).task.name == "steps"


def test_a_resume_takes_several_rewards_and_tasks_as_the_start_did(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(response):\n    return 0.0\n\n\ndef g(response):\n    return 1.0\n")
    rewards = [f"{tmp_path}/r.py:f", {"function": f"{tmp_path}/r.py:g", "weight": 2.0}]
    begun = to_plain(
        validate({"model": {"path": "bundled:tiny"}, "task": {"rewards": [{"function": rewards[0]}, rewards[1]]}})
    )
    (tmp_path / "config.toml").write_text(tomli_w.dumps(begun))
    found = begun_config(tmp_path, read_settings(None, dotted({"reward": rewards})))
    assert [(part.function, part.weight) for part in found.task.rewards] == [
        (rewards[0], 1.0),
        (f"{tmp_path}/r.py:g", 2.0),
    ]
    assert dotted({"task": [{"name": "steps"}]}) == {"task.name": "mixture", "task.mixture": [{"name": "steps"}]}


def test_numbers_of_numpy_are_numbers() -> None:
    given = {"num_ticks": numpy.int64(3), "optimizer": {"lr": numpy.float32(0.5)}, "seed": numpy.array([1, 2])[1]}
    plain = dotted(given)
    assert plain == {"run.num_ticks": 3, "optimizer.lr": 0.5, "run.seed": 2}
    assert [type(value) for value in plain.values()] == [int, float, int]


def test_a_cluster_leaves_the_nodes_that_the_same_call_names() -> None:
    for given in (
        {"hosts": {"on": {"trainer": ["a"]}}, "cluster": "auto"},
        {"hosts.on": {"trainer": ["a"]}, "cluster": "auto"},
    ):
        assert dotted(given) == {"hosts.cluster": "auto", "hosts.on": {"trainer": ["a"]}}
    assert dotted({"cluster": "here"}) == {"hosts.cluster": "", "hosts.on": {}}
