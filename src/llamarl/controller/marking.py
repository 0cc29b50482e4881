"""Where the tokens are: the state of a running dataflow graph, and which executors may fire. Pure.

    ready() ─▶ orders ─▶ (runtime) ─▶ report ─▶ complete() ─▶ tokens move ─▶ ready() ...

Executor X may fire tick k when it is idle, tick k - d of every in-channel (delay d) is there, and every out-channel has
room: its sink has finished tick k + d - c (capacity c). Nothing else ever delays a firing, and no clock is consulted,
so the result of a run does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from llamarl.channels.base import ChannelSpec, Handle
from llamarl.controller.graph import Graph

__all__ = ["Firing", "Marking"]


@dataclass(frozen=True)
class Firing:
    """One executor, one tick, and the handles of its inputs."""

    executor: str
    tick: int
    inputs: Mapping[str, tuple[Handle, ...]]
    later: Mapping[str, Mapping[int, tuple[Handle, ...]]]
    """``latest`` in-channel -> source tick -> handles of the tokens that follow the one in ``inputs``."""


class Marking:
    """Tokens on the edges of ``graph`` between ``first_tick`` and ``num_ticks``.

    Args:
        initial_tokens: As of ``begin``; None: they are not made yet.
        needs: For a ``latest`` channel and its sink's tick, the source tick that must lie on the
            edge before the sink may fire: that of the newest token that it will take. None: tick -
            delay, and whatever else is there.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        first_tick: int = 0,
        num_ticks: int,
        initial_tokens: Mapping[str, Mapping[int, tuple[Handle, ...]]] | None = None,
        needs: Callable[[ChannelSpec, int], int] | None = None,
    ) -> None:
        self.graph = graph
        self._needs = needs
        self.first_tick, self.num_ticks = first_tick, num_ticks
        self.done_ticks = {e.name: first_tick for e in graph.executors}
        """Executor -> number of ticks it has finished (its next tick)."""
        self._busy: dict[str, Firing] = {}
        self._tokens: dict[str, dict[int, tuple[Handle, ...]]] = {}
        self._withdrawn: set[tuple[str, int]] = set()
        self._channels = {channel.name: channel for channel in graph.channels}
        none_yet = {c.name: dict.fromkeys(range(first_tick - c.delay, first_tick), ()) for c in graph.channels}
        self.begin(none_yet if initial_tokens is None else initial_tokens)

    def begin(self, initial_tokens: Mapping[str, Mapping[int, tuple[Handle, ...]]]) -> None:
        """Lay out what lies on edges before the first tick: channel -> source tick -> handles, for the ``delay`` ticks before."""
        for channel in self.graph.channels:
            wanted = range(self.first_tick - channel.delay, self.first_tick)
            given = initial_tokens.get(channel.name, {})
            assert set(given) == set(wanted), (
                f"channel {channel.name}: initial tokens {sorted(given)}, need {list(wanted)}"
            )
            self._tokens[channel.name] = dict(given)

    @property
    def finished(self) -> bool:
        return all(done >= self.num_ticks for done in self.done_ticks.values())

    @property
    def busy(self) -> Mapping[str, Firing]:
        return self._busy

    def ready(self) -> list[Firing]:
        """Firings that may start now, in the graph's executor order; each is marked as started."""
        firings = []
        for executor in self.graph.executors:
            if executor.name in self._busy or self._blockers(executor.name):
                continue
            firing = self._firing(executor.name)
            self._busy[executor.name] = firing
            firings.append(firing)
        return firings

    def refire(self, executor: str) -> Firing | None:
        """The firing of an executor that is at work, to be done again from its beginning, with the
        tokens that lie on its edges now: those of its tick have not moved, and later ones may have
        come. None if it is not at work."""
        if executor in self._busy:
            self._busy[executor] = self._firing(executor)
        return self._busy.get(executor)

    def _firing(self, name: str) -> Firing:
        tick = self.done_ticks[name]
        inputs = {c.name: self._tokens[c.name][tick - c.delay] for c in self.graph.inputs[name]}
        later = {
            c.name: {t: handles for t, handles in self._tokens[c.name].items() if t > tick - c.delay}
            for c in self.graph.inputs[name]
            if c.latest
        }
        return Firing(name, tick, inputs, later)

    def complete(self, executor: str, tick: int, outputs: Mapping[str, tuple[Handle, ...]]) -> None:
        """Move the tokens of a finished firing: its inputs are gone, its outputs lie on their edges."""
        firing = self._busy.pop(executor)
        assert firing.tick == tick, f"{executor} reported tick {tick}, expected {firing.tick}"
        expected = {c.name for c in self.graph.outputs[executor]}
        assert set(outputs) == expected, (
            f"{executor} tick {tick}: outputs {sorted(outputs)}, expected {sorted(expected)}"
        )
        for channel in self.graph.inputs[executor]:
            del self._tokens[channel.name][tick - channel.delay]
        for channel in self.graph.outputs[executor]:
            self._tokens[channel.name][tick] = outputs[channel.name]
        self.done_ticks[executor] = tick + 1

    def advance_by(self, reports: Iterable[tuple[str, int, Mapping[str, tuple[Handle, ...]]]]) -> None:
        """Move to where the job was when these, (executor, tick, outputs), had counted, in this
        order, and nobody was at work. Versions of the weights are not among the outputs: those that
        still lie on an edge are withdrawn.

        Raises:
            ValueError: They are not what this job would have done.
        """
        lost: list[tuple[str, int]] = []
        for executor, tick, outputs in reports:
            self.ready()
            firing, edges = self._busy.get(executor), {channel.name for channel in self.graph.outputs[executor]}
            if firing is None or firing.tick != tick or not outputs.keys() <= edges:
                raise ValueError(f"tick {tick} of {executor!r} cannot have counted by then")
            lost += [(name, tick) for name in sorted(edges - outputs.keys())]
            self.complete(executor, tick, {**dict.fromkeys(edges, ()), **outputs})
        self._busy.clear()
        for name, tick in lost:
            if tick in self._tokens[name]:
                self.withdraw(name, tick)

    def withdraw(self, channel: str, tick: int) -> str:
        """Take a token off its edge: it went with its process before it was whole, and is made
        again. Until then whoever needs it waits, as for any token that is not there.

        Returns:
            The sink, if it is at work with the token or may be: it must be brought up again, as if
            it had not been fired. Else "".
        """
        del self._tokens[channel][tick]
        self._withdrawn.add((channel, tick))
        edge = self._channels[channel]
        firing = self._busy.get(edge.sink)
        if firing is None or (firing.tick - edge.delay != tick and not (edge.latest or edge.fetched_ahead)):
            return ""
        del self._busy[edge.sink]
        return edge.sink

    def put_back(self, channel: str, tick: int, handles: tuple[Handle, ...]) -> None:
        """A withdrawn token was made again."""
        self._withdrawn.remove((channel, tick))
        self._tokens[channel][tick] = handles

    def withdrawn(self, executor: str) -> frozenset[tuple[str, int]]:
        """(channel, tick) of tokens of ``executor`` that are yet to be made again."""
        return frozenset(token for token in self._withdrawn if self._channels[token[0]].source == executor)

    def is_needed(self, executor: str) -> bool:
        """Whether it has ticks to do, or tokens to make again that somebody will read."""
        owed = (tick + self._channels[channel].delay < self.num_ticks for channel, tick in self.withdrawn(executor))
        return self.done_ticks[executor] < self.num_ticks or any(owed)

    def _blockers(self, name: str) -> list[str]:
        tick = self.done_ticks[name]
        if tick >= self.num_ticks:
            return [f"all {self.num_ticks} ticks done"]
        blockers = [
            f"token {needed} of channel {c.name!r} from {c.source!r}"
            for c in self.graph.inputs[name]
            if (needed := self._needed(c, tick)) not in self._tokens[c.name]
        ]
        blockers += [
            f"room on channel {c.name!r}: {c.sink!r} has not finished tick {tick + c.delay - c.capacity}"
            for c in self.graph.outputs[name]
            if self.done_ticks[c.sink] <= tick + c.delay - c.capacity and tick + c.delay - c.capacity < self.num_ticks
        ]
        return blockers

    def _needed(self, channel: ChannelSpec, tick: int) -> int:
        return self._needs(channel, tick) if self._needs and channel.latest else tick - channel.delay

    def describe(self) -> str:
        """Who runs, and who waits for whom: one line an executor."""
        lines = []
        for executor in self.graph.executors:
            name = executor.name
            if name in self._busy:
                lines.append(f"  {name}: running tick {self._busy[name].tick}")
            else:
                lines.append(
                    f"  {name}: at tick {self.done_ticks[name]}, waits for {'; '.join(self._blockers(name)) or 'nothing'}"
                )
        return "\n".join(lines)
