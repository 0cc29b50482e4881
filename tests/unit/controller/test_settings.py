"""What a run that has begun may be given other values for: each key says it, and the refusal says the way out."""

import shlex
from pathlib import Path
from typing import Any

from llamarl.config import RunConfig, _merge, _parse_overrides, key_effects, to_plain, validate
from llamarl.controller.begun_settings import differences, explain, settings_on_top
from llamarl.strict import Effect

BEGUN = to_plain(validate({"trainer": {"threads": 3}, "optimizer": {"schedule": "linear", "decay_ticks": 40}}))


def changed(*overrides: str) -> dict[str, Any]:
    return to_plain(validate(_merge(BEGUN, _parse_overrides(overrides))))


def test_every_key_is_of_one_effect_and_a_key_without_a_mark_changes_bits() -> None:
    effects = key_effects()
    assert set(effects.values()) == set(Effect)
    for key in (
        "optimizer.lr",
        "run.seed",
        "schedule.max_staleness",
        "generator.engine.kv_cache_bytes",
        "task.options",
    ):
        assert effects[key] is Effect.BITS
    for key in (
        "run.runtime",
        "run.dir",
        "deadlines.step_s",
        "evaluation.every",
        "observability.trace",
        "checkpoint.keep",
    ):
        assert effects[key] is Effect.NO_BITS
    for key in (
        *("generator.dp", "lora.rank", "lora.alpha", "lora.hand_over", "data.candidates"),
        *("dynamic_sampling.oversample", "schedule.prompts_per_step", "schedule.weights"),
    ):
        assert effects[key] is Effect.IN_STATE


def test_only_keys_that_change_bits_are_differences_and_each_has_both_values() -> None:
    now = changed("--deadlines.step_s", "9", "--evaluation.num_prompts", "7", "--optimizer.lr", "0.5", "--run.dir", "b")
    assert [str(d) for d in differences(BEGUN, now)] == ["optimizer.lr: it has 1e-06, this run 0.5"]
    assert differences(BEGUN, BEGUN) == []


def test_a_key_that_a_run_of_an_earlier_release_lacks_had_its_default() -> None:
    older = {name: dict(section) for name, section in BEGUN.items()}
    del older["algorithm"]["rho"], older["data"]
    assert differences(older, BEGUN) == []
    assert [d.key for d in differences(older, changed("--algorithm.rho", "5.0"))] == ["algorithm.rho"]


def test_the_runs_own_settings_stand_where_the_user_sets_nothing_or_leaves_the_choice() -> None:
    given = {
        "trainer": {"threads": 0, "dtype": "bfloat16"},
        "optimizer": {"decay_ticks": 0},
        "task": {"options": {"a": 1}},
    }
    merged = settings_on_top(BEGUN, given)
    assert merged["trainer"]["threads"] == 3 and merged["trainer"]["dtype"] == "bfloat16"
    assert merged["optimizer"] == BEGUN["optimizer"] and merged["task"]["options"] == {"a": 1}
    served = {"engine": {"dtype": "bfloat16"}}
    assert settings_on_top({"generator": served}, {"generator": {"engine": {"dtype": "auto"}}}) == {"generator": served}
    assert settings_on_top(BEGUN, {}) == BEGUN
    assert settings_on_top(BEGUN, {"trainer": {"threads": 1}})["trainer"]["threads"] == 1


def test_each_refusal_names_its_way_out() -> None:
    run, made = Path("/runs/my run"), Path("/runs/my run/checkpoints/tick_000009")

    def told(*overrides: str, platform: tuple[str, ...] = (), policy: str = "model.path = /here") -> str:
        return explain(differences(BEGUN, changed(*overrides)), platform, run, made, policy=policy)

    text = told("--optimizer.lr", "0.5", "--generator.sampling.stop_strings", '["\\n"]')
    assert "leave out --generator.sampling.stop_strings, --optimizer.lr" in text
    command = shlex.split(text.splitlines()[-1].partition(": ")[2])
    assert command[:6] == ["llamarl", "train", "--resume", "/runs/my run", "--fork", "/runs/my run-fork"]
    assert changed(*command[6:]) == changed("--optimizer.lr", "0.5", "--generator.sampling.stop_strings", '["\\n"]')
    assert "--checkpoint.reshard true" not in text and "other_platform" not in text
    assert "--checkpoint.reshard true" in told("--trainer.fsdp", "2")
    bound = told("--generator.dp", "2")
    assert "--fork" not in bound and "start a new run, with model.path = /here to begin where this one ended." in bound
    assert told("--generator.dp", "2", policy="").endswith("for another value start a new run.")
    assert "--fork" not in told("--optimizer.lr", "0.5", policy="")
    assert "leave out" not in told(platform=("torch: it has '1', this machine '2'",))


def test_a_branch_stays_the_commit_that_it_was_when_the_run_began_and_tables_keep_what_is_not_said_anew() -> None:
    commit, other = f"org/m@{'a' * 40}", f"org/m@{'b' * 40}"
    table = f"org/rows@{'a' * 40}"
    begun = {"model": {"path": commit}, "task": {"mixture": [{"name": "gsm8k", "data": table}, {"weight": 2.0}]}}
    given = {"model": {"path": "org/m@main"}, "task": {"mixture": [{"name": "gsm8k"}, {"weight": 3.0}]}}
    went_on = settings_on_top(begun, given)
    assert went_on["model"] == {"path": commit}
    assert went_on["task"] == {"mixture": [{"name": "gsm8k", "data": table}, {"weight": 3.0}]}
    for another in (other, "org/another"):  # refused by its difference
        assert settings_on_top(begun, {"model": {"path": another}})["model"] == {"path": another}
    assert settings_on_top(begun, {"model": {"path": "org/m"}})["model"] == {"path": commit}
    assert settings_on_top({"model": {"path": "org/m"}}, given)["model"] == {"path": "org/m@main"}


def test_what_a_run_saves_of_itself_is_its_whole_configuration() -> None:
    """A refusal can name only what the checkpoint's manifest holds."""
    tables = {
        "task.options",
        "task.columns",
        "task.environment_options",
        "generator.engine.options",
        "algorithm.options",
        "optimizer.options",
        "data.chat_template_kwargs",
        "executors",
        "hosts.on",
    }  # empty by default
    flat = key_effects().keys() - tables

    def held(config: Any, prefix: str = "") -> set[str]:
        keys: set[str] = set()
        for name, value in config.items():
            keys |= held(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}"}
        return keys

    assert held(to_plain(RunConfig())) == flat


def test_replicas_of_a_generator_with_shards_are_no_difference_and_without_them_they_are() -> None:
    base = ("--schedule.prompts_per_step", "12")
    shards_4, others = changed(*base, "--generator.shards", "4"), ("--generator.dp", "3", "--generator.shards", "4")
    assert differences(shards_4, changed(*base, *others)) == []
    assert [d.key for d in differences(shards_4, changed(*base, "--generator.shards", "6"))] == ["generator.shards"]
    replicas_2 = changed(*base, "--generator.dp", "2")
    assert differences(replicas_2, changed(*base, "--generator.dp", "1", "--generator.shards", "2")) == []
    assert [d.key for d in differences(replicas_2, changed(*base, "--generator.dp", "3"))] == ["generator.dp"]
    without = differences(shards_4, changed(*base, "--generator.dp", "4", "--generator.shards", "0"))
    assert {d.key for d in without} == {"generator.shards", "generator.dp"}


def test_which_gpu_it_has_is_no_difference_and_whether_it_has_one_is() -> None:
    one, other, none = (changed("--generator.device", device) for device in ("cuda:0,cuda:1", "cuda", "cpu"))
    assert differences(one, other) == []
    assert [d.key for d in differences(one, none)] == ["generator.device"]
    first, second = ({"algorithm": {"options": {"device": number}}} for number in (0, 1))
    assert [d.key for d in differences(first, second)] == ["algorithm.options.device"]


def test_a_key_in_an_own_executors_settings_has_the_effect_of_the_key() -> None:
    def of(**judge: Any) -> dict[str, Any]:
        mine = {"factory": "a.b:C", "reads": ["scored"], "writes": ["kept"], "settings": {"judge": judge}}
        return to_plain(validate({"executors": {"mine": mine, "trainer": {"reads": ["kept"]}}}))

    assert differences(of(), of(deadline_s=5.0)) == differences(of(deadline_s=4.0), of(deadline_s=5.0)) == []
    (found,) = differences(of(), of(deadline_s=5.0, weight=0.5))
    assert (found.key, found.had, found.asked) == ("executors.mine.settings.judge.weight", None, 0.5)


def test_of_tables_the_keys_that_differ_are_named_and_can_be_given_back() -> None:
    begun = to_plain(validate({"algorithm": {"name": "my.py:f", "options": {"clip": 0.2, "other": [1]}}}))
    asked = to_plain(validate({"algorithm": {"name": "my.py:f", "options": {"clip": 0.3, "other": [1]}}}))
    (found,) = differences(begun, asked)
    assert (found.key, found.had, found.asked) == ("algorithm.options.clip", 0.2, 0.3)
    told = explain([found], [], Path("runs/x"), Path("runs/x/c"), policy="--model.path M")
    assert told.endswith("--fork runs/x-fork --algorithm.options.clip 0.3")
