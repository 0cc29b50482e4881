"""The trainer executor: one optimizer step a tick, then the new version goes onto its weight edges.

In: the judged samples; out: ``weights`` (with a delay, to the generator) and, where the job evaluates, ``eval_weights``
(without one: the versions that are due, nothing at other ticks) and, where the policy teaches itself,
``teacher_weights``, as ``weights``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.channels.weights import WeightsPayload
from llamarl.checkpoint.storage import RunIdentity
from llamarl.config import RunConfig
from llamarl.errors import DeadlineExceeded, TrainingDiverged
from llamarl.executors.base import BaseExecutor, ExecutorContext, StepResult
from llamarl.executors.device_lease import DeviceLease
from llamarl.executors.generator_ranks import evaluator_weights, generator_weights
from llamarl.models.precision import resolve_precision
from llamarl.observability.keys import own_metrics
from llamarl.observability.trained_tokens import TrainedResponse, write_trained
from llamarl.observability.writing import Patience
from llamarl.roles import carries_version
from llamarl.trainer.batch import TrainingSequence
from llamarl.trainer.sharded_state import in_background
from llamarl.trainer.step import Trainer
from llamarl.types import Group
from llamarl.weight_sync.layout import AnyLayout, MeshLayout
from llamarl.weight_sync.model_layouts import layout_of_shards

__all__ = ["TokenLog", "TrainerExecutor"]


class TokenLog:
    """Keeps what a tick's forward passes said of each token, for ``observability.trained_tokens``.

    micro-batch ──add──▶ tensors on the device ──responses──▶ one copy to the host, after the last update was queued

    Of one tick on one rank. A response that several steps take is kept as the first of them saw it.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        """``groups`` are those that the sequences' ``group`` counts."""
        self._groups = groups
        self._parts: list[tuple[Sequence[TrainingSequence], Tensor, Tensor]] = []

    def add(self, part: Sequence[TrainingSequence], policy_logprobs: Tensor, clipped: Tensor) -> None:
        """Take a micro-batch: its sequences, and of their T tokens end to end log-probs and clipped
        ones, both [T]; or sequences that were not computed, with none."""
        if part:
            self._parts.append((part, policy_logprobs, clipped))

    def responses(self) -> list[TrainedResponse]:
        """All of them, in order of groups and samples. Waits for the device."""
        found: dict[tuple[int, int], TrainedResponse] = {}
        for part, policy_logprobs, clipped in self._parts:
            ends = np.cumsum([len(s.targets) for s in part])[:-1]
            of_each = zip(
                part,
                np.split(policy_logprobs.to(torch.float32).cpu().numpy(), ends),
                np.split(clipped.cpu().numpy(), ends),
                strict=True,
            )
            for sequence, logprobs, cut in of_each:
                found.setdefault(
                    (sequence.group, sequence.sample),
                    TrainedResponse(
                        prompt_index=self._groups[sequence.group].prompt.index,
                        sample_index=sequence.sample,
                        advantage=sequence.advantage,
                        policy_logprobs=logprobs,
                        clipped=cut,
                    ),
                )
        return [found[place] for place in sorted(found)]


_COPY_LIMIT_S = 600.0


class _Released(threading.Event):
    """Set when a version has been copied; says when that was."""

    def __init__(self) -> None:
        super().__init__()
        self.made_s = self.freed_s = time.monotonic()

    def set(self) -> None:
        self.freed_s = time.monotonic()
        super().set()


class TrainerExecutor(BaseExecutor):
    """Owns the policy. Version v is the weights after v ticks."""

    def __init__(self, config: RunConfig, context: ExecutorContext) -> None:
        super().__init__(resolve_precision(config), context)
        self._stop = ""
        self._readers: list[_Released] = []
        """Copies of the last version into slots that may still be running."""
        self._copied_s = 0.0
        """How long the copies took that have ended since the last tick."""
        served = getattr(torch, self.config.generator.served_dtype)
        adapters_only = config.lora.rank > 0 and config.lora.hand_over == "adapter"
        self._wire_dtype = served if served != torch.float32 and not adapters_only else None
        """Generators hold the weights in it, so they travel in it; adapters are merged in float32."""
        self._layout: MeshLayout | None = None
        self._waits: list[tuple[str, float, float]] = []
        """Spans of this tick in which training stood still for such a copy."""
        self._edge_versions: dict[int, dict[str, torch.Tensor]] = {}
        """Earlier versions that the next checkpoint must hold: copies, made only in the ticks before one is due."""
        self._saves: set[int] = set()
        """Ticks to come after which the state is saved, as far as they are told."""
        self._lease: DeviceLease | None = None
        """Of a co-located job."""
        delays = [channel.delay for channel in context.writes if channel.kind is ChannelKind.WEIGHTS]
        self._kept = max([1, *delays]) - 1
        """Versions before the newest that lie on a weights edge: the standard job's ``schedule.max_staleness``."""

    def setup(self) -> None:
        if self.context.run_dir is not None:
            self._folder = RunIdentity.of(self.context.run_dir)
        self.trainer = Trainer(
            self.config.model.path,
            self.config.trainer,
            self.config.optimizer,
            self.config.algorithm,
            temperature=self.config.trained_temperature,
            seed=self.config.run.seed,
            device=self.context.device,
            num_ticks=self.config.run.num_ticks,
            lora=self.config.lora,
            has_reference=self.config.has_reference,
            max_staleness=self.config.token_staleness_bound,
        )
        self.trainer.before_update = self._wait_for_readers
        if self.config.schedule.colocated:
            self._lease = DeviceLease(self.name, self.trainer)

    def initial_token(self, channel: str, source_tick: int) -> Any:
        """The version made at ``source_tick``: version 0 before the run began, saved ones after a resume."""
        version = max(0, source_tick + 1)
        sink_layout = self._layout_behind(channel)
        if version == self.trainer.policy_version:
            return self._payload(version, sink_layout=sink_layout)
        return WeightsPayload(
            version=version,
            tensors=self._edge_versions[version],
            layout=self._sync_layout(),
            wire_dtype=self._wire_dtype,
            sink_layout=sink_layout,
        )

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        if self._lease is not None:
            self._lease.take()
        started = time.monotonic()
        arrived: list[Group] = self.items_of(inputs)
        groups = [group for group in arrived if not group.is_held_out]
        held_out = [group for group in arrived if group.is_held_out]
        files: list[Path] = []
        evaluated = self._measure(held_out, tick) if tick == 0 else {}
        log = TokenLog(groups) if self._logs_tokens(tick) else None
        self.trainer.on_tokens = log.add if log is not None else None
        metrics = self._train(groups, tick)
        trained = time.monotonic()
        if tick > 0:
            evaluated = self._measure(held_out, tick)
        metrics = {**metrics, **evaluated}
        if log is not None and self.context.run_dir is not None:
            self._folder.check()
            patience = Patience(self.config.deadlines.disk_s)
            rank = self.context.rank
            files.append(write_trained(self.context.run_dir, tick, self.name, rank, log.responses(), patience))
            self._waits.append(("write trained tokens", trained, time.monotonic()))
        version = self.trainer.policy_version
        self._remember(version)
        if self._lease is not None:
            self._wait_for_readers()  # a tick without an update has not waited for them
            self._lease.give_back()
        outputs = self.outputs_of(groups)
        for channel in self.context.writes:
            if channel.kind is ChannelKind.WEIGHTS:
                outputs[channel.name] = self._version_for(channel, version)
        metrics = {**metrics, "time/weight_copy_s": self._copied_s}
        self._copied_s = 0.0
        spans = (("train", started, trained), *self._waits)
        self._waits.clear()
        if self._lease is not None:
            metrics |= self._lease.metrics
            spans += self._lease.spans
        if self.context.rank:  # the trainer's are over all ranks already
            metrics = own_metrics(metrics)
        return StepResult(outputs=outputs, metrics=metrics, spans=spans, stop=self._stop, files=tuple(files))

    def _logs_tokens(self, tick: int) -> bool:
        """Whether this rank writes what it makes of the tick's tokens; of peers, which see the same, one does."""
        due = self.context.run_dir is not None and self.config.observability.rollouts
        return due and self.trainer.layout.is_data_leader

    def _train(self, groups: list[Group], tick: int) -> Mapping[str, float]:
        """The tick's optimizer steps; if training has diverged, the job is asked to stop."""
        try:
            return self.trainer.train(groups, tick)
        except TrainingDiverged as error:
            self._stop = self._stop or str(error)
            return self.trainer.metrics

    def _measure(self, held_out: list[Group], tick: int) -> dict[str, float]:
        """The present weights' loss on held-out demonstrations, at ticks that have any; all ranks agree on these."""
        evaluation = self.config.evaluation
        if not self.config.algorithm.imitates or not evaluation.every:
            return {}
        if tick > 0 and not evaluation.is_due(tick + 1, self.config.run.num_ticks):
            return {}
        started = time.monotonic()
        loss = self.trainer.loss_on(held_out)
        self._waits.append(("evaluate", started, time.monotonic()))
        return {"eval/loss": loss, "eval/policy_version": float(self.trainer.policy_version)}

    def _version_for(self, channel: ChannelSpec, version: int) -> WeightsPayload | None:
        """What leaves on a weights channel: each version to a generator, to the evaluator those that are due."""
        if not carries_version(self.config, channel.sink, version - 1):
            return None
        return self._payload(version, background=True, sink_layout=self._layout_behind(channel.name))

    def _sync_layout(self) -> MeshLayout:
        """What all trainer ranks hold of what is handed over."""
        if self._layout is None:
            self._layout = layout_of_shards(self.trainer.sync_layout(), self.trainer.layout)
        return self._layout

    def _layout_behind(self, channel: str) -> AnyLayout | None:
        """What the ranks at a channel's other end hold of what is handed over; None: all of it."""
        sink = next((edge.sink for edge in self.context.writes if edge.name == channel), "generator")
        known = {"generator": generator_weights, "evaluator": evaluator_weights}
        return known[sink](self.config) if sink in known else None

    def _payload(
        self, version: int, *, background: bool = False, sink_layout: AnyLayout | None = None
    ) -> WeightsPayload:
        released = _Released() if background else None
        if released is not None:
            self._readers.append(released)
        return WeightsPayload(
            version=version,
            tensors=self.trainer.parameters_for_sync(self._wire_dtype),
            layout=self._sync_layout(),
            wire_dtype=self._wire_dtype,
            sink_layout=sink_layout,
            released=released,
        )

    def _wait_for_readers(self) -> None:
        """Return when no version is being copied out of the weights any more: from now on they may change.

        Raises:
            DeadlineExceeded: A copy is still running after the limit.
        """
        started = time.monotonic()
        for reader in self._readers:
            if not reader.wait(_COPY_LIMIT_S):
                raise DeadlineExceeded(
                    f"the trainer has waited {_COPY_LIMIT_S:g} s for its own copy of the weights into a slot; the machine "
                    "is short of memory or cores"
                )
            self._copied_s += reader.freed_s - reader.made_s
        if self._readers:
            self._waits.append(("weight_sync: wait for own copy", started, time.monotonic()))
        self._readers.clear()

    def expect_saves(self, ticks: Collection[int]) -> None:
        """Keep the versions that the checkpoints after ``ticks`` hold: from the one that is there now on."""
        self._saves.update(ticks)
        self._remember(self.trainer.policy_version)

    def _remember(self, version: int) -> None:
        """Copy this version if a checkpoint comes while it still lies on the weights edge.

        The checkpoint after tick c holds versions c + 1 - kept .. c + 1; the last is the trainer's own state.
        """
        ahead = range(version, version + self._kept)  # ticks c whose checkpoint needs this version as an older one
        if version not in self._edge_versions and not self._saves.isdisjoint(ahead):
            self._edge_versions[version] = self.trainer.copies_for_sync()
        for old in [v for v in self._edge_versions if v < version - self._kept]:
            del self._edge_versions[old]
        self._saves = {tick for tick in self._saves if tick >= version}

    def save(self, folder: Path, tick: int) -> Future[tuple[Path, ...]]:
        """All ranks write into one folder beside their own, on a thread. Once it is done,
        the versions up to this tick's are whole in their slots too: who begins again from it need
        not make them again."""
        edge = {_edge(v): self._edge_versions[v] for v in range(max(0, tick + 1 - self._kept), tick + 1)}
        state = self.trainer.stage(edge, copy=True)
        copies = tuple(self._readers)

        def write() -> tuple[Path, ...]:
            written = self.trainer.write(state, folder.parent / "state")
            for copy in copies:
                copy.wait(_COPY_LIMIT_S)
            return written

        return in_background(write)

    def load(self, folder: Path, tick: int) -> None:
        if self._lease is not None:
            self._lease.take()
        edge = self.trainer.load(folder.parent / "state")
        if self._lease is not None:
            self._lease.give_back()
        assert self.trainer.policy_version == tick + 1, f"{folder}: version {self.trainer.policy_version}, tick {tick}"
        self._edge_versions = {v: edge[_edge(v)] for v in range(max(0, tick + 1 - self._kept), tick + 1)}

    def close(self) -> None:
        self._edge_versions = {}


def _edge(version: int) -> str:
    """What a checkpoint calls a version that still lies on the weights edge."""
    return f"version_{version}"
