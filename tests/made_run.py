"""A run's folder written by the run's own writers from values that a test chooses: no model, milliseconds a tick.

Times are those of ``TIMES``: the generator works 4 s of every 5, the reward 1 s after it, the trainer 3 s after that.
"""

import base64
import gzip
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.config import load_config, save_config
from llamarl.controller.recorder import Recorder
from llamarl.observability.job_description import Edge, JobDescription, Lane
from llamarl.observability.rollouts import write_rollouts
from llamarl.observability.trained_tokens import TrainedResponse, write_trained
from llamarl.settings.observability import ObservabilityConfig
from llamarl.types import Failure, Group, Prompt, Response, Score, Turn

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "tiny.toml"
EXECUTORS = ("generator", "reward", "trainer")
TIMES = {"generator": (0.0, 4.0), "reward": (4.0, 5.0), "trainer": (5.0, 8.0)}
"""Start and end in seconds, tick 0; each tick 5 s later."""
PERIOD_S = 5.0
JOB = JobDescription(
    title="made",
    lanes=tuple(Lane(name=name, detail=f"does the {name}'s work") for name in EXECUTORS),
    edges=(
        Edge(name="completions", source="generator", sink="reward", delay=0, capacity=2),
        Edge(name="scored", source="reward", sink="trainer", delay=0, capacity=2),
        Edge(
            name="weights",
            source="trainer",
            sink="generator",
            delay=2,
            capacity=2,
            transport="shared_memory",
            version_bytes=2_500_000.0,
        ),
    ),
    facts={"model": "made, 7 million parameters", "learning rate": "0.0002, constant"},
)

Outcome = float | Failure


@dataclass(frozen=True, kw_only=True)
class MadeRun:
    """What every response of the run is; functions take (tick, group, sample)."""

    ticks: int = 6
    groups: int = 2
    samples: int = 4
    outcome: Callable[[int, int, int], Outcome] = lambda tick, group, sample: float((tick + sample) % 2)
    text: Callable[[int, int, int], str] = lambda tick, group, sample: f"answer {sample} of tick {tick}"
    length: Callable[[int, int, int], int] = lambda tick, group, sample: 3 + sample
    finish: Callable[[int, int, int], str] = lambda tick, group, sample: "stop"
    turns: Callable[[int, int, int], tuple[Turn, ...]] = lambda tick, group, sample: ()
    """Of an episode; the tokens between them are the environment's."""
    prompt: Callable[[int, int], str] = lambda tick, group: f"question {tick * 10 + group}"
    answer: str | None = "42"
    accuracy: Callable[[int], float | None] = lambda tick: None
    """What the evaluation that ended in a tick found; None: none did."""
    settings: dict[str, str] = field(default_factory=dict)
    job: JobDescription | None = JOB
    overhead_s: float = 0.0
    """Time between the tick that a gap waited for and the gap's end: later starts of the trainer."""

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        overrides = [f"--{key}={value}" for key, value in {"run.num_ticks": str(self.ticks), **self.settings}.items()]
        save_config(load_config(RECIPE, overrides), folder / "config.toml")
        quiet = ObservabilityConfig(console="none", tensorboard=False)
        recorder = Recorder(folder, quiet, EXECUTORS, self.ticks, job=self.job)
        for tick in range(self.ticks):
            groups = [self._group(tick, group) for group in range(self.groups)]
            write_rollouts(folder, tick, groups)
            write_trained(
                folder,
                tick,
                "trainer",
                0,
                [_trained(r) for g in groups for r in g.responses if isinstance(r.outcome, Score)],
            )
            metrics = self._metrics(tick, groups)
            for name in EXECUTORS:
                start, end = (at + PERIOD_S * tick for at in TIMES[name])
                start += self.overhead_s if name == "trainer" else 0.0
                spans = (("weight_sync: receive weights", start, start + 0.25),) if name == "generator" else ()
                recorder.on_report(Report(name, tick, metrics[name], start, end, spans))
        recorder.close()
        return folder

    def _group(self, tick: int, group: int) -> Group:
        index = 10 * tick + group
        prompt = Prompt(
            index=index,
            tokens=np.array([7, 8], dtype=np.int32),
            text=self.prompt(tick, group),
            answer=self.answer,
            task="made",
        )
        return Group(prompt=prompt, responses=tuple(self._response(tick, group, s, index) for s in range(self.samples)))

    def _response(self, tick: int, group: int, sample: int, index: int) -> Response:
        length, told = self.length(tick, group, sample), self.outcome(tick, group, sample)
        version = max(0, tick - 1)
        versions = [version] * length
        if length > 3 and tick > 1:
            versions[0] = version - 1  # a partial rollout: its first token is older
        mask = np.ones(length, dtype=np.bool_)
        turns = self.turns(tick, group, sample)
        for turn, following in zip(turns, turns[1:], strict=False):
            mask[turn.end : following.start] = False
        return Response(
            prompt_index=index,
            sample_index=sample,
            tokens=np.arange(7, 7 + length, dtype=np.int32),
            behavior_logprobs=np.where(
                mask, -np.arange(1, length + 1, dtype=np.float32) / np.float32(4), np.float32("nan")
            ),
            policy_versions=np.where(mask, np.array(versions, dtype=np.int32), np.int32(-1)),
            loss_mask=mask,
            turns=turns,
            text=self.text(tick, group, sample),
            finish_reason=self.finish(tick, group, sample),
            outcome=told if isinstance(told, Failure) else Score(value=told, parts={}),
        )

    def _metrics(self, tick: int, groups: list[Group]) -> dict[str, dict[str, float]]:
        responses = [r for g in groups for r in g.responses]
        rewards = [r.outcome.value for r in responses if isinstance(r.outcome, Score)]
        trained = sum(r.num_sampled for r in responses if isinstance(r.outcome, Score))
        failed = sum(r.num_sampled for r in responses if isinstance(r.outcome, Failure))
        late = [tick - int(v) for r in responses if isinstance(r.outcome, Score) for v in r.policy_versions if v >= 0]
        silent = sum(len({r.outcome.value for r in g.responses if isinstance(r.outcome, Score)}) <= 1 for g in groups)
        accuracy = self.accuracy(tick)
        evaluated = {} if accuracy is None else {"eval/accuracy": accuracy, "eval/policy_version": tick}
        return {
            "generator": {
                "samples/delivered": len(responses),
                "tokens/generated": trained + failed,
                "tokens/carried": 0,
                "response/length_mean": sum(len(r.tokens) for r in responses) / len(responses),
                "response/truncated_fraction": sum(r.finish_reason == "length" for r in responses) / len(responses),
            },
            "reward": {
                "reward/mean": sum(rewards) / len(rewards) if rewards else math.nan,
                "reward/failed": len(responses) - len(rewards),
                "tokens/failed": failed,
                "groups/generated": len(groups),
                "groups/no_signal": silent,
            },
            "trainer": {
                "policy_version": tick + 1,
                "tokens/trained": trained,
                "tokens/unused": 0,
                "staleness/mean": sum(late) / len(late) if late else 0.0,
                "staleness/max": max(late, default=0),
                "entropy": 0.5,
                "mismatch/kl": 0.001,
                "ratio/clipped_fraction": 0.01,
                "grad_norm": float(silent < len(groups)),
                **evaluated,
            },
        }


def decode_block(text: str) -> Any:
    """The values of a block of the report's page."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


def _trained(response: Response) -> TrainedResponse:
    """The trainer holds each token for a tenth of a nat likelier than the generator did, and clips the last one."""
    return TrainedResponse(
        prompt_index=response.prompt_index,
        sample_index=response.sample_index,
        advantage=0.75,
        policy_logprobs=response.behavior_logprobs[response.loss_mask] + np.float32(0.1),
        clipped=np.arange(response.num_sampled) == response.num_sampled - 1,
    )


@dataclass(frozen=True)
class Report:
    executor: str
    tick: int
    metrics: dict[str, float]
    started_s: float
    finished_s: float
    spans: tuple[tuple[str, float, float], ...] = ()
    controller_bytes: int = 700
    failures: dict[str, int] = field(default_factory=dict)
    events: tuple[dict[str, Any], ...] = ()
    outputs: dict[str, Any] = field(default_factory=dict)
