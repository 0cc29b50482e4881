"""The generator: takes a weight version, delivers ``groups_per_tick`` complete groups, carries the rest.

    tick k:  weights v ─▶ engine ;  admit new prompts ─▶ decode until enough groups are complete ─▶ suspend ─▶ groups
                                       ▲                                                            │
                                       └───────────── unfinished sequences (no KV cache) ◀──────────┘

once for each of this rank's shards, one after the other; usually it has one (``generator_shard.py``).

A second generator of a recipe's own (``[executors.NAME]`` with this class) samples other prompts of
the same task. Without a weights channel its model stays as it is, and its responses say so
(``Response.sampled_by``).

Every tick starts from an empty KV cache, whether the weights changed or not, so a resumed run repeats the same
arithmetic. The end of a tick is counted in completed groups, never in seconds.

Under ``schedule.weights = "latest"`` newer versions are swapped in between engine steps. Which and when is decided by a
``SwapPolicy`` and reported as an event; everything else follows from these decisions. Groups whose tokens would become
too old before they can leave wait outside of the engine for a newer version (``tick_schedule.py``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.channels.base import ChannelKind
from llamarl.channels.data import Shares
from llamarl.channels.samples import Limits
from llamarl.config import RunConfig
from llamarl.data.curriculum import Outcome, PassRates
from llamarl.determinism import derive_seed
from llamarl.engine.base import Parkable
from llamarl.engine.episode_ranks import make_environments
from llamarl.engine.episodes import EpisodeEngine, ReplyTimes, make_player
from llamarl.engine.expert_record import of_group
from llamarl.engine.factory import make_engine, sampling_params, to_response
from llamarl.engine.ranks import EngineRanks
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.engine.sequence import written
from llamarl.environments.episode_pool import Environments
from llamarl.environments.episodes import begin_episode
from llamarl.environments.factory import make_prompt_stream
from llamarl.errors import CheckpointError, ConfigError
from llamarl.executors.base import BaseExecutor, ExecutorContext, Feed, StepResult
from llamarl.executors.device_lease import DeviceLease
from llamarl.executors.generator_ranks import generator_layout, generator_weights, replicas_of, why_ranks_unfit
from llamarl.executors.generator_shard import ActiveGroup, GeneratorShard, num_sampled, shards_of_rank
from llamarl.executors.in_flight import Moment, SwapPolicy, swap_policy, tick_event
from llamarl.executors.reward import JUDGING_SHARE
from llamarl.executors.version_loader import Served, VersionLoader
from llamarl.models.loading import load_tokenizer
from llamarl.observability.keys import REPLICA_KEY, own_metrics
from llamarl.progress import watch
from llamarl.roles import ROLES
from llamarl.tick_schedule import num_startable, urgency_order
from llamarl.tick_shares import Dealing
from llamarl.types import Failure, Group

__all__ = ["GeneratorExecutor"]

_SAMPLING_SEED = 1


class GeneratorExecutor(BaseExecutor):
    """Samples groups of responses; in: ``weights``; out: ``completions``."""

    def __init__(self, config: RunConfig, context: ExecutorContext) -> None:
        super().__init__(config, context)
        generator, replicas = config.generator, replicas_of(config, context.num_ranks)
        num_shards = generator.shards or len(replicas)
        if why := why_ranks_unfit(generator, context.num_ranks, config.groups_per_tick):
            raise ConfigError(f"executor {self.name!r} {why}")
        dealing = Dealing(generator.shares if generator.replicas else (1.0,) * num_shards, config.groups_per_tick)
        self._weights = next((c for c in context.reads if c.kind is ChannelKind.WEIGHTS), None)
        self.replica = next(replica for replica in replicas if replica.holds(context.rank))
        self._is_leader = context.rank == self.replica.first_rank  # its peers hold the same groups and deliver none
        self.shards = [
            GeneratorShard(
                index,
                dealing,
                first_prompt=self.first_prompt,
                oversubscription=generator.oversubscription,
                max_segments=generator.max_segments,
                new_group=self._new_group,
            )
            for index in shards_of_rank(self.replica.number, len(replicas), num_shards)
        ]
        """Decoded one after the other, in this order."""
        self._outcomes = next((c for c in context.reads if c.kind is ChannelKind.BROADCAST), None)
        self._served = Served(0, None)
        self._notes_experts = config.trainer.router == "replay" and self._weights is not None
        self._policy: SwapPolicy | None = None  # None: the weights edge alone says which version
        latest = self._weights is not None and self._weights.latest
        assert len(self.shards) == 1 or not latest, "the configuration has been checked"
        self._latest_staleness = config.schedule.max_staleness if latest else None
        self._steps = 0  # engine steps of this tick
        self._swaps: list[tuple[int, int]] = []  # (engine step, version) of this tick
        self._sync_spans: list[tuple[str, float, float]] = []
        self._colocated = config.schedule.colocated and self.name in ROLES
        self._lease: DeviceLease | None = None
        self.environments: Environments | None = None

    def setup(self) -> None:
        model = self.config.model
        self.tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        layout = generator_layout(self.config, self.context.device, self.replica)
        self._ranks = EngineRanks(layout)
        if self.config.task.has_environment:
            self.environments = make_environments(self.config.task, layout)
        self.prompts = make_prompt_stream(self.config, self.tokenizer, self.environments)
        self._rates = self._pass_rates([])
        self.engine = make_engine(
            self.replica.section(self.config),
            self.tokenizer,
            device=self.context.device,
            layout=layout,
            parked=self._colocated,
            note_experts=self._notes_experts,
        )
        if self._colocated:
            assert isinstance(self.engine, Parkable)  # the configuration has been checked
            self._lease = DeviceLease(self.name, self.engine, parked=True)
        latest = self._weights is not None and self._weights.latest
        self.player = make_player(self.config, self.engine, self.tokenizer, self.environments, on_arrival=latest)
        self.params = sampling_params(self.config.generator.sampling, self.tokenizer)
        self.version_loader = VersionLoader(
            self.engine,
            self.config.lora,
            generator_weights(self.config),
            rank=self.context.rank,
            model_path=self.config.model.path,
        )
        if latest:
            self._policy = swap_policy(self.context.run_dir, self.context.rank, num_ticks=self.config.run.num_ticks)

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        self._steps, self._swaps, self._sync_spans = 0, [], []
        began = time.monotonic()
        if self.environments is not None:
            self.environments.begin(JUDGING_SHARE * self.config.deadlines.step_s)
        if self._outcomes is not None:
            self._rates.add(inputs[self._outcomes.name])
        if self._lease is not None:
            self._lease.take()
        weights = inputs[self._weights.name] if self._weights is not None else None
        if weights is not None:
            self._take_weights(tick, weights)
        loaded = time.monotonic()
        worked = [self._work(shard, tick, weights) for shard in self.shards]
        self._served.check()
        finished = time.monotonic()
        if self._lease is not None:
            self._lease.give_back()
        shares = [list(map(self._to_group, work.delivered)) for work in worked]
        of_shards = [self._shard_metrics(groups, work, tick) for groups, work in zip(shares, worked, strict=True)]
        metrics = {
            "time/repack_s": sum(end - start for label, start, end in self._sync_spans if label == "repack"),
            "tokens_per_s/generated": sum(work.generated for work in worked) / max(finished - loaded, 1e-9),
        }
        if isinstance(self.player, EpisodeEngine):
            times = self.player.take_times()
            metrics |= reply_metrics(times)
            self._sync_spans += [("environment", start, end) for start, end in times.waits]
        events: tuple[Mapping[str, Any], ...] = ()
        if self._policy is not None:
            joins = self.player.joins if isinstance(self.player, EpisodeEngine) else ()
            event = tick_event(tick, self.context.rank, self._swaps, self._steps, shares[0], joins)
            self._policy.check(event)
            events = (event.to_plain(),)
            metrics["rollout/swaps"] = float(len(self._swaps) - 1)
        spans = (*self._sync_spans, ("generate", loaded, finished))
        if self._lease is not None:
            metrics |= self._lease.metrics
            spans += self._lease.spans
        if self.config.generator.replicas and self._is_leader:
            metrics[REPLICA_KEY.format(self.replica.number)] = time.monotonic() - began
        metrics = self.own_keys(metrics)
        if not self._is_leader:
            return StepResult(outputs=self.outputs_of([]), metrics=own_metrics(metrics), spans=spans, events=events)
        first = (
            [self.replica.first_rank]
            if self.config.generator.replicas
            else [shard.index * self.replica.num_ranks for shard in self.shards]
        )
        outputs = Shares(zip(first, shares, strict=True))
        return StepResult(
            outputs=self.outputs_of(outputs),
            metrics=metrics,
            share_metrics=tuple(map(self.own_keys, of_shards)),
            spans=spans,
            events=events,
        )

    def _work(self, shard: GeneratorShard, tick: int, weights: Any) -> _Worked:
        """A shard's tick, in an engine that holds nothing else."""
        skipped = self.prompts.num_skipped
        self._admit(shard, tick)
        before = num_sampled(shard.active)
        if self._policy is not None and isinstance(self.player, EpisodeEngine):
            self.player.begin_tick(self._policy.joins(tick))
        delivered = self._decode(shard, tick, weights)
        carried = num_sampled(shard.active)
        return _Worked(
            delivered=delivered,
            generated=num_sampled(delivered) + carried - before,
            carried=carried,
            unfinished=sum(not s.finished for g in shard.active for s in g.sequences),
            skipped=self.prompts.num_skipped - skipped,
        )

    def _shard_metrics(self, groups: Sequence[Group], work: _Worked, tick: int) -> dict[str, float]:
        metrics = _metrics(groups, work.delivered, tick)
        if self.config.data.too_long == "skip":
            metrics["prompts/too_long"] = float(work.skipped)
        metrics["tokens/generated"] = float(work.generated)
        metrics["tokens/carried"] = float(work.carried)
        metrics["rollout/carried"] = float(work.unfinished)
        return metrics | (episode_metrics(groups) if isinstance(self.player, EpisodeEngine) else {})

    def _take_weights(self, tick: int, weights: Any) -> bool:
        """Serve the version that is due before the next engine step; returns whether it is another one.

        Args:
            weights: The tick's version, or, where a policy decides, the feed of all that have arrived.
        """
        started = time.monotonic()
        if self._policy is not None:
            feed: Feed = weights
            on_all = self._ranks.least(feed.newest())  # the ranks of a replica swap before the same step
            newest = max(0, on_all + 1)  # the trainer's tick j makes version j + 1; before it began, 0
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

    def _admit(self, shard: GeneratorShard, tick: int) -> None:
        shard.admit(tick)
        if self.environments is not None and self._outcomes is None:  # the next tick's prompts begin with what they say
            for index in shard.next_prompts(tick):
                self.prompts.ask_ahead(index)

    def _pass_rates(self, outcomes: Sequence[Outcome]) -> PassRates:
        """What is known of an item counts until it has been a candidate about twice."""
        return PassRates(2 * (self.prompts.num_items("train") or 0) // self.config.data.candidates, outcomes)

    def _new_group(self, index: int, tick: int, item: int | None = None) -> ActiveGroup:
        if item is None and self._outcomes is not None:
            item = self._rates.choose(*self.prompts.candidates(index), index)
        prompt = self.prompts.get(index, item)
        prompt_tokens = prompt.tokens.tolist()  # one list for the group: of 30,000 tokens it takes a megabyte
        sequences = [
            TokenSequence(
                prompt_index=index,
                sample_index=sample,
                prompt_tokens=prompt_tokens,
                params=self.params,
                seed=derive_seed(self.config.run.seed, _SAMPLING_SEED, index, sample),
                episode=begin_episode(prompt, self.params.max_new_tokens),
            )
            for sample in range(self.config.generator.group_size)
        ]
        return ActiveGroup(prompt, tick, sequences)

    def _decode(self, shard: GeneratorShard, tick: int, weights: Any) -> list[ActiveGroup]:
        """Decode until the groups to deliver are complete; take them out of the active ones."""
        first = self._steps
        self._enter(shard, tick)
        watch("sampling", "group", shard.delivers(tick), lambda: len(shard.completed), lambda: _tokens_written(shard))
        while (chosen := shard.deliverable(tick, latest_staleness=self._latest_staleness)) is None:
            if self._policy is not None and self._steps > first and self._take_weights(tick, weights):
                self._enter(shard, tick)
            shard.heard_of(self.player.step())
            self._steps += 1
        self.player.suspend()
        shard.inside.clear()
        return shard.take(chosen)

    def _enter(self, shard: GeneratorShard, tick: int) -> None:
        """Give the engine, in order of admission, the unfinished groups that it may sample and has not got."""
        groups = shard.active
        if self._policy is not None:
            startable = num_startable(
                self.engine.policy_version,
                tick=tick,
                max_staleness=(staleness := self.config.schedule.max_staleness),
                prompts_per_step=shard.delivers(tick),
                later=shard.delivers_after(tick, staleness),
            )
            due = shard.deadlines(latest_staleness=staleness)
            groups = [groups[i] for i in sorted(urgency_order(due)[:startable])]
        groups = [g for g in groups if g.prompt.index not in shard.inside]
        self.player.add([s for g in groups for s in g.sequences if not s.finished])
        shard.inside.update(g.prompt.index for g in groups)

    def _to_group(self, active: ActiveGroup) -> Group:
        sampled_by = "" if self._weights is not None else self.name
        responses = (to_response(s, self.tokenizer) for s in active.sequences)
        return Group(
            prompt=active.prompt,
            responses=tuple(replace(response, sampled_by=sampled_by) for response in responses),
            prompt_experts=of_group(s.experts for s in active.sequences),
        )

    def save(self, folder: Path, tick: int) -> None:
        for shard in self.shards:
            state = {"tick": tick, "rates": self._rates.state(), **shard.state()}
            (folder / _shard_file(shard)).write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path, tick: int) -> None:
        for shard in self.shards:
            path = _find_state(folder, shard)
            state = json.loads(path.read_text(encoding="utf-8"))
            assert state["tick"] == tick, f"{path} holds tick {state['tick']}, not {tick}"
            self._rates = self._pass_rates(state["rates"])
            shard.take_state(state, tick, Limits.of_model(self.config.model.path))

    def journal(self, tick: int) -> bytes:
        """The carried groups of its shards, and what a curriculum knows."""
        shards = {shard.index: shard.state() for shard in self.shards}
        return json.dumps({"tick": tick, "rates": self._rates.state(), "shards": shards}).encode()

    def restore(self, state: bytes, tick: int) -> None:
        self.restore_from([state], tick)

    def restore_from(self, states: Sequence[bytes], tick: int) -> None:
        """Take the states of this rank's shards, out of what one or several ranks gave."""
        saved: dict[str, Any] = {}
        for journal in map(json.loads, states):
            assert journal["tick"] == tick, f"the journal holds tick {journal['tick']}, not {tick}"
            saved |= journal["shards"]
            self._rates = self._pass_rates(journal["rates"])
        for shard in self.shards:
            shard.take_state(saved[str(shard.index)], tick, Limits.of_model(self.config.model.path))

    def close(self) -> None:
        for shard in self.shards:
            shard.active = []
        if self.environments is not None:
            self.environments.close()


def _tokens_written(shard: GeneratorShard) -> str:
    return written(s for g in list(shard.active) for s in g.sequences)


@dataclass(frozen=True)
class _Worked:
    """What came of a shard's tick."""

    delivered: list[ActiveGroup]
    generated: int
    """Tokens that were sampled."""
    carried: int
    """Tokens of the groups that stay."""
    unfinished: int
    """Sequences that go on at the next tick."""
    skipped: int
    """Prompts that were too long."""


def _shard_file(shard: GeneratorShard) -> str:
    return f"shard_{shard.index}.json"


def _find_state(folder: Path, shard: GeneratorShard) -> Path:
    """In a rank's folder, or, where the ranks were another number when the state was saved, in one beside it.

    Raises:
        CheckpointError: The state was saved with another number of shards.
    """
    name = _shard_file(shard)
    found = [folder / name, *sorted(folder.parent.glob(f"rank_*/{name}"))]
    path = next((path for path in found if path.is_file()), None)
    if path is None:
        raise CheckpointError(f"{folder.parent} holds no state of shard {shard.index}: it was saved with fewer shards")
    return path


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


def _metrics(groups: Sequence[Group], delivered: Sequence[ActiveGroup], tick: int) -> dict[str, float]:
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
