"""The generator: takes a weight version, delivers ``groups_per_tick`` complete groups, carries the rest.

    tick k:  weights v ─▶ engine ;  admit new prompts ─▶ decode until enough groups are complete ─▶ suspend ─▶ groups
                                       ▲                                                            │
                                       └───────────── unfinished sequences (no KV cache) ◀──────────┘

Every tick starts from an empty KV cache, whether the weights changed or not, so a resumed run repeats the same
arithmetic. (With ``generator.kv_on_update = "keep"`` the cache lives on, and checkpoints hold it.) The end of a tick is
counted in completed groups, never in seconds.

Under ``schedule.weights = "latest"`` newer versions are swapped in between engine steps. Which and when is decided by a
``SwapPolicy`` and reported as an event; everything else follows from these decisions. Groups whose tokens would become
too old before they can leave wait outside of the engine for a newer version (``partial_rollouts.py``).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from llamarl.config import RunConfig
from llamarl.engine.base import Engine, KeepsKV, Parkable
from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.errors import ConfigError
from llamarl.executors.base import ExecutorContext, Feed, StepResult
from llamarl.executors.config import SamplingConfig
from llamarl.executors.generator_ranks import generator_layout, generator_weights
from llamarl.executors.hand_over import Served
from llamarl.executors.in_flight import Moment, SwapPolicy, swap_policy, tick_event
from llamarl.executors.partial_rollouts import deadline, num_startable, select_due, urgency_order
from llamarl.executors.prompts import make_prompt_stream
from llamarl.executors.turns import Turns
from llamarl.executors.version_loader import VersionLoader
from llamarl.models.loading import load_tokenizer
from llamarl.models.parallel import ParallelLayout
from llamarl.seeding import derive_seed
from llamarl.types import Failure, Group, Prompt, Response

__all__ = ["GeneratorExecutor", "make_engine", "resolve_device", "sampling_params", "to_response"]

_SAMPLING_SEED = 1


@dataclass
class _ActiveGroup:
    prompt: Prompt
    admitted_tick: int
    sequences: list[TokenSequence] = field(default_factory=list)
    _oldest_version: int | None = None

    @property
    def oldest_version(self) -> int | None:
        """Of all its tokens; None while it has none. Versions only grow, so the first one found stays."""
        if self._oldest_version is None:
            versions = (v for s in self.sequences for v in s.policy_versions if v >= 0)
            self._oldest_version = min(versions, default=None)
        return self._oldest_version

    @property
    def complete(self) -> bool:
        return all(s.finished for s in self.sequences)


class GeneratorExecutor:
    """Samples groups of responses; in: ``weights``; out: ``completions``."""

    def __init__(self, config: RunConfig, context: ExecutorContext) -> None:
        self.name = context.name
        self.config = config
        self.context = context
        self._prompts_per_tick = config.groups_per_tick // config.generator.dp
        self._replica, tp_rank = divmod(context.rank, config.generator.tp)
        self._speaks = tp_rank == 0  # its tensor-parallel peers hold the same groups and deliver none
        self._num_active = int(self._prompts_per_tick * config.generator.oversubscription)
        self._cursor = 0  # prompts this replica has admitted so far
        self._active: list[_ActiveGroup] = []  # in order of admission
        self._served = Served(0, None)
        self._completed: list[int] = []  # prompt indices, in order of completion
        self._inside: set[int] = set()  # prompt indices of groups that the engine has been given
        self._keep_kv = config.generator.kv_on_update == "keep"
        self._policy: SwapPolicy | None = None  # None: the weights edge alone says which version
        self._steps = 0  # engine steps of this tick
        self._swaps: list[tuple[int, int]] = []  # (engine step, version) of this tick
        self._sync_spans: list[tuple[str, float, float]] = []
        self._turns: Turns | None = None  # of a co-located job

    def setup(self) -> None:
        self.tokenizer = load_tokenizer(self.config.model.path)
        self.prompts = make_prompt_stream(self.config, self.tokenizer)
        layout = generator_layout(self.config, self.context.device)
        colocated = self.config.schedule.colocated
        self.engine = make_engine(
            self.config, self.tokenizer, device=self.context.device, layout=layout, parked=colocated
        )
        if colocated:
            assert isinstance(self.engine, Parkable)  # the configuration has been checked
            self._turns = Turns(self.name, self.engine, parked=True)
        self.params = sampling_params(self.config.generator.sampling, self.tokenizer)
        if self._keep_kv and not isinstance(self.engine, KeepsKV):
            raise ConfigError(
                'generator.kv_on_update is "keep", but this engine cannot keep its KV cache: set it to "recompute"'
            )
        self.version_loader = VersionLoader(
            self.engine, self.config.lora, generator_weights(self.config), keep_kv=self._keep_kv
        )
        if self.config.schedule.weights == "latest":
            self._policy = swap_policy(self.context.run_dir, self.context.rank, num_ticks=self.config.run.num_ticks)

    def initial_token(self, channel: str, source_tick: int) -> Any:
        raise ValueError(f"channel {channel!r} leaves the generator with a delay; only the weights edge may have one")

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        self._steps, self._swaps, self._sync_spans = 0, [], []
        if self._turns is not None:
            self._turns.take()
        self._take_weights(tick, inputs["weights"])
        loaded = time.monotonic()
        self._admit(tick)
        before = sum(len(s.tokens) for g in self._active for s in g.sequences)
        delivered = self._decode(tick, inputs["weights"])
        self._served.check()
        finished = time.monotonic()
        if self._turns is not None:
            self._turns.give_back()
        generated = sum(len(s.tokens) for g in [*delivered, *self._active] for s in g.sequences) - before
        groups = [self._to_group(g) for g in delivered]
        metrics = _metrics(groups, delivered, tick)
        metrics["tokens/generated"] = float(generated)
        metrics["time/repack_s"] = sum(end - start for label, start, end in self._sync_spans if label == "repack")
        metrics["rollout/carried"] = float(sum(not s.finished for g in self._active for s in g.sequences))
        metrics["tokens_per_s/generated"] = generated / max(finished - loaded, 1e-9)
        events: tuple[Mapping[str, Any], ...] = ()
        if self._policy is not None:
            event = tick_event(tick, self.context.rank, self._swaps, self._steps, groups)
            self._policy.check(event)
            events = (event.to_plain(),)
            metrics["rollout/swaps"] = float(len(self._swaps) - 1)
        spans = (*self._sync_spans, ("generate", loaded, finished))
        if self._turns is not None:
            metrics |= self._turns.metrics
            spans += self._turns.spans
        outputs = {"completions": groups if self._speaks else []}
        return StepResult(outputs=outputs, metrics=metrics, spans=spans, events=events)

    def _take_weights(self, tick: int, weights: Any) -> bool:
        """Serve the version that is due before the next engine step; returns whether it is another one.

        Args:
            weights: The tick's version, or, where a policy decides, the feed of all that have arrived.
        """
        started = time.monotonic()
        if self._policy is not None:
            feed: Feed = weights
            newest = max(0, feed.newest() + 1)  # the trainer's tick j makes version j + 1; before it began, 0
            serving = self.engine.policy_version
            version = self._policy.choose(Moment(tick=tick, step=self._steps, serving=serving, newest=newest))
            if not self._swaps or version != serving:
                self._swaps.append((self._steps, version))
            if version == serving:
                return False
            weights = feed.take(version - 1)
            if self._steps:  # else the last tick has checked it, and its slot may since hold another version
                self._served.check()
        changed = bool(weights.version != self.engine.policy_version)
        lost = self._served.in_place is not None or self._turns is not None  # what was served did not outlive its tick
        if changed or lost:
            self._served = self.version_loader.load(weights)
            arrived = self._served.arrived_s
            self._sync_spans += [("weight_sync", started, arrived), ("repack", arrived, time.monotonic())]
        return changed

    def _admit(self, tick: int) -> None:
        while len(self._active) < self._num_active:
            index = self._cursor * self.config.generator.dp + self._replica
            self._cursor += 1
            self._active.append(self._new_group(index, tick))

    def _new_group(self, index: int, tick: int) -> _ActiveGroup:
        prompt = self.prompts.get(index)
        sequences = [
            TokenSequence(
                prompt_index=index,
                sample_index=sample,
                prompt_tokens=prompt.tokens.tolist(),
                params=self.params,
                seed=derive_seed(self.config.run.seed, _SAMPLING_SEED, index, sample),
            )
            for sample in range(self.config.generator.group_size)
        ]
        return _ActiveGroup(prompt, tick, sequences)

    def _decode(self, tick: int, weights: Any) -> list[_ActiveGroup]:
        """Decode until the groups to deliver are complete; take them out of the active ones."""
        by_index = {g.prompt.index: g for g in self._active}
        self._enter(tick)
        while (chosen := self._deliverable(tick)) is None:
            if self._policy is not None and self._steps and self._take_weights(tick, weights):
                self._enter(tick)
            for sequence in self.engine.step():
                group = by_index[sequence.prompt_index]
                if group.complete and group.prompt.index not in self._completed:
                    self._completed.append(group.prompt.index)
            self._steps += 1
        self._leave_engine()
        delivered = [self._active[i] for i in chosen]
        gone = {g.prompt.index for g in delivered}
        self._active = [g for g in self._active if g.prompt.index not in gone]
        self._completed = [i for i in self._completed if i not in gone]
        self._inside -= gone
        return delivered

    def _enter(self, tick: int) -> None:
        """Give the engine, in order of admission, the unfinished groups that it may sample and has not got."""
        groups = self._active
        if self._policy is not None:
            startable = num_startable(
                self.engine.policy_version,
                tick=tick,
                max_staleness=self.config.schedule.max_staleness,
                prompts_per_step=self._prompts_per_tick,
            )
            groups = [groups[i] for i in sorted(urgency_order(self._deadlines())[:startable])]
        groups = [g for g in groups if g.prompt.index not in self._inside]
        self.engine.add([s for g in groups for s in g.sequences if not s.finished])
        self._inside.update(g.prompt.index for g in groups)

    def _leave_engine(self) -> None:
        """At the end of a tick: all leave without their cache, or all that have tokens stay with it."""
        if not self._keep_kv:
            self.engine.suspend()
            self._inside.clear()
            return
        assert isinstance(self.engine, KeepsKV)
        for group in self._active if self._policy is not None else ():
            if (
                group.oldest_version is None and group.prompt.index in self._inside
            ):  # the next tick may not sample it yet
                self.engine.withdraw(group.prompt.index)
                self._inside.remove(group.prompt.index)

    def _deadlines(self) -> list[int]:
        """The last tick at which each active group may leave."""
        segments = self.config.generator.max_segments
        if self._policy is None:
            return [g.admitted_tick + segments - 1 for g in self._active]
        staleness = self.config.schedule.max_staleness
        return [
            deadline(g.admitted_tick, g.oldest_version, max_segments=segments, max_staleness=staleness)
            for g in self._active
        ]

    def _deliverable(self, tick: int) -> list[int] | None:
        position = {g.prompt.index: i for i, g in enumerate(self._active)}
        return select_due(
            self._deadlines(),
            [position[i] for i in self._completed],
            tick=tick,
            prompts_per_step=self._prompts_per_tick,
        )

    def _to_group(self, active: _ActiveGroup) -> Group:
        return Group(prompt=active.prompt, responses=tuple(to_response(s, self.tokenizer) for s in active.sequences))

    def save(self, folder: Path, tick: int) -> None:
        state = {
            "tick": tick,
            "cursor": self._cursor,
            "completed": self._completed,
            "active": [
                {
                    "prompt_index": g.prompt.index,
                    "admitted_tick": g.admitted_tick,
                    "sequences": [_sequence_state(s) for s in g.sequences],
                }
                for g in self._active
            ],
        }
        if self._keep_kv:
            assert isinstance(self.engine, KeepsKV)
            state["inside"] = sorted(self._inside)
            state["kv"], tensors = self.engine.kv_state()
            save_file(dict(tensors), folder / "kv.safetensors")
        (folder / "generator.json").write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path, tick: int) -> None:
        state = json.loads((folder / "generator.json").read_text(encoding="utf-8"))
        assert state["tick"] == tick, f"{folder} holds tick {state['tick']}, not {tick}"
        self._cursor = state["cursor"]
        self._completed = state["completed"]
        self._active = []
        for saved in state["active"]:
            group = self._new_group(saved["prompt_index"], saved["admitted_tick"])
            for sequence, values in zip(group.sequences, saved["sequences"], strict=True):
                for name, value in values.items():
                    setattr(sequence, name, value)
            self._active.append(group)
        if self._keep_kv:
            assert isinstance(self.engine, KeepsKV)
            self._inside = set(state["inside"])
            sequences = {(s.prompt_index, s.sample_index): s for g in self._active for s in g.sequences}
            self.engine.load_kv_state(state["kv"], load_file(folder / "kv.safetensors"), sequences)

    def close(self) -> None:
        self._active = []


_STATE = ("tokens", "logprobs", "raw_logprobs", "policy_versions", "loss_mask", "finish_reason", "error", "kept_kv")


def _sequence_state(sequence: TokenSequence) -> dict[str, Any]:
    """What a new sequence of the same prompt lacks. Floats survive JSON: Python writes the shortest exact form."""
    return {name: getattr(sequence, name) for name in _STATE}


def make_engine(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: str,
    layout: ParallelLayout | None = None,
    parked: bool = False,
) -> Engine:
    """The engine that the recipe's generator section asks for.

    Args:
        layout: This rank's place among tensor-parallel ranks; None holds the whole model.
        parked: Without its memory until ``unpark``; the native engine only.
    """
    if config.generator.engine.name == "vllm":
        from llamarl.engine.vllm import VllmEngine

        return VllmEngine(config.model.path, config.generator.engine, quantization=config.generator.quantization)
    return NativeEngine(
        config.model.path,
        config.generator.engine,
        tokenizer=tokenizer,
        device=device,
        quantization=config.generator.quantization,
        layout=layout,
        parked=parked,
    )


def resolve_device(device: str) -> str:
    """ "auto" is CUDA where there is one.

    Raises:
        ConfigError: There is no such device here.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    there = torch.cuda.device_count()
    if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= there:
        raise ConfigError(f"there is no device {device!r} here ({there} CUDA devices): set it to cpu or auto")
    return device


def sampling_params(config: SamplingConfig, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> SamplingParams:
    """Sampling parameters of a recipe; the tokenizer's end-of-text token always stops a response."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)} | changes
    eos = tokenizer.eos_token_id
    return SamplingParams(stop_token_ids=() if eos is None else (int(eos),), **values)


def to_response(sequence: TokenSequence, tokenizer: PreTrainedTokenizerBase) -> Response:
    """The record of a finished sequence. One that the engine had to give up is failed, not scored."""
    assert sequence.finish_reason is not None, "only a finished sequence becomes a response"
    failed = sequence.finish_reason in ("error", "deadline", "cancelled")
    return Response(
        prompt_index=sequence.prompt_index,
        sample_index=sequence.sample_index,
        tokens=np.asarray(sequence.tokens, np.int32),
        behavior_logprobs=np.asarray(sequence.logprobs, np.float32),
        policy_versions=np.asarray(sequence.policy_versions, np.int32),
        loss_mask=np.asarray(sequence.loss_mask, np.bool_),
        text=str(tokenizer.decode(sequence.tokens, skip_special_tokens=True)),
        finish_reason=sequence.finish_reason,
        kept_kv=sequence.kept_kv,
        outcome=Failure(kind="generation", detail=sequence.error or sequence.finish_reason) if failed else None,
    )


def _metrics(groups: Sequence[Group], delivered: Sequence[_ActiveGroup], tick: int) -> dict[str, float]:
    lengths = [len(r.tokens) for g in groups for r in g.responses]
    reasons = [r.finish_reason for g in groups for r in g.responses]
    segments = [len(np.unique(r.policy_versions)) for g in groups for r in g.responses]
    return {
        "response/length_mean": float(np.mean(lengths)),
        "response/length_min": float(min(lengths)),
        "response/length_max": float(max(lengths)),
        "response/truncated_fraction": reasons.count("length") / len(reasons),
        "rollout/segments_max": float(max(segments)),
        "rollout/age_max": float(max(tick - g.admitted_tick for g in delivered)),
    }
