"""The trainer executor: one optimizer step a tick, then the new version goes onto its weight edges.

In: ``scored``; out: ``weights`` (delay max_staleness + 1, to the generator) and, where the job evaluates,
``eval_weights`` (the versions that are due, nothing at other ticks).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from llamarl.channels.weights import WeightsPayload
from llamarl.checkpoint.storage import saving
from llamarl.config import RunConfig
from llamarl.errors import TrainingDiverged
from llamarl.executors.base import ExecutorContext, StepResult
from llamarl.executors.evaluator import evaluation_due
from llamarl.executors.generator_ranks import generator_weights
from llamarl.trainer.step import Trainer
from llamarl.types import Group
from llamarl.weight_sync.layout import Layout

__all__ = ["TrainerExecutor"]


class TrainerExecutor:
    """Owns the policy. Version v is the weights after v ticks."""

    def __init__(self, config: RunConfig, context: ExecutorContext) -> None:
        self.name = context.name
        self.config = config
        self.context = context
        self._stop = ""
        self._edge_versions: dict[int, dict[str, torch.Tensor]] = {}
        """Earlier versions that the next checkpoint must hold: copies, made only in the ticks before one is due."""

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
        )
        self._remember(0)

    def initial_token(self, channel: str, source_tick: int) -> Any:
        """The version made at ``source_tick``: version 0 before the run began, saved ones after a resume."""
        version = max(0, source_tick + 1)
        if version == self.trainer.policy_version:
            return self._payload(version, generator_weights(self.config))
        return WeightsPayload(
            version=version,
            tensors=self._edge_versions[version],
            layout=self.trainer.sync_layout(),
            sink_layout=generator_weights(self.config),
        )

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        started = time.monotonic()
        metrics = self._train(inputs["scored"], tick)
        trained = time.monotonic()
        version = self.trainer.policy_version
        self._remember(version)
        outputs: dict[str, Any] = {"weights": self._payload(version, generator_weights(self.config))}
        if self.config.evaluation.every:
            due = evaluation_due(version, every=self.config.evaluation.every, num_ticks=self.config.run.num_ticks)
            outputs["eval_weights"] = self._payload(version) if due else None
        if tick == self.config.run.num_ticks - 1 and self.context.run_dir is not None:
            self._export(self.context.run_dir / "model")
        return StepResult(outputs=outputs, metrics=metrics, spans=(("train", started, trained),), stop=self._stop)

    def _train(self, groups: list[Group], tick: int) -> Mapping[str, float]:
        """One optimizer step; if training has diverged, the job is asked to stop and this step's metrics are few."""
        try:
            return self.trainer.train(groups, tick)
        except TrainingDiverged as error:
            self._stop = self._stop or str(error)
            return {"policy_version": float(self.trainer.policy_version), "step/skipped": 1.0}

    def _payload(self, version: int, sink_layout: Layout | None = None) -> WeightsPayload:
        return WeightsPayload(
            version=version,
            tensors=self.trainer.parameters_for_sync(),
            layout=self.trainer.sync_layout(),
            sink_layout=sink_layout,
        )

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

    def _export(self, folder: Path) -> None:
        """A Hugging Face folder of the policy; the old one, if any, stays until the new one is whole."""
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        with saving(partial):
            self.trainer.export(partial)
            if self.context.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(partial, folder)

    def save(self, folder: Path, tick: int) -> None:
        self.trainer.save(folder)
        staleness = self.config.schedule.max_staleness
        versions = [v for v in range(max(0, tick + 1 - staleness), tick + 1)]
        for version in versions:
            save_file(self._edge_versions[version], folder / f"edge_version_{version}.safetensors")
        (folder / "edge.json").write_text(json.dumps({"tick": tick, "versions": versions}), encoding="utf-8")

    def load(self, folder: Path, tick: int) -> None:
        self.trainer.load(folder)
        assert self.trainer.policy_version == tick + 1, f"{folder}: version {self.trainer.policy_version}, tick {tick}"
        edge = json.loads((folder / "edge.json").read_text(encoding="utf-8"))
        self._edge_versions = {v: load_file(folder / f"edge_version_{v}.safetensors") for v in edge["versions"]}
        self._remember(self.trainer.policy_version)

    def close(self) -> None:
        self._edge_versions = {}
