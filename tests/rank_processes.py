"""Processes that are the ranks of one mesh: how a test starts them, and how they meet."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from forked_command import SERVER

from llamarl.process_tree import end_with_parent

__all__ = ["join_group", "run_cases", "run_meshes", "run_ranks"]

Arguments = tuple[Any, ...]


def run_cases(
    main: Callable[[int, int, Path, list[str]], None],
    folder: Path,
    cases: Iterable[str],
    world_of: Callable[[str], int],
    *,
    limit_s: float,
) -> None:
    """Call ``main`` with rank, number of ranks, folder and the cases of that number, first those of one rank (:func:`run_meshes`)."""
    of_world: dict[int, list[str]] = {}
    for case in cases:
        of_world.setdefault(world_of(case), []).append(case)
    alone, *meshes = [[(rank, world, folder, own) for rank in range(world)] for world, own in sorted(of_world.items())]
    run_meshes(main, *alone, meshes, limit_s=limit_s)


def run_meshes(
    main: Callable[..., None], alone: Arguments, meshes: Sequence[Sequence[Arguments]], *, limit_s: float
) -> None:
    """Call ``main`` alone, then with the arguments of each rank of one mesh after the other. Ranks are forks of the process that was alone:
    what it has imported and made first, they have.

    Raises:
        AssertionError: As :func:`run_ranks`.
    """
    run_ranks(_run_meshes, [(main, alone, meshes, limit_s)], limit_s=limit_s)


def _run_meshes(
    main: Callable[..., None], alone: Arguments, meshes: Sequence[Sequence[Arguments]], limit_s: float
) -> None:
    main(*alone)
    gc.collect()
    gc.freeze()  # no rank looks through what is there, and so copies it
    for mesh in meshes:
        given = [(os.getpid(), main, rank) for rank in mesh]
        run_ranks(_rank, given, limit_s=limit_s, context=multiprocessing.get_context("fork"))


def _rank(parent: int, main: Callable[..., None], arguments: Arguments) -> None:
    end_with_parent(parent)
    main(*arguments)


def run_ranks(
    main: Callable[..., None], arguments: Iterable[Arguments], *, limit_s: float = 240, context: Any = SERVER
) -> None:
    """Call ``main`` with each tuple of arguments, in a process of its own, and wait until all have returned.

    Args:
        context: Whose forks they are.

    Raises:
        AssertionError: A rank failed, or did not return in time; its traceback is in the captured stderr.
    """
    ranks = [context.Process(target=main, args=own) for own in arguments]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(timeout=limit_s)
        assert [rank.exitcode for rank in ranks] == [0] * len(ranks)
    finally:
        for rank in ranks:
            rank.kill()


def join_group(rank: int, world: int, meeting: Path | str) -> None:
    """Meet the other ranks over gloo.

    Args:
        meeting: File that all ranks name, and no other group.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
