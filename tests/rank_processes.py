"""Processes that are the ranks of one mesh: how a test starts them, and how they meet."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from forked_command import SERVER

__all__ = ["join_group", "run_ranks"]


def run_ranks(main: Callable[..., None], arguments: Iterable[tuple[Any, ...]], *, limit_s: float = 240) -> None:
    """Call ``main`` with each tuple of arguments, in a process of its own, and wait until all have returned.

    Raises:
        AssertionError: A rank failed, or did not return in time; its traceback is in the captured stderr.
    """
    ranks = [SERVER.Process(target=main, args=own) for own in arguments]
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
