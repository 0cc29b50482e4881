"""The ranks of a job as the controller's io thread sees them: brought up, told, watched, ended.

All links live on one thread with an asyncio loop. What happens arrives on one queue as an
``Answer`` or a ``RankFailure``: a reply, an exception in an executor, the death of a process,
whichever comes first. How a rank is started and spoken to is its launcher's business:
:mod:`llamarl.runtime.local` on this machine, :mod:`llamarl.runtime.hosts` on others. What a rank says
of times is on its own machine's clock, and is read on the controller's the moment it arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import cloudpickle

from llamarl.errors import LlamaRLError
from llamarl.runtime.children import Killed
from llamarl.runtime.commands import Link, command_blob
from llamarl.runtime.output import OutputReader
from llamarl.runtime.worker import RankFailure, RankReport, WorkerPlan, capture
from llamarl.transports.segments import Segment

__all__ = ["END_S", "Answer", "Launcher", "Rank", "Ranks", "on_our_clock"]

_WHERE_S = 3.0
_STOP_S = 2.0
_KILL_S = 2.0
_OUTPUT_S = 1.0
_THREAD_S = 1.0
END_S = _STOP_S + _KILL_S + _OUTPUT_S + 2 * _THREAD_S
"""What ``Ranks.end`` takes at most, beyond the time that executors have to close."""
_TOLD_S = 2.0
"""After memory of a rank could not be read: how long to listen for its death."""


class Launcher(Protocol):
    """Starts the processes of executors somewhere."""

    async def start(
        self, plans: Sequence[WorkerPlan], labels: Sequence[str], output: OutputReader
    ) -> tuple[Sequence[Link], str]:
        """A link to each rank of one executor, in rank order, and where they meet: an
        ``init_method`` of ``torch.distributed``.

        Args:
            labels: What to call each rank in front of its lines.
            output: Who reads these.
        """
        ...

    async def stop(self) -> None:
        """Return when every process whose executor has closed is gone; may never return."""
        ...

    def close(self) -> None:
        """Release what the launcher itself holds. Any thread."""
        ...


@dataclass(frozen=True)
class Answer:
    """A rank has done what it was told."""

    executor: str
    result: Any
    num_bytes: int
    incarnation: int = 0
    """Of the executor."""
    brought: Sequence[Segment] = ()
    """Memory of this process that ``result`` names, to be closed when others hold it."""


Bring = Callable[[str, RankReport], tuple[RankReport, Sequence[Segment]]]
"""Copies what a report of an executor names on another host to this one."""


@dataclass
class Rank:
    """One process, as the io thread knows it."""

    executor: str
    rank: int
    incarnation: int = 0
    """How often the executor was brought up before."""
    link: Link | None = None
    up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it may be told more than its setup."""
    told: list[str] = field(default_factory=list)
    """What it was told to do and has not done, in order."""
    unwanted: bool = False
    """It is to end, or not to begin: nobody looks at it any more."""

    @property
    def doing(self) -> str:
        if self.link is None:
            return "start of its process"
        return self.told[0] if self.told else "between two ticks"

    @property
    def pid(self) -> int:
        return self.link.pid if self.link is not None else 0

    @property
    def dead(self) -> bool:
        return self.link is not None and self.link.ended.done()


class Ranks:
    """Brings the ranks of all executors up, carries orders to them, ends them.

    Args:
        plans: Executor -> the plan of each rank.
        launchers: Executor -> who starts its processes.
    """

    bring: Bring | None = None
    """Applied to reports as they come, on a thread. Where it fails, that is as if it had not been there."""

    def __init__(self, plans: Mapping[str, tuple[WorkerPlan, ...]], launchers: Mapping[str, Launcher]) -> None:
        self.events: queue.SimpleQueue[Answer | RankFailure] = queue.SimpleQueue()
        self.of = {name: [Rank(name, plan.rank) for plan in ranks] for name, ranks in plans.items()}
        """Executor -> its ranks, in order."""
        self._plans = plans
        self._launchers = dict(launchers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False
        self._output = OutputReader()
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run_loop, name="llamarl-runtime", daemon=True)

    # -- for the controller's thread --

    def bring_up(self) -> None:
        """Start every process and set it up; the answers are ``RankSetup``."""
        self._thread.start()
        for name, plans in self._plans.items():
            self._submit(self._bring_up(name, plans, self.of[name]))

    def replace(
        self,
        executor: str,
        plans: tuple[WorkerPlan, ...],
        incarnation: int,
        *,
        prepared: Callable[[], Sequence[WorkerPlan]] | None = None,
    ) -> None:
        """End what is left of an executor and start its processes anew; the answers are
        ``RankSetup``, and it may be told more at once. What its earlier processes still say arrives
        with their own incarnation.

        Args:
            prepared: Called first, on a thread: the plans as they are to be.
        """
        old = self.of[executor]
        now = [Rank(executor, plan.rank, incarnation) for plan in plans]
        self.of[executor] = now
        self._submit(self._replace(executor, plans, old, now, prepared))

    def stop(self, executor: str) -> None:
        """End what is left of an executor's processes; returns when they have ended, within five seconds."""
        stopping = asyncio.run_coroutine_threadsafe(self._stop(self.of[executor]), self._loop)
        with contextlib.suppress(TimeoutError):
            stopping.result(2 * _KILL_S + 1.0)

    def send(self, executor: str, doing: str, method: str, argument: Any) -> int:
        """Tell every rank of ``executor`` to do something; returns the bytes sent."""
        ranks, pickled = self.of[executor], cloudpickle.dumps(argument)
        blobs = [command_blob(executor, rank.rank, doing, method, pickled) for rank in ranks]
        for rank, blob in zip(ranks, blobs, strict=True):
            self._submit(self._command(rank, doing, blob))
        return sum(map(len, blobs))

    def tell(self, executor: str, news: Any) -> int:
        """Hand ``news`` to every rank of ``executor`` while it works; returns the bytes sent. News
        that gets lost with its process needs no report: the death is reported."""
        blob = cloudpickle.dumps(news)
        for rank in self.of[executor]:
            self._submit(self._tell(rank, blob))
        return len(blob) * len(self.of[executor])

    def where(self, ranks: Sequence[Rank]) -> list[str]:
        """Where the executor of each of ``ranks`` is now, in words; takes at most six seconds."""
        asking = asyncio.run_coroutine_threadsafe(self._where(ranks), self._loop)
        try:
            return asking.result(2 * _WHERE_S)
        except TimeoutError:
            return ["unknown: the runtime's own thread does not answer"] * len(ranks)

    def progress(self) -> dict[str, str]:
        """Executor -> how far its first rank has come, in words, of those that are at work; takes at most six seconds."""
        asking = asyncio.run_coroutine_threadsafe(self._progress(), self._loop)
        try:
            return asking.result(2 * _WHERE_S)
        except TimeoutError:
            return {}

    def stopped(self, ranks: Sequence[Rank]) -> list[Rank]:
        """Those of ``ranks`` that a signal has stopped, as far as their machines can tell; takes at
        most six seconds."""
        asking = asyncio.run_coroutine_threadsafe(self._stopped(ranks), self._loop)
        try:
            return asking.result(2 * _WHERE_S)
        except TimeoutError:
            return []

    def end(self, grace_s: float, *, orderly: bool) -> None:
        """Close the executors, stop the processes, kill what is left. Takes at most ``grace_s`` + ``END_S`` seconds.

        Args:
            grace_s: How long executors may take to close.
            orderly: Let processes exit in order and print what goes wrong on the way. After a failure, when that would
                take time and bury the cause, they are killed as soon as their executors have closed.
        """
        self._ending = True
        ending = asyncio.run_coroutine_threadsafe(self._end(grace_s, orderly), self._loop)
        try:
            ending.result(grace_s + _STOP_S + _KILL_S + _THREAD_S)
        except TimeoutError:
            print("runtime: processes did not end in time and are killed", file=sys.stderr)
        except KeyboardInterrupt:
            self._kill_all()  # asked a second time to stop: it is what this does, now without waiting
        finally:
            self._output.close(_OUTPUT_S)
            self._kill_all(at_once=True)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_THREAD_S)
            for launcher in set(self._launchers.values()):
                launcher.close()

    # -- io thread: bringing up --

    async def _replace(
        self,
        name: str,
        plans: Sequence[WorkerPlan],
        old: Sequence[Rank],
        now: Sequence[Rank],
        prepared: Callable[[], Sequence[WorkerPlan]] | None,
    ) -> None:
        await self._stop(old)
        await self._bring_up(name, plans, now, prepared)

    async def _stop(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            rank.unwanted = True
        for at_once in (False, True):
            for rank in ranks:
                _kill(rank, at_once=at_once)
            if left := [rank.link.ended for rank in ranks if rank.link is not None and not rank.dead]:
                await asyncio.wait(left, timeout=_KILL_S)

    async def _bring_up(
        self,
        name: str,
        plans: Sequence[WorkerPlan],
        ranks: Sequence[Rank],
        prepared: Callable[[], Sequence[WorkerPlan]] | None = None,
    ) -> None:
        labels = [name] if len(plans) == 1 else [f"{name} {plan.rank}" for plan in plans]
        try:
            if prepared is not None:
                plans = await asyncio.to_thread(prepared)
            if any(rank.unwanted for rank in ranks):
                return
            links, rendezvous = await self._launchers[name].start(plans, labels, self._output)
        except Exception as error:
            failure = capture(name, 0, "start of its processes", error)
            lost = isinstance(error, ConnectionError)  # a host: as if its ranks had begun, and died with it
            self.events.put(replace(failure, incarnation=ranks[0].incarnation, died=lost, from_outside=lost))
            return
        for rank, link in zip(ranks, links, strict=True):
            rank.link = link
        if any(rank.unwanted for rank in ranks):  # since it was begun to start them
            await self._stop(ranks)
            return
        for rank, plan, link in zip(ranks, plans, links, strict=True):
            self._spawn(self._watch(rank, link))
            plan = replace(plan, rendezvous=rendezvous, in_own_process=True)
            setup = command_blob(name, rank.rank, "setup", "setup", cloudpickle.dumps(plan))
            rank.told.insert(0, "setup")
            self._spawn(self._carry(rank, "setup", setup))
            rank.up.set()  # whoever waits for it writes after the setup's task, which is first in line

    # -- io thread: orders, deaths --

    async def _command(self, rank: Rank, doing: str, blob: bytes) -> None:
        rank.told.append(doing)
        await rank.up.wait()
        await self._carry(rank, doing, blob)

    async def _carry(self, rank: Rank, doing: str, blob: bytes) -> None:
        assert rank.link is not None
        try:
            reply = await rank.link.command(blob)
            result = on_our_clock(cloudpickle.loads(reply), rank.link)
        except Exception as error:  # the process is gone, or the reply cannot be read here
            result = None if rank.dead else capture(rank.executor, rank.rank, doing, error)
        else:
            rank.told.remove(doing)
        brought: Sequence[Segment] = ()
        if self.bring is not None and isinstance(result, RankReport):
            try:
                result, brought = await asyncio.to_thread(self.bring, rank.executor, result)
            except LlamaRLError:
                await asyncio.wait({rank.link.ended}, timeout=_TOLD_S)
                if rank.dead:
                    return
        if self._ending or result is None:
            return
        if isinstance(result, RankFailure):
            self.events.put(replace(result, incarnation=rank.incarnation))
        else:
            self.events.put(Answer(rank.executor, result, len(reply), rank.incarnation, brought))

    async def _tell(self, rank: Rank, blob: bytes) -> None:
        if rank.link is None:  # brought up again: its order has what was there, and news is never waited for
            return
        try:
            trouble = await rank.link.tell(blob)
            failure = on_our_clock(cloudpickle.loads(trouble), rank.link) if trouble else None
        except Exception as error:
            failure = None if rank.dead else capture(rank.executor, rank.rank, rank.doing, error)
        if failure is not None and not self._ending:
            self.events.put(replace(failure, incarnation=rank.incarnation))

    async def _watch(self, rank: Rank, link: Link) -> None:
        cause = await link.ended
        if not self._ending:
            failure = RankFailure(
                executor=rank.executor,
                rank=rank.rank,
                doing=rank.doing,
                cause=cause,
                traceback="",
                pid=rank.pid,
                host=link.host,
                at_s=float("-inf"),  # before every exception: peers that miss a dead process fail because of it
                died=True,
                from_outside=isinstance(cause, Killed),
                incarnation=rank.incarnation,
            )
            self.events.put(failure)

    async def _where(self, ranks: Sequence[Rank]) -> list[str]:
        async def ask(rank: Rank) -> str:
            if rank.link is None:
                return rank.doing
            try:
                return await asyncio.wait_for(rank.link.where(), _WHERE_S)
            except Exception as error:  # a diagnosis only: the deadline that asked for it is what gets raised
                return f"unknown, it does not answer ({type(error).__name__}): stopped, or busy in native code"

        return list(await asyncio.gather(*(ask(rank) for rank in ranks)))

    async def _progress(self) -> dict[str, str]:
        async def ask(rank: Rank) -> str:
            doing = {"setup": "starting", "start of its process": "starting"}.get(rank.doing, rank.doing)
            if rank.link is None or rank.dead:
                return doing
            try:
                return await asyncio.wait_for(rank.link.progress(), _WHERE_S) or doing
            except (OSError, TimeoutError):  # it is gone, or busy in native code: only shown
                return doing

        working = [ranks[0] for ranks in self.of.values() if ranks[0].link is None or ranks[0].told]
        return dict(zip([r.executor for r in working], await asyncio.gather(*map(ask, working)), strict=True))

    async def _stopped(self, ranks: Sequence[Rank]) -> list[Rank]:
        async def ask(rank: Rank) -> bool:
            if rank.link is None or rank.dead:
                return False
            try:
                return await asyncio.wait_for(rank.link.stopped(), _WHERE_S)
            except (OSError, TimeoutError):  # its host is gone, or does not answer: that is told where it is seen
                return False

        answers = await asyncio.gather(*(ask(rank) for rank in ranks))
        return [rank for rank, stopped in zip(ranks, answers, strict=True) if stopped]

    # -- io thread: ending --

    async def _end(self, grace_s: float, orderly: bool) -> None:
        up = [rank for rank in self._all() if rank.link is not None and not rank.dead]
        closing = {asyncio.ensure_future(self._close(rank, orderly)): rank for rank in up}
        if closing:
            _, late = await asyncio.wait(closing, timeout=grace_s)
            for task in late:
                task.cancel()
                if orderly:
                    who = f"{closing[task].executor!r} rank {closing[task].rank}"
                    print(f"runtime: {who} did not close within {grace_s:g} s and is killed", file=sys.stderr)
                _kill(closing[task])
        if not orderly:  # there is nothing to wait for: who could close has closed
            self._kill_all()
        stopping = [asyncio.ensure_future(launcher.stop()) for launcher in set(self._launchers.values())]
        await asyncio.wait(stopping, timeout=_STOP_S)
        self._kill_all()
        if alive := [rank.link.ended for rank in up if rank.link is not None and not rank.dead]:
            await asyncio.wait(alive, timeout=_KILL_S)

    async def _close(self, rank: Rank, orderly: bool) -> None:
        blob = command_blob(rank.executor, rank.rank, "close", "close", cloudpickle.dumps(None))
        assert rank.link is not None
        try:
            result = cloudpickle.loads(await rank.link.command(blob))
        except Exception as error:
            result = capture(rank.executor, rank.rank, "close", error)
        if orderly:
            for trouble in (result.message(),) if isinstance(result, RankFailure) else result:
                print(trouble, file=sys.stderr)

    def _run_loop(self) -> None:
        """The io thread. At its end, calls that will never be answered are dropped without a word."""
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _all(self) -> list[Rank]:
        return [rank for ranks in self.of.values() for rank in ranks]

    def _kill_all(self, *, at_once: bool = False) -> None:
        for rank in self._all():
            _kill(rank, at_once=at_once)

    def _submit(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._loop.call_soon_threadsafe(self._spawn, coroutine)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop alone would let it be collected
        task.add_done_callback(self._tasks.discard)


def on_our_clock(result: Any, link: Link) -> Any:
    """What a rank sent, with its times on this machine's clock; a failure also says where it happened."""
    if isinstance(result, RankFailure):
        return replace(result, at_s=link.here_s(result.at_s), host=link.host)
    if isinstance(result, RankReport):
        spans = tuple((label, link.here_s(start), link.here_s(end)) for label, start, end in result.spans)
        started_s, finished_s = link.here_s(result.started_s), link.here_s(result.finished_s)
        return replace(result, started_s=started_s, finished_s=finished_s, spans=spans)
    return result


def _kill(rank: Rank, *, at_once: bool = False) -> None:
    if rank.link is not None and not rank.dead:
        with contextlib.suppress(OSError):  # it has ended
            rank.link.kill(at_once=at_once)
