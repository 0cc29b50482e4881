"""The generator: takes a weight version, delivers ``groups_per_tick`` complete groups, carries the rest.

    tick k:  weights v ─▶ engine ;  admit new prompts ─▶ decode until enough groups are complete ─▶ suspend ─▶ groups
                                       ▲                                                            │
                                       └───────────── unfinished sequences (no KV cache) ◀──────────┘

A second generator of a recipe's own (``[executors.NAME]`` with this class) samples other prompts of the same task. Without a
weights channel its model stays as it is, and its responses say so (``Response.sampled_by``).

Every tick starts from an empty KV cache, whether the weights changed or not, so a resumed run repeats the same
arithmetic. (With ``generator.kv_on_update = "keep"`` the cache lives on, and checkpoints hold it.) The end of a tick is
counted in completed groups, never in seconds.

Under ``schedule.weights = "latest"`` newer versions are swapped in between engine steps. Which and when is decided by a
``SwapPolicy`` and reported as an event; everything else follows from these decisions. Groups whose tokens would become
too old before they can leave wait outside of the engine for a newer version (``tick_schedule.py``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from llamarl.channels.base import ChannelKind
from llamarl.config import RunConfig
from llamarl.engine.base import KeepsKV, Parkable
from llamarl.engine.episode_ranks import make_environments
from llamarl.engine.episodes import EpisodeEngine, ReplyTimes, make_player
from llamarl.engine.factory import make_engine, sampling_params, to_response
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.environments.episode_pool import Environments
from llamarl.environments.episodes import begin_episode, load_episode, save_episode
from llamarl.errors import ConfigError
from llamarl.executors.base import BaseExecutor, ExecutorContext, Feed, StepResult
from llamarl.executors.device_lease import DeviceLease
from llamarl.executors.generator_ranks import generator_layout, generator_weights
from llamarl.executors.in_flight import Moment, SwapPolicy, swap_policy, tick_event
from llamarl.executors.prompts import make_prompt_stream
from llamarl.executors.version_loader import Served, VersionLoader
from llamarl.models.loading import load_tokenizer
from llamarl.observability.ranks import own_metrics
from llamarl.roles import ROLES
from llamarl.seeding import derive_seed
from llamarl.tick_schedule import NEVER, deadlines, num_startable, select_due, urgency_order
from llamarl.types import Failure, Group, Prompt

__all__ = ["GeneratorExecutor"]

_SAMPLING_SEED = 1
_OWN_PROMPTS = 1 << 25
"""Prompt indices of each further generator: the first one's begin at 0, the next one's here."""


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


class GeneratorExecutor(BaseExecutor):
    """Samples groups of responses; in: ``weights``; out: ``completions``."""

    def __init__(self, config: RunConfig, context: ExecutorContext) -> None:
        super().__init__(config, context)
        self._replicas = context.num_ranks // config.generator.tp
        if not self._replicas or config.groups_per_tick % self._replicas:
            raise ConfigError(
                f"executor {self.name!r} has {context.num_ranks} ranks for {config.groups_per_tick} groups a tick "
                f"(schedule.prompts_per_step) and generator.tp {config.generator.tp}: it needs a multiple of its ranks, and a tp of 1"
            )
        self._prompts_per_tick = config.groups_per_tick // self._replicas
        others = [name for name in config.executors if name not in ROLES]
        self._first_prompt = 0 if self.name in ROLES else _OWN_PROMPTS * (1 + others.index(self.name))
        self._weights = next((c for c in context.reads if c.kind is ChannelKind.WEIGHTS), None)
        self._replica, tp_rank = divmod(context.rank, config.generator.tp)
        self._is_tp_leader = tp_rank == 0  # its tensor-parallel peers hold the same groups and deliver none
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
        self._colocated = config.schedule.colocated and self.name in ROLES
        self._lease: DeviceLease | None = None
        self.environments: Environments | None = None

    def setup(self) -> None:
        model = self.config.model
        self.tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        layout = generator_layout(self.config, self.context.device)
        if self.config.task.has_environment:
            self.environments = make_environments(self.config.task, layout)
        self.prompts = make_prompt_stream(self.config, self.tokenizer, self.environments)
        self.engine = make_engine(
            self.config, self.tokenizer, device=self.context.device, layout=layout, parked=self._colocated
        )
        if self._colocated:
            assert isinstance(self.engine, Parkable)  # the configuration has been checked
            self._lease = DeviceLease(self.name, self.engine, parked=True)
        latest = self._weights is not None and self._weights.latest
        self.player = make_player(self.config, self.engine, self.tokenizer, self.environments, on_arrival=latest)
        self.params = sampling_params(self.config.generator.sampling, self.tokenizer)
        if self._keep_kv and not isinstance(self.engine, KeepsKV):
            raise ConfigError(
                'generator.kv_on_update is "keep", but this engine cannot keep its KV cache: set it to "recompute"'
            )
        self.version_loader = VersionLoader(
            self.engine,
            self.config.lora,
            generator_weights(self.config),
            model_path=self.config.model.path,
            keep_kv=self._keep_kv,
        )
        if latest:
            self._policy = swap_policy(self.context.run_dir, self.context.rank, num_ticks=self.config.run.num_ticks)

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        self._steps, self._swaps, self._sync_spans = 0, [], []
        if self._lease is not None:
            self._lease.take()
        weights = inputs[self._weights.name] if self._weights is not None else None
        if weights is not None:
            self._take_weights(tick, weights)
        loaded = time.monotonic()
        skipped = self.prompts.num_skipped
        self._admit(tick)
        before = _num_sampled(self._active)
        if self._policy is not None and isinstance(self.player, EpisodeEngine):
            self.player.begin_tick(self._policy.joins(tick))
        delivered = self._decode(tick, weights)
        self._served.check()
        finished = time.monotonic()
        if self._lease is not None:
            self._lease.give_back()
        carried = _num_sampled(self._active)
        generated = _num_sampled(delivered) + carried - before
        groups = [self._to_group(g) for g in delivered]
        metrics = _metrics(groups, delivered, tick)
        if self.config.data.too_long == "skip":
            metrics["prompts/too_long"] = float(self.prompts.num_skipped - skipped)
        metrics["tokens/generated"] = float(generated)
        metrics["tokens/carried"] = float(carried)
        metrics["time/repack_s"] = sum(end - start for label, start, end in self._sync_spans if label == "repack")
        metrics["rollout/carried"] = float(sum(not s.finished for g in self._active for s in g.sequences))
        if isinstance(self.player, EpisodeEngine):
            times = self.player.take_times()
            metrics |= episode_metrics(groups) | reply_metrics(times)
            self._sync_spans += [("environment", start, end) for start, end in times.waits]
        metrics["tokens_per_s/generated"] = generated / max(finished - loaded, 1e-9)
        events: tuple[Mapping[str, Any], ...] = ()
        if self._policy is not None:
            joins = self.player.joins if isinstance(self.player, EpisodeEngine) else ()
            event = tick_event(tick, self.context.rank, self._swaps, self._steps, groups, joins)
            self._policy.check(event)
            events = (event.to_plain(),)
            metrics["rollout/swaps"] = float(len(self._swaps) - 1)
        spans = (*self._sync_spans, ("generate", loaded, finished))
        if self._lease is not None:
            metrics |= self._lease.metrics
            spans += self._lease.spans
        metrics = self.own_keys(metrics)
        if not self._is_tp_leader:
            return StepResult(outputs=self.outputs_of([]), metrics=own_metrics(metrics), spans=spans, events=events)
        return StepResult(outputs=self.outputs_of(groups), metrics=metrics, spans=spans, events=events)

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
        lost = self._served.in_place is not None or self._lease is not None  # what was served did not outlive its tick
        if changed or lost:
            self._served = self.version_loader.load(weights)
            arrived = self._served.arrived_s
            self._sync_spans += [("weight_sync", started, arrived), ("repack", arrived, time.monotonic())]
        return changed

    def _admit(self, tick: int) -> None:
        while len(self._active) < self._num_active:
            index = self._first_prompt + self._cursor * self._replicas + self._replica
            self._cursor += 1
            self._active.append(self._new_group(index, tick))
        if self.environments is not None:  # the next tick's prompts begin with what their environments say
            for ahead in range(self._cursor, self._cursor + self._prompts_per_tick):
                self.prompts.ask_ahead(self._first_prompt + ahead * self._replicas + self._replica)

    def _new_group(self, index: int, tick: int) -> _ActiveGroup:
        prompt = self.prompts.get(index)
        sequences = [
            TokenSequence(
                prompt_index=index,
                sample_index=sample,
                prompt_tokens=prompt.tokens.tolist(),
                params=self.params,
                seed=derive_seed(self.config.run.seed, _SAMPLING_SEED, index, sample),
                episode=begin_episode(prompt, self.params.max_new_tokens),
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
            for sequence in self.player.step():
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
        self.player.add([s for g in groups for s in g.sequences if not s.finished])
        self._inside.update(g.prompt.index for g in groups)

    def _leave_engine(self) -> None:
        """At the end of a tick: all leave without their cache, or all that have tokens stay with it."""
        if not self._keep_kv:
            self.player.suspend()
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
        oldest = [NEVER if g.oldest_version is None else g.oldest_version for g in self._active]
        admitted = [g.admitted_tick for g in self._active]
        staleness = self.config.schedule.max_staleness
        found: list[int] = deadlines(admitted, oldest, max_segments=segments, max_staleness=staleness).tolist()
        return found

    def _deliverable(self, tick: int) -> list[int] | None:
        position = {g.prompt.index: i for i, g in enumerate(self._active)}
        return select_due(
            self._deadlines(),
            [position[i] for i in self._completed],
            tick=tick,
            prompts_per_step=self._prompts_per_tick,
        )

    def _to_group(self, active: _ActiveGroup) -> Group:
        sampled_by = "" if self._weights is not None else self.name
        responses = (to_response(s, self.tokenizer) for s in active.sequences)
        return Group(prompt=active.prompt, responses=tuple(replace(r, sampled_by=sampled_by) for r in responses))

    def save(self, folder: Path, tick: int) -> None:
        state = self._state(tick)
        if self._keep_kv:
            assert isinstance(self.engine, KeepsKV)
            state["inside"] = sorted(self._inside)
            state["kv"], tensors = self.engine.kv_state()
            save_file(dict(tensors), folder / "kv.safetensors")
        (folder / "generator.json").write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path, tick: int) -> None:
        state = json.loads((folder / "generator.json").read_text(encoding="utf-8"))
        self._take_state(state, tick, f"{folder}")
        if self._keep_kv:
            assert isinstance(self.engine, KeepsKV)
            self._inside = set(state["inside"])
            sequences = {(s.prompt_index, s.sample_index): s for g in self._active for s in g.sequences}
            self.engine.load_kv_state(state["kv"], load_file(folder / "kv.safetensors"), sequences)

    def journal(self, tick: int) -> bytes | None:
        """The carried groups; a KV cache that lives on is not small."""
        return None if self._keep_kv else json.dumps(self._state(tick)).encode()

    def restore(self, state: bytes, tick: int) -> None:
        self._take_state(json.loads(state), tick, "the journal")

    def _state(self, tick: int) -> dict[str, Any]:
        return {
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

    def _take_state(self, state: dict[str, Any], tick: int, where: str) -> None:
        assert state["tick"] == tick, f"{where} holds tick {state['tick']}, not {tick}"
        self._cursor = state["cursor"]
        self._completed = state["completed"]
        self._active = []
        for saved in state["active"]:
            group = self._new_group(saved["prompt_index"], saved["admitted_tick"])
            for sequence, values in zip(group.sequences, saved["sequences"], strict=True):
                if sequence.episode is not None:
                    load_episode(sequence.episode, values.pop("episode"))
                for name, value in values.items():
                    setattr(sequence, name, value)
            self._active.append(group)

    def close(self) -> None:
        self._active = []
        if self.environments is not None:
            self.environments.close()


_STATE = ("tokens", "logprobs", "raw_logprobs", "policy_versions", "loss_mask", "finish_reason", "error", "kept_kv")


def _sequence_state(sequence: TokenSequence) -> dict[str, Any]:
    """What a new sequence of the same prompt lacks. Floats survive JSON: Python writes the shortest exact form."""
    episode = {} if sequence.episode is None else {"episode": save_episode(sequence.episode)}
    return {name: getattr(sequence, name) for name in _STATE} | episode


def _num_sampled(groups: Sequence[_ActiveGroup]) -> int:
    """Tokens that a policy wrote."""
    return sum(len(s.tokens) - s.policy_versions.count(-1) for g in groups for s in g.sequences)


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """``episodes/*`` of delivered groups; a sample whose environment failed counts as far as it came."""
    episodes = [r for g in groups if g.prompt.opening is not None for r in g.responses]
    if not episodes:
        return {}
    turns = [len(r.turns) for r in episodes]
    return {
        "episodes/delivered": float(len(episodes)),
        "episodes/turns_mean": float(np.mean(turns)),
        "episodes/turns_max": float(max(turns)),
        "episodes/truncated_fraction": sum(r.finish_reason == "length" for r in episodes) / len(episodes),
        "episodes/environment_tokens_mean": float(np.mean([len(r.tokens) - r.num_sampled for r in episodes])),
        "episodes/failed": float(sum(isinstance(r.outcome, Failure) for r in episodes)),
    }


def reply_metrics(times: ReplyTimes) -> dict[str, float]:
    """What replies that were late cost the generator, and what it takes to say by how many steps they were."""
    return {
        "time/environment_wait_s": times.waited_s,
        "time/environment_held_s": times.held_s,
        "time/late_reply_s": times.longest_s,
        "time/engine_step_s": times.stepping_s / max(1, times.steps),
    }


def _metrics(groups: Sequence[Group], delivered: Sequence[_ActiveGroup], tick: int) -> dict[str, float]:
    lengths = [len(r.tokens) for g in groups for r in g.responses]
    reasons = [r.finish_reason for g in groups for r in g.responses]
    segments = [len(np.unique(r.policy_versions[r.policy_versions >= 0])) for g in groups for r in g.responses]
    return {
        "samples/delivered": float(len(lengths)),
        "response/length_mean": float(np.mean(lengths)),
        "response/length_min": float(min(lengths)),
        "response/length_max": float(max(lengths)),
        "response/truncated_fraction": reasons.count("length") / len(reasons),
        "rollout/segments_max": float(max(segments)),
        "rollout/age_max": float(max(tick - g.admitted_tick for g in delivered)),
    }
