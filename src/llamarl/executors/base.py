"""What an executor is: one role of a job, on its own ranks, with its own devices, parallelism and precision.

The controller never sees payloads. Around every executor stands the same thin shell (``runtime/worker.py``):

    order (tick, handles) ─▶ shell pulls the inputs ─▶ executor.step ─▶ shell publishes the outputs ─▶ report (handles)

so a test can drive one executor alone, with plain values and no channel, process or controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.roles import ROLES
from llamarl.types import OWN_PROMPTS

__all__ = [
    "BaseExecutor",
    "Elastic",
    "Executor",
    "ExecutorContext",
    "ExecutorSpec",
    "Feed",
    "Journaled",
    "Stateless",
    "StepResult",
    "is_journaled",
]


@dataclass(frozen=True, kw_only=True)
class ExecutorSpec:
    """How to make one executor. Picklable: it travels to the processes that will hold it."""

    name: str
    factory: str
    """Import path ``package.module:callable``; called as ``factory(config, context)`` in each of its processes."""
    config: Any = None
    """Whatever the factory takes; picklable."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of this executor alone; plain values."""
    num_ranks: int = 1
    threads: int = 1
    """CPU threads of each rank. Bits depend on it, so a run pins it."""
    fills_cores: bool = False
    """Its threads wait neither for each other nor before others: with ``threads`` 0 a lone rank of
    it takes a thread a core of a small machine, and uses what the others leave."""
    device: str = "cpu"
    """``cpu``, ``cuda:N``, a comma-separated list with one a rank (``cuda:2,cuda:3``), or ``cuda``:
    placement chooses."""
    gpus: int = 1
    """Of a rank on a GPU: that one and those behind it, which are nobody else's by number alone."""
    process_group: str = ""
    """Backend of ``torch.distributed`` that each rank has joined before the factory is called: ``gloo``, ``nccl``,
    ``cpu:gloo,cuda:nccl``; empty for none. In processes of their own, RANK and
    WORLD_SIZE are set in any case."""


@dataclass(frozen=True, kw_only=True)
class ExecutorContext:
    """Where an executor finds itself."""

    name: str
    rank: int
    num_ranks: int
    device: str
    run_dir: Path | None
    seed: int
    reads: tuple[ChannelSpec, ...] = ()
    """Channels that end at this executor: the keys of ``inputs``."""
    writes: tuple[ChannelSpec, ...] = ()
    """Channels that leave it: each wants a payload in ``StepResult.outputs``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """``[executors.NAME.options]`` of the recipe."""
    incarnation: int = 0
    """A number that no earlier processes of this executor had in this run; one of these may still be at work."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one firing made."""

    outputs: Mapping[str, Any] = field(default_factory=dict)
    """One payload a channel that leaves this executor, by channel name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metric key -> value. Ranks' values are reduced as docs/metric_keys.md says of the key, or of
    names that it does not know."""
    share_metrics: tuple[Mapping[str, float], ...] = ()
    """Where the work is cut into shares that do not depend on the number of ranks: the metrics of
    each of this rank's, in order. Those of all ranks are reduced as if each share were a rank;
    ``metrics`` then holds what is the rank's own, such as times."""
    spans: tuple[tuple[str, float, float], ...] = ()
    """(label, start, end) on ``time.monotonic``, for the trace: what the step spent its time on."""
    stop: str = ""
    """Why the job should end soon, with a checkpoint; empty to go on. Rank 0's is kept."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Why samples have no reward: an example of each kind of cause -> samples that failed so, for
    the console. All ranks' are kept."""
    events: tuple[Mapping[str, Any], ...] = ()
    """What this firing decided that its inputs alone do not determine, as small plain JSON values,
    for the run's event log. All ranks' are kept."""
    files: tuple[Path, ...] = ()
    """Files that this firing wrote into the run's folder and that the run's result depends on, each
    written once, whole, and under its final name: they are flushed, proved, and brought to the
    controller's folder if this rank has another one."""


class Feed(Protocol):
    """The tokens that lie on a ``latest`` channel, as its sink sees them; more may arrive while it works."""

    def newest(self) -> int:
        """Source tick of the newest token that has arrived. Never waits."""
        ...

    def take(self, source_tick: int) -> Any:
        """The payload made at ``source_tick``, from tick - delay up to ``newest()``."""
        ...


@runtime_checkable
class Journaled(Protocol):
    """An executor that can be brought up again in the middle of a run, because what it carries from
    tick to tick is small and it can say what that is. Its ``save``, too, is done when it
    returns."""

    def journal(self, tick: int) -> bytes | None:
        """The state after ``tick``, asked for after each; None: it is not small now, and a death
        before the next tick's end ends the run."""
        ...

    def restore(self, state: bytes, tick: int) -> None:
        """Take what ``journal`` gave, after ``setup`` and instead of ``load``, so that tick + 1 gives the same bits."""
        ...


@runtime_checkable
class Elastic(Journaled, Protocol):
    """A journaled executor whose ranks may be another number after any tick: what they make
    together does not depend on it. Its ``load``, too, finds what it needs among the folders of all
    ranks."""

    def restore_from(self, states: Sequence[bytes], tick: int) -> None:
        """Instead of ``restore``: take this rank's part out of what ranks gave: it alone, where
        they are as many as then, else all."""
        ...


class Stateless:
    """Of a journaled executor that carries nothing: what it makes is a function of what it reads and the recipe."""

    def journal(self, tick: int) -> bytes | None:
        """Nothing."""
        return b""

    def restore(self, state: bytes, tick: int) -> None:
        """Nothing."""


def is_journaled(executor: object) -> bool:
    """Whether it is ``Journaled`` and means it: a subclass that saves more than its parent must say
    more in its journal too."""
    order = type(executor).__mro__
    where = {name: i for i, kind in reversed([*enumerate(order)]) for name in ("journal", "save") if name in vars(kind)}
    return isinstance(executor, Journaled) and where["journal"] <= where.get("save", len(order))


class Executor(Protocol):
    """One role of a job.

    Life: ``factory`` -> ``setup`` (or ``setup`` then ``load``) -> ``initial_token`` for each delayed out-edge ->
    ``step`` once a tick -> ``save`` after a tick, when asked -> ``close`` once, also after a failure.
    All methods of one rank run on one thread. Executors never call each other.
    """

    name: str

    def setup(self) -> None:
        """Build models and pools. May take long; has a deadline of its own."""
        ...

    def initial_token(self, channel: str, source_tick: int) -> Any:
        """Payload that stands for the token made at ``source_tick`` on a delayed channel.

        Asked at start for the ticks ``first_tick - delay .. first_tick - 1``; negative ticks exist before the run began
        (weights: version 0). After ``load`` the earlier ticks are real, and the payload must be the one made then.
        """
        ...

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        """Fire once. Consumes one payload of every in-channel, makes one for every out-channel."""
        ...

    def save(self, folder: Path, tick: int) -> Future[Any] | Sequence[Path] | None:
        """Write the state after ``tick`` into an existing, empty folder of this rank's own.

        Returns:
            The files that this rank has written beside ``folder``, into the folder of all ranks above
            it, or None; a future of these if it is being written beside the ticks that follow.
        """
        ...

    def load(self, folder: Path, tick: int) -> None:
        """Restore what ``save`` wrote, so that tick + 1 gives the same bits as if never interrupted."""
        ...

    def close(self) -> None:
        """Release processes, files and memory. Called more than once at worst."""
        ...


class BaseExecutor:
    """What most executors have in common: no model to build, no state, no token to begin with.
    Subclasses write ``step``.

    Args:
        config: The whole recipe.
        context: Where it finds itself, and the channels that it reads and writes.
    """

    def __init__(self, config: Any, context: ExecutorContext) -> None:
        self.name = context.name
        self.config = config
        self.context = context

    def setup(self) -> None:
        """Nothing to build."""

    def initial_token(self, channel: str, source_tick: int) -> Any:
        """Refused.

        Raises:
            ValueError: Always: who makes no first token cannot stand before a delay.
        """
        raise ValueError(
            f"channel {channel!r} leaves {self.name!r} with a delay, but {type(self).__name__} has no token that could lie on "
            f"it at start: give it an initial_token method, or the channel no delay"
        )

    def save(self, folder: Path, tick: int) -> Future[Any] | None:
        """No state: what this executor makes is a function of what it reads."""
        return None

    def load(self, folder: Path, tick: int) -> None:
        """No state."""

    def close(self) -> None:
        """Nothing to release."""

    def own_keys(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a class of the standard job, under keys that two executors of it do not both report.

        One of the user's own names its rows ``NAME/key``; times and ``tokens/*`` stay as they are,
        since those of all add up.
        """
        if self.name in ROLES:
            return dict(metrics)
        shared = ("time/", "tokens/")
        return {key if key.startswith(shared) else f"{self.name}/{key}": value for key, value in metrics.items()}

    @property
    def first_prompt(self) -> int:
        """Where the indices of its prompts or rows begin: the standard job's at 0, those of each executor of the
        user's own in a range of their own."""
        others = [name for name in self.config.executors if name not in ROLES]
        return 0 if self.name in ROLES else OWN_PROMPTS * (1 + others.index(self.name))

    def items_of(self, inputs: Mapping[str, Any]) -> list[Any]:
        """What has come on all data channels that it reads, in their order: usually :class:`llamarl.types.Group`."""
        data = (channel for channel in self.context.reads if channel.kind is not ChannelKind.WEIGHTS)
        return [item for channel in data for item in inputs[channel.name]]

    def outputs_of(self, items: list[Any]) -> dict[str, Any]:
        """The same items on every data channel that it writes; held-out rows in a share of their own, so that they
        change nothing of which rank gets which of the others."""
        if held_out := [item for item in items if getattr(item, "is_held_out", False)]:
            from llamarl.channels.data import Shares  # needs torch

            others = [item for item in items if not getattr(item, "is_held_out", False)]
            items = Shares([(self.context.rank, others), (self.context.rank, held_out)])
        return {channel.name: items for channel in self.context.writes if channel.kind is not ChannelKind.WEIGHTS}
