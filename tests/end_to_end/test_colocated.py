"""The co-located job: generator and trainer share a device in turn, and the run's bits do not know it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, CommandLine, arguments, rows

from llamarl.config import load_config
from llamarl.controller.resume import resume_run
from llamarl.controller.run import start_run
from llamarl.engine.engine import NativeEngine
from llamarl.executors import generator as generator_module
from llamarl.executors import trainer as trainer_module
from llamarl.observability.keys import is_timing_key
from llamarl.settings.engine import CPU_CACHE_BYTES
from llamarl.trainer.parking import Parking

RECIPE = REPOSITORY / "recipes" / "colocated.toml"
SETTINGS = {
    "run.runtime": '"inline"',
    "run.num_ticks": 4,
    "generator.threads": 1,
    "trainer.threads": 1,
    "generator.max_segments": 2,
    "generator.oversubscription": 1.5,
    "evaluation.every": 0,
    "checkpoint.every": 2,
}


def train(run_dir: Path, *, resume: bool = False, **changes: Any) -> Path:
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    config = load_config(RECIPE, arguments(run_dir, settings))
    (resume_run if resume else start_run)(config)
    return run_dir


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not is_timing_key(k) and "parked" not in k} for row in rows(run_dir)]


def weights(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job, not co-located."""
    return train(tmp_path_factory.mktemp("synchronous") / "run", schedule__colocated="false")


def test_co_located_run_has_the_bits_of_the_synchronous_one(synchronous: Path, tmp_path: Path) -> None:
    together = train(tmp_path / "run")
    assert untimed(together) == untimed(synchronous)
    assert weights(together) == weights(synchronous)
    table = rows(together)
    assert max(row["rollout/carried"] for row in table) > 0  # responses were cut, without a cache to go on from
    # what the engine holds: its cache, and packed linear layers of 2,233,856 bytes; on a CPU the trainer moves nothing
    blocks = CPU_CACHE_BYTES // 1536  # of 2 tokens, 768 bytes each
    assert {row["memory/generator_parked_bytes"] for row in table} == {blocks * 1536 + 2_233_856}
    assert {row["memory/trainer_parked_bytes"] for row in table} == {0}
    assert all(row["time/park_s"] > 0 for row in table)
    assert not any("parked" in key for row in rows(synchronous) for key in row)


def test_co_located_episodes_have_the_bits_of_synchronous_ones(tmp_path: Path) -> None:
    """Environments live on while the generator's memory is the trainer's."""
    environment = REPOSITORY / "tests" / "small_environments.py"
    episodes = {
        "run__num_ticks": 3,
        "task__name": '"episodes"',
        "task__environment": json.dumps(f"{environment}:Ledgers"),
        "task__environment_options": "{ turns = 5, fewest = 1 }",
        "task__max_turn_tokens": 24,
        "generator__sampling__max_new_tokens": 96,
    }
    together = train(tmp_path / "together", **episodes)
    apart = train(tmp_path / "apart", schedule__colocated="false", **episodes)
    assert untimed(together) == untimed(apart) and weights(together) == weights(apart)
    assert max(row["rollout/carried"] for row in rows(together)) > 0
    assert max(row["episodes/turns_max"] for row in rows(together)) > 2


def test_memory_is_free_while_the_other_works_and_a_trainer_that_moves_out_changes_no_bit(
    synchronous: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[NativeEngine] = []
    trainers: list[Any] = []
    seen: list[tuple[str, int, int]] = []

    def cache_bytes() -> int:
        return engines[0]._runner._cache.untyped_storage().nbytes()

    def trainer_bytes() -> int:
        return sum(t.untyped_storage().nbytes() for t in trainers[0].weights.state().values())

    def make_engine(*args: Any, **kwargs: Any) -> NativeEngine:
        engines.append(original_engine(*args, **kwargs))
        return engines[-1]

    def make_trainer(*args: Any, **kwargs: Any) -> Any:
        trainers.append(original_trainer(*args, **kwargs))
        with torch.no_grad():  # own memory in place of the file's pages
            for parameter, master in zip(
                trainers[0].weights.parameters.values(), trainers[0].weights.tensors.values(), strict=True
            ):
                parameter.data = parameter.data.clone()
                master.data = parameter.data
        trainers[0].parking = Parking(torch.device("cpu"), move=True)
        return trainers[0]

    def decode(self: Any, *args: Any) -> Any:
        seen.append(("generate", cache_bytes(), trainer_bytes()))
        return original_decode(self, *args)

    def step(self: Any, *args: Any) -> Any:
        seen.append(("train", cache_bytes(), trainer_bytes()))
        return original_step(self, *args)

    original_engine, original_trainer = generator_module.make_engine, trainer_module.Trainer
    original_decode = generator_module.GeneratorExecutor._decode
    original_step = trainer_module.TrainerExecutor._train
    monkeypatch.setattr(generator_module, "make_engine", make_engine)
    monkeypatch.setattr(trainer_module, "Trainer", make_trainer)
    monkeypatch.setattr(generator_module.GeneratorExecutor, "_decode", decode)
    monkeypatch.setattr(trainer_module.TrainerExecutor, "_train", step)
    together = train(tmp_path / "run", run__num_ticks=4)
    assert [who for who, _, _ in seen] == ["generate", "train"] * 4
    assert all(cache > 0 and state == 0 for who, cache, state in seen if who == "generate")
    assert all(cache == 0 and state > 0 for who, cache, state in seen if who == "train")
    assert weights(together) == weights(synchronous)
    parameters = sum(t.numel() for t in trainers[0].weights.tensors.values())
    steps = 4 * len(trainers[0].weights.tensors)  # AdamW counts each tensor's steps, 4 bytes
    assert {row["memory/trainer_parked_bytes"] for row in rows(together)} == {3 * 4 * parameters + steps}


def test_co_located_run_goes_on_from_a_checkpoint_bit_for_bit_and_may_change_its_mind(
    synchronous: Path, tmp_path: Path
) -> None:
    run_dir = train(tmp_path / "run", run__num_ticks=2)
    train(run_dir, resume=True, run__num_ticks=3, schedule__colocated="false")
    train(run_dir, resume=True)
    assert untimed(run_dir) == untimed(synchronous)
    assert weights(run_dir) == weights(synchronous)


def test_processes_take_turns_and_give_the_same_bits(llamarl: CommandLine, synchronous: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    llamarl.train(run_dir, SETTINGS | {"run.runtime": '"local"'}, recipe=RECIPE)
    assert untimed(run_dir) == untimed(synchronous)
    assert weights(run_dir) == weights(synchronous)
    trace = json.loads((run_dir / "trace.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    turns = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("ph") == "X" and event["name"] in ("unpark", "park")
    )
    assert [name for _, _, name in turns] == ["unpark", "park"] * 8  # never two that hold memory at once
    assert all(end <= start for (_, end, _), (start, _, _) in zip(turns, turns[1:], strict=False))
