"""Runs that learn from a teacher: same bits twice and where the teacher dies; another tokenizer is refused by name."""

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CommandLine, kill_after_rows, rows, wait_for_rows
from same_run import assert_same_run
from test_survival import INLINE, kill
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from llamarl.models.folders import resolve_model_path
from llamarl.observability.rollouts import read_rollouts
from llamarl.observability.trained_tokens import read_trained

TINY = resolve_model_path("bundled:tiny")
SETTINGS: dict[str, Any] = {
    "algorithm.advantage": '"distillation"',
    "reference.threads": 1,
    "run.num_ticks": 6,
    "evaluation.every": 0,
    "checkpoint.every": 3,
}


@pytest.fixture(scope="module")
def teacher(llamarl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, some ticks of reinforcement learning on."""
    run_dir = tmp_path_factory.mktemp("teacher") / "run"
    llamarl.train(run_dir, {"evaluation.every": 0, "optimizer.lr": 1e-3} | INLINE)
    return run_dir / "model"


@pytest.fixture(scope="module")
def undisturbed(llamarl: CommandLine, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    llamarl.train(run_dir, {**SETTINGS, **INLINE, "reference.path": json.dumps(str(teacher))})
    return run_dir


def test_the_policy_comes_nearer_to_its_teacher(undisturbed: Path) -> None:
    table = rows(undisturbed)
    assert table[0]["kl/reference"] > 1e-4
    assert min(row["kl/reference"] for row in table[3:]) < table[0]["kl/reference"]
    assert {"reward/mean", "ratio/mean", "time/reference_s"} <= table[0].keys()


def test_a_teacher_that_dies_is_brought_up_again_and_the_bits_are_the_same(
    llamarl: CommandLine, teacher: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run = llamarl.start(run_dir, {**SETTINGS, "reference.path": json.dumps(str(teacher))})
    wait_for_rows(run, run_dir, 2)
    kill(run, "reference")
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    assert re.search(r"'reference' rank 0 died .*SIGKILL", said), said
    assert_same_run(run_dir, undisturbed)


SELF = {"reference.template": '"{answer} {question}"'}
"""The policy teaches itself."""


@pytest.mark.parametrize("itself", [False, True])
def test_towards_likeliest_tokens_a_run_that_loses_its_teacher_and_is_resumed_has_the_same_bits(
    llamarl: CommandLine, teacher: Path, tmp_path: Path, itself: bool
) -> None:
    of_teacher = SELF if itself else {"reference.path": json.dumps(str(teacher))}
    settings = {**SETTINGS, **of_teacher, "algorithm.teacher_top_k": 8}
    llamarl.train(tmp_path / "calm", {**settings, **INLINE})
    fallen = [row["kl/reference"] for row in rows(tmp_path / "calm")]
    assert rows(tmp_path / "calm")[0]["loss/policy"] == pytest.approx(fallen[0])
    assert 0 < min(fallen[3:]) < fallen[0]
    run_dir = tmp_path / "run"
    run = llamarl.start(run_dir, settings)
    wait_for_rows(run, run_dir, 2)
    kill(run, "reference")
    kill_after_rows(run, run_dir, 4)
    assert "'reference' rank 0 died" in run.communicate(timeout=60)[0]
    llamarl.run(["train", "--resume", str(run_dir)])
    assert_same_run(run_dir, tmp_path / "calm")


def test_a_policy_that_teaches_itself_is_the_version_that_wrote_the_responses_and_has_seen_the_answer(
    llamarl: CommandLine, tmp_path: Path
) -> None:
    """At tick 2 with staleness 1 that is version 1: by transformers' own forward of it on the longer prompt."""
    settings = {**SETTINGS, **SELF, **INLINE, "checkpoint.every": 0}
    settings |= {"optimizer.decay_ticks": 100, "optimizer.warmup_ticks": 0, "optimizer.lr": 1e-3}
    for ticks in (1, 3):
        llamarl.train(tmp_path / str(ticks), {**settings, "run.num_ticks": ticks})
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    errors: dict[str, list[float]] = {"version 1": [], "version 0": [], "without the answer": []}
    advantages = {(t.prompt_index, t.sample_index): t.advantage for t in read_trained(tmp_path / "3", 2)}
    for rollout in read_rollouts(tmp_path / "3", 2):
        response = rollout.response
        for name, folder, prompt in (
            ("version 1", tmp_path / "1" / "model", f"{rollout.answer} {rollout.prompt}"),
            ("version 0", TINY, f"{rollout.answer} {rollout.prompt}"),
            ("without the answer", tmp_path / "1" / "model", rollout.prompt),
        ):
            shown = tokenizer(prompt)["input_ids"]
            ids = torch.tensor([*shown, *response.tokens])
            with torch.no_grad():
                table = model_of(folder)(ids[None]).logits[0, len(shown) - 1 : -1].log_softmax(-1)
            gap = table.gather(1, ids[len(shown) :, None])[:, 0].numpy() - response.behavior_logprobs
            errors[name].append(abs(float(gap.mean()) - advantages[response.prompt_index, response.sample_index]))
    assert max(errors["version 1"]) < 1e-4
    assert min(max(errors["version 0"]), max(errors["without the answer"])) > 1e-3


@functools.cache
def model_of(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def other_tokenizer(folder: Path) -> Path:
    """The bundled model with two of its tokens exchanged."""
    shutil.copytree(TINY, folder)
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    vocabulary = stored["model"]["vocab"]
    (one, first), (other, second) = list(vocabulary.items())[-2:]
    vocabulary[one], vocabulary[other] = second, first
    file.write_text(json.dumps(stored))
    return folder


def test_a_teacher_of_another_tokenizer_is_refused_by_name(llamarl: CommandLine, tmp_path: Path) -> None:
    folder = other_tokenizer(tmp_path / "other")
    done = llamarl.train(tmp_path / "run", {**SETTINGS, "reference.path": json.dumps(str(folder))}, status=2)
    assert (
        f"reference.path: the teacher {folder} has another tokenizer than bundled:tiny (2 tokens differ" in done.stderr
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "reference.path is '', but algorithm.advantage is 'distillation': name the teacher"),
        ({"reference.template": '"{question}"'}, "reference.template is '{question}', without {answer}"),
        ({**SELF, "algorithm.advantage": '"group_mean"'}, "that has no teacher to be shown answers: leave it out"),
        ({**SELF, "reference.fsdp": 2}, "it takes each version whole: set reference.fsdp and reference.tp to 1"),
        ({**SELF, "lora.rank": 2, "lora.hand_over": '"adapter"'}, "a policy that teaches itself takes whole weights"),
        ({"reference.template": json.dumps("{answer}" * 300)}, "reference.template makes a prompt of "),
        ({"reference.path": '"bundled:tiny"', "algorithm.kl_coef": 0.1}, "the reference model is the teacher"),
        (
            {"reference.path": '"bundled:tiny"', "algorithm.teacher_top_k": 44},
            "algorithm.teacher_top_k: 44 is more than the 43 tokens that ",
        ),
        (
            {"reference.path": '"bundled:tiny"', "dynamic_sampling.enabled": "true"},
            "drops groups whose rewards agree, but with algorithm.advantage 'distillation'",
        ),
    ],
)
def test_what_has_no_meaning_beside_a_teacher_is_refused(
    llamarl: CommandLine, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    done = llamarl.train(tmp_path / "run", {**SETTINGS, **changes}, status=2)
    assert said in done.stderr, done.stderr
