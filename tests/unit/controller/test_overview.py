"""What a user checks before a run starts, line for line, and what a dry-run refuses as a start would."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import load_config
from llamarl.controller.notices import Questions, overview
from llamarl.controller.prepare import plan_run, prepare
from llamarl.controller.run_folder import held, make_folder
from llamarl.errors import ConfigError, LlamaRLError
from llamarl.models.folders import resolve_model_path
from llamarl.settings.observability import TRACKERS

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "tiny.toml"
ENDLESS = Questions(num_training=None, num_held_out=None, first_prompt="a1 b2 =\n", first_tokens=8)


def lines_of(*words: str, questions: Questions = ENDLESS) -> dict[str, str]:
    config = load_config(RECIPE, ["--trainer.dtype", "float32", *words])
    return overview(config, config, questions)


def test_the_lines_of_the_shipped_recipe() -> None:
    assert lines_of() == {
        "model": "bundled:tiny, 0.559 million parameters, trained in float32",
        "task": "steps, questions without end",
        "first prompt": r"8 tokens: 'a1 b2 =\n'",
        "batch": "16 prompts x 8 responses of at most 80 tokens, 1 optimizer step a tick",
        "learning rate": "0.0002, cosine to 2e-05 at tick 100, after 5 ticks of warm-up",
        "algorithm": "aipo, advantage group_mean, no KL term",
        "evaluation": "every 10 ticks, and before the first: 200 held-out prompts x 1 response, 1.6 times what a tick samples",
        "memory": "trainer 8.95 MB of weights, gradients and moments a rank, and activations; generator 2.24 MB of weights and at "
        "most 1.07 GB of KV cache a rank",  # 559,168 parameters at 16 and at 4 bytes
    }


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--trainer.cp", "2"], "trainer 4.47 MB of weights, gradients and moments a rank, and activations"),
        (
            ["--lora.rank", "4", "--trainer.dtype", "bfloat16"],
            "trainer 1.12 MB of frozen weights a rank, adapters and activations",
        ),
    ],
)
def test_memory_counts_ranks_that_share_a_sequence_and_the_width_of_frozen_weights(words: list[str], line: str) -> None:
    """559,168 parameters: 16 bytes each over two ranks; 2 bytes each."""
    assert lines_of(*words)["memory"].startswith(line)


def test_a_rate_that_never_falls_is_not_said_to_fall() -> None:
    assert lines_of("--run.num_ticks", "3")["learning rate"] == "0.0002, cosine, after 5 ticks of warm-up"


def test_the_preset_grpo_says_its_kl_term_and_its_reference_model() -> None:
    line = lines_of("--algorithm.name", "grpo")["algorithm"]
    assert line == "ppo, advantage group_std, KL term kl_coef 0.04 (k3) against bundled:tiny as a reference model"


def test_questions_are_counted_and_so_is_how_often_they_are_seen() -> None:
    """100 ticks of 16 prompts over 400 questions are four passes."""
    few = Questions(num_training=400, num_held_out=44, first_prompt="x" * 1000, first_tokens=500)
    found = lines_of(questions=few)
    assert found["task"] == "steps, 400 questions, seen 4 times in this run; 44 held out"
    assert found["evaluation"].startswith("every 10 ticks, and before the first: 44 held-out prompts x 1 response")
    assert "seen 1 time in this run" in lines_of("--run.num_ticks", "25", questions=few)["task"]
    assert len(found["first prompt"]) < 300 and found["first prompt"].startswith("500 tokens: 'xxx")


def test_the_first_prompt_is_shown_as_its_tokens_spell_it(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "a3 b9 =\\n", "answer": "12"}\n' * 2)
    words = ["--run.dir", str(tmp_path / "run"), "--task.name", "math", "--task.data", str(file)]
    prefix = ["--data.response_prefix", "b", "--data.shuffle", "false"]
    prepared = prepare(load_config(RECIPE, [*words, *prefix]))
    assert prepared.overview["first prompt"] == r"9 tokens: 'a3 b9 =\nb'"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"used": True}, "already holds a run"),
        ({"file": True}, "is no folder; choose another --run.dir"),
        ({"held": True}, "is in use by another llamarl train"),
        ({"model": 0.5}, "model.safetensors is not a usable safetensors file"),  # of which half came
        ({"model": 0.0}, "has no weights as safetensors"),
        ({"reward": "def reward(prompt, response, answer):\n    return 1.0\n\nraise RuntimeError('broken import')\n"}, "broken import"),
    ],
)  # fmt: skip
def test_a_dry_run_refuses_what_a_start_would(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["--run.dir", str(run_dir)]
    if "used" in change:
        run_dir.mkdir()
        (run_dir / "config.toml").touch()
        (run_dir / "metrics.jsonl").write_text("{}\n")
    if "file" in change:
        run_dir.touch()
    if "reward" in change:
        (tmp_path / "own.py").write_text(change["reward"])
        words += ["--task.reward", f"{tmp_path}/own.py:reward"]
    if "model" in change:
        weights = Path(shutil.copytree(resolve_model_path("bundled:tiny"), tmp_path / "model"), "model.safetensors")
        weights.write_bytes(weights.read_bytes()[: int(change["model"] * weights.stat().st_size)])
        weights = weights if change["model"] else weights.rename(weights.with_name("pytorch_model.bin"))
        words += ["--model.path", str(weights.parent)]
    config = load_config(RECIPE, words)
    if "held" in change:
        make_folder(run_dir)
        with held(run_dir), pytest.raises(ConfigError, match=why):
            plan_run(config)
        return
    with pytest.raises(LlamaRLError, match=why):
        plan_run(config)
    assert not run_dir.is_dir() or sorted(p.name for p in run_dir.iterdir()) == ["config.toml", "metrics.jsonl"]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "opentelemetry"])
def test_a_sink_whose_package_is_missing_is_refused_before_a_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamarl.controller.preflight import find_missing

    monkeypatch.setitem(TRACKERS, name, "nowhere.at_all")
    with pytest.raises(
        ConfigError, match=rf"observability.sinks '{name}' needs the package nowhere: pip install 'llamarl\[{name}\]'"
    ):
        load_config(RECIPE, ["--observability.sinks", f'["{name}"]'], [find_missing])


@pytest.mark.parametrize(("rate", "told"), [(0.02, True), (2e-4, False)])
def test_a_rate_far_too_high_is_told_before_the_start(
    rate: float, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(load_config(RECIPE, ["--run.dir", str(tmp_path / "run"), "--optimizer.lr", str(rate)]))
    assert ("optimizer.lr 0.02 is far above what trains a language model" in capsys.readouterr().err) is told


@pytest.mark.parametrize(
    ("words", "told"),
    [([], True), (["--data.chat_template_kwargs.enable_thinking", "false"], False), (["--data.chat_template", "none"], False)],
)  # fmt: skip
def test_a_model_that_thinks_first_is_known_by_its_template(
    words: list[str], told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "thinks"
    shutil.copytree(resolve_model_path("bundled:tiny"), folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}{% endif %}"
    )
    prepare(load_config(RECIPE, ["--model.path", str(folder), "--run.dir", str(tmp_path / "run"), *words]))
    assert ("this model thinks before it answers" in capsys.readouterr().err) is told


@pytest.mark.parametrize(("end", "told"), [("<think>\n", True), ("<think></think>", False)])
def test_a_model_whose_prompts_end_in_a_thought_thinks_first(
    end: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(resolve_model_path("bundled:tiny"), folder := tmp_path / "thinks")
    head = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}"
    (folder / "chat_template.jinja").write_text(f"{head}{{{{ {end!r} }}}}{{% endif %}}")
    prepare(load_config(RECIPE, ["--model.path", str(folder), "--run.dir", str(tmp_path / "run")]))
    err = capsys.readouterr().err
    assert ("this model thinks before it answers" in err) is told and "enable_thinking" not in err


@pytest.mark.parametrize(
    ("template", "words", "told"),
    [
        ("{% for m in messages %}{{ m.content }}<pad>{% endfor %}", [], True),
        ("{% for m in messages %}{{ m.content }}<eos>{% endfor %}", [], False),
        (
            "{% for m in messages %}{{ m.content }}<pad>{% endfor %}",
            ["--generator.sampling.stop_token_ids", "[0]"],
            False,
        ),
        ("{{ messages[0].content }}", [], False),
    ],
)
def test_a_template_whose_turns_end_no_response_is_told(
    template: str, words: list[str], told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(resolve_model_path("bundled:tiny"), folder := tmp_path / "base")
    (folder / "chat_template.jinja").write_text(template)
    prepare(load_config(RECIPE, ["--model.path", str(folder), "--run.dir", str(tmp_path / "run"), *words]))
    assert ("the chat template ends a turn with '<pad>'" in capsys.readouterr().err) is told
