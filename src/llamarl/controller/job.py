"""The LlamaRL job as a graph: which executors a recipe asks for, and the channels between them.

    ┌────────────── weights, delay max_staleness + 1 ◀─────────────┐
    ▼                                                              │
generator ── completions ──▶ reward ── scored ──▶ trainer ─────────┴── eval_weights ──▶ evaluator

Where the algorithm asks for a reference model or a critic, they stand between reward and trainer, one after the other:

reward ── scored ──▶ reference ── referenced ──▶ critic ── valued ──▶ trainer
"""

from __future__ import annotations

from itertools import pairwise

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import RunConfig
from llamarl.controller.graph import Graph
from llamarl.executors.base import ExecutorSpec
from llamarl.executors.sample_path import sample_channel_into, sample_path
from llamarl.runtime.placement import available_cuda_devices

__all__ = ["llamarl_graph"]

_EVALUATION_ROOM = 2
"""Ticks by which the trainer may be ahead of the evaluator, at least; else the ticks from one evaluation to the next. Only ticks
that are due carry a version, so that much room costs one copy of the weights in shared memory, or two if every tick is due."""


def llamarl_graph(config: RunConfig) -> Graph:
    """The standard job of a recipe: generator, reward, trainer and, where it asks for them, reference, critic, evaluator."""
    room = config.schedule.max_staleness + 1
    trainer = config.trainer
    reference, critic = config.reference, config.critic
    executors = [
        _executor(
            "generator",
            "Generator",
            config,
            config.generator.dp * config.generator.tp,
            config.generator.threads,
            config.generator.device,
            together=config.generator.tp > 1,
        ),
        _executor("reward", "Reward", config, 1, 1, "cpu"),
    ]
    if config.has_reference:
        ranks = reference.fsdp * reference.tp
        executors.append(
            _executor("reference", "Reference", config, ranks, reference.threads, reference.device, together=True)
        )
    if config.has_critic:
        ranks = critic.fsdp * critic.tp
        executors.append(_executor("critic", "Critic", config, ranks, critic.threads, critic.device, together=True))
    executors.append(
        _executor(
            "trainer", "Trainer", config, trainer.fsdp * trainer.tp, trainer.threads, trainer.device, together=True
        )
    )
    channels = [
        ChannelSpec(name="completions", kind=ChannelKind.GATHER, source="generator", sink="reward", capacity=room),
    ]
    replicas = {"reference": config.reference.tp, "critic": config.critic.tp, "trainer": trainer.tp}
    path = sample_path(config)
    for source, sink in pairwise(path):
        channels.append(
            ChannelSpec(
                name=sample_channel_into(config, sink),
                kind=ChannelKind.SCATTER,
                source=source,
                sink=sink,
                capacity=room,
                sink_replicas=replicas[sink],
            )
        )
    channels.append(
        ChannelSpec(
            name="weights",
            kind=ChannelKind.WEIGHTS,
            source="trainer",
            sink="generator",
            delay=room,
            capacity=room,
            latest=config.schedule.weights == "latest",
        )
    )
    if config.evaluation.every:
        evaluation = config.evaluation
        executors.append(_executor("evaluator", "Evaluator", config, 1, evaluation.threads, evaluation.device))
        channels.append(
            ChannelSpec(
                name="eval_weights",
                kind=ChannelKind.WEIGHTS,
                source="trainer",
                sink="evaluator",
                capacity=max(_EVALUATION_ROOM, config.evaluation.every),
            )
        )
    return Graph(tuple(executors), tuple(channels))


def _executor(
    name: str, kind: str, config: RunConfig, num_ranks: int, threads: int, device: str, *, together: bool = False
) -> ExecutorSpec:
    """``together``: its ranks share one model; generator replicas and evaluators never talk to each other."""
    return ExecutorSpec(
        name=name,
        factory=f"llamarl.executors.{name}:{kind}Executor",
        config=config,
        num_ranks=num_ranks,
        threads=threads,
        device=_device(device),
        process_group=_process_group(_device(device)) if together and num_ranks > 1 else "",
    )


def _process_group(device: str) -> str:
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"


def _device(device: str) -> str:
    """ "auto" is CUDA where there is one."""
    if device != "auto":
        return device
    return "cuda" if available_cuda_devices() else "cpu"
