"""Environments of a generator whose model lies on several ranks: one rank asks, all hear.

    rank 0      ask ─▶ pool ─▶ answer ──broadcast──▶ every rank        the others hold no environments
    all ranks   wait for the same questions, in the same order

The ranks hold the same sequences and count the same steps, so they wait for the same answers at the
same moments; only what an answer says must travel. Whether it has arrived is known to rank 0 alone.
Where replies join at stated steps that decides nothing; where they join on arrival, rank 0 tells
(``agree``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llamarl.engine.ranks import EngineRanks
from llamarl.environments.episode_pool import Answer, Environments, EpisodePool
from llamarl.environments.episodes import Ask
from llamarl.environments.messages import Answered, parse_reply, reply_text
from llamarl.models.parallel import ParallelLayout
from llamarl.settings.environments import TaskConfig

__all__ = ["SharedEpisodes", "make_environments"]


class SharedEpisodes:
    """Implements :class:`llamarl.environments.episode_pool.Environments` on one of several ranks.

    Args:
        pool: On rank 0; None on the others.
        share: Returns on every rank what the function given to it makes on rank 0.
    """

    def __init__(self, pool: EpisodePool | None, share: Callable[[Callable[[], bytes]], bytes]) -> None:
        self._pool = pool
        self._share = share

    def begin(self, limit_s: float) -> None:
        if self._pool is not None:
            self._pool.begin(limit_s)

    def ask(self, ask: Ask) -> None:
        if self._pool is not None:
            self._pool.ask(ask)

    def poll(self) -> None:
        if self._pool is not None:
            self._pool.poll()

    def answered(self, ask: Ask) -> bool:
        """Elsewhere than on rank 0 always, so that one rank counts how long was waited."""
        return self._pool is None or self._pool.answered(ask)

    def wait(self, ask: Ask) -> Answer:
        """As the pool's. All ranks call it in the same order."""

        def heard() -> bytes:
            assert self._pool is not None, "rank 0 holds the pool"
            return reply_text(Answered(0, self._pool.wait(ask)))

        reply = parse_reply(self._share(heard))
        assert isinstance(reply, Answered) and not isinstance(reply.answer, tuple), reply
        return reply.answer

    def wait_any(self, asks: Sequence[Ask]) -> None:
        if self._pool is not None:
            self._pool.wait_any(asks)

    def agree(self, arrived: Sequence[bool]) -> Sequence[bool]:
        """What rank 0 has seen. All ranks call it with as many, in the same order."""
        return [bool(one) for one in self._share(lambda: bytes(arrived))]

    def release(self, key: tuple[Any, ...]) -> None:
        if self._pool is not None:
            self._pool.release(key)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def make_environments(task: TaskConfig, layout: ParallelLayout | None) -> Environments:
    """The pool of a generator rank; of those that share a model the first has one, and all hear it.

    Raises:
        DataError, ExecutorFailed, DeadlineExceeded: As ``EpisodePool``.
    """
    ranks = EngineRanks(layout)
    if ranks.size == 1:
        return EpisodePool(task)
    return SharedEpisodes(EpisodePool(task) if ranks.is_leader else None, ranks.share_bytes)
