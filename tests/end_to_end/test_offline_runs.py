"""Runs that learn from what an earlier run has recorded: its best samples by imitation, or all of them by an algorithm's loss."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CommandLine, kill_after_rows, rows
from forked_command import Started
from same_run import contents, untimed

from llamarl.observability.rollouts import read_rollouts
from llamarl.types import Score


@pytest.fixture(scope="module")
def recorded(llamarl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four ticks of four groups of four samples."""
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    llamarl.train(run_dir, {"run.num_ticks": 4, "evaluation.every": 0})
    return run_dir


def imitation(recorded: Path, run_dir: Path, **more: Any) -> list[str]:
    given = {
        "run.dir": json.dumps(str(run_dir)),
        "optimizer.lr": 1e-3,
        "trainer.threads": 1,
        "checkpoint.every": 2,
        "evaluation.every": 3,
        "observability.console": '"plain"',
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    flags = [f"--{key}={value}" for key, value in given.items()]
    return ["sft", "bundled:tiny", str(recorded), "--epochs", "2", "--batch", "4", *flags]


def offline(recorded: Path, **more: Any) -> dict[str, Any]:
    return {"task.rollouts": json.dumps(str(recorded)), "run.num_ticks": 4, "evaluation.every": 2, **more}


def assert_same(one: Path, other: Path) -> None:
    assert contents(one / "model") == contents(other / "model")
    assert untimed(one) == untimed(other)


def test_the_best_samples_alone_are_imitated_each_once_an_epoch(
    llamarl: CommandLine, recorded: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    inline = {"run__runtime": '"inline"'}
    llamarl.run(imitation(recorded, run_dir, **inline))
    samples = list(read_rollouts(recorded))
    best = {
        (s.prompt_tokens.tobytes(), s.response.tokens.tobytes()): int(s.response.loss_mask.sum())
        for s in samples
        if isinstance(s.response.outcome, Score) and s.response.outcome.value >= 1
    }
    assert 0 < len(best) < len(samples), "some were right and some were wrong"
    table = rows(run_dir)
    assert all(row["samples/trained"] == 4 for row in table)
    assert [row["eval/policy_version"] for row in table if "eval/loss" in row][0] == 0, "some prompts are held out"
    all_rows = tmp_path / "all"  # one tick of all rows, none held out: as many tokens as the best samples have
    llamarl.run(
        [
            *imitation(recorded, all_rows, task__eval_fraction=0, evaluation__every=0, **inline),
            "--epochs",
            "1",
            "--batch",
            str(len(best)),
        ]
    )
    (row,) = rows(all_rows)
    assert row["samples/trained"] == len(best) and row["tokens/trained"] == sum(best.values())


def test_recorded_samples_train_with_their_own_log_probs_and_nothing_is_sampled(
    llamarl: CommandLine, recorded: Path, tmp_path: Path
) -> None:
    """In the order in which they were recorded the first tick is the online run's: the same samples, weights and mu."""
    run_dir = tmp_path / "run"
    llamarl.train(run_dir, offline(recorded, **{"data.shuffle": "false"}))
    table, online = rows(run_dir), rows(recorded)
    for key in ("loss/policy", "grad_norm", "ratio/mean", "mismatch/kl", "tokens/trained", "entropy"):
        assert table[0][key] == pytest.approx(online[0][key], rel=1e-5, abs=1e-7), key
    assert not any("time/generator_s" in row or "time/reward_s" in row for row in table)
    assert all(row["staleness/max"] == 0 for row in table)
    assert [row["eval/policy_version"] for row in table if "eval/accuracy" in row], "the task still evaluates"


@pytest.mark.parametrize("kind", ["imitation", "offline"])
def test_it_repeats_and_a_run_that_was_killed_ends_with_the_same_bits(
    llamarl: CommandLine, recorded: Path, tmp_path: Path, kind: str
) -> None:
    def words(run_dir: Path) -> list[str]:
        if kind == "imitation":
            return imitation(recorded, run_dir, run__num_ticks=8)
        done = {"run.num_ticks": 8, "evaluation.every": 0, "checkpoint.every": 2, "task.options": "{ max_terms = 9 }"}
        done |= {"trainer.threads": 1, "observability.console": '"plain"'}
        given = {"run.dir": json.dumps(str(run_dir)), **offline(recorded, **done)}
        return ["train", "tiny", "--schedule.prompts_per_step=4", *(f"--{key}={value}" for key, value in given.items())]

    llamarl.run([*words(tmp_path / "whole"), '--run.runtime="inline"'])
    run = Started(words(tmp_path / "killed"), together=True)
    kill_after_rows(run, tmp_path / "killed", 3)
    llamarl.run(["train", "--resume", str(tmp_path / "killed"), '--run.runtime="inline"'])
    assert_same(tmp_path / "killed", tmp_path / "whole")


def altered(recorded: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The rollouts of a run as somebody else might have written them."""
    (folder / "rollouts").mkdir(parents=True)
    for file in sorted((recorded / "rollouts").glob("tick_*.jsonl")):
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        for sample in samples:
            change(sample)
        (folder / "rollouts" / file.name).write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def test_samples_without_log_probs_are_refused_by_a_loss_that_weighs_by_them_and_can_be_imitated(
    llamarl: CommandLine, recorded: Path, tmp_path: Path
) -> None:
    bare = altered(recorded, tmp_path / "bare", lambda sample: sample.pop("behavior_logprobs"))
    done = llamarl.train(tmp_path / "run", offline(bare), status=2)
    assert "task.rollouts: sample" in done.stderr and "has no log-probs of what sampled it" in done.stderr
    llamarl.run(imitation(bare, tmp_path / "imitated", run__num_ticks=2, run__runtime='"inline"'))
    assert len(rows(tmp_path / "imitated")) == 2


def test_samples_of_another_tokenizer_or_temperature_and_rewards_that_nobody_earned_are_refused(
    llamarl: CommandLine, recorded: Path, tmp_path: Path
) -> None:
    def exchange(sample: dict[str, Any]) -> None:
        sample["prompt_tokens"] = [token + 1 for token in sample["prompt_tokens"]]

    other = altered(recorded, tmp_path / "other", exchange)
    done = llamarl.run(imitation(other, tmp_path / "run"), status=2)
    assert f"{other} was recorded with another tokenizer than the policy's" in done.stderr
    warm = {"generator.sampling": "{ max_new_tokens = 80, temperature = 0.7 }"}
    done = llamarl.train(tmp_path / "run", offline(recorded, **warm), status=2)
    assert "generator.sampling.temperature is 0.7, but" in done.stderr and "was sampled at 1" in done.stderr
    done = llamarl.run(imitation(recorded, tmp_path / "run", task__least_reward=2), status=2)
    assert "has a reward of 2 or more (the highest is 1): lower it" in done.stderr
    done = llamarl.train(tmp_path / "run", offline(tmp_path / "nowhere"), status=2)
    assert "holds no rollouts" in done.stderr
    (tmp_path / "empty" / "rollouts").mkdir(parents=True)
    (tmp_path / "empty" / "rollouts" / "tick_000000.jsonl").touch()
    done = llamarl.train(tmp_path / "run", offline(tmp_path / "empty"), status=2)
    assert "are empty files: no sample was recorded" in done.stderr
    done = llamarl.train(tmp_path / "run", offline(recorded, **{"dynamic_sampling.enabled": "true"}), status=2)
    assert "with task.rollouts nothing is sampled and nothing judged" in done.stderr
