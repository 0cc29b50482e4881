"""The evaluator: scores the versions that are due on held-out prompts, in processes of its own, beside the training.

In: ``eval_weights`` (nothing at most ticks). Sampling seeds are fixed, so two evaluations differ by the weights alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from llamarl.config import RunConfig
from llamarl.determinism import derive_seed
from llamarl.engine.base import Engine
from llamarl.engine.episode_ranks import make_environments
from llamarl.engine.episodes import make_player
from llamarl.engine.factory import make_engine, sampling_params, to_response
from llamarl.engine.sequence import SamplingParams, written
from llamarl.engine.sequence import Sequence as TokenSequence
from llamarl.environments.episode_pool import Environments
from llamarl.environments.episodes import begin_episode
from llamarl.environments.factory import make_prompt_stream
from llamarl.environments.pool import RewardPool
from llamarl.executors.base import BaseExecutor, ExecutorContext, Stateless, StepResult
from llamarl.executors.generator_ranks import evaluator_weights
from llamarl.executors.reward import JUDGING_SHARE, count_causes, part_means
from llamarl.executors.version_loader import VersionLoader
from llamarl.models.loading import load_tokenizer
from llamarl.models.parallel import ParallelLayout, make_layout, new_group
from llamarl.observability.findings import Causes
from llamarl.progress import watch
from llamarl.running_time import running_s
from llamarl.types import RIGHT, Failure, Group, Prompt, Score

__all__ = ["EvaluatorExecutor", "evaluate", "sample_groups", "standard_error"]

_EVALUATION_SEED = 2

T = TypeVar("T")

_log = logging.getLogger(__name__)


class EvaluatorRanks:
    """This process among the evaluator's ``dp`` replicas of ``tp`` ranks.

    Replica r plays prompts r, r + dp, r + 2 dp, .. and its first rank has them judged. A response's seed comes
    from its prompt, so who plays it makes no difference but of rounding.
    """

    def __init__(self, config: RunConfig, device: str) -> None:
        dp, tp = config.evaluation.dp, config.evaluation.tp
        self._layout = make_layout(fsdp=dp, tp=tp, device=device, keys=("evaluation.dp", "evaluation.tp"))
        self.engine_layout: ParallelLayout | None = self._layout if tp > 1 else None
        """Of the engine; None where it holds the whole model."""
        self._group = None
        if self._layout.num_ranks > 1:
            self._group = new_group(backend="gloo")

    @property
    def judges(self) -> bool:
        """Whether this rank has its replica's responses judged."""
        return self._layout.tp_rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """What this rank's replica plays."""
        return items[self._layout.fsdp_rank :: self._layout.fsdp]

    def together(self, groups: Sequence[Group]) -> list[Group] | None:
        """All replicas' groups in the order of their prompts, on rank 0; None elsewhere. Every rank
        calls it, those that do not judge with nothing."""
        if self._group is None:
            return list(groups)
        found: list[Sequence[Group]] = [()] * self._layout.num_ranks
        dist.gather_object(groups, found if self._layout.rank == 0 else None, dst=0, group=self._group)
        shares = found[:: self._layout.tp]
        order = range(sum(map(len, shares)))
        return [shares[i % len(shares)][i // len(shares)] for i in order] if self._layout.rank == 0 else None


class EvaluatorExecutor(Stateless, BaseExecutor):
    """Scores version 0 at tick 0, and version k + 1 at tick k where it is due."""

    environments: Environments | None = None
    ranks: EvaluatorRanks | None = None

    def __init__(self, config: RunConfig, context: ExecutorContext) -> None:
        super().__init__(config, context)
        self._causes = Causes()

    def setup(self) -> None:
        model = self.config.model
        self.tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self.ranks = EvaluatorRanks(self.config, self.context.device)
        layout = self.ranks.engine_layout
        if self.config.task.has_environment:
            self.environments = make_environments(self.config.task, layout)
        stream = make_prompt_stream(self.config, self.tokenizer, self.environments)
        self.prompts = self.ranks.share(stream.eval_prompts(self.config.evaluation.num_prompts))
        self.engine = make_engine(self.config, self.tokenizer, device=self.context.device, layout=layout)
        self.version_loader = VersionLoader(
            self.engine,
            self.config.lora,
            evaluator_weights(self.config),
            rank=self.context.rank,
            model_path=self.config.model.path,
        )
        self.params = sampling_params(
            self.config.generator.sampling, self.tokenizer, temperature=self.config.evaluation.temperature
        )
        if self.ranks.judges:
            self.pool = RewardPool(self.config.task, seed=self.config.run.seed)

    def step(self, tick: int, inputs: Mapping[str, Any]) -> StepResult:
        (weights,) = (inputs[channel.name] for channel in self.context.reads)
        metrics: dict[str, float] = {}
        spans: tuple[tuple[str, float, float], ...] = ()
        if tick == 0:
            metrics = self._evaluate(version=0)
        elif weights is not None:
            started = time.monotonic()
            served = self.version_loader.load(weights)
            spans = (("weight_sync", started, served.arrived_s), ("repack", served.arrived_s, time.monotonic()))
            metrics = self._evaluate(version=weights.version)
            served.check()
        return StepResult(metrics=metrics, spans=spans)

    def _evaluate(self, version: int) -> dict[str, float]:
        started = running_s()
        if self.environments is not None:
            self.environments.begin(JUDGING_SHARE * self.config.deadlines.step_s)
        groups = sample_groups(
            make_player(self.config, self.engine, self.tokenizer, self.environments),
            self.prompts,
            self.params,
            self.tokenizer,
            samples_per_prompt=self.config.evaluation.samples_per_prompt,
            seed=self.config.run.seed,
        )
        step_s = self.config.deadlines.step_s
        left_s = JUDGING_SHARE * step_s - (running_s() - started)
        least_s = (
            (1 - JUDGING_SHARE) / 2 * step_s
        )  # after slow sampling, still within the tick's deadline if all goes well
        judges = self.ranks is None or self.ranks.judges
        groups = self.pool.score(groups, limit_s=max(left_s, least_s)) if judges else []
        together = groups if self.ranks is None else self.ranks.together(groups)
        if together is None:
            return {}  # rank 0 says it
        for cause in self._causes.add(count_causes(together)):
            _log.warning("held-out responses fail, from policy version %d: %s", version, cause)
        scores = evaluate(together, list(self.config.task.tasks))
        return {f"eval/{key}": value for key, value in scores.items()} | {"eval/policy_version": float(version)}

    def close(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()
        if self.environments is not None:
            self.environments.close()


def sample_groups(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples_per_prompt: int,
    seed: int,
) -> list[Group]:
    """Sample ``samples_per_prompt`` responses to each prompt, to the end."""
    sequences = [
        [
            TokenSequence(
                prompt_index=prompt.index,
                sample_index=sample,
                prompt_tokens=prompt_tokens,
                params=params,
                seed=derive_seed(seed, _EVALUATION_SEED, prompt.index, sample),
                episode=begin_episode(prompt, params.max_new_tokens),
            )
            for sample in range(samples_per_prompt)
        ]
        for prompt, prompt_tokens in ((prompt, prompt.tokens.tolist()) for prompt in prompts)
    ]
    every = [s for group in sequences for s in group]
    watch("evaluating", "response", len(every), lambda: sum(s.finished for s in every), lambda: written(every))
    engine.add(every)
    while engine.has_work:
        engine.step()
    return [
        Group(prompt=prompt, responses=tuple(to_response(s, tokenizer) for s in group))
        for prompt, group in zip(prompts, sequences, strict=True)
    ]


def evaluate(groups: Sequence[Group], tasks: Sequence[str] = ()) -> dict[str, float]:
    """Scores of judged groups.

    A response is right when its reward is at least 1. ``accuracy``: share of right ones among scored samples;
    ``pass_at_k``: share of prompts with a right one among their k samples, of those of which any was scored;
    ``reward_mean``: mean reward of scored samples; ``failed``: samples without a verdict, which count in none of these;
    ``parts/NAME``: mean of a named part over the samples that have it. Of each of ``tasks``, the labels
    of a mixture, the first three as ``tasks/LABEL/*``.
    """
    of_tasks: dict[str, float] = {}
    for task in tasks:
        mine = evaluate([group for group in groups if group.prompt.task == task])
        of_tasks |= {f"tasks/{task}/{key}": mine[key] for key in ("accuracy", "reward_mean", "pass_at_k")}
    responses = [r for g in groups for r in g.responses]
    values = [r.outcome.value for r in responses if isinstance(r.outcome, Score)]
    of_prompts = [[r.outcome.value for r in g.responses if isinstance(r.outcome, Score)] for g in groups]
    solved = [max(found) >= RIGHT for found in of_prompts if found]
    return {
        "accuracy": float(np.mean([v >= RIGHT for v in values])) if values else float("nan"),
        "reward_mean": float(np.mean(values)) if values else float("nan"),
        "pass_at_k": float(np.mean(solved)) if solved else float("nan"),
        "length_mean": float(np.mean([len(r.tokens) for r in responses])) if responses else float("nan"),
        "failed": float(sum(isinstance(r.outcome, Failure) for r in responses)),
        **part_means([r.outcome for r in responses]),
        **of_tasks,
    }


def standard_error(groups: Sequence[Group]) -> float:
    """Of ``accuracy``: over prompts, since responses to one are alike; NaN below two prompts with a verdict."""
    scored = [[r.outcome.value >= RIGHT for r in g.responses if isinstance(r.outcome, Score)] for g in groups]
    shares = [float(np.mean(one)) for one in scored if one]
    return float(np.std(shares, ddof=1) / np.sqrt(len(shares))) if len(shares) > 1 else float("nan")
