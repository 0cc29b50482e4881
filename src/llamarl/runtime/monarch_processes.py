"""The processes of a job under Monarch, and the thread that talks to them.

All of Monarch and all pidfds live on one thread with an asyncio loop. What happens arrives on one queue as an ``Answer``
or a ``RankFailure``: a reply, an exception in an executor, the death of a process, whichever comes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import HostMesh, Point, ProcMesh

from llamarl.runtime.bootstrap import OUTPUT_PREFIX, PARENT_PID
from llamarl.runtime.determinism import environment
from llamarl.runtime.monarch_actors import Hello, RankActor, Witness, command_blob
from llamarl.runtime.monarch_client import fault_listeners, local_host
from llamarl.runtime.output import OutputReader
from llamarl.runtime.process_watch import cause_of_death, open_pidfd, process_space
from llamarl.runtime.worker import RankFailure, WorkerPlan, capture

__all__ = ["Answer", "Processes", "Rank"]

_WHERE_S = 3.0
_STOP_S = 2.0
_KILL_S = 2.0
_OUTPUT_S = 1.0
_runtimes = itertools.count()


@dataclass(frozen=True)
class Answer:
    """A rank has done what it was told."""

    executor: str
    result: Any
    num_bytes: int


@dataclass
class Rank:
    """One process, as the io thread knows it."""

    executor: str
    rank: int
    actor: Any = None
    witness: Any = None
    pid: int = 0
    pidfd: int | None = None
    """Set for processes that this one can watch and kill by pid."""
    doing: str = "start of its process"
    dead: bool = False

    def kill(self) -> None:
        if self.pidfd is not None and not self.dead:
            with contextlib.suppress(OSError):  # it has ended
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class Processes:
    """Brings the ranks of all executors up, carries orders to them, ends them.

    Args:
        plans: Executor -> the plan of each rank.
        hosts: Executor -> where its processes go; executors without an entry go to this machine.
    """

    def __init__(self, plans: Mapping[str, tuple[WorkerPlan, ...]], hosts: Mapping[str, HostMesh]) -> None:
        self.events: queue.SimpleQueue[Answer | RankFailure] = queue.SimpleQueue()
        self.ranks = {name: [Rank(name, plan.rank) for plan in ranks] for name, ranks in plans.items()}
        self._plans = plans
        self._hosts = hosts
        self._meshes: list[ProcMesh] = []
        self._greeted: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending = False
        self._token = f"j{os.getpid()}r{next(_runtimes)}"
        self._reader = OutputReader()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="llamarl-runtime", daemon=True)

    # -- for the controller's thread --

    def bring_up(self) -> None:
        """Start every process and set it up; the answers are ``RankSetup``."""
        self._thread.start()
        fault_listeners.add(self._on_fault)
        self._submit(self._bring_up())

    def send(self, executor: str, doing: str, method: str, argument: Any) -> int:
        """Tell every rank of ``executor`` to do something; returns the bytes sent."""
        blobs = [command_blob(executor, rank.rank, doing, method, argument) for rank in self.ranks[executor]]
        for rank, blob in zip(self.ranks[executor], blobs, strict=True):
            self._submit(self._command(rank, doing, blob))
        return sum(map(len, blobs))

    def tell(self, executor: str, news: Any) -> int:
        """Hand ``news`` to every rank of ``executor`` while it works; returns the bytes sent. News that gets lost with its
        process needs no report: the death is reported."""
        blob = cloudpickle.dumps(news)
        for rank in self.ranks[executor]:
            self._submit(self._tell(rank, blob))
        return len(blob) * len(self.ranks[executor])

    def where(self, ranks: Sequence[Rank]) -> list[str]:
        """Where the executor of each of ``ranks`` is now, in words; takes at most six seconds."""
        asking = asyncio.run_coroutine_threadsafe(self._where(ranks), self._loop)
        try:
            return asking.result(2 * _WHERE_S)
        except TimeoutError:
            return ["unknown: the runtime's own thread does not answer"] * len(ranks)

    def end(self, grace_s: float, *, orderly: bool) -> None:
        """Close the executors, stop the processes, kill what is left. Takes at most ``grace_s`` + 6 seconds.

        Args:
            grace_s: How long executors may take to close.
            orderly: Let processes exit in order and print what goes wrong on the way. After a failure, when that would
                take time and bury the cause, they are killed as soon as their executors have closed.
        """
        self._ending = True
        fault_listeners.discard(self._on_fault)
        ending = asyncio.run_coroutine_threadsafe(self._end(grace_s, orderly), self._loop)
        try:
            ending.result(grace_s + _STOP_S + _KILL_S + 1.0)
        except TimeoutError:
            print("runtime: processes did not end in time and are killed", file=sys.stderr)
        except KeyboardInterrupt:
            pass  # asked a second time to stop: it is what this does, now without waiting
        finally:
            for rank in self._all_ranks():
                rank.kill()
            self._reader.close(_OUTPUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(1.0)

    # -- io thread: bringing up --

    async def _bring_up(self) -> None:
        try:
            here = await local_host(alone=not self._hosts)
            for name in self._plans:
                self._spawn(self._bring_up_executor(name, self._hosts.get(name, here)))
        except Exception as error:
            self.events.put(capture("runtime", 0, "start", error))

    async def _bring_up_executor(self, name: str, host: HostMesh) -> None:
        ranks, plans = self.ranks[name], self._plans[name]
        try:
            hosts = len(host.region.slice())
            assert len(plans) % hosts == 0, f"{name!r}: {len(plans)} ranks cannot be spread evenly over {hosts} hosts"
            mesh = host.spawn_procs(
                per_host={"ranks": len(plans) // hosts},
                name=re.sub(r"\W", "_", name),
                bootstrap_command=self._bootstrap_commands(name, local=name not in self._hosts),
            )
            self._meshes.append(mesh)
            actors = mesh.spawn(self._mesh_name(name), RankActor).flatten("rank")
            witnesses = mesh.spawn("witness", Witness).flatten("rank")
            for rank in ranks:
                rank.actor, rank.witness = actors.slice(rank=rank.rank), witnesses.slice(rank=rank.rank)
            hellos: list[Hello] = await asyncio.gather(*(rank.actor.hello.call_one() for rank in ranks))
        except Exception as error:
            self.events.put(capture(name, 0, "start of its processes", error))
            return
        self._greeted.add(name)
        if len(self._greeted) == len(self._plans):
            self._reader.unlink()
        space = process_space()
        _, first_space, address, port = hellos[0]
        together = all(other == first_space for _, other, _, _ in hellos)
        for rank, plan, (pid, its_space, _, _) in zip(ranks, plans, hellos, strict=True):
            rank.pid = pid
            if its_space == space:
                self._watch(rank)
            plan = replace(plan, rendezvous=("127.0.0.1" if together else address, port))
            self._spawn(self._command(rank, "setup", command_blob(name, rank.rank, "setup", "setup", plan)))

    def _bootstrap_commands(self, name: str, *, local: bool) -> Callable[[Point], BootstrapCommand]:
        """The command line and environment of each rank; what torch reads at import must be there from the start."""
        spec = self._plans[name][0].spec
        shared = {
            **environment(spec.threads),
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path)),
        }
        if local:
            shared[PARENT_PID] = str(os.getpid())
        labels = [name] if spec.num_ranks == 1 else [f"{name} {rank}" for rank in range(spec.num_ranks)]
        prefixes = [self._reader.open(label) for label in labels]

        def command(point: Point) -> BootstrapCommand:
            own = {OUTPUT_PREFIX: prefixes[point.rank]}
            return BootstrapCommand(sys.executable, None, ["-m", "llamarl.runtime.bootstrap"], shared | own)

        return command

    # -- io thread: orders, deaths --

    async def _command(self, rank: Rank, doing: str, blob: bytes) -> None:
        rank.doing = doing
        try:
            reply = await rank.actor.command.call_one(blob)
            result = cloudpickle.loads(reply)
        except Exception as error:  # the actor is gone, or the reply cannot be read here
            result = None if rank.dead else capture(rank.executor, rank.rank, doing, error)
        else:
            rank.doing = "between two ticks"
        if self._ending or result is None:
            return
        failed = isinstance(result, RankFailure)
        self.events.put(result if failed else Answer(rank.executor, result, len(reply)))

    async def _tell(self, rank: Rank, blob: bytes) -> None:
        try:
            await rank.witness.tell.call_one(blob)
        except Exception as error:
            if not rank.dead and not self._ending:
                self.events.put(capture(rank.executor, rank.rank, rank.doing, error))

    def _watch(self, rank: Rank) -> None:
        try:
            rank.pidfd = open_pidfd(rank.pid)
        except ProcessLookupError:
            self._on_death(rank, "its process ended")
            return
        if rank.pidfd is not None:
            self._loop.add_reader(rank.pidfd, self._on_pidfd, rank, rank.pidfd)

    def _on_pidfd(self, rank: Rank, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        self._on_death(rank, cause_of_death(pidfd))

    def _on_death(self, rank: Rank, cause: str) -> None:
        rank.dead = True
        if not self._ending:
            # At "the beginning of time", before every exception: peers that miss a dead process fail because of it.
            self.events.put(_failure(rank.executor, rank.rank, rank.doing, cause, rank.pid, at_s=float("-inf")))

    def _mesh_name(self, executor: str) -> str:
        """Names that no other runtime of this process uses, so that Monarch's late reports find the right one."""
        return f"{re.sub(r'[^a-z0-9]', '', executor.lower())}{self._token}n{list(self._plans).index(executor)}"

    def _on_fault(self, mesh_name: str, text: str) -> None:
        """Monarch tells of a failure that no call waited for: an idle process on another host died."""
        name = next((name for name in self._plans if mesh_name.startswith(self._mesh_name(name) + "-")), None)
        if name is None:
            return
        crashed = re.search(r"crashed_ranks=\[(\d+)", text)  # in the text only
        rank = self.ranks[name][int(crashed[1]) if crashed else 0]
        if not rank.dead:
            cause = f"Monarch reports: {text.strip()}"
            self.events.put(_failure(name, rank.rank, rank.doing, cause, rank.pid, at_s=time.monotonic()))

    async def _where(self, ranks: Sequence[Rank]) -> list[str]:
        async def ask(rank: Rank) -> str:
            if not rank.pid:
                return rank.doing
            try:
                return str(await asyncio.wait_for(rank.witness.where.call_one().as_asyncio(), _WHERE_S))
            except Exception as error:  # a diagnosis only: the deadline that asked for it is what gets raised
                return f"unknown, it does not answer ({type(error).__name__}): stopped, or busy in native code"

        return list(await asyncio.gather(*(ask(rank) for rank in ranks)))

    # -- io thread: ending --

    async def _end(self, grace_s: float, orderly: bool) -> None:
        up = [rank for rank in self._all_ranks() if rank.actor is not None and not rank.dead]
        closing = {asyncio.ensure_future(self._close(rank, orderly)): rank for rank in up}
        if closing:
            _, late = await asyncio.wait(closing, timeout=grace_s)
            for task in late:
                task.cancel()
                closing[task].kill()
                if orderly:
                    who = f"{closing[task].executor!r} rank {closing[task].rank}"
                    print(f"runtime: {who} did not close within {grace_s:g} s and is killed", file=sys.stderr)
        if self._meshes and orderly:  # after a failure there is nothing to wait for: who could close has closed
            await asyncio.wait([asyncio.ensure_future(_stop(mesh)) for mesh in self._meshes], timeout=_STOP_S)
        for rank in up:
            rank.kill()
        until = time.monotonic() + _KILL_S
        while any(rank.pidfd is not None and not rank.dead for rank in up) and time.monotonic() < until:
            await asyncio.sleep(0.005)

    async def _close(self, rank: Rank, orderly: bool) -> None:
        blob = command_blob(rank.executor, rank.rank, "close", "close", None)
        try:
            result = cloudpickle.loads(await rank.actor.command.call_one(blob))
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
        for rank in self._all_ranks():
            if rank.pidfd is not None:
                os.close(rank.pidfd)
                rank.pidfd = None

    def _all_ranks(self) -> list[Rank]:
        return [rank for ranks in self.ranks.values() for rank in ranks]

    def _submit(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._loop.call_soon_threadsafe(self._spawn, coroutine)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop alone would let it be collected
        task.add_done_callback(self._tasks.discard)


def _failure(executor: str, rank: int, doing: str, cause: str, pid: int, at_s: float) -> RankFailure:
    return RankFailure(executor=executor, rank=rank, doing=doing, cause=cause, traceback="", pid=pid, at_s=at_s)


async def _stop(mesh: ProcMesh) -> None:
    with contextlib.suppress(Exception):  # a mesh with a dead member cannot be stopped in order; the kill remains
        await mesh.stop()
