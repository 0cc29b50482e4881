"""The trainer executor: one optimizer step a tick, then the new version goes onto its weight edges.

In: the judged samples (``scored``, or what reference and critic made of them); out: ``weights`` (delay max_staleness + 1, to the generator) and, where the job evaluates,
``eval_weights`` (the versions that are due, nothing at other ticks).
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from llamarl.channels.weights import WeightsPayload
from llamarl.checkpoint.storage import saving
from llamarl.config import RunConfig
from llamarl.errors import DeadlineExceeded, TrainingDiverged
from llamarl.executors.base import ExecutorContext, StepResult
from llamarl.executors.evaluator import evaluation_due
from llamarl.executors.generator_ranks import generator_weights
from llamarl.executors.sample_path import sample_channel_into
from llamarl.executors.turns import Turns
from llamarl.trainer.sharded_state import in_background
from llamarl.trainer.step import Trainer
from llamarl.types import Group
from llamarl.weight_sync.layout import Layout

__all__ = ["TrainerExecutor"]


_COPY_LIMIT_S = 600.0


class _Released(threading.Event):
    """Set when a version has been copied; says when that was."""

    def __init__(self) -> None:
        super().__init__()
        self.made_s = self.freed_s = time.monotonic()

    def set(self) -> None:
        self.freed_s = time.monotonic()
        super().set()


class TrainerExecutor:
    """Owns the policy. Version v is the weights after v ticks."""

    def __init__(self, config: RunConfig, context: ExecutorContext) -> None:
        self.name = context.name
        self.config = config
        self.context = context
        self._stop = ""
        self._readers: list[_Released] = []
        """Copies of the last version into slots that may still be running."""
        self._copied_s = 0.0
        """How long the copies took that have ended since the last tick."""
        served = getattr(torch, config.generator.engine.dtype)
        adapters_only = config.lora.rank > 0 and config.lora.hand_over == "adapter"
        self._wire_dtype = served if served != torch.float32 and not adapters_only else None
        """Generators hold the weights in it, so they travel in it; adapters are merged in float32."""
        self._waits: list[tuple[str, float, float]] = []
        """Spans of this tick in which training stood still for such a copy."""
        self._edge_versions: dict[int, dict[str, torch.Tensor]] = {}
        """Earlier versions that the next checkpoint must hold: copies, made only in the ticks before one is due."""
        self._turns: Turns | None = None
        """Of a co-located job."""

    def setup(self) -> None:
        self.trainer = Trainer(
            self.config.model.path,
            self.config.trainer,
            self.config.optimizer,
            self.config.algorithm,
            temperature=self.config.generator.sampling.temperature,
            seed=self.config.run.seed,
            device=self.context.device,
            num_ticks=self.config.run.num_ticks,
            lora=self.config.lora,
            has_reference=self.config.has_reference,
        )
        self.trainer.before_update = self._wait_for_readers
        self._remember(0)
        if self.config.schedule.colocated:
            self._turns = Turns(self.name, self.trainer)

    def initial_token(self, channel: str, source_tick: int) -> Any:
        """The version made at ``source_tick``: version 0 before the run began, saved ones after a resume."""
        version = max(0, source_tick + 1)
        if version == self.trainer.policy_version:
            return self._payload(version, sink_layout=generator_weights(self.config))
        return WeightsPayload(
            version=version,
            tensors=self._edge_versions[version],
            layout=self.trainer.sync_layout(),
            wire_dtype=self._wire_dtype,
            sink_layout=generator_weights(self.config),
        )

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        if self._turns is not None:
            self._turns.take()
        started = time.monotonic()
        metrics = self._train(inputs[sample_channel_into(self.config, "trainer")], tick)
        trained = time.monotonic()
        version = self.trainer.policy_version
        self._remember(version)
        if tick == self.config.run.num_ticks - 1 and self.context.run_dir is not None and not self._stop:
            if self.config.lora.rank:
                self._export(self.context.run_dir / "adapter", self.trainer.export_adapter)
            if not self.config.lora.rank or self.config.lora.export_merged:
                self._export(self.context.run_dir / "model", self.trainer.export)
        if self._turns is not None:
            self._wait_for_readers()  # a tick without an update has not waited for them
            self._turns.give_back()
        outputs: dict[str, Any] = {
            "weights": self._payload(version, background=True, sink_layout=generator_weights(self.config))
        }
        if self.config.evaluation.every:
            due = evaluation_due(version, every=self.config.evaluation.every, num_ticks=self.config.run.num_ticks)
            outputs["eval_weights"] = self._payload(version, background=True) if due else None
        metrics = {**metrics, "time/weight_copy_s": self._copied_s}
        self._copied_s = 0.0
        spans = (("train", started, trained), *self._waits)
        self._waits.clear()
        if self._turns is not None:
            metrics |= self._turns.metrics
            spans += self._turns.spans
        return StepResult(outputs=outputs, metrics=metrics, spans=spans, stop=self._stop)

    def _train(self, groups: list[Group], tick: int) -> Mapping[str, float]:
        """One optimizer step; if training has diverged, the job is asked to stop and this step's metrics are few."""
        try:
            return self.trainer.train(groups, tick)
        except TrainingDiverged as error:
            self._stop = self._stop or str(error)
            return {"policy_version": float(self.trainer.policy_version), "step/skipped": 1.0}

    def _payload(self, version: int, *, background: bool = False, sink_layout: Layout | None = None) -> WeightsPayload:
        released = _Released() if background else None
        if released is not None:
            self._readers.append(released)
        return WeightsPayload(
            version=version,
            tensors=self.trainer.parameters_for_sync(),
            layout=self.trainer.sync_layout(),
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

    def _remember(self, version: int) -> None:
        """Copy this version if a checkpoint comes while it still lies on the weights edge.

        The checkpoint after tick c holds versions c + 1 - max_staleness .. c + 1; the last is the trainer's own state.
        """
        staleness = self.config.schedule.max_staleness
        saves = self.config.checkpoint.is_due
        ahead = range(version, version + staleness)  # ticks c whose checkpoint needs this version as an older one
        if staleness and (self._stop or any(saves(c, self.config.run.num_ticks) for c in ahead)):
            self._edge_versions[version] = {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in self.trainer.parameters_for_sync().items()
            }
        for old in [v for v in self._edge_versions if v < version - staleness]:
            del self._edge_versions[old]

    def _export(self, folder: Path, write: Callable[[Path], None]) -> None:
        """A folder of the policy; the old one, if any, stays until the new one is whole."""
        partial = folder.with_name(folder.name + ".partial")
        if self.context.rank == 0:  # who writes also tidies: another rank would remove what rank 0 has begun
            shutil.rmtree(partial, ignore_errors=True)
        with saving(partial):
            write(partial)
            if self.context.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(partial, folder)

    def save(self, folder: Path, tick: int) -> Future[None]:
        """All ranks write into one folder beside their own, on a thread unless ``checkpoint.background`` is off."""
        staleness = self.config.schedule.max_staleness
        edge = {_edge(v): self._edge_versions[v] for v in range(max(0, tick + 1 - staleness), tick + 1)}
        background = self.config.checkpoint.background
        state = self.trainer.stage(edge, copy=background)
        writing = in_background(lambda: self.trainer.write(state, folder.parent / "state"))
        if not background:
            writing.result()
        return writing

    def load(self, folder: Path, tick: int) -> None:
        if self._turns is not None:
            self._turns.take()
        edge = self.trainer.load(folder.parent / "state")
        if self._turns is not None:
            self._turns.give_back()
        assert self.trainer.policy_version == tick + 1, f"{folder}: version {self.trainer.policy_version}, tick {tick}"
        staleness = self.config.schedule.max_staleness
        self._edge_versions = {v: edge[_edge(v)] for v in range(max(0, tick + 1 - staleness), tick + 1)}
        self._remember(self.trainer.policy_version)

    def close(self) -> None:
        self._edge_versions = {}


def _edge(version: int) -> str:
    """What a checkpoint calls a version that still lies on the weights edge."""
    return f"version_{version}"
