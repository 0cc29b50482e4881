"""A generator's tick in parts: every group that leaves gets its part, and a part that is complete is sent before the tick ends.

    groups that leave, in order of completion ─▶ part_of ─▶ part complete in all shards of this rank? ─▶ send (tick, part, groups)

Which part a group belongs to is counted in engine steps, so it is a function of recipe and seed (``tick_schedule.py``). The last
part is not sent: the whole tick comes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from llamarl.executors.generator_shard import ActiveGroup
from llamarl.tick_schedule import part_of
from llamarl.types import Group

__all__ = ["LeavingParts"]

Send = Callable[[int, int, Sequence[Group]], None]


class LeavingParts:
    """Of one tick on one rank.

    Args:
        send: Called with tick, part and the part's groups, parts in order.
        num_parts: ``schedule.parts``.
        num_shards: Of this rank; decoded one after the other.
        groups_per_shard: That leave in the tick.
        to_group: Of a complete group.
    """

    def __init__(
        self,
        tick: int,
        send: Send,
        *,
        num_parts: int,
        num_shards: int,
        groups_per_shard: int,
        to_group: Callable[[ActiveGroup], Group],
    ) -> None:
        self._tick = tick
        self._send = send
        self._num_parts = num_parts
        self._groups_per_shard = groups_per_shard
        self._to_group = to_group
        self._left: list[dict[int, Group]] = [{} for _ in range(num_shards)]
        """Of each shard: prompt index -> its group, in order of completion."""
        self._num_sent = 0

    def leave(self, place: int, groups: Sequence[ActiveGroup]) -> None:
        """Of the rank's ``place``-th shard these groups leave in this tick, so far, in order of completion."""
        left = self._left[place]
        for number in range(len(left), len(groups)):
            part = part_of(number, num_groups=self._groups_per_shard, parts=self._num_parts)
            group = self._to_group(groups[number])
            left[group.prompt.index] = replace(group, part=part)
        while self._num_sent < self._num_parts - 1 and self._is_complete(self._num_sent):
            groups_of_part = [g for left in self._left for g in _admitted(left) if g.part == self._num_sent]
            self._send(self._tick, self._num_sent, groups_of_part)
            self._num_sent += 1

    def whole(self, place: int) -> list[Group]:
        """Every group of a shard's tick, in order of admission."""
        assert len(self._left[place]) == self._groups_per_shard, "the tick has not ended"
        return _admitted(self._left[place])

    def _is_complete(self, part: int) -> bool:
        return all(
            part_of(len(left), num_groups=self._groups_per_shard, parts=self._num_parts) > part for left in self._left
        )


def _admitted(left: dict[int, Group]) -> list[Group]:
    """A shard admits prompts in the order of their indices."""
    return [left[index] for index in sorted(left)]
