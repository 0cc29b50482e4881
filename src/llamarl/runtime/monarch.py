"""Each executor in a Monarch process mesh of its own, one process and one actor a rank.

Nothing outside this package imports Monarch.

    controller thread          io thread (asyncio)                 worker process of rank r
    fire(order) ────────────▶  actor call, one future a rank ───▶  actor ▶ executor thread ▶ Worker.run
    wait(deadline) ◀─ queue ◀─ reply, or pidfd of the process ◀──  report or failure, as bytes

- ``wait`` sleeps on one queue. A reply, an exception and a death all arrive there the moment they happen: nothing polls.
- An executor's exception travels as a value (``RankFailure``). Monarch sees no exception and prints none.
- The death of a local process is seen through its pidfd within milliseconds; Monarch's own supervision, which needs about 10 s
  on one host and minutes between hosts, is kept for processes on other hosts.
- Orders and reports are pickled here, once, so their size is known: ``Report.controller_bytes``.
- Workers ignore Ctrl-C, which is for the controller, and are killed by the kernel if the controller dies.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import queue
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import Actor, HostMesh, MeshFailure, Point, ProcMesh, endpoint, this_host

from llamarl.channels.base import ChannelSpec
from llamarl.errors import DeadlineExceeded
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import Order, Report, SetupReport
from llamarl.runtime.bootstrap import OUTPUT_PREFIX, PARENT_PID
from llamarl.runtime.determinism import environment
from llamarl.runtime.job import combine_reports, combine_setups, executor_failed, plan_workers
from llamarl.runtime.output import OutputReader
from llamarl.runtime.process_watch import cause_of_death, open_pidfd, process_space
from llamarl.runtime.worker import (
    CHANNEL_FACTORY,
    RankFailure,
    RankReport,
    RankSetup,
    Worker,
    WorkerPlan,
    capture,
    stack_of,
)

__all__ = ["MonarchRuntime", "RankActor", "Witness"]

_BOOTSTRAP = "llamarl.runtime.bootstrap"
_FOLLOW_UP_S = 0.3
"""After a first failure, how long to listen for the others that came with it, to name the cause and not a consequence."""
_EXECUTOR_THREAD = "llamarl-executor"
_WHERE_S = 1.0
"""How long a stuck process may take to say where it is stuck."""
_CLOSE_IDLE_S = 10.0
_CLOSE_BUSY_S = 0.5
_STOP_S = 2.0
_KILL_S = 2.0


class RankActor(Actor):
    """The worker process's end. The executor's calls all run on one thread of their own."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix=_EXECUTOR_THREAD)
        self._worker: Worker | None = None

    @endpoint
    async def hello(self) -> tuple[int, str]:
        """This process's pid, and the space in which it holds."""
        return os.getpid(), process_space()

    @endpoint
    async def command(self, blob: bytes) -> bytes:
        """Run a pickled (method, argument); the reply is a pickled result or ``RankFailure``."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._command, blob)

    def _command(self, blob: bytes) -> bytes:
        executor, rank, doing, method, argument = cloudpickle.loads(blob)
        try:
            if method == "setup":
                self._worker = Worker(cloudpickle.loads(argument))
                result: Any = self._worker.setup()
            else:
                assert self._worker is not None, f"{method} came before setup"
                result = self._worker.run(argument) if method == "run" else self._worker.close()
            return cloudpickle.dumps(result)
        except BaseException as error:  # also SystemExit: an executor does not decide that its process ends
            return cloudpickle.dumps(capture(executor, rank, doing, error))


class Witness(Actor):
    """A second actor in each process, which can still answer while the executor's thread is stuck."""

    @endpoint
    async def where(self) -> str:
        """Where the executor's thread is now."""
        return stack_of(_EXECUTOR_THREAD)


@dataclass
class _Rank:
    """One process, as the io thread knows it."""

    executor: str
    rank: int
    actor: Any = None
    witness: Any = None
    pid: int = 0
    pidfd: int | None = None
    doing: str = "start of its process"
    dead: bool = False


@dataclass
class _Out:
    """An order that is out."""

    tick: int
    sent_s: float
    num_bytes: int
    replies: list[RankReport] = field(default_factory=list)


@dataclass(frozen=True)
class _Reply:
    """An event on the queue: a rank answered."""

    executor: str
    result: Any
    num_bytes: int


class MonarchRuntime:
    """The Protocol of ``runtime/base.py`` on Monarch.

    Args:
        pull_deadline_s: Longest wait of a rank for one payload.
        collective_timeout_s: Longest wait of one collective inside an executor's process group.
        channel_factory: Module with ``make_sender`` and ``make_receiver``.
        deterministic: Pin repeatable kernels in the workers.
        host: Where to start the processes; None for this machine.
    """

    def __init__(
        self,
        *,
        pull_deadline_s: float = 60.0,
        collective_timeout_s: float = 600.0,
        channel_factory: str = CHANNEL_FACTORY,
        deterministic: bool = True,
        host: HostMesh | None = None,
    ) -> None:
        self._pull_deadline_s = pull_deadline_s
        self._collective_timeout_s = collective_timeout_s
        self._channel_factory = channel_factory
        self._deterministic = deterministic
        self._host = host
        self._events: queue.SimpleQueue[_Reply | RankFailure] = queue.SimpleQueue()
        self._out: dict[tuple[str, int], _Out] = {}
        self._ranks: dict[str, list[_Rank]] = {}
        self._meshes: list[ProcMesh] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._reader: OutputReader | None = None
        self._failed = False
        self._closing = False

    def start(
        self,
        executors: Sequence[ExecutorSpec],
        channels: Sequence[ChannelSpec],
        *,
        run_dir: Path | None,
        seed: int,
        first_tick: int,
        load_from: Path | None,
        deadline_s: float,
    ) -> Mapping[str, SetupReport]:
        """Bring all executors up, in parallel."""
        assert self._loop is None, "start is called once"
        began = self.now()
        plans = plan_workers(
            executors,
            channels,
            run_dir=run_dir,
            seed=seed,
            first_tick=first_tick,
            load_from=load_from,
            pull_deadline_s=self._pull_deadline_s,
            collective_timeout_s=self._collective_timeout_s,
            channel_factory=self._channel_factory,
            deterministic=self._deterministic,
        )
        self._reader = OutputReader()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llamarl-runtime", daemon=True)
        self._thread.start()
        _live_runtimes.add(self)
        for name, ranks in plans.items():
            self._ranks[name] = [_Rank(name, plan.rank) for plan in ranks]
        self._submit(lambda: self._bring_up(plans))
        waiting: dict[str, list[RankSetup]] = {name: [] for name in plans}
        reports: dict[str, SetupReport] = {}
        while len(reports) < len(plans):
            event = self._next_event(began + deadline_s - self.now())
            if event is None:
                self._failed = True
                raise DeadlineExceeded(
                    f"controller waited {self.now() - began:.1f} s for executors to stand ready, limit {deadline_s:g} s:\n"
                    + "\n".join(
                        self._late(name, "setup", began, [ready.rank for ready in waiting[name]])
                        for name in plans
                        if name not in reports
                    )
                )
            waiting[event.executor].append(event.result)
            if len(waiting[event.executor]) == len(plans[event.executor]):
                reports[event.executor] = combine_setups(event.executor, waiting[event.executor])
        return reports

    def fire(self, order: Order) -> None:
        """Send ``order`` to every rank of its executor; returns at once."""
        assert self._loop is not None and not self._closing, "fire needs a started runtime"
        key = (order.executor, order.tick)
        assert key not in self._out, f"{key} is out already"
        blobs = [
            cloudpickle.dumps((order.executor, rank.rank, f"tick {order.tick}", "run", order))
            for rank in self._ranks[order.executor]
        ]
        self._out[key] = _Out(order.tick, self.now(), sum(map(len, blobs)))

        async def send() -> None:
            for rank, blob in zip(self._ranks[order.executor], blobs, strict=True):
                self._spawn_task(self._command(rank, f"tick {order.tick}", blob))

        self._submit(send)

    def wait(self, deadline_s: float) -> Report:
        """The next report."""
        assert self._out, "wait without an order out: it could never end"
        began = self.now()
        while True:
            event = self._next_event(began + deadline_s - self.now())
            if event is None:
                self._failed = True
                raise DeadlineExceeded(
                    f"controller waited {self.now() - began:.1f} s for a report, limit {deadline_s:g} s; orders out:\n"
                    + "\n".join(
                        self._late(executor, f"tick {tick}", out.sent_s, [report.rank for report in out.replies])
                        for (executor, tick), out in self._out.items()
                    )
                )
            report: RankReport = event.result
            key = (event.executor, report.tick)
            out = self._out[key]
            out.replies.append(report)
            out.num_bytes += event.num_bytes
            if len(out.replies) == len(self._ranks[event.executor]):
                del self._out[key]
                return combine_reports(event.executor, out.replies, controller_bytes=out.num_bytes)

    def now(self) -> float:
        """``time.monotonic``."""
        return time.monotonic()

    def close(self) -> None:
        """Close executors, stop processes, kill what is left.

        Takes at most 14.5 s with idle executors (10 of them for their own ``close``) and at most 5 s after a failure or
        with orders still out.
        """
        if self._loop is None or self._closing:
            return
        self._closing = True
        _live_runtimes.discard(self)
        busy = self._failed or bool(self._out)
        grace_s = _CLOSE_BUSY_S if busy else _CLOSE_IDLE_S
        ended = asyncio.run_coroutine_threadsafe(self._shut_down(grace_s, tell=not busy), self._loop)
        try:
            ended.result(grace_s + _STOP_S + _KILL_S + 1.0)
        except TimeoutError:
            print("runtime: closing did not end in time, killing what is left", file=sys.stderr)
        finally:
            for ranks in self._ranks.values():
                for rank in ranks:
                    _kill(rank)
            assert self._reader is not None and self._thread is not None
            self._reader.close(timeout_s=1.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(1.0)
            self._end_loop()

    def _end_loop(self) -> None:
        """Close the stopped loop; calls that will never be answered are dropped without a word."""
        assert self._loop is not None
        if self._loop.is_running():
            return
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
        for rank in (rank for ranks in self._ranks.values() for rank in ranks):
            if rank.pidfd is not None:
                os.close(rank.pidfd)
                rank.pidfd = None

    # -- controller thread ------------------------------------------------------------------------------------------

    def _next_event(self, timeout_s: float) -> _Reply | None:
        """The next reply; None when the time is over. A failure raises, with those that came with it."""
        try:
            event = self._events.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(event, _Reply):
            return event
        self._failed = True
        failures = [event]
        until = self.now() + _FOLLOW_UP_S
        while (left := until - self.now()) > 0:
            with contextlib.suppress(queue.Empty):
                follower = self._events.get(timeout=left)
                if isinstance(follower, RankFailure):
                    failures.append(follower)
        raise executor_failed(failures)

    def _late(self, executor: str, doing: str, sent_s: float, reported: Sequence[int]) -> str:
        """Who has not answered, since when, and where its executor is now."""
        missing = [rank for rank in self._ranks[executor] if rank.rank not in reported]
        assert self._loop is not None
        asking = asyncio.run_coroutine_threadsafe(self._where(missing), self._loop)
        try:
            places = asking.result(_WHERE_S + 1.0)
        except TimeoutError:
            places = ["unknown"] * len(missing)
        head = f"{executor!r}, {doing}, out for {self.now() - sent_s:.1f} s"
        return "\n".join(
            f"{head}: no report from rank {rank.rank} (pid {rank.pid}), which is at: {place}"
            for rank, place in zip(missing, places, strict=True)
        )

    def _submit(self, job: Callable[[], Any]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(lambda: self._spawn_task(job()))

    # -- io thread --------------------------------------------------------------------------------------------------

    def _spawn_task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_up(self, plans: Mapping[str, tuple[WorkerPlan, ...]]) -> None:
        try:
            host = self._host or await _local_host()
            for name, ranks in plans.items():
                self._spawn_task(self._bring_up_one(host, name, ranks))
        except Exception as error:
            self._events.put(capture("runtime", 0, "start", error))

    async def _bring_up_one(self, host: HostMesh, name: str, plans: tuple[WorkerPlan, ...]) -> None:
        try:
            command = self._bootstrap_commands(name, plans)
            safe = re.sub(r"\W", "_", name)
            mesh = host.spawn_procs(per_host={"ranks": len(plans)}, name=safe, bootstrap_command=command)
            self._meshes.append(mesh)
            actors, witnesses = mesh.spawn(safe, RankActor), mesh.spawn(f"{safe}_witness", Witness)
            for rank in self._ranks[name]:
                rank.actor, rank.witness = actors.slice(ranks=rank.rank), witnesses.slice(ranks=rank.rank)
            here = process_space()
            for rank, (pid, space) in zip(
                self._ranks[name],
                await asyncio.gather(*(rank.actor.hello.call_one() for rank in self._ranks[name])),
                strict=True,
            ):
                rank.pid = pid
                if space == here:
                    self._watch(rank)
        except Exception as error:
            self._events.put(capture(name, 0, "start of its processes", error))
            return
        for rank, plan in zip(self._ranks[name], plans, strict=True):
            blob = cloudpickle.dumps((name, rank.rank, "setup", "setup", cloudpickle.dumps(plan)))
            self._spawn_task(self._command(rank, "setup", blob))

    def _bootstrap_commands(self, name: str, plans: tuple[WorkerPlan, ...]) -> Callable[[Point], BootstrapCommand]:
        """The command line and environment of each rank; what torch reads at import must be there from the start."""
        spec = plans[0].spec
        shared = {
            **environment(spec.threads),
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path)),
            "WORLD_SIZE": str(spec.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        if self._host is None:
            shared[PARENT_PID] = str(os.getpid())
        assert self._reader is not None
        prefixes = []
        for plan in plans:
            label = name if spec.num_ranks == 1 else f"{name} {plan.rank}"
            prefixes.append(self._reader.open(label))

        def command(point: Point) -> BootstrapCommand:
            own = {"RANK": str(point.rank), "LOCAL_RANK": str(point.rank)}
            if self._host is None:
                own[OUTPUT_PREFIX] = prefixes[point.rank]
            return BootstrapCommand(sys.executable, None, ["-m", _BOOTSTRAP], shared | own)

        return command

    async def _command(self, rank: _Rank, doing: str, blob: bytes) -> None:
        rank.doing = doing
        try:
            reply = await rank.actor.command.call_one(blob)
            result = cloudpickle.loads(reply)
        except Exception as error:  # the actor is gone, or the reply cannot be read here
            if not rank.dead and not self._closing:
                self._events.put(capture(rank.executor, rank.rank, doing, error))
            return
        rank.doing = "idle"
        if self._closing:
            return
        if isinstance(result, RankFailure):
            self._events.put(result)
        else:
            self._events.put(_Reply(rank.executor, result, len(reply)))

    def _watch(self, rank: _Rank) -> None:
        try:
            rank.pidfd = open_pidfd(rank.pid)
        except ProcessLookupError:
            self._on_death(rank, "its process ended")
            return
        if rank.pidfd is not None:
            asyncio.get_running_loop().add_reader(rank.pidfd, self._on_pidfd, rank, rank.pidfd)

    def _on_pidfd(self, rank: _Rank, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        self._on_death(rank, cause_of_death(pidfd))

    def _on_death(self, rank: _Rank, cause: str) -> None:
        rank.dead = True
        if not self._closing:
            self._events.put(
                RankFailure(
                    executor=rank.executor,
                    rank=rank.rank,
                    doing="between two ticks" if rank.doing == "idle" else rank.doing,
                    cause=cause,
                    traceback="",
                    pid=rank.pid,
                    at_s=float("-inf"),  # before every exception: peers that miss a dead process fail because of it
                )
            )

    def on_fault(self, text: str) -> None:
        """Monarch reports a failure that no call waited for: the death of a process on another host."""
        self._events.put(
            RankFailure(executor="?", rank=0, doing="supervision", cause=text, traceback="", pid=0, at_s=self.now())
        )

    async def _where(self, ranks: Sequence[_Rank]) -> list[str]:
        async def ask(rank: _Rank) -> str:
            if rank.witness is None or not rank.pid:
                return rank.doing
            try:
                return str(await asyncio.wait_for(rank.witness.where.call_one().as_asyncio(), _WHERE_S))
            except Exception as error:  # a diagnosis only: the deadline that asked for it is what gets raised
                return f"unknown, it does not answer ({type(error).__name__}): stopped, or busy in native code"

        return await asyncio.gather(*(ask(rank) for rank in ranks))

    async def _shut_down(self, grace_s: float, tell: bool) -> None:
        """Ask every executor to close, stop what has answered, kill what has not.

        ``tell`` prints what goes wrong. After a failure it stays silent: the cause has been told, this is a consequence.
        """
        everyone = [rank for ranks in self._ranks.values() for rank in ranks]
        closing = {
            asyncio.ensure_future(self._close_rank(rank, tell)): rank
            for rank in everyone
            if rank.actor is not None and not rank.dead
        }
        if closing:
            _, late = await asyncio.wait(closing, timeout=grace_s)
            for task in late:
                task.cancel()
                rank = closing[task]
                _kill(rank)
                if tell:
                    print(f"{rank.executor!r} rank {rank.rank} did not close in {grace_s:g} s: killed", file=sys.stderr)
        if self._meshes:
            await asyncio.wait([asyncio.ensure_future(_stop(mesh)) for mesh in self._meshes], timeout=_STOP_S)
        for rank in everyone:
            _kill(rank)
        until = time.monotonic() + _KILL_S
        while any(_alive(rank) for rank in everyone) and time.monotonic() < until:
            await asyncio.sleep(0.005)

    async def _close_rank(self, rank: _Rank, tell: bool) -> None:
        blob = cloudpickle.dumps((rank.executor, rank.rank, "close", "close", None))
        try:
            result = cloudpickle.loads(await rank.actor.command.call_one(blob))
        except Exception as error:
            result = capture(rank.executor, rank.rank, "close", error)
        if tell:
            for trouble in (result.message(),) if isinstance(result, RankFailure) else result:
                print(trouble, file=sys.stderr)


async def _stop(mesh: ProcMesh) -> None:
    with contextlib.suppress(Exception):  # a mesh with a dead member cannot be stopped in order; the kill below remains
        await mesh.stop()


def _alive(rank: _Rank) -> bool:
    if rank.pidfd is None or rank.dead:
        return False
    try:
        signal.pidfd_send_signal(rank.pidfd, 0)  # type: ignore[arg-type]
    except OSError:
        return False
    return True


def _kill(rank: _Rank) -> None:
    if rank.pidfd is not None and not rank.dead:
        with contextlib.suppress(OSError):  # it has ended
            signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)


def _free_port() -> int:
    """A port below the range from which the kernel serves outgoing connections, so none of them can take it."""
    for _ in range(100):
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port among 100 tried between 20000 and 32000")


_live_runtimes: weakref.WeakSet[MonarchRuntime] = weakref.WeakSet()


def _on_fault(failure: MeshFailure) -> None:
    for runtime in list(_live_runtimes):
        runtime.on_fault(str(failure))


@atexit.register
def _close_all() -> None:
    """For a controller that ended without ``close``."""
    for runtime in list(_live_runtimes):
        runtime.close()


async def _local_host() -> HostMesh:
    """This machine, with Monarch's client brought up in silence the first time."""
    monarch.actor.unhandled_fault_hook = _on_fault  # its default ends this process and prints the cause a second time
    with _drop_stderr_line("Monarch internal logs are being written to"):
        host = this_host()
        await asyncio.wait_for(host.initialized.as_asyncio(), 30.0)
    return host


@contextlib.contextmanager
def _drop_stderr_line(start: str) -> Iterator[None]:
    """Hold back what is written to file descriptor 2 and write it afterwards, less the lines that begin with ``start``."""
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            for line in held:
                if not line.startswith(start.encode()):
                    os.write(2, line)
