"""Tensors that are being copied into a slot are not written: the trainer's update waits, within a limit."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_responses import made_group, made_response
from whole_versions import read_all

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload, WeightsReceiver, WeightsSender
from llamarl.config import RunConfig, load_config
from llamarl.controller.graph import llamarl_graph
from llamarl.errors import DeadlineExceeded
from llamarl.executors import trainer as trainer_module
from llamarl.executors.base import ExecutorContext
from llamarl.executors.trainer import TrainerExecutor
from llamarl.types import Group, Score
from llamarl.weight_sync import source

WAIT_S = 120.0
SPEC = ChannelSpec(name="weights", kind=ChannelKind.WEIGHTS, source="trainer", sink="generator", capacity=2)
ENDS = {"rank": 0, "num_source_ranks": 1, "num_sink_ranks": 1}


def group(index: int) -> Group:
    """Four answers of three tokens, two of them right."""
    responses = (
        made_response(
            sample, index=index, tokens=[4 + sample, 6, 7], logprobs=-2.0, outcome=Score(value=float(sample % 2))
        )
        for sample in range(4)
    )
    return made_group(responses, index=index, tokens=[3, 5, 8])


@dataclass
class Job:
    """A trainer whose copies into slots stand still until ``gate`` opens."""

    config: RunConfig
    trainer: TrainerExecutor
    sender: WeightsSender
    gate: threading.Event
    updates: list[bool] = field(default_factory=list)
    """Of each update since the first tick: had the copy of the version before ended?"""
    waiting: threading.Event = field(default_factory=threading.Event)

    def tick(self, tick: int) -> WeightsPayload:
        payload = self.trainer.step(tick, {"scored": [group(i) for i in range(2)]}).outputs["weights"]
        assert isinstance(payload, WeightsPayload)
        return payload

    def watch(self, copied: threading.Event) -> None:
        """Note when the next tick comes to its update, and when it carries it out."""
        wait, update = self.trainer.trainer.before_update, self.trainer.trainer.weights.step

        def before() -> None:
            self.waiting.set()
            wait()

        def step(*args: Any) -> Any:
            self.updates.append(copied.is_set())
            return update(*args)

        self.trainer.trainer.before_update = before
        self.trainer.trainer.weights.step = step  # type: ignore[method-assign]

    def values(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.trainer.trainer.parameters_for_sync().items()}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    config = load_config(None, ["--evaluation.every", "0"])
    graph = llamarl_graph(config)
    ends = {"reads": graph.inputs["trainer"], "writes": graph.outputs["trainer"]}
    context = ExecutorContext(name="trainer", rank=0, num_ranks=1, device="cpu", run_dir=None, seed=0, **ends)
    gate, digest = threading.Event(), source.block_digest

    def held(data: torch.Tensor, kind: Any) -> int:
        if threading.current_thread().name == "weight-copy":
            assert gate.wait(WAIT_S)
        return digest(data, kind)

    monkeypatch.setattr(source, "block_digest", held)
    trainer = TrainerExecutor(config, context)
    trainer.setup()
    made = Job(config, trainer, WeightsSender(SPEC, **ENDS), gate)
    yield made
    gate.set()
    made.sender.close()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_update_begins_only_when_the_copy_of_the_version_before_has_ended(job: Job) -> None:
    payload = job.tick(0)
    assert payload.released is not None
    sent = job.values()
    handle = job.sender.send(1, payload)
    job.watch(payload.released)
    second = threading.Thread(target=job.tick, args=(1,), daemon=True)
    second.start()
    assert job.waiting.wait(WAIT_S), "the gradients are there"
    second.join(0.3)
    assert second.is_alive() and not job.updates and same(job.values(), sent)
    job.gate.set()
    second.join(WAIT_S)
    assert not second.is_alive() and job.updates == [True] and not same(job.values(), sent)
    version = WeightsReceiver(SPEC, **ENDS).receive((handle,), WAIT_S)
    assert version is not None and version.version == 1 and same(read_all(version), sent)


def test_copy_that_never_ends_stops_the_trainer_within_its_limit(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "_COPY_LIMIT_S", 0.1)
    payload = job.tick(0)
    assert payload.released is not None
    sent = job.values()
    job.sender.send(1, payload)
    job.watch(payload.released)
    with pytest.raises(DeadlineExceeded, match=r"has waited 0\.1 s for its own copy of the weights"):
        job.tick(1)
    assert not job.updates and same(job.values(), sent)


@pytest.mark.parametrize(("staleness", "every", "copies"), [(1, 3, 1), (2, 1, 3), (3, 2, 4), (4, 10, 5), (2, 0, 2)])
def test_versions_on_the_edge_are_kept_for_checkpoints_and_no_others(staleness: int, every: int, copies: int) -> None:
    """Each tick is told the saves of its reach; when one comes, the versions on the edge are there."""
    num_ticks = 12
    config = load_config(
        None,
        [
            "--schedule.max_staleness",
            f"{staleness}",
            "--checkpoint.every",
            f"{every}",
            "--run.num_ticks",
            f"{num_ticks}",
        ],
    )
    saves = [tick for tick in range(num_ticks) if config.checkpoint.is_due(tick, num_ticks)]
    graph = llamarl_graph(config)
    writes = graph.outputs["trainer"]
    executor = TrainerExecutor(
        config, ExecutorContext(name="t", rank=0, num_ranks=1, device="cpu", run_dir=None, seed=0, writes=writes)
    )
    executor.trainer = SimpleNamespace(copies_for_sync=lambda: {}, policy_version=0)  # type: ignore[assignment]
    most = 0
    for tick in range(num_ticks):
        executor.expect_saves([save for save in saves if tick <= save <= tick + staleness])
        executor.trainer.policy_version = tick + 1
        executor._remember(tick + 1)
        if tick in saves:
            assert set(range(max(0, tick + 1 - staleness), tick + 1)) <= executor._edge_versions.keys()
        most = max(most, len(executor._edge_versions))
    assert most == copies
