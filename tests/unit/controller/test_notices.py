"""What a user is told of checkpoints, word for word."""

import math
from pathlib import Path

import pytest

from llamarl.config import load_config
from llamarl.controller.notices import (
    checkpoint_bytes,
    checkpoint_plan,
    done_again,
    left_behind,
    reached_policy,
    what_is_saved,
)
from llamarl.models.folders import resolve_model_path
from llamarl.weight_sync.model_layouts import model_parameters

RUN = Path("/runs/my run")


def test_who_stops_a_run_is_told_what_is_saved_and_the_command_that_goes_on() -> None:
    assert what_is_saved(RUN, RUN / "checkpoints" / "tick_000039", 43, 100) == (
        "saved: 40 of 100 ticks (0 to 39), in /runs/my run/checkpoints/tick_000039; 3 ticks beyond will be done again\n"
        "to go on: llamarl train --resume '/runs/my run'"
    )
    assert "beyond" not in what_is_saved(RUN, RUN / "checkpoints" / "tick_000039", 40, 100)
    journaled = what_is_saved(RUN, RUN / "checkpoints" / "tick_000039", 43, 100, journaled=True)
    assert "tick_000039; the journal holds the samples and rewards of 3 ticks beyond\n" in journaled
    assert what_is_saved(RUN, None, 7, 100, journaled=True) == (
        "no checkpoint of this run was finished, the journal holds the samples and rewards of 7 ticks: "
        "llamarl train --resume '/runs/my run'"
    )
    nothing = what_is_saved(RUN, None, 1, 100)
    assert "no checkpoint of this run was finished" in nothing and "1 tick that" in nothing and "--resume" in nothing


def test_a_new_run_is_told_to_begin_with_a_policy_that_is_there(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    assert reached_policy(run) == f"model.path = DIR (first: llamarl export '{run}' --out DIR)"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").touch()
    assert reached_policy(run) == f"model.path = {run}/model"


def test_who_resumes_is_told_what_is_done_again() -> None:
    assert done_again(RUN, 40, 43, latest=False) == (
        "/runs/my run goes on at tick 40; 3 ticks beyond are done again: their rows, rollouts and trace give way to the "
        "same ones"
    )
    assert done_again(RUN, 40, 40, latest=False) == "/runs/my run goes on at tick 40"
    assert "all of its 7 ticks are done again" in done_again(RUN, 0, 7, latest=False)
    assert "other ones" in done_again(RUN, 40, 41, latest=True)


def test_the_plan_says_when_how_many_and_how_much() -> None:
    config = load_config(None, ["--checkpoint.keep", "2"])
    assert checkpoint_plan(config, 1e9) == (
        "every 10 min, at the end; the newest 2 are kept, about 1.00 GB each, at most 3.00 GB of disk"
    )
    assert "only" not in checkpoint_plan(config, 1e9, free_bytes=3e9)
    assert checkpoint_plan(config, 1e9, free_bytes=2.9e9).endswith("of disk; the disk has only 2.90 GB left")
    assert "only" not in checkpoint_plan(config, 1e9, num_held=2, free_bytes=1e9), "two are there already"
    assert "only" in checkpoint_plan(config, 1e9, num_held=5, free_bytes=0.9e9)
    all_kept = load_config(None, ["--checkpoint.keep", "0"])
    assert checkpoint_plan(all_kept, 1e9, free_bytes=0.9e9).endswith("each; the disk has only 900.00 MB left")
    last = load_config(None, ["--checkpoint.every_minutes", "0"])
    assert checkpoint_plan(last, 1e9).startswith("at the end; ")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_takes_sixteen_bytes_a_parameter_at_staleness_one(dtype: str) -> None:
    """Masters, two moments, and the version on the weights edge: all float32."""
    words = ["--trainer.dtype", dtype, "--schedule.max_staleness"]
    one, none = load_config(None, [*words, "1"]), load_config(None, [*words, "0"])
    parameters = checkpoint_bytes(none) / 12
    assert parameters == int(parameters) > 100_000
    assert checkpoint_bytes(one) == 16 * parameters


def test_a_checkpoint_of_muon_lacks_a_moment_of_each_matrix_in_a_layer() -> None:
    words = ["--trainer.dtype", "float32", "--schedule.max_staleness", "0"]
    by_adamw, by_muon = (
        checkpoint_bytes(load_config(None, [*words, "--optimizer.name", n])) for n in ("adamw", "muon")
    )
    shapes = model_parameters(resolve_model_path("bundled:tiny"), dtype="float32")
    moved = sum(math.prod(p.shape) for name, p in shapes.items() if "_proj" in name)
    assert by_adamw - by_muon == 4 * moved > 0.5 * by_adamw / 3


def test_a_checkpoint_that_lacks_a_ranks_state_is_left_out_and_the_newest_complete_one_named(tmp_path: Path) -> None:
    partial, finished = tmp_path / "tick_000005.partial", [tmp_path / "tick_000001", tmp_path / "tick_000003"]
    assert left_behind(partial, finished) == (
        f"{tmp_path / 'tick_000005'} was not finished when the run ended, and is left out; "
        "the newest complete one is tick_000003"
    )
    assert left_behind(partial, []).endswith("is left out; none is complete")
    assert left_behind(tmp_path / "tick_000001.deleted", finished).endswith("left by a run that was killed: tidied up")
