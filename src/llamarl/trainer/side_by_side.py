"""Several micro-batches at the same time, one a thread, with the results in their order.

    micro-batches 0 1 2 3 ..  ──▶ thread: 0 ▶ 2 ▶ ..
                              ──▶ thread: 1 ▶ 3 ▶ ..      ──▶ results 0, 1, 2, 3 .. to the caller, in this order

A team of threads inside one product meets after every operation. Where another process has one of
their cores, each meeting waits for its time slice: two threads on a core and a half compute less
than one alone. Threads with a micro-batch each meet nobody: whatever a core has left, they use.
They stand back a little (nice 5), so that it is what others leave: who decodes in one thread, or in
a team, has its cores. And a product on one core is as exact as the sum of its parts is ordered:
gradients are added by the caller, in the order of the micro-batches, so the bits do not depend on
who is done first.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["in_order"]

_NICE = 5

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    compute: Callable[[Item], Result], items: Sequence[Item], *, at_once: int, threads: int
) -> Iterator[Result]:
    """``compute`` of each item, in their order, ``at_once`` at the same time. One more may be done
    and waiting to be taken.

    Args:
        threads: CPU threads of the caller, which the computing threads divide.

    Raises:
        Exception: What ``compute`` raised, once those that are being computed have ended.
    """
    if at_once == 1:
        yield from map(compute, items)
        return

    def begin() -> None:
        torch.set_num_threads(max(1, threads // at_once))  # of this thread
        _stand_back()

    own = torch.get_num_threads()
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(at_once, thread_name_prefix="microbatch", initializer=begin)
    try:
        for item in items:
            if len(waiting) > at_once:
                yield waiting.popleft().result()
            waiting.append(pool.submit(compute, item))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(own)  # what threads that begin later find


def _stand_back() -> None:
    """Lower the priority of the calling thread."""
    with contextlib.suppress(OSError):  # a sandbox that forbids it: then everyone is equal
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, min(19, os.getpriority(os.PRIO_PROCESS, me) + _NICE))
