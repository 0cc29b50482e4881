"""A recipe brings executors and rewires the standard ones; what does not fit together is refused with its key."""

from pathlib import Path
from typing import Any

import pytest

from llamarl.config import load_config, save_config, validate
from llamarl.controller.graph import llamarl_graph
from llamarl.controller.preflight import find_missing
from llamarl.controller.prepare import prepare
from llamarl.errors import ConfigError, GraphError
from llamarl.roles import carries_version

SHORT = {"factory": "a.module:Filter", "reads": ["scored"], "writes": ["kept"]}
TRAINER = {"reads": ["kept"]}

GENERATOR = "llamarl.executors.generator:GeneratorExecutor"
STUDENT = {"factory": GENERATOR, "reads": ["more"], "writes": ["drafts"]}
MORE = {"trainer": {"writes": ["weights", "more"]}, "reward": {"reads": ["completions", "drafts"]}}
"""What a second generator that follows the policy asks of the others."""


def edges(**executors: Any) -> list[str]:
    graph = llamarl_graph(validate({"executors": executors, "evaluation": {"every": 0}}))
    return [f"{c.source} {c.name} {c.sink} {c.kind.value} {c.delay}" for c in graph.channels]


def test_an_executor_between_reward_and_trainer() -> None:
    assert sorted(edges(short=SHORT, trainer=TRAINER)) == [
        "generator completions reward gather 0",
        "reward scored short gather 0",
        "short kept trainer scatter 0",
        "trainer weights generator weights 2",
    ]


def test_several_channels_arrive_in_the_order_of_the_recipes_reads() -> None:
    second = {"factory": "a.module:Judge", "reads": ["more"], "writes": ["also"]}
    generator = {"writes": ["completions", "more"]}
    graph = llamarl_graph(
        validate({"executors": {"second": second, "generator": generator, "trainer": {"reads": ["also", "scored"]}}})
    )
    assert [c.name for c in graph.inputs["trainer"]] == ["also", "scored"]


def test_a_standard_executor_may_be_another_class_with_options() -> None:
    config = validate({"executors": {"reward": {"factory": "my.py:Mine", "options": {"k": [1, {"b": 2.5}]}}}})
    reward = next(spec for spec in llamarl_graph(config).executors if spec.name == "reward")
    assert (reward.factory, reward.options) == ("my.py:Mine", {"k": [1, {"b": 2.5}]})


def test_an_executor_of_ones_own_reads_the_policys_weights_with_the_delay_of_the_generator() -> None:
    found = edges(student=STUDENT, **MORE)
    assert {edge for edge in found if "weights" in edge} == {
        "trainer weights generator weights 2",
        "trainer more student weights 2",
    }
    assert "trainer more student weights 0" in edges(
        student={**STUDENT, "writes": [], "delays": {"more": 0}}, **{"trainer": MORE["trainer"]}
    )


def test_settings_change_the_recipe_for_one_executor_alone() -> None:
    settings = {"model": {"path": "other"}, "generator": {"sampling": {"temperature": 0.5}}}
    teacher = {"factory": GENERATOR, "writes": ["drafts"], "settings": settings}
    config = validate({"executors": {"teacher": teacher, "reward": MORE["reward"]}})
    specs = {spec.name: spec.config for spec in llamarl_graph(config).executors}
    assert specs["teacher"].model.path == "other" and specs["teacher"].generator.sampling.temperature == 0.5
    assert specs["teacher"].generator.group_size == config.generator.group_size  # what is not said is the recipe's
    assert specs["generator"] == specs["trainer"] == config
    assert not [channel for channel in llamarl_graph(config).channels if channel.sink == "teacher"]  # nothing moves it


@pytest.mark.parametrize(
    ("reads", "recipe"),
    [
        ("scored", {"algorithm": {"name": "dapo"}, "dynamic_sampling": {"enabled": True}}),
        ("scored", {"data": {"candidates": 4}, "task": [{"name": "steps"}, {"name": "steps", "label": "more"}]}),
        ("scored", {"schedule": {"colocated": True, "max_staleness": 0}, "task": {"options": {"max_terms": 3}}}),
        ("scored", {"reward_model": {"path": "m"}, "judge": {"path": "m"}, "trainer": {"fsdp": 8, "minibatches": 8}}),
        ("scored", {"generator": {"dp": 8}, "task": {"rollouts": "RUN"}}),
        ("referenced", {"algorithm": {"kl_coef": 0.1, "kl_place": "reward", "kl_estimator": "k1"}}),
        ("referenced", {"algorithm": {"advantage": "distillation", "teacher_top_k": 8}, "reference": {"path": "m"}}),
        ("referenced", {"algorithm": {"advantage": "distillation"}, "reference": {"template": "{question}{answer}"}}),
        ("valued", {"algorithm": {"advantage": "gae"}}),
    ],
)
def test_rows_to_imitate_stand_beside_whatever_else_the_recipe_has(reads: str, recipe: dict[str, Any]) -> None:
    rows = {
        "factory": "llamarl.executors.demonstrations:DemonstrationsExecutor",
        "writes": ["shown"],
        "settings": {
            "algorithm": {"name": "sft"},
            "schedule": {"prompts_per_step": 4},
            "task": {"name": "demonstrations", "data": "rows.jsonl"},
        },
    }
    config = validate({**recipe, "executors": {"rows": rows, "trainer": {"reads": [reads, "shown"]}}})
    seen = config.for_executor("rows")
    assert seen.algorithm.imitates and seen.task.data == "rows.jsonl" and seen.schedule.prompts_per_step == 4
    assert list(seen.executors) == ["rows"] and config.for_executor("trainer") is config


def test_groups_of_a_second_generator_need_not_be_as_many_as_ranks_and_steps_of_the_trainer() -> None:
    few = {"factory": GENERATOR, "writes": ["drafts"], "settings": {"schedule": {"prompts_per_step": 2}}}
    large = {"trainer": {"fsdp": 8, "ep": 8, "minibatches": 8, "router": "replay"}, "critic": {"fsdp": 8}}
    config = validate({**large, "algorithm": {"advantage": "gae"}, "executors": {"few": few, "reward": MORE["reward"]}})
    seen = config.for_executor("few")
    assert (seen.groups_per_tick, seen.trainer.router, config.trainer.fsdp) == (2, "replay", 8)


def test_settings_that_fit_no_recipe_are_refused_with_the_executors_key(tmp_path: Path) -> None:
    teacher = {"factory": GENERATOR, "writes": ["drafts"], "settings": {"generator": {"temperature": 2.0}}}
    executors = {"teacher": teacher, "reward": MORE["reward"]}
    with pytest.raises(ConfigError, match=r"- executors\.teacher\.settings: generator\.temperature: unknown key"):
        validate({"executors": executors})
    teacher["settings"] = {"model": {"path": str(tmp_path)}}
    (line,) = find_missing(validate({"executors": executors}))
    assert line.key == "executors.teacher.settings.model.path" and f"{tmp_path} has no config.json" in line.text


def test_an_executor_of_ones_own_is_sent_every_version_and_the_evaluator_those_that_are_due() -> None:
    config = validate({"evaluation": {"every": 3}, "run": {"num_ticks": 7}})
    assert [tick for tick in range(7) if carries_version(config, "evaluator", tick)] == [2, 5, 6]
    each, one = validate({"evaluation": {"every": 1}}), validate({"evaluation": {"every": 1}, "run": {"num_ticks": 1}})
    assert [tick for tick in range(4) if carries_version(each, "evaluator", tick)] == [
        1,
        2,
        3,
    ]  # version 0 is of tick 0
    assert not carries_version(one, "evaluator", 0)
    assert all(carries_version(config, reader, tick) for reader in ("generator", "student") for tick in range(7))


def test_own_sizes_are_settled_and_saved_with_the_run(tmp_path: Path) -> None:
    short = {**SHORT, "ranks": 2, "threads": 0}
    config = validate(
        {"executors": {"short": short, "trainer": TRAINER}, "evaluation": {"every": 0}, "run": {"cores": 12}}
    )
    prepared = prepare(config)
    spec = next(spec for spec in prepared.graph.executors if spec.name == "short")
    assert (spec.num_ranks, spec.threads, spec.device) == (2, 2, "cpu")  # (12 - 1) / 4 ranks, as the other two sharers
    save_config(prepared.config, tmp_path / "config.toml")
    saved = load_config(tmp_path / "config.toml").executors
    assert saved == prepared.config.executors and saved["short"].threads == 2


@pytest.mark.parametrize(
    ("executors", "said"),
    [
        ({"short": {**SHORT, "reads": ["scord"]}, "trainer": TRAINER}, r"short\.reads: nobody writes 'scord'; did you mean 'scored'"),
        ({"short": SHORT}, r"reads: channel 'scored' is read by trainer already; .* let short read what trainer writes"),
        ({"short": {**SHORT, "writes": ["scored"]}}, r"short\.writes: channel 'scored' is written by reward already"),
        ({"generator": {"writes": ["completions", "more"]}}, r"generator\.writes: nobody reads 'more'"),
        ({"short": {**SHORT, "reads": ["weights"]}, "trainer": TRAINER}, r"channel 'weights' is read by generator already"),
        ({"reward": {"reads": ["more"]}, "trainer": {"writes": ["weights", "more"]}}, r"'more', which trainer writes, carries weights, and reward reads groups"),
        ({"student": {**STUDENT, "delays": {"more": 3}}, **MORE}, r"student\.delays: \{'more': 3\} ticks are more than schedule\.max_staleness \+ 1 = 2"),
        ({"student": {**STUDENT, "settings": {"model": {"path": "other"}}}, **MORE}, r"student\.settings: model\.path is 'other', but 'more' carries weights"),
        ({"student": {**STUDENT, "settings": {"executors": {}}}, **MORE}, r"student\.settings are of the recipe's other sections"),
        ({"trainer": {"settings": {"optimizer": {"lr": 1.0}}}}, r"executors\.trainer\.settings is .*, but trainer is an executor of the standard job"),
        ({"short": {"reads": ["scored"]}}, r"short\.factory is empty"),
        ({"trainr": {"reads": ["kept"]}}, r"did you mean executors\.trainer\?"),
        ({"trainer": {"ranks": 2}}, r"trainer\.ranks is 2, but trainer is an executor of the standard job: set it in section \[trainer\]"),
        ({"critic": {"factory": "a.b:C"}}, r"executors\.critic: this job has no critic"),
        ({"short": {**SHORT, "rank": 2}, "trainer": TRAINER}, r"executors\.short\.rank: unknown key; did you mean 'executors\.short\.ranks'"),
        ({"short": {**SHORT, "ranks": "2"}, "trainer": TRAINER}, r"executors\.short\.ranks: expected an integer"),
        ({"short": {**SHORT, "delays": {"kept": 1}}, "trainer": TRAINER}, r"delays must name channels of reads"),
        ({"short": {**SHORT, "factory": "Filter"}, "trainer": TRAINER}, r"factory must be package\.module:Class"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused_with_its_key(executors: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate({"executors": executors})


def test_a_cycle_without_a_delay_is_refused_and_one_with_a_delay_is_not() -> None:
    back = {**SHORT, "reads": ["scored", "echo"], "writes": ["kept", "sent"]}
    mirror = {"factory": "a.module:Mirror", "reads": ["sent"], "writes": ["echo"]}
    with pytest.raises(GraphError, match=r"deadlock: no token on the cycle of .*'sent'.*delay >= 1"):
        edges(short=back, mirror=mirror, trainer=TRAINER)
    assert "mirror echo short gather 1" in edges(short={**back, "delays": {"echo": 1}}, mirror=mirror, trainer=TRAINER)


def test_code_that_settings_bring_is_told_like_that_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    settings = {"task": {"reward": f"{tmp_path}/mine.py:score"}}
    second = {"factory": "llamarl.executors.reward:RewardExecutor", "reads": ["more"], "writes": ["also"]}
    executors = {
        "second": {**second, "settings": settings},
        "generator": {"writes": ["completions", "more"]},
        "trainer": {"reads": ["scored", "also"]},
    }
    config = validate({"executors": executors})
    assert ("executors.second.settings.task.reward", f"{tmp_path}/mine.py:score") in config.own_code
    assert any(mistake.key == "executors.second.settings.task.reward" for mistake in find_missing(config))
