"""A tiny job for runtime tests: source ─▶ doubler ─▶ sink, and back to the source over a delayed edge.

The handle is the payload itself, unless the job asks for blobs: then payloads go through files and handles name them.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.errors import ChannelError, DataError
from llamarl.executors.base import ExecutorContext, ExecutorSpec, StepResult
from llamarl.progress import watch

HERE = Path(__file__).resolve()
DELAY = 2


@dataclass(frozen=True)
class Config:
    """What a fake does out of the ordinary."""

    trouble: str = ""
    trouble_tick: int = 2
    trouble_rank: int = 0
    blob_bytes: int = 0
    step_s: float = 0.0


def job(num_ranks: int = 1, threads: int = 1, **configs: Config) -> tuple[list[ExecutorSpec], list[ChannelSpec]]:
    executors = [
        ExecutorSpec(
            name=name,
            factory=f"{HERE}:{kind}",
            config=configs.get(name, Config()),
            num_ranks=num_ranks if name == "doubler" else 1,
            threads=threads,
        )
        for name, kind in (("source", "Source"), ("doubler", "Doubler"), ("sink", "Sink"))
    ]
    channels = [
        ChannelSpec(name="numbers", kind=ChannelKind.BROADCAST, source="source", sink="doubler"),
        ChannelSpec(name="doubled", kind=ChannelKind.GATHER, source="doubler", sink="sink"),
        ChannelSpec(name="back", kind=ChannelKind.BROADCAST, source="sink", sink="source", delay=DELAY, capacity=DELAY),
    ]
    return executors, channels


class _Fake:
    def __init__(self, config: Config, context: ExecutorContext) -> None:
        self.config, self.context, self.name = config, context, context.name
        self.total = 0

    def setup(self) -> None:
        self._trouble(-1)

    def initial_token(self, channel: str, source_tick: int) -> Any:
        return 100 + source_tick

    def save(self, folder: Path, tick: int) -> None:
        (folder / "state").write_text(f"{tick} {self.total}")

    def load(self, folder: Path, tick: int) -> None:
        saved_tick, total = map(int, (folder / "state").read_text().split())
        assert saved_tick == tick
        self.total = total

    def close(self) -> None:
        if self.context.run_dir is not None:
            (self.context.run_dir / f"closed-{self.name}-{self.context.rank}").touch()

    def _trouble(self, tick: int) -> None:
        halves: list[int] = []
        watch("sleeping", "halve", 2, lambda: len(halves))
        for half in range(2):
            time.sleep(self.config.step_s / 2)
            halves.append(half)
        if tick != self.config.trouble_tick or self.context.rank != self.config.trouble_rank:
            return
        match self.config.trouble:
            case "raise":
                raise ValueError("the answer is 42")
            case "bad data":
                raise DataError("prompts.jsonl, line 3: not JSON")
            case "exit":
                sys.exit(7)
            case "exit at once":
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill once" | "stop once":
                assert self.context.run_dir is not None
                done = self.context.run_dir / f"{self.name}-{self.context.rank}-had-trouble"
                if not done.exists():
                    done.touch()
                    os.kill(os.getpid(), signal.SIGKILL if self.config.trouble == "kill once" else signal.SIGSTOP)
            case "hang":
                time.sleep(1000)
            case "print":
                print("a line on stdout")
                print("a line on stderr", file=sys.stderr)
                os.write(1, b"no newline at the end")
            case "child":
                child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
                assert self.context.run_dir is not None
                (self.context.run_dir / "child.pid").write_text(str(child.pid))
            case "daemon":
                assert self.context.run_dir is not None
                _leave_a_daemon(self.context.run_dir / "daemon.pid")
            case "":
                return
            case other:
                raise AssertionError(other)


def _leave_a_daemon(pid_file: Path) -> None:
    """A process that nobody is meant to find again: forked twice, a session of its own, deaf to polite signals."""
    code = f"""
import os, signal, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGIO, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
with open({str(pid_file) + ".new"!r}, "w") as file: file.write(str(os.getpid()))
os.rename({str(pid_file) + ".new"!r}, {str(pid_file)!r})
time.sleep(1000)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Source(_Fake):
    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        self._trouble(tick)
        self.total += 1
        payload: Any = 10 * tick + inputs["back"]
        if self.config.blob_bytes:
            payload = (payload, bytes(self.config.blob_bytes))
        return StepResult(outputs={"numbers": payload}, metrics={"source/total": self.total})


class Doubler(_Fake):
    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        self._trouble(tick)
        number = inputs["numbers"][0] if isinstance(inputs["numbers"], tuple) else inputs["numbers"]
        self.total += number
        return StepResult(
            outputs={"doubled": 2 * number + self.context.rank},
            metrics={"doubler/rank": self.context.rank, "doubler/threads": float(os.environ.get("OMP_NUM_THREADS", 0))},
            spans=(("double", time.monotonic(), time.monotonic()),),
        )


class Sink(_Fake):
    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        self._trouble(tick)
        self.total += sum(inputs["doubled"])
        return StepResult(outputs={"back": self.total}, metrics={"sink/total": self.total})


class _Direct:
    def __init__(self, spec: ChannelSpec) -> None:
        self.spec = spec

    def send(self, tick: int, payload: Any) -> Any:
        data = pickle.dumps(payload)
        if len(data) < 1000:
            return data
        fd, path = tempfile.mkstemp(prefix="llamarl-test-payload-")
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        return Path(path)

    def receive(self, handles: tuple[Any, ...], deadline_s: float) -> Any:
        payloads = []
        for handle in handles:
            data = handle
            if isinstance(handle, Path):
                try:
                    data = handle.read_bytes()
                    handle.unlink()
                except OSError as error:
                    raise ChannelError(f"{self.spec.name}: {error}") from error
            payloads.append(pickle.loads(data))
        return payloads if self.spec.kind is ChannelKind.GATHER else payloads[0]

    def close(self) -> None:
        return


def make_sender(spec: ChannelSpec, *, rank: int, num_source_ranks: int, num_sink_ranks: int) -> _Direct:
    return _Direct(spec)


def make_receiver(spec: ChannelSpec, *, rank: int, num_source_ranks: int, num_sink_ranks: int) -> _Direct:
    return _Direct(spec)


class Reducer(_Fake):
    """Sums rank + 1 over its ranks by ``torch.distributed``; the metric tells what torch was pinned to."""

    def setup(self) -> None:
        import torch.distributed

        assert torch.distributed.is_initialized()

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        import torch

        number = torch.tensor([self.context.rank + 1.0])
        self._trouble(tick)
        torch.distributed.all_reduce(number)
        return StepResult(
            metrics={
                "sum": number.item(),
                "threads": torch.get_num_threads(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
            }
        )


class MeshReducer(_Fake):
    """The same over its pair of four ranks, an axis of a mesh; a metric tells how long this group waits."""

    def setup(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "along")).get_group("along")

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        import torch

        number = torch.tensor([self.context.rank + 1.0])
        self._trouble(tick)
        torch.distributed.all_reduce(number, group=self.group)
        limit = self.group._get_backend(torch.device("cpu")).options._timeout
        return StepResult(metrics={f"sum_{self.context.rank}": number.item(), "limit_s": limit.total_seconds()})
