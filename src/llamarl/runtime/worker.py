"""The thin shell around one rank of one executor; the same in both runtimes.

    order (tick, handles) ─▶ receivers pull the inputs ─▶ executor.step ─▶ senders publish ─▶ rank report (handles)

The shell owns the ends of the channels, the thread count and the order of calls; the executor owns its work. Whatever
the executor raises becomes a :class:`RankFailure`, a plain value with the traceback as text: it crosses process borders
whole and is printed once, by whoever ends the job.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any
from urllib.parse import urlsplit

from llamarl.channels.base import ChannelKind, ChannelSpec, Handle, Receiver, Sender
from llamarl.checkpoint.snapshot import FileRecord
from llamarl.determinism import pin
from llamarl.errors import CheckpointError, ConfigError, LlamaRLError, SourceGone
from llamarl.executors.base import Elastic, Executor, ExecutorContext, ExecutorSpec, Journaled, StepResult, is_journaled
from llamarl.import_path import load_module, resolve
from llamarl.progress import forget
from llamarl.runtime.base import News, Order
from llamarl.runtime.rank_saves import RankSaves, rank_folder, record_products
from llamarl.runtime.tick_record import MAX_STATE_BYTES, State, read_state, write_state
from llamarl.transports.network import Network, join
from llamarl.transports.remote_segment import RemoteSegment
from llamarl.transports.segments import Segment, SegmentHandle, is_elsewhere

__all__ = [
    "CHANNEL_FACTORY",
    "RankFailure",
    "RankReport",
    "RankSetup",
    "TokenFeed",
    "Worker",
    "WorkerPlan",
    "capture",
    "rank_device",
]

_HERE = os.path.dirname(__file__)
_METHODS = ("setup", "step", "close")
"""Without which an executor is none."""
_REACH_S = 5.0
CHANNEL_FACTORY = "llamarl.channels.ends"
"""Module with ``make_sender`` and ``make_receiver``."""
PULL_DEADLINE_S = 60.0
"""A rank's longest wait for one payload of a channel."""


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """All that a rank must know to come up. Picklable."""

    spec: ExecutorSpec
    rank: int
    channels: tuple[ChannelSpec, ...]
    """Those that enter or leave this executor."""
    num_ranks: Mapping[str, int]
    """Executor name -> ranks, for both ends of every channel above."""
    run_dir: Path | None
    """The run's folder, as this rank sees it."""
    seed: int
    first_tick: int
    load_from: Path | None
    collective_timeout_s: float = 600.0
    """Longest wait of one collective of the executor's process group, and of groups of some of its ranks; and for a state
    that is still being written."""
    channel_factory: str = CHANNEL_FACTORY
    rendezvous: str = ""
    """Where the ranks of an executor meet: an ``init_method`` of ``torch.distributed``; a lone rank needs none."""
    in_own_process: bool = False
    """Whether this rank may set the environment of its process."""
    controller_dir: Path | None = None
    """The run's folder as the controller sees it, where this rank's ``run_dir`` is another: what an
    order places below it is meant below ``run_dir``."""
    network: Network | None = None
    """Where its process is among the hosts of the job; None: the whole job is on one machine."""
    journal: bool = False
    """Whether the state after each tick is kept where it outlives this rank's process."""
    incarnation: int = 0
    """How often the executor was brought up before in this run: what it finds of itself is from then."""
    makes_initial_tokens: bool = True
    """Whether the tokens that lie on its delayed edges at the job's beginning are still to be made."""
    restore: tuple[State, ...] = ()
    """The state after ``first_tick - 1``, for a rank that is brought up in the middle of a run: its
    own, or those of all ranks if they were another number then."""
    controller: SegmentHandle | None = None
    """Memory of the controller that this rank is to try to read; None: nothing will be read from there."""


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """One rank stands ready."""

    rank: int
    initial_tokens: Mapping[str, Mapping[int, Handle]] = field(default_factory=dict)
    journaled: bool = False
    """Whether the state after each tick will be kept."""
    why_unreached: str = ""
    """Why memory of the controller cannot be read from here; empty: it can, or nobody asked."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank has finished a tick."""

    rank: int
    tick: int
    outputs: Mapping[str, Handle]
    metrics: Mapping[str, float]
    spans: tuple[tuple[str, float, float], ...]
    started_s: float
    finished_s: float
    stop: str = ""
    failures: Mapping[str, int] = field(default_factory=dict)
    events: tuple[Mapping[str, Any], ...] = ()
    saving: tuple[int, ...] = ()
    """Ticks whose state is still being written."""
    saved: Mapping[int, tuple[FileRecord, ...]] = field(default_factory=dict)
    """Ticks whose state is written since the last report -> this rank's files of it, relative to
    the checkpoint; flushed."""
    unsaved: Mapping[int, str] = field(default_factory=dict)
    """Ticks whose state could not be written, as was found since the last report -> why."""
    files: tuple[FileRecord, ...] = ()
    """What it wrote elsewhere in the run's folder (``StepResult.files``), relative to that; flushed."""
    journal: State | None = None
    """Where the state after this tick is kept."""
    share_metrics: tuple[Mapping[str, float], ...] = ()
    """See ``StepResult``."""
    at_start: bool = False
    """See ``Report``."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """One rank raised."""

    executor: str
    rank: int
    doing: str
    """What it was at: ``setup``, ``tick 3``."""
    cause: str
    """``ValueError: text``."""
    traceback: str
    pid: int
    at_s: float
    """On ``time.monotonic``: of several failures the earliest is the cause, the others mostly follow from it."""
    exit_code: int = 1
    explained: bool = False
    """Raised on purpose, with a message that says all: a mistake in a recipe, a full disk, a deadline."""
    host: str = ""
    """Where, as the user calls it; empty: on the controller's machine."""
    died: bool = False
    """Its process ended by itself; nothing was raised."""
    from_outside: bool = False
    """Somebody else ended it."""
    source_gone: bool = False
    """It was reading memory of a process that has ended: it follows from that death."""
    incarnation: int = 0
    """Of the executor, as the controller counts."""

    def message(self) -> str:
        """For an ``ExecutorFailed``; with a traceback where the cause alone may not be understood."""
        where = f" on host {self.host}" if self.host else ""
        text = f"executor {self.executor!r}, rank {self.rank}{where} (pid {self.pid}), {self.doing}: {self.cause}"
        return text if self.explained else f"{text}\n{self.traceback.rstrip()}"


def capture(executor: str, rank: int, doing: str, error: BaseException) -> RankFailure:
    """An exception as a plain value."""
    return RankFailure(
        executor=executor,
        rank=rank,
        doing=doing,
        cause="".join(traceback.format_exception_only(error)).strip(),
        traceback="".join(traceback.format_exception(type(error), error, _outside_the_shell(error.__traceback__))),
        pid=os.getpid(),
        at_s=time.monotonic(),
        exit_code=error.exit_code if isinstance(error, LlamaRLError) else 1,
        explained=isinstance(error, LlamaRLError),
        source_gone=any(isinstance(one, SourceGone) for one in _chain(error)),
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those from which it was raised."""
    while error is not None:
        yield error
        error = error.__cause__


def stack_of(thread_name: str) -> str:
    """Where the thread of this process whose name starts so is now, innermost call last, without
    the shell's own calls."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name.startswith(thread_name) and thread.ident in frames:
            stack = traceback.extract_stack(frames[thread.ident])
            start = next((i for i in range(len(stack), 0, -1) if os.path.dirname(stack[i - 1].filename) == _HERE), 0)
            return "\n" + "".join(traceback.format_list(stack[start:] or stack[-1:])).rstrip()
    return "no call"


def _outside_the_shell(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the executor, below the shell's last call; all of it
    if the shell raised."""
    below, frame = trace, trace
    while frame is not None:
        if os.path.dirname(frame.tb_frame.f_code.co_filename) == _HERE:
            below = frame.tb_next
        frame = frame.tb_next
    return below or trace


class TokenFeed:
    """Implements :class:`llamarl.executors.base.Feed` for one ``latest`` channel. ``put`` may come from any thread."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._lock = threading.Lock()
        self._tokens: dict[int, tuple[Handle, ...]] = {}

    def put(self, tokens: Mapping[int, tuple[Handle, ...]]) -> None:
        with self._lock:
            self._tokens.update(tokens)

    def forget_before(self, source_tick: int) -> None:
        """Tokens that have left the edge."""
        with self._lock:
            self._tokens = {tick: handles for tick, handles in self._tokens.items() if tick >= source_tick}

    def newest(self) -> int:
        with self._lock:
            return max(self._tokens)

    def take(self, source_tick: int) -> Any:
        with self._lock:
            handles = self._tokens[source_tick]
        return self._receiver.receive(handles, PULL_DEADLINE_S)


class Worker:
    """One rank of one executor. All calls but ``tell`` must come from one thread."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._executor: Executor | None = None
        self._senders: dict[str, Sender] = {}
        self._receivers: dict[str, Receiver] = {}
        self._feeds: dict[str, TokenFeed] = {}
        self._weight_channels = {channel.name for channel in plan.channels if channel.kind is ChannelKind.WEIGHTS}
        self._delays = {channel.name: channel.delay for channel in plan.channels}
        self._saves = RankSaves(
            plan.spec.name, plan.rank, limit_s=plan.collective_timeout_s, again=plan.incarnation > 0
        )
        self._journaled = False
        self._journal: Segment | None = None
        """The state after the last tick."""
        self._leave_process_group: Callable[[], None] = lambda: None
        self._closed = False

    def pin(self) -> None:
        """Take this rank's thread count on the calling thread."""
        pin(self._plan.spec.threads)

    def setup(self) -> RankSetup:
        """Make the executor and the channel ends, restore the state if asked, publish the initial tokens."""
        plan, spec = self._plan, self._plan.spec
        self.pin()
        join(plan.network)
        if plan.in_own_process:
            os.environ |= {"RANK": str(plan.rank), "WORLD_SIZE": str(spec.num_ranks)}
            logging.getLogger("llamarl.environments.items").setLevel(
                logging.ERROR
            )  # the checks before a run have warned
        if spec.process_group:
            self._leave_process_group = _join_process_group(plan)
        factory = resolve(spec.factory)
        ends = load_module(plan.channel_factory, plan.channel_factory) if plan.channels else None
        self.pin()  # again: one of these may have been what imported torch
        context = ExecutorContext(
            name=spec.name,
            rank=plan.rank,
            num_ranks=spec.num_ranks,
            device=rank_device(spec, plan.rank),
            run_dir=plan.run_dir,
            seed=plan.seed,
            reads=tuple(channel for channel in plan.channels if channel.sink == spec.name),
            writes=tuple(channel for channel in plan.channels if channel.source == spec.name),
            options=spec.options,
            incarnation=plan.incarnation,
        )
        _take_device(context.device)
        executor = factory(spec.config, context)
        if missing := [name for name in _METHODS if not callable(getattr(executor, name, None))]:
            raise ConfigError(
                f"executor {spec.name!r}: {spec.factory} made a {type(executor).__name__}, which lacks "
                f"{', '.join(missing)}: a class derived from llamarl.executors.base.BaseExecutor has them"
            )
        self._executor = executor
        self.pin()
        executor.setup()
        if plan.load_from is not None:
            executor.load(rank_folder(self._here(plan.load_from), spec.name, plan.rank), plan.first_tick - 1)
        self._journaled = plan.journal and is_journaled(executor)
        if plan.restore:
            self._restore(executor, [read_state(state) for state in plan.restore], plan.first_tick - 1)
        _give_back_host_memory(context.device)
        if ends is not None:
            self._open_channels(ends)
        tokens: dict[str, dict[int, Handle]] = {}
        for channel in plan.channels:
            if channel.source == spec.name and channel.delay and plan.makes_initial_tokens:
                tokens[channel.name] = {
                    tick: self._senders[channel.name].send(tick, executor.initial_token(channel.name, tick))
                    for tick in range(plan.first_tick - channel.delay, plan.first_tick)
                }
        return RankSetup(
            rank=plan.rank,
            initial_tokens=tokens,
            journaled=self._journaled,
            why_unreached=_why_unreached(plan.controller) if plan.controller is not None else "",
        )

    def _restore(self, executor: Executor, states: Sequence[bytes], tick: int) -> None:
        """Raises CheckpointError where the executor can make nothing of its state: a journal may be anybody's."""
        name = self._plan.spec.name
        try:
            if isinstance(executor, Elastic):
                executor.restore_from(states, tick)
            else:
                assert isinstance(executor, Journaled) and len(states) == 1, f"{name!r} takes no such journal"
                executor.restore(states[0], tick)
        except Exception as error:
            words = " ".join(str(error).split())
            raise CheckpointError(
                f"{name!r} cannot go on from its state after tick {tick} ({type(error).__name__}: {words}): if "
                f"{self._plan.run_dir or 'RUN'}/journal holds it, remove that folder and resume from the checkpoint"
            ) from error

    def run(self, order: Order) -> RankReport:
        """Fire the executor once."""
        executor = self._executor
        assert executor is not None, "an order came before setup"
        started_s = time.monotonic()
        if order.tick < self._plan.first_tick:
            return self._at_start(executor, order.tick, started_s)
        spans: list[tuple[str, float, float]] = []
        inputs: dict[str, Any] = {}
        for name, handles in order.inputs.items():
            if name in self._feeds:
                inputs[name] = self._fill_feed(name, order)
                continue
            with _Span(self._label("receive", name), spans):
                inputs[name] = self._receivers[name].receive(handles, PULL_DEADLINE_S)
        if order.saves and (expect_saves := getattr(executor, "expect_saves", None)):  # the trainer's
            expect_saves(order.saves)
        try:
            result = executor.step(order.tick, inputs)
        finally:
            forget()
        if not isinstance(result, StepResult):
            raise ConfigError(
                f"{type(executor).__name__}.step of executor {order.executor!r} returned {type(result).__name__}, expected "
                f"StepResult(outputs=self.outputs_of(groups))"
            )
        spans.extend(result.spans)
        if set(result.outputs) != set(self._senders):
            raise ConfigError(
                f"executor {order.executor!r} made outputs for {sorted(result.outputs)} at tick {order.tick}, "
                f"expected one for each channel that leaves it: {sorted(self._senders)}"
            )
        outputs: dict[str, Handle] = {}
        for name, sender in self._senders.items():
            with _Span(self._label("send", name), spans):
                outputs[name] = sender.send(order.tick, result.outputs[name])
        metrics = {key: _number(order.executor, key, value) for key, value in result.metrics.items()}
        if order.save_to is not None:
            self._save(executor, order, spans)
            if order.tick in self._saves.writing:
                metrics[f"time/{order.executor}_save_s"] = spans[-1][2] - spans[-1][1]
        with _Span("flush saves", spans) if order.flush_saves and self._saves.writing else nullcontext():
            self._saves.finish(wait=order.flush_saves)
        files = record_products(self._plan.run_dir, result.files)
        journal = None
        if self._journaled:
            with _Span("journal", spans):
                journal = self._keep_state(executor, order.tick)
        return RankReport(
            rank=self._plan.rank,
            tick=order.tick,
            outputs=outputs,
            metrics=metrics,
            spans=tuple(spans),
            started_s=started_s,
            finished_s=time.monotonic(),
            stop=result.stop,
            failures=result.failures,
            saving=self._saves.writing,
            saved=self._saves.take(),
            unsaved=self._saves.take_unwritten(),
            files=files,
            events=result.events,
            journal=journal,
            share_metrics=tuple({key: float(v) for key, v in one.items()} for one in result.share_metrics),
        )

    def _save(self, executor: Executor, order: Order, spans: list[tuple[str, float, float]]) -> None:
        assert order.save_to is not None
        with _Span("save", spans):
            self._saves.finish(wait=True)  # two at once would hold two copies of the state
            self._saves.begin(executor, order.tick, self._here(order.save_to))

    def _at_start(self, executor: Executor, tick: int, started_s: float) -> RankReport:
        """Make tokens once more that lay on delayed edges where this executor begins: those that
        went with earlier processes."""
        outputs = {
            channel.name: self._senders[channel.name].send(tick, executor.initial_token(channel.name, tick))
            for channel in self._plan.channels
            if channel.source == self._plan.spec.name and self._plan.first_tick - channel.delay <= tick
        }
        return RankReport(
            rank=self._plan.rank,
            tick=tick,
            outputs=outputs,
            metrics={},
            spans=(),
            started_s=started_s,
            finished_s=time.monotonic(),
            at_start=True,
        )

    def _keep_state(self, executor: Executor, tick: int) -> State | None:
        """The one of the tick before goes: the controller has held it since it sent this tick's order."""
        assert isinstance(executor, Journaled)
        state = executor.journal(tick)
        before, self._journal = self._journal, None
        if before is not None:
            before.close()
        if state is None or len(state) > MAX_STATE_BYTES:
            return None
        self._journal, kept = write_state(state)
        return kept

    def _label(self, verb: str, channel: str) -> str:
        """Of a span. What an executor spends on weights is told from what it spends on data."""
        return f"weight_sync: {verb} {channel}" if channel in self._weight_channels else f"{verb} {channel}"

    def _here(self, path: Path) -> Path:
        """What the controller calls ``path``, as this rank sees it."""
        plan = self._plan
        if plan.controller_dir is None or plan.run_dir is None or not path.is_relative_to(plan.controller_dir):
            return path
        return plan.run_dir / path.relative_to(plan.controller_dir)

    def tell(self, news: News) -> None:
        """A token has come onto a channel that enters here. Any thread; a worker that is not set up
        yet needs no news."""
        feed, receiver = self._feeds.get(news.channel), self._receivers.get(news.channel)
        if feed is not None:
            feed.put({news.source_tick: news.handles})
        elif fetch_ahead := getattr(receiver, "fetch_ahead", None):  # of weights
            fetch_ahead(news.handles, PULL_DEADLINE_S)

    def _fill_feed(self, name: str, order: Order) -> TokenFeed:
        feed, first = self._feeds[name], order.tick - self._delays[name]
        feed.forget_before(first)
        feed.put({first: order.inputs[name], **order.later.get(name, {})})
        return feed

    def close(self) -> tuple[str, ...]:
        """Release everything; what goes wrong on the way is returned as text, and the rest is still closed."""
        if self._closed:
            return ()
        self._closed = True
        closers: list[Callable[[], None]] = [receiver.close for receiver in self._receivers.values()]
        if self._executor is not None:
            closers.append(self._executor.close)
        closers.extend(sender.close for sender in self._senders.values())  # last: a sink may still read what was sent
        if self._journal is not None:
            closers.append(self._journal.close)
        closers.append(self._leave_process_group)
        troubles = []
        for closer in closers:
            try:
                closer()
            except Exception as error:  # the job is ending: one end that will not close must not keep the others open
                failure = capture(self._plan.spec.name, self._plan.rank, "close", error)
                troubles.append(failure.message())
        return tuple(troubles)

    def _open_channels(self, factory: ModuleType) -> None:
        plan = self._plan
        for channel in plan.channels:
            ends = {
                "rank": plan.rank,
                "num_source_ranks": plan.num_ranks[channel.source],
                "num_sink_ranks": plan.num_ranks[channel.sink],
            }
            if channel.source == plan.spec.name:
                self._senders[channel.name] = factory.make_sender(channel, **ends)
            if channel.sink == plan.spec.name:
                receiver = self._receivers[channel.name] = factory.make_receiver(channel, **ends)
                if channel.latest:
                    self._feeds[channel.name] = TokenFeed(receiver)


class _Span:
    """Appends (label, start, end) when the block is left, also by an exception."""

    def __init__(self, label: str, spans: list[tuple[str, float, float]]) -> None:
        self._label, self._spans = label, spans

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._label, self._start, time.monotonic()))


def _number(executor: str, key: str, value: Any) -> float:
    """Raises:
    ConfigError: A metric is no number.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"executor {executor!r} reports the metric {key} = {value!r:.80}, expected a number"
        ) from None


def _why_unreached(memory: SegmentHandle) -> str:
    if is_elsewhere(memory):
        try:
            RemoteSegment(memory, _REACH_S).close()
        except LlamaRLError as error:
            return str(error)
    return ""


def rank_device(spec: ExecutorSpec, rank: int) -> str:
    """The one of ``spec.device``'s comma-separated devices that is ``rank``'s; a single one is everybody's."""
    devices = [device.strip() for device in spec.device.split(",")]
    if len(devices) not in (1, spec.num_ranks):
        raise ConfigError(
            f"executor {spec.name!r} has {spec.num_ranks} ranks and {len(devices)} devices ({spec.device!r}); "
            "expected one for all or one for each"
        )
    return devices[rank] if len(devices) > 1 else devices[0]


def _take_device(device: str) -> None:
    """Make a rank's GPU the current one of this process: channels and libraries then allocate there."""
    torch = sys.modules.get("torch")
    if torch is not None and device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))


def _give_back_host_memory(device: str) -> None:
    """Have a rank on a GPU return to the system what loading has freed: weights pass through host memory, and the C library
    is told to keep all of it for the next step (``determinism.environment``), which is computed elsewhere."""
    torch = sys.modules.get("torch")
    if torch is not None and device.startswith("cuda"):
        from llamarl.models.device_memory import give_back_freed

        give_back_freed(torch.device("cpu"))


def _join_process_group(plan: WorkerPlan) -> Callable[[], None]:
    """Join the executor's own ``torch.distributed`` group and return what leaves it.

    A lone rank meets nobody; where executors share a process, as they do inline, they share its one
    lone-rank group too.
    """
    import torch
    import torch.distributed as dist

    spec, rank = plan.spec, plan.rank
    device = rank_device(spec, rank)
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
    timeout = timedelta(seconds=plan.collective_timeout_s)
    if spec.num_ranks == 1:
        if dist.is_initialized():
            return lambda: None
        dist.init_process_group(spec.process_group, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        where: dict[str, Any] = {"init_method": plan.rendezvous}
        if plan.rendezvous.startswith("tcp://"):
            where = {"store": _store_at(plan.rendezvous, rank, spec.num_ranks, timeout)}
        dist.init_process_group(spec.process_group, rank=rank, world_size=spec.num_ranks, timeout=timeout, **where)
        _limit_parts(timeout)
    return dist.destroy_process_group


def _limit_parts(timeout: timedelta) -> None:
    """Groups of some of the ranks that are made from here on wait as long as that of all.

    torch gives them half an hour (NCCL ten minutes) unless each says otherwise, which a
    ``DeviceMesh`` has no way to do for its axes. So it is torch's own default that is set, in this
    rank's process, which belongs to this executor.
    """
    from torch.distributed import distributed_c10d

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        assert hasattr(distributed_c10d, name), f"this torch calls the default limit of its process groups not {name}"
        setattr(distributed_c10d, name, timeout)


def _store_at(rendezvous: str, rank: int, num_ranks: int, timeout: timedelta) -> Any:
    """The store in which the ranks of several hosts meet, at ``tcp://address:port`` of rank 0: it
    listens there alone, where torch by itself would listen on every interface."""
    from torch.distributed import TCPStore

    place = urlsplit(rendezvous)
    assert place.hostname is not None and place.port is not None, rendezvous
    listener = -1
    if rank == 0:
        family = socket.AF_INET6 if ":" in place.hostname else socket.AF_INET
        with socket.socket(family) as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((place.hostname, place.port))
            made.listen()
            listener = made.detach()  # the store closes it
    where: dict[str, Any] = {"wait_for_workers": False}
    if rank == 0:
        where["master_listen_fd"] = listener
    return TCPStore(place.hostname, place.port, num_ranks, rank == 0, timeout, **where)
