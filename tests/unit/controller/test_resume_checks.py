"""What a resume compares before it starts anything."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import pytest
import tomli_w

from llamarl.checkpoint import storage
from llamarl.cli.main import main
from llamarl.config import RunConfig, load_config, save_config, validate
from llamarl.controller import fork, prepare, resume, run
from llamarl.controller.begun import begun_config, refuse_code_of_a_run
from llamarl.controller.products import write_products
from llamarl.controller.run_folder import RunFolder
from llamarl.controller.settle import record_models
from llamarl.determinism import platform_facts
from llamarl.errors import CheckpointError, ConfigError, LlamaRLError
from llamarl.models.exported import ExportFacts, write_export
from llamarl.models.folders import resolve_model_path
from llamarl.runtime.tick_log import Resumed

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "tiny.toml"


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would have run."""
    calls: list[dict[str, Any]] = []
    for module in (run, resume, fork):
        monkeypatch.setattr(module, "execute", lambda prepared, run_dir, **how: calls.append(how))
    return calls


def config(run_dir: Path, rank: int = 0, **optimizer: Any) -> RunConfig:
    inline = ["--run.dir", str(run_dir), "--run.runtime", "inline", "--run.cores", "2"]
    made = load_config(RECIPE, [*inline, "--lora.rank", str(rank)])
    return dataclasses.replace(made, optimizer=dataclasses.replace(made.optimizer, **optimizer))


def checkpointed(run_dir: Path, monkeypatch: pytest.MonkeyPatch, platform: Mapping[str, str], **optimizer: Any) -> None:
    prepared = prepare.prepare(config(run_dir, **optimizer))
    run_dir.mkdir()
    save_config(prepared.config, run_dir / "config.toml")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "platform_facts", lambda: platform)
        store = storage.CheckpointStore(run_dir / "checkpoints")
        store.begin(4)
        store.finish(4, {}, prepare.description(prepared))


def test_a_run_without_a_checkpoint_begins_again_under_its_own_configuration_only(
    tmp_path: Path, executed: list[dict[str, Any]]
) -> None:
    run_dir = tmp_path / "run"
    run.start_run(config(run_dir))
    assert executed == [{"resume_after_tick": None, "load_from": None, "mirror": None}]
    with pytest.raises(ConfigError, match=r"optimizer\.lr: it has .*, this run 0\.5"):
        resume.resume_run(config(run_dir, lr=0.5))
    resume.resume_run(config(run_dir))
    assert executed[1:] == [{"resume_after_tick": -1, "load_from": None, "resumed": Resumed(), "mirror": None}]


def test_a_run_whose_set_up_failed_can_be_started_again_with_another_setting(
    tmp_path: Path, executed: list[dict[str, Any]]
) -> None:
    run.start_run(config(tmp_path / "run"))  # nothing ran, so the folder holds its configuration alone
    run.start_run(config(tmp_path / "run", lr=0.5))
    assert len(executed) == 2
    assert load_config(tmp_path / "run" / "config.toml").optimizer.lr == 0.5


def test_a_run_of_a_version_that_had_other_keys_is_told_from_a_slip_in_a_recipe(
    tmp_path: Path, executed: list[dict[str, Any]]
) -> None:
    run.start_run(config(tmp_path / "run"))
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("[checkpoint]\n", "[checkpoint]\nat_end = true\n"))
    with pytest.raises(ConfigError, match=r"1 mistake in .*config.toml:\n  - checkpoint.at_end: .*\nAnother version"):
        begun_config(tmp_path / "run", {})
    with pytest.raises(ConfigError, match="remove its line there"):
        load_config(file)


def test_other_libraries_or_another_processor_are_refused_unless_asked_for(
    tmp_path: Path, executed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    checkpointed(run_dir, monkeypatch, {**platform_facts(), "torch": "2.0.1", "processor": "x86_64 Other avx2"})
    with pytest.raises(ConfigError) as caught:
        resume.resume_run(config(run_dir))
    message = str(caught.value)
    assert "torch: it has '2.0.1'" in message and "processor: it has 'x86_64 Other avx2'" in message
    assert "--checkpoint.other_platform true" in message and "leave out" not in message
    assert executed == []
    asked = config(run_dir)
    asked = dataclasses.replace(asked, checkpoint=dataclasses.replace(asked.checkpoint, other_platform=True))
    moved: list[bool] = []
    monkeypatch.setattr(resume, "load_journal", lambda *_, **how: (moved.append(how["moved"]), Resumed())[1])
    resume.resume_run(asked)
    folder = run_dir / "checkpoints" / "tick_000004"
    assert executed == [{"resume_after_tick": 4, "load_from": folder, "resumed": Resumed(), "mirror": None}]
    told = capsys.readouterr().err  # config.toml keeps the consent, so each use of it is said
    assert "no longer bit for bit" in told and "torch: it has '2.0.1'" in told
    monkeypatch.setattr(resume, "platform_differences", lambda *_: [])
    resume.resume_run(asked)  # from a checkpoint of this platform, with the consent that config.toml keeps
    assert moved == [True, False]


def test_a_prolonged_run_keeps_the_rate_that_it_was_started_with(
    tmp_path: Path, executed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointed(tmp_path / "run", monkeypatch, dict(platform_facts()))
    assert load_config(tmp_path / "run" / "config.toml").optimizer.decay_ticks == 100
    asked = config(tmp_path / "run")
    for num_ticks in (200, 300):
        resume.resume_run(dataclasses.replace(asked, run=dataclasses.replace(asked.run, num_ticks=num_ticks)))
        assert load_config(tmp_path / "run" / "config.toml").optimizer.decay_ticks == 100
    assert len(executed) == 2


@pytest.mark.parametrize("num_ticks", [5, 4])
def test_a_run_without_its_whole_model_is_not_called_complete(
    tmp_path: Path,
    executed: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_ticks: int,
) -> None:
    run_dir = tmp_path / "run"
    checkpointed(run_dir, monkeypatch, dict(platform_facts()))  # after tick 4
    (run_dir / "checkpoints" / "tick_000004" / "trainer" / "state").mkdir(parents=True)
    asked = config(run_dir)
    asked = dataclasses.replace(asked, run=dataclasses.replace(asked.run, num_ticks=num_ticks))

    def written(run: RunFolder, checkpoint: Path, config: RunConfig, names: Collection[str]) -> None:
        for name in names:
            (run.path / name).mkdir(exist_ok=True)
            (run.path / name / "config.json").write_text("{}")
            write_export(run.path / name, ExportFacts(policy_version=5, dtype="float32", served_dtype="float32"))

    monkeypatch.setattr(resume, "write_products", written)
    if num_ticks == 4:  # the checkpoint is of later weights than the run's last
        for verb in (resume.resume_run, resume.plan_resume):
            with pytest.raises(ConfigError, match="writes model: give at least 6"):
                verb(asked)
    else:
        assert resume.plan_resume(asked).endswith("is at its last tick; its checkpoint would give again: model")
        resume.resume_run(asked)
        told = capsys.readouterr()
        assert "model: it is missing; it is written again from" in told.err and "is complete at 5 ticks" in told.out
        assert (
            "# what would run" not in (told_before := resume.plan_resume(asked)) and "is complete at 5" in told_before
        )
        resume.resume_run(asked)
        assert "written again" not in capsys.readouterr().err
        write_export(run_dir / "model", ExportFacts(policy_version=3, dtype="float32", served_dtype="float32"))
        resume.resume_run(asked)  # it was prolonged after tick 2, and killed before its end wrote a model anew
        assert "(policy version 3, not 5); it is written again" in capsys.readouterr().err
        (run_dir / "model" / "config.json").write_text("[]")
        monkeypatch.setattr(resume, "write_products", lambda *_: None)
        with pytest.raises(ConfigError, match="writes model"):
            resume.resume_run(asked)
        assert "config.json was altered" in capsys.readouterr().err
    assert executed == []


def test_a_run_without_checkpoints_that_is_whole_is_complete(
    tmp_path: Path, executed: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    run.start_run(config(run_dir))
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {tick}}}\n' for tick in range(100)))
    resume.resume_run(config(run_dir))
    assert len(executed) == 2 and "all of its 100 ticks are done again" in capsys.readouterr().err
    (run_dir / "model").mkdir()
    write_export(run_dir / "model", ExportFacts(policy_version=100, dtype="float32", served_dtype="float32"))
    resume.resume_run(config(run_dir))
    assert len(executed) == 2 and "is complete at 100 ticks" in capsys.readouterr().out
    assert "is complete at 100 ticks" in resume.plan_resume(config(run_dir))


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ((), {"model"}),
        (("--lora.rank", "4"), {"model", "adapter"}),
        (("--lora.rank", "4", "--lora.export_merged", "false"), {"adapter"}),
        (("--algorithm.advantage", "gae"), {"model", "critic"}),
    ],
)
def test_what_the_last_tick_leaves_follows_from_the_configuration(
    tmp_path: Path, overrides: tuple[str, ...], wanted: set[str]
) -> None:
    assert resume.incomplete_products(tmp_path, load_config(None, overrides)) == dict.fromkeys(wanted, "it is missing")


def test_a_trainer_of_ones_own_that_keeps_another_state_leaves_no_model(tmp_path: Path) -> None:
    (tmp_path / "tick_000004" / "trainer" / "rank_0").mkdir(parents=True)
    write_products(cast("RunFolder", None), tmp_path / "tick_000004", load_config(None, ()))
    assert resume.incomplete_products(tmp_path, load_config(None, ()), tmp_path / "tick_000004") == {}


def test_what_several_checks_find_is_told_at_once() -> None:
    def refuse(text: str) -> None:
        raise ConfigError(text)

    with pytest.raises(ConfigError, match="2 mistakes.*\n  - one\n  - two"):
        prepare._raise_all(lambda: refuse("one"), lambda: None, lambda: refuse("two"))
    with pytest.raises(ConfigError, match="^one$"):
        prepare._raise_all(lambda: refuse("one"), lambda: None)


def test_a_warm_up_that_outlasts_the_run_is_told(
    tmp_path: Path, executed: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    run.start_run(config(tmp_path / "run", warmup_ticks=399))  # of 100 ticks
    assert "the rate ends at 25% of optimizer.lr" in capsys.readouterr().err
    run.start_run(config(tmp_path / "other", warmup_ticks=99))
    assert "warmup" not in capsys.readouterr().err
    assert len(executed) == 2


def test_consent_that_a_runs_own_configuration_gives_to_a_models_code_is_asked_of_the_user(tmp_path: Path) -> None:
    """A run's folder may come from somebody else."""
    (tmp_path / "config.toml").write_text("[model]\ntrust_remote_code = true\n")
    with pytest.raises(ConfigError, match="--model.trust_remote_code true"):
        begun_config(tmp_path, {})
    assert begun_config(tmp_path, {"model": {"trust_remote_code": True}}).model.trust_remote_code


@pytest.mark.parametrize(
    "place", ["journal/000000000000", "checkpoints/tick_000001/generator/rank_0/generator.json", "run_id", "link"]
)
def test_a_pipe_anywhere_in_a_runs_folder_is_refused_and_holds_nobody_up(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    pipe = tmp_path / "pipe" if place == "link" else run_dir / place
    pipe.parent.mkdir(parents=True, exist_ok=True)
    run_dir.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    if place == "link":
        (run_dir / place).symlink_to(pipe)
    (run_dir / "config.toml").write_text("")
    for verb in ("--resume", "--replay"):
        assert main(["train", verb, str(run_dir), "--dry-run"]) == 2
        assert f"{run_dir / place} is a pipe, expected a file" in capsys.readouterr().err


def test_a_socket_in_a_runs_folder_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "metrics.jsonl"))
    assert main(["train", "--resume", str(tmp_path), "--dry-run"]) == 2
    assert f"{tmp_path / 'metrics.jsonl'} is a socket, expected a file" in capsys.readouterr().err


def test_processes_of_a_run_that_goes_on_import_while_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text('[model]\npath = "bundled:tiny"\n[task]\nname = "steps"\n')
    asked = []

    def start(config: RunConfig) -> None:
        asked.append(config.model.path)
        raise ConfigError("that is all")

    monkeypatch.setattr("llamarl.controller.prepare.start_fork_servers", start)
    for words in (["--resume"], ["--fork", str(tmp_path / "fork"), "--resume"], ["--replay"]):
        assert main(["train", *words, str(tmp_path)]) == 2
    assert asked == ["bundled:tiny"] * 3


def test_a_replay_refuses_what_a_resume_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evil.py").write_text("def score(*a):\n    return 1.0\n")
    (tmp_path / "config.toml").write_text(f'[task]\nreward = "{tmp_path}/evil.py:score"\n')
    assert main(["train", "--replay", str(tmp_path), "--dry-run"]) == 2
    assert "is code inside the run's folder" in capsys.readouterr().err


def test_a_replay_that_would_give_other_bits_is_refused_as_is_its_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text('[model]\npath = "bundled:tiny"\n[task]\nname = "steps"\n')
    monkeypatch.setattr("llamarl.controller.prepare.start_fork_servers", lambda config: None)
    for words in ([], ["--dry-run"]):
        assert main(["train", "--replay", str(tmp_path), "--run.num_ticks", "1", "--optimizer.lr", "1.0", *words]) == 2
        assert "\n  - optimizer.lr: it has 1e-06, this run 1.0\nOnly keys that" in capsys.readouterr().err


CODE = {
    "task.name", "task.environment", "task.reward", "task.rewards.*.function",
    "task.mixture.*.name", "task.mixture.*.environment", "task.mixture.*.reward", "task.mixture.*.rewards.*.function",
    "algorithm.name", "algorithm.advantage", "optimizer.name", "generator.engine.name", "schedule.transport",
    "hosts.cluster",
    "observability.sinks.*", "executors.*.factory", "executors.*.settings.*",
}  # fmt: skip
"""Keys that may hold an import path: each is to be in ``RunConfig.named_code``."""
NO_CODE = {
    # folders, files and addresses that are read as data
    "model.path", "critic.path", "judge.path", "reference.path", "reward_model.path", "run.dir", "task.data", "task.eval_data",
    "task.train_file", "task.eval_file", "task.mixture.*.data", "task.mixture.*.eval_data", "task.mixture.*.train_file",
    "task.mixture.*.eval_file", "task.rollouts",
    # names, words and patterns
    "judge.name", "judge.model", "reward_model.name", "task.rewards.*.name", "task.mixture.*.rewards.*.name",
    "task.mixture.*.label", "judge.rubric", "judge.score_pattern", "hosts.on.*", "hosts.on.*.*",
    "hosts.port_range", "lora.targets.*", "generator.sampling.stop_strings.*", "task.pool.pass_env.*",
    "task.mixture.*.pool.pass_env.*", "executors.*", "executors.*.reads.*", "executors.*.writes.*", "executors.*.delays.*",
    # what an engine, environment or executor of one's own is given, and what built-in ones check
    "generator.engine.options.*", "executors.*.options.*", "data.chat_template_kwargs.*",
}  # fmt: skip
NO_CODE_BY_NAME = {
    "split", "eval_split", "subset", "template", "device", "question_template", "response_prefix",
    "system_prompt", "turn_template",
}  # fmt: skip
ADDRESSES = {"hosts.cluster", "judge.api_key_env", "judge.url", "run.mirror"}


def text_keys(hint: Any, key: str) -> Iterator[str]:
    """Keys of a configuration whose values are free text, ``*`` for names that a user chooses."""
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        for field in dataclasses.fields(hint):
            yield from text_keys(hints[field.name], f"{key}.{field.name}".strip("."))
    elif hint in (str, Any):
        yield key
    elif get_origin(hint) is not Literal:
        of_names = get_origin(hint) in (dict, list, tuple, Mapping, Sequence)
        for argument in get_args(hint):
            yield from text_keys(argument, f"{key}.*" if of_names else key)


def test_every_key_that_holds_text_is_known_to_name_code_or_to_name_none() -> None:
    """Whoever adds a key decides here, and adds one that names code to ``RunConfig.named_code``."""
    found = set(text_keys(RunConfig, ""))
    options = {key for key in found if "options.*" in key or "columns.*" in key}
    left = {
        key for key in found - CODE - NO_CODE - ADDRESSES - options if key.rpartition(".")[2] not in NO_CODE_BY_NAME
    }
    assert not left
    assert found >= CODE | ADDRESSES


@pytest.mark.parametrize("key", sorted(CODE - {"executors.*.settings.*"}))
def test_code_in_a_runs_folder_is_refused_under_every_key_that_may_name_it(tmp_path: Path, key: str) -> None:
    path = f"{tmp_path}/evil.py:Thing"
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\nclass Thing: pass\n")
    value: Any = path
    parts = key.split(".")
    if key.endswith("rewards.*.function"):
        value, parts = [{"name": "a", "function": path}], parts[:-2]
    elif key.endswith(".sinks.*"):
        value, parts = [path], parts[:-1]
    if "mixture" in parts:
        kind = "episodes" if parts[3] == "environment" else "function"
        data = {} if parts[3] in ("environment", "name") else {"data": f"{tmp_path}/rows.jsonl"}
        value = [{"label": "one", "name": kind, **data, parts[3]: value}, {"label": "two", "name": "steps"}]
        parts = ["task"]
    for part in reversed([part.replace("*", "mine") for part in parts]):
        value = {part: value}
    (tmp_path / "config.toml").write_text(tomli_w.dumps(value))
    with pytest.raises(LlamaRLError, match="is code inside the run's folder"):
        begun_config(tmp_path, {})


def test_the_flag_by_which_sinks_are_named_again_is_one_that_is_taken(tmp_path: Path) -> None:
    found = validate({"observability": {"sinks": ["wandb", "json:JSONEncoder"]}})
    with pytest.raises(ConfigError, match="name it yourself") as raised:
        refuse_code_of_a_run(found, tmp_path, {})
    words = shlex.split(str(raised.value).partition("or by ")[2])
    assert len(words) == 2
    assert load_config(RECIPE, words).observability.sinks == found.observability.sinks


def test_a_preset_put_on_top_of_a_run_brings_all_its_keys(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(
        '[algorithm]\nname = "aipo"\nadvantage = "group_mean"\nclip_high = 0.2\nkl_coef = 0.0\n'
    )
    algorithm = begun_config(tmp_path / "run", {"algorithm": {"name": "grpo", "clip_low": 0.1}}).algorithm
    assert (algorithm.name, algorithm.advantage, algorithm.normalization) == ("ppo", "group_std", "sequence")
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef) == (0.1, 0.2, 0.04)
    with pytest.raises(ConfigError, match="advantage is 'leave_one_out', but name 'grpo' means 'group_std'"):
        begun_config(tmp_path / "run", {"algorithm": {"name": "grpo", "advantage": "leave_one_out"}})


def test_a_dry_run_of_a_resume_refuses_what_the_resume_would_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    checkpointed(run_dir, monkeypatch, platform_facts())
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    assert main(["train", "--resume", str(run_dir), "--optimizer.lr", "1", "--dry-run"]) == 2
    assert main(["train", "--resume", str(run_dir), "--deadlines.step_s", "9", "--dry-run"]) == 0
    assert main(["train", "--resume", str(run_dir), "--fork", "other", "--optimizer.lr", "1", "--dry-run"]) == 0
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_a_dry_run_of_a_resume_refuses_another_model_and_a_reward_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    checkpointed(run_dir, monkeypatch, platform_facts(), rank=2)
    record_models(config(run_dir, rank=2), run_dir)
    dry = ["train", "--resume", str(run_dir), "--dry-run"]
    assert main(dry) == 0
    recorded = run_dir / "models.json"
    recorded.write_text(recorded.read_text().replace('"xxh3_128": "', '"xxh3_128": "0'))
    assert main(dry) == 2
    assert "model.path: " in capsys.readouterr().err

    def refuse(_: RunConfig) -> None:
        raise ConfigError("no such reward")

    monkeypatch.setattr(resume, "check_reward", refuse)
    assert main(dry) == 2
    assert "no such reward" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schedule.prompts_per_step", "8"], r"  - schedule\.prompts_per_step: .*; the states"),
        (["--model.path", "other"], r"  - model\.path: .*; the weights"),
        (["--critic.path", "other"], r"  - critic\.path: .*; the weights"),
        (
            ["--algorithm.name", "sft", "--task.name", "demonstrations", "--task.data", "rows.jsonl"],
            "only one of the two runs samples",
        ),
        (["--run.num_ticks", "5"], "no tick is left of --run.num_ticks 5"),
    ],
)
def test_a_fork_and_its_dry_run_refuse_what_the_checkpoint_cannot_serve_and_make_no_folder(
    tmp_path: Path,
    executed: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpointed(tmp_path / "run", monkeypatch, platform_facts())
    shutil.copytree(resolve_model_path("bundled:tiny"), "other")
    fork_of_it = ["train", "--resume", "run", "--fork", "fork"]
    assert main([*fork_of_it, "--model.path", "other", "--dry-run"]) == 0  # the same files elsewhere
    assert fork._same_model("gone", "other")  # moved
    with Path("other/config.json").open("a") as file:
        file.write("\n")
    Path("rows.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n' * 4)
    for dry in ([], ["--dry-run"]):
        assert main([*fork_of_it, *words, *dry]) == 2
        assert re.search(said, capsys.readouterr().err)
    assert executed == [] and not Path("fork").exists()


def test_a_fork_of_adapters_is_refused_where_their_base_was_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointed(tmp_path / "run", monkeypatch, platform_facts(), rank=2)
    record_models(config(tmp_path / "run", rank=2), tmp_path / "run")
    fork_of_it = ["train", "--resume", str(tmp_path / "run"), "--fork", str(tmp_path / "fork"), "--dry-run"]
    assert main(fork_of_it) == 0
    recorded = tmp_path / "run" / "models.json"
    recorded.write_text(recorded.read_text().replace('"xxh3_128": "', '"xxh3_128": "0'))
    assert main(fork_of_it) == 2
    assert "the adapters in the checkpoint were trained on it" in capsys.readouterr().err


def test_a_fork_is_refused_whose_carried_responses_are_to_prompts_of_another_data_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointed(tmp_path / "run", monkeypatch, platform_facts())
    fork_of_it = ["train", "--resume", str(tmp_path / "run"), "--fork", str(tmp_path / "fork"), "--dry-run"]
    monkeypatch.setattr(fork, "changed_files", lambda *_: {"task.data": "task.data: rows.jsonl is not what it was"})
    assert main(fork_of_it) == 0
    monkeypatch.setattr(fork, "_carries_responses", lambda _: True)
    assert main(fork_of_it) == 2
    assert "rows.jsonl is not what it was; the checkpoint holds unfinished responses" in capsys.readouterr().err


def test_a_fork_of_a_constant_rate_ends_a_falling_one_with_its_own_ticks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointed(tmp_path / "run", monkeypatch, platform_facts(), schedule="constant")
    asked = ["--run.num_ticks", "300", "--optimizer.schedule", "linear", "--dry-run"]
    assert main(["train", "--resume", str(tmp_path / "run"), "--fork", str(tmp_path / "fork"), *asked]) == 0
    assert "\ndecay_ticks = 300\n" in capsys.readouterr().out


def test_a_fork_without_its_checkpoint_is_not_begun_anew_by_a_resume(
    tmp_path: Path, executed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, forked = tmp_path / "run", tmp_path / "fork"
    checkpointed(source, monkeypatch, platform_facts())
    fork_of_it = ["train", "--resume", str(source), "--fork", str(forked), "--optimizer.lr", "0.5"]
    with monkeypatch.context() as patch:
        patch.setattr(fork, "copy_history", lambda *_: (_ for _ in ()).throw(CheckpointError("no room")))
        assert main(fork_of_it) == 1
    assert main(["train", "--resume", str(forked)]) == 2 and "holds no run" in capsys.readouterr().err
    assert main(fork_of_it) == 0 and len(executed) == 1
    shutil.rmtree(forked / "checkpoints" / "tick_000004")  # it was refused, and removed
    assert main(["train", "--resume", str(forked)]) == 2 and "fork its source again" in capsys.readouterr().err
    assert len(executed) == 1


def test_settings_are_on_the_disk_before_they_take_the_name_of_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, fsync, replace = set[int](), os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.add(os.fstat(file).st_ino), fsync(file)))

    def checked(source: Path, target: Path) -> None:
        assert os.stat(source).st_ino in flushed, target
        replace(source, target)

    monkeypatch.setattr(os, "replace", checked)
    run.save_settings(prepare.prepare(config(tmp_path)), tmp_path)
    assert (tmp_path / "config.toml").is_file()
