"""One rank of a trainer executor under test; ``main`` runs in processes forked from a server that has imported this."""

import dataclasses
import errno
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import join_group
from trainer_ranks import share
from training_fixtures import make_groups

from llamarl.checkpoint.storage import CheckpointStore
from llamarl.config import RunConfig
from llamarl.controller.graph import llamarl_graph
from llamarl.errors import CheckpointError
from llamarl.executors.base import ExecutorContext
from llamarl.executors.trainer import TrainerExecutor
from llamarl.trainer import sharded_state

SAVED = 1
"""The tick whose state is saved; with ``max_staleness`` 1, version 1 still lies on the weights edge."""


def executor(folder: Path, rank: int, fsdp: int, tp: int) -> TrainerExecutor:
    base = RunConfig()
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, path=str(folder / "model")),
        run=dataclasses.replace(base.run, num_ticks=SAVED + 3),
        trainer=dataclasses.replace(base.trainer, fsdp=fsdp, tp=tp, max_tokens_per_microbatch=48),
        optimizer=dataclasses.replace(base.optimizer, lr=1e-3, warmup_ticks=4),
        checkpoint=dataclasses.replace(base.checkpoint, every=SAVED + 1),
        evaluation=dataclasses.replace(base.evaluation, every=0),
    )
    (folder / "run").mkdir(exist_ok=True)
    graph = llamarl_graph(config)
    context = ExecutorContext(
        name="trainer",
        rank=rank,
        num_ranks=fsdp * tp,
        device="cpu",
        run_dir=folder / "run",
        seed=0,
        reads=graph.inputs["trainer"],
        writes=graph.outputs["trainer"],
    )
    made = TrainerExecutor(config, context)
    made.setup()
    return made


def train(trainer: TrainerExecutor, tick: int) -> None:
    layout = trainer.trainer.layout
    groups = share(make_groups(num_groups=5, seed=tick), layout.fsdp, layout.fsdp_rank)
    for group in groups:
        for response in group.responses:
            response.policy_versions[:] = tick  # on policy: none is too old for the schedule
    weights = trainer.step(tick, {"scored": groups}).outputs["weights"]
    weights.released.set()  # no channel here: nobody copies them


def rank_folder(root: Path, rank: int) -> Path:
    made = root / "trainer" / f"rank_{rank}"
    made.mkdir(parents=True)
    return made


def main(rank: int, world: int, what: str, folder: Path) -> None:
    torch.set_num_threads(1)
    if world > 1:
        join_group(rank, world, f"{folder}/{what}")
    {"resume": resume, "reshard": reshard, "die": die}[what](rank, folder)
    if world > 1:
        dist.destroy_process_group()


def resume(rank: int, folder: Path) -> None:
    whole = executor(folder, rank, 2, 2)
    whole.expect_saves({SAVED})
    for tick in range(SAVED + 1):
        train(whole, tick)
    for refused in (0, 2):
        refused_save(whole, folder / f"refused_by_{refused}", rank, refused)
    own = rank_folder(folder / "checkpoint", rank)
    writing = whole.save(own, SAVED)
    edge = {name: tensor.clone() for name, tensor in whole.initial_token("weights", SAVED - 1).tensors.items()}
    for tick in range(SAVED + 1, SAVED + 3):
        train(whole, tick)  # while it is being written
    writing.result(timeout=120)
    again = executor(folder, rank, 2, 2)
    again.load(own, SAVED)
    for name, tensor in again.initial_token("weights", SAVED - 1).tensors.items():
        assert torch.equal(tensor, edge[name]), name
    for tick in range(SAVED + 1, SAVED + 3):
        train(again, tick)
    for name, tensor in whole.trainer.weights.state().items():
        assert torch.equal(tensor, again.trainer.weights.state()[name]), name


def refused_save(trainer: TrainerExecutor, root: Path, rank: int, refused: int) -> None:
    """One rank's disk is full: every rank hears of it, at once, and may save again."""
    original = sharded_state.save_file

    def save_file(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == refused:
        sharded_state.save_file = save_file
    try:
        trainer.save(rank_folder(root, rank), SAVED).result(timeout=60)
    except CheckpointError as error:
        assert f"rank {refused}: No space left on device" in error.cause, error.cause
    else:
        raise AssertionError("it was refused")
    finally:
        sharded_state.save_file = original


def reshard(rank: int, folder: Path) -> None:
    alone, loaded = executor(folder, rank, 1, 1), executor(folder, rank, 1, 1)
    alone.expect_saves({SAVED})
    for tick in range(SAVED + 1):
        train(alone, tick)
    loaded.load(folder / "checkpoint" / "trainer" / "rank_0", SAVED)
    for version in (SAVED - 1, SAVED):
        expected = alone.initial_token("weights", version).tensors
        for name, tensor in loaded.initial_token("weights", version).tensors.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-5, msg=f"{name}, {version}")


def die(rank: int, folder: Path) -> None:
    original = sharded_state.save_file

    def save_file(*args: Any) -> None:
        original(*args)
        os.kill(os.getpid(), signal.SIGKILL)  # the parts are written, the values are not

    sharded_state.save_file = save_file
    trainer = executor(folder, rank, 1, 1)
    trainer.expect_saves({SAVED})
    for tick in range(SAVED + 1):
        train(trainer, tick)
    store = CheckpointStore(folder / "killed" / "checkpoints")
    trainer.save(rank_folder(store.begin(SAVED), rank), SAVED).result(timeout=120)
    raise AssertionError("it was to be killed")
