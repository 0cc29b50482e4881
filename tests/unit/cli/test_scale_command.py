"""llamarl scale: what is refused at once, and that nobody is waited for who has ended."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from llamarl.cli.main import main
from llamarl.config import save_config, validate
from llamarl.controller.run_folder import CONFIG_FILE, held
from llamarl.controller.scaling import uneven


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    generator = {"dp": 2, "shards": 4, "threads": 1, "device": "cpu"}
    save_config(validate({"schedule": {"prompts_per_step": 8}, "generator": generator}), tmp_path / CONFIG_FILE)
    return tmp_path


def test_a_run_that_has_ended_is_said_to_have_ended(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(run_dir):
        pass
    assert main(["scale", str(run_dir), "generator=4"]) == 2
    said = capsys.readouterr().err
    assert "nobody carries out the run" in said and "it has ended, or was stopped" in said
    assert f"llamarl train --resume {run_dir} --generator.dp 4" in said
    assert not (run_dir / "scale.json").exists()


def test_a_run_that_ends_meanwhile_is_waited_for_no_longer(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as run:
        run.enter_context(held(run_dir))
        threading.Timer(0.3, run.close).start()
        began = time.monotonic()
        assert main(["scale", str(run_dir), "generator=4", "--wait", "60"]) == 2
    assert time.monotonic() - began < 30
    assert "ended before it took the request, which is withdrawn" in capsys.readouterr().err
    assert not (run_dir / "scale.json").exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("generator=5", "5 replicas are more than generator.shards = 4: each needs a shard at least to decode"),
        ("generator=0", "expected generator=N, with N replicas"),
        ("trainer=2", "only 'generator' may have others"),
    ],
)
def test_what_no_run_could_do_is_refused_at_once(
    run_dir: Path, capsys: pytest.CaptureFixture[str], change: str, why: str
) -> None:
    with held(run_dir):
        assert main(["scale", str(run_dir), change, "--wait", "60"]) == 2
    assert why in capsys.readouterr().err
    assert not (run_dir / "scale.json").exists()


@pytest.mark.parametrize(
    ("shards", "replicas", "told"),
    [
        (4, 2, ""),
        (4, 3, "4 shards over 3 replicas: some decode 2, and the others wait for them, so 2 would be as fast"),
        (5, 3, "5 shards over 3 replicas: some decode 2, and the others wait for them"),
        (8, 8, ""),
    ],
)
def test_replicas_that_do_not_divide_the_shards_are_told_of(shards: int, replicas: int, told: str) -> None:
    config = validate({"schedule": {"prompts_per_step": shards}, "generator": {"shards": shards, "threads": 1}})
    assert uneven(config, replicas) == told
