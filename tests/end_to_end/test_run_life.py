"""A run that is stopped, gone on with, prolonged and forked; and what may change meanwhile without changing a bit."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import RECIPE, CommandLine, arguments, as_flags, rows, wait_until

from llamarl.checkpoint.storage import CheckpointStore
from llamarl.config import key_effects
from llamarl.observability.keys import is_timing_key
from llamarl.strict import Effect

INLINE = {"run.runtime": '"inline"', "run.cores": 2, "evaluation.every": 0, "checkpoint.every": 0}
STALE = {
    **INLINE,
    "schedule.max_staleness": 2,
    "generator.max_segments": 2,
    "generator.oversubscription": 1.5,
    "optimizer.schedule": '"constant"',
}

OTHER_VALUES: dict[str, Any] = {
    "run.cores": 1,
    "task.pool.num_workers": 2,
    "task.pool.timeout_s": 19.0,
    "task.pool.memory_limit_mb": 4000,
    "reward.max_failed_fraction": 0.95,
    "reward.max_failed_ticks": 4,
    "schedule.colocated": "true",
    "schedule.transport": '"shared_memory"',
    "trainer.max_skipped_steps": 5,
    "lora.export_merged": "false",
    "judge.deadline_s": 119.0,
    "judge.concurrency": 7,
    "evaluation.every": 1,
    "evaluation.num_prompts": 3,
    "evaluation.samples_per_prompt": 2,
    "evaluation.temperature": 0.5,
    "evaluation.threads": 1,
    "evaluation.device": '"cpu"',
    "checkpoint.every_minutes": 0.0001,
    "checkpoint.every": 1,
    "checkpoint.keep": 5,
    "checkpoint.max_failed": 9,
    "checkpoint.reshard": "true",
    "checkpoint.other_platform": "true",
    "observability.console": '"none"',
    "observability.tensorboard": "false",
    "observability.trace": "false",
    "deadlines.setup_s": 599.0,
    "deadlines.step_s": 1799.0,
    "deadlines.disk_s": 61.0,
    "recovery.max_restarts": 3,
}
"""Keys that are said to change no bit, each with a value that is not its default."""
ELSEWHERE = {
    "run.dir": "any two runs of these tests",
    "run.mirror": "test_runs_with_a_mirror.py",
    "run.num_ticks": "test_a_finished_run_can_be_prolonged_to_the_bits_of_a_longer_one",
    "run.runtime": "test_the_inline_runtime_gives_the_bits_of_the_processes",
    "observability.rollouts": "without them there is nothing to compare",
    "observability.sinks": "test_an_engine_and_a_sink_of_ones_own_change_no_bit",
    "judge.api_key_env": "a run with a judge behind a URL needs a server; test_judge.py gives it a key",
    **dict.fromkeys(
        (*("hosts.cluster", "hosts.on", "hosts.port_range", "hosts.run_folder", "hosts.allow_unlike"),),
        "runs on a cluster: tests/cluster",
    ),
    **dict.fromkeys(("evaluation.dp", "evaluation.tp"), "test_evaluator_parallel.py"),
    "run.epochs": "becomes run.num_ticks before a run starts: test_small_data.py",
    "observability.prometheus_port": "test_recorder.py",
    "evaluation.patience": "test_sft_runs.py",
}
"""And those that another test changes, or none can."""


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {
            key: value
            for key, value in row.items()
            if not is_timing_key(key) and not key.startswith(("eval/", "memory/"))
        }
        for row in rows(run_dir)
    ]


def trainer_state(run_dir: Path, tick: int) -> dict[str, str]:
    """Name -> checksum of what the trainer saved after a tick."""
    files = CheckpointStore(run_dir / "checkpoints").load(tick).manifest.files
    return {f.path: f.xxh3_128 for f in files if f.path.startswith("trainer/") and f.path.endswith(".safetensors")}


def contents(run_dir: Path) -> dict[Path, bytes]:
    """Every file but the lock, which names whoever held it last."""
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}


def test_every_key_that_is_said_to_change_no_bit_is_changed_by_a_test() -> None:
    free = {key for key, effect in key_effects().items() if effect is Effect.NO_BITS}
    assert free == OTHER_VALUES.keys() | ELSEWHERE.keys()


@pytest.mark.long
def test_all_free_keys_at_once_change_no_bit(llamarl: CommandLine, tmp_path: Path) -> None:
    common = {"run.num_ticks": 2, "run.runtime": '"inline"', "schedule.max_staleness": 0}
    threads = {
        "generator.threads": 1,
        "trainer.threads": 1,
    }  # the bits depend on them, and cores divide among those that say 0
    for name, settings in (("usual", {"evaluation.every": 0}), ("other", OTHER_VALUES)):
        llamarl.train(tmp_path / name, common | threads | settings)
    usual, other = tmp_path / "usual", tmp_path / "other"
    assert untimed(usual) == untimed(other)
    assert (usual / "rollouts/tick_000000.jsonl").read_bytes() == (other / "rollouts/tick_000000.jsonl").read_bytes()
    assert trainer_state(usual, 1) == trainer_state(other, 1) != {}


def test_who_stops_a_run_is_told_the_command_that_goes_on_and_it_does(llamarl: CommandLine, tmp_path: Path) -> None:
    run_dir = tmp_path / "a run"
    process = llamarl.start(run_dir, STALE | {"run.num_ticks": 500, "checkpoint.every_minutes": 0.0001})
    try:
        wait_until(lambda: any((run_dir / "checkpoints").glob("tick_??????")), limit_s=180, what="a checkpoint")
        process.send_signal(signal.SIGTERM)  # as Ctrl-C, which a shell's background jobs do not hear
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, text
    assert "saved: " in text and "of 500 ticks" in text
    command = shlex.split(
        next(line for line in text.splitlines() if line.startswith("to go on: "))[len("to go on: ") :]
    )
    assert command[:2] == ["llamarl", "train"]
    saved = CheckpointStore(run_dir / "checkpoints").load().tick + 1
    llamarl.run([*command[1:], "--run.num_ticks", str(saved + 1)])
    assert len(rows(run_dir)) == saved + 1


def test_ctrl_c_saves_the_ticks_that_are_done_although_no_checkpoint_was_due(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = arguments(run_dir, STALE | {"run.num_ticks": 500, "checkpoint.every_minutes": 0})
    process = subprocess.Popen(
        [sys.executable, "-m", "llamarl", "train", str(RECIPE), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # also where the tests run in the background
    )
    try:
        wait_until(lambda: len(rows(run_dir)) >= 2, limit_s=180, what="2 rows")
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, text
    saved = CheckpointStore(run_dir / "checkpoints").load().tick + 1
    assert saved == len(rows(run_dir)) < 500 and f"saved: {saved} of 500 ticks (0 to {saved - 1})" in text
    assert text.count("stopped by the user") == 1 and "Ctrl-C once more stops at once" in text


@pytest.mark.long
def test_a_run_whose_folder_is_moved_ends_with_the_cause_and_goes_on_from_where_it_lies(
    llamarl: CommandLine, tmp_path: Path
) -> None:
    run_dir, place = tmp_path / "run", tmp_path / "moved"
    process = llamarl.start(run_dir, STALE | {"run.num_ticks": 500, "checkpoint.every": 1})
    try:
        wait_until(lambda: any((run_dir / "checkpoints").glob("tick_??????")), limit_s=180, what="a checkpoint")
        run_dir.rename(place)
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1, text
    assert f"{run_dir} is not there any more" in text and "Traceback" not in text
    assert not run_dir.exists()
    command = shlex.split(text.strip().splitlines()[-1].partition("to go on: ")[2])
    assert command == ["llamarl", "train", "--resume", str(place)]
    done = CheckpointStore(place / "checkpoints").load().tick + 1
    llamarl.run([*command[1:], "--run.num_ticks", str(done + 1)])
    assert len(rows(place)) == done + 1


def test_a_fork_learns_otherwise_from_the_same_state_and_leaves_its_source_alone(
    llamarl: CommandLine, tmp_path: Path
) -> None:
    source, fork = tmp_path / "source", tmp_path / "fork"
    carrying = {"generator.max_segments": 2, "generator.oversubscription": 1.5}
    llamarl.train(source, STALE | carrying | {"run.num_ticks": 2})
    before = contents(source)
    words = ["train", "--resume", str(source), "--optimizer.lr", "0.01"]
    refused = llamarl.run(words, status=2)
    assert "--fork" in refused.stderr and "optimizer.lr: it has" in refused.stderr
    bound: dict[str, Any] = {
        "run.seed": 5,
        "schedule.max_staleness": 1,
        "generator.max_segments": 1,
        "generator.oversubscription": 1.0,
    }
    bound |= {"generator.sampling.max_new_tokens": 8, "schedule.weights": "latest", "schedule.prompts_per_step": 8}
    refused = llamarl.run([*words, "--fork", str(fork), "--run.num_ticks", "4", *as_flags(bound)], status=2)
    reasons = {line.split()[1].strip(":"): line for line in refused.stderr.splitlines() if line.startswith("  - ")}
    assert reasons.keys() == bound.keys() - {"generator.oversubscription"} and not fork.exists()
    assert "unfinished responses to prompts that it chose" in reasons["run.seed"]
    for key in ("schedule.max_staleness", "generator.max_segments", "generator.sampling.max_new_tokens"):
        assert "unfinished responses, which may be beyond that" in reasons[key]
    llamarl.run([*words, "--fork", str(fork), "--run.num_ticks", "4"])
    assert contents(source) == before
    assert untimed(fork)[:2] == untimed(source) and len(rows(fork)) == 4
    assert json.loads((fork / "forked_from.json").read_text())["ticks"] == 2
    # killed and gone on with, it is a run like any other: the checkpoint that it was given carries its own settings
    for made in (fork / "checkpoints").iterdir():
        if made.name != "tick_000001":
            for path in sorted(made.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            made.rmdir()
    weights = (fork / "model/model.safetensors").read_bytes()
    again = llamarl.run(["train", "--resume", str(fork)])
    assert "2 ticks beyond are done again" in again.stderr
    assert (fork / "model/model.safetensors").read_bytes() == weights
    replayed = llamarl.run(["train", "--replay", str(fork)], status=2)
    assert "cannot be repeated from tick 0" in replayed.stderr


@pytest.mark.long
def test_a_torn_or_missing_model_is_written_again_from_the_last_checkpoint(
    llamarl: CommandLine, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    settings = INLINE | {"run.num_ticks": 1, "algorithm.advantage": '"gae"', "schedule.max_staleness": 0}
    llamarl.train(run_dir, settings)
    before = contents(run_dir)
    weights = run_dir / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    shutil.rmtree(run_dir / "critic")
    done = llamarl.run(["train", "--resume", str(run_dir)])
    assert "model.safetensors is torn" in done.stderr and "critic: it is missing" in done.stderr
    assert f"{run_dir} is complete at 1 tick;" in done.stdout
    assert contents(run_dir) == before
