"""From a configuration to a run that can start: what cannot run is refused, threads and devices are
settled. Starts nothing but the imports of the run's processes, which take seconds of a core, and imports no torch before.

recipe ─┬─▶ fork servers that import meanwhile
        └─▶ preflight (paths, data, first prompts) ─▶ graph ─▶ placement ─▶ transports ─▶ Prepared
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.config import RunConfig, changed_keys, to_plain
from llamarl.controller.graph import (
    Graph,
    WeightEdge,
    choose_transports,
    colocated_group,
    group_backends,
    llamarl_graph,
)
from llamarl.controller.notices import Questions, overview, replica_line
from llamarl.controller.preflight import (
    check_architectures,
    check_engine,
    check_folder,
    check_lora,
    check_models,
    check_parallel_sizes,
    check_prompts,
    check_reward,
    check_reward_models,
)
from llamarl.controller.settle import Machine, local, settle_on, settle_recipe
from llamarl.determinism import GPU, platform_facts, rank_environment
from llamarl.errors import ConfigError, LlamaRLError, ModelError
from llamarl.executors.base import ExecutorSpec
from llamarl.models.folders import resolve_model_path
from llamarl.reading import read_object, user_path
from llamarl.roles import ROLES, present_roles
from llamarl.runtime.fork_server import shared_modules, start_early
from llamarl.runtime.placement import Placement, check_system, gpus_here, here, may_have_gpus, place

if TYPE_CHECKING:
    from llamarl.controller.job_hosts import JobHosts

__all__ = [
    "Prepared",
    "absolute_dir",
    "describe_plan",
    "description",
    "modules_of_model",
    "plan_run",
    "prepare",
    "start_fork_servers",
]

_HIGH_RATE = 5e-3
"""The bundled model, of half a million parameters, learns at 2e-4."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run that has passed its checks: thread counts and devices are settled."""

    config: RunConfig
    """As it is written down: models of the Hub by id and commit."""
    local: RunConfig
    """As it is carried out: models by folders."""
    graph: Graph
    """Its executors have configurations of the latter kind."""
    placement: Placement
    weight_edges: tuple[WeightEdge, ...]
    hosts: JobHosts | None = None
    """None: all on this machine."""
    facts: Mapping[str, str] | None = None
    """What decides the bits besides the configuration (``determinism.platform_facts``) where its ranks are; None: this
    machine's."""
    questions: Questions | None = None
    overview: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What a person checks before it starts, label -> text."""
    gpu_memory: str = ""
    """What is held of each GPU's memory, a line each."""


def start_fork_servers(config: RunConfig) -> None:
    """Preload imports in fork servers while the recipe is checked. Says nothing of mistakes: the
    checks that follow do.

    Raises:
        ConfigError: This is not Linux.
    """
    check_system()
    if config.run.runtime != "local" or config.hosts.wanted or may_have_gpus():
        return
    try:
        graph = llamarl_graph(config)
        machine = here(cores=config.run.cores or None, cuda_devices=0)
        placement = place(graph.executors, [machine], colocated=colocated_group(config, graph))
    except LlamaRLError:
        return
    of_model = modules_of_model(config.model.path)
    threads = [spec.threads for spec in placement.executors for _ in range(spec.num_ranks)]
    last = max(set(threads), key=threads.count)  # those that are started by themselves import meanwhile
    for count in sorted(set(threads), key=lambda count: (count == last, count)):
        modules, may_be_a_fork = shared_modules(placement.executors, count), count == last
        start_early(modules, rank_environment(count), also=of_model, may_be_a_fork=may_be_a_fork)


def modules_of_model(path: str) -> tuple[str, ...]:
    """What loading this model imports, and makes, first; nothing for one that is not here yet, or no folder."""
    if not path.startswith("bundled:") and not os.path.isdir(os.path.expanduser(path)):
        return ()
    try:
        kind = str(read_object(resolve_model_path(path) / "config.json")["model_type"]).replace("-", "_")
    except (LlamaRLError, KeyError, OSError):
        return ()
    return (f"transformers.models.{kind}.modeling_{kind}",)


def plan_run(
    config: RunConfig, *, every_key: bool = True, prepared_by: Callable[[RunConfig], Prepared] | None = None
) -> str:
    """What a run of ``config`` would be: overview, configuration, graph and placement, as text. Starts nothing.

    Args:
        every_key: Whether keys that are at their defaults are printed too.
        prepared_by: What checks and settles it; None: ``prepare``.

    Raises:
        LlamaRLError: The run would not start.
    """
    check_system()
    check_folder(absolute_dir(config))
    if config.run.mirror:
        from llamarl.checkpoint.mirror import check_mirror

        check_mirror(config.run.mirror)
    prepared = (prepared_by or prepare)(config)
    check_reward(prepared.config)
    return describe_plan(prepared, every_key=every_key)


def describe_plan(prepared: Prepared, *, every_key: bool = True) -> str:
    """See :func:`plan_run`. The run's hosts are let go."""
    import tomli_w

    of_cluster = ""
    if prepared.hosts is not None:
        of_cluster = prepared.hosts.plan_lines(absolute_dir(prepared.config))
        prepared.hosts.close()
    shown, num_default = (to_plain(prepared.config), 0) if every_key else changed_keys(prepared.config)
    rest = f"# and {num_default} keys at their defaults: --every-key prints them\n" if num_default else ""
    gpus = f"# memory of the GPUs\n{prepared.gpu_memory}\n\n" if prepared.gpu_memory else ""
    replicas = f"# replicas\n{line}\n\n" if (line := replica_line(prepared.config)) else ""
    label = max(map(len, prepared.overview), default=0)
    lines = "\n".join(f"{name:<{label}}   {text}" for name, text in prepared.overview.items())
    return (
        f"# what would run\n{lines}\n\n"
        f"# configuration\n{tomli_w.dumps(shown)}{rest}\n"
        f"# graph\n{prepared.graph.describe()}\n\n# placement\n{prepared.placement.table()}\n\n"
        f"{gpus}{replicas}"
        f"# weight hand-over\n"
        + "\n".join(f"{edge.channel} ({edge.ends}): {edge.summary()}" for edge in prepared.weight_edges)
        + of_cluster
    )


def prepare(config: RunConfig, begun: RunConfig | None = None) -> Prepared:
    """Refuse what cannot run, before any process starts; settle threads and devices.

    Args:
        begun: Of the run that is gone on with: it may do so without some of its hosts.
    """
    if any(task.name == "code" for task in (config.task, *config.task.tasks.values())):
        from llamarl.environments.code import warning_of_boxes

        if warning := warning_of_boxes(config.task):
            print(warning, file=sys.stderr)
    recorded = settle_recipe(config)
    config = local(recorded)
    check_models(config)
    check_reward_models(config)
    check_architectures(config)
    folder = resolve_model_path(config.model.path)
    questions = check_prompts(config, folder)
    if not questions.holds_out and config.evaluation.every:
        if config.evaluation.patience:
            raise ConfigError.at(
                "evaluation.patience", "is of held-out rows, and nothing is held out: raise task.eval_fraction"
            )
        print(
            "nothing is held out, so this run is not evaluated: raise task.eval_fraction above 0 (two questions or more), or "
            "give task.eval_data",
            file=sys.stderr,
        )
        recorded = dataclasses.replace(recorded, evaluation=dataclasses.replace(recorded.evaluation, every=0))
        config = local(recorded)
    _check_vocabularies(config, folder)
    graph = llamarl_graph(config)
    hosts = None
    if config.hosts.wanted:
        from llamarl.controller.job_hosts import open_hosts  # a run of one machine needs none of it

        hosts = open_hosts(config, begun)
    try:
        prepared = _place_executors(recorded, config, folder, graph, hosts)
    except BaseException:
        if hosts is not None:
            hosts.close()
        raise
    if hosts is not None and hosts.news:
        print(hosts.news, file=sys.stderr)
    checked = overview(prepared.config, prepared.local, questions)
    return dataclasses.replace(prepared, questions=questions, overview=checked)


def _place_executors(
    recorded: RunConfig, config: RunConfig, folder: Path, graph: Graph, hosts: JobHosts | None
) -> Prepared:
    """Threads, devices and transports, on this machine or on hosts."""
    colocated = colocated_group(config, graph)
    if hosts is None:
        placement = place(graph.executors, [here(cores=config.run.cores or None)], colocated=colocated)
    else:
        placement = hosts.place(graph.executors, colocated)
    gpus = hosts.gpus() if hosts is not None else gpus_here(placement.executors)
    on_gpus = placement.by_gpu()
    facts = hosts.facts if hosts is not None else None
    devices = {device for spec in on_gpus for device in spec.device.split(",")}
    if kinds := sorted({gpu.kind for device, gpu in gpus.items() if device in devices}):
        facts = {**(facts or platform_facts()), GPU: " and ".join(kinds)}
    memory_of = {device: gpu.memory for device, gpu in gpus.items()}
    in_turn = colocated.sharing if colocated is not None else ()
    processor = hosts.facts["processor"] if hosts is not None else ""
    recorded = settle_on(recorded, Machine(on_gpus, processor, memory_of, in_turn))
    config = local(recorded)
    gpu_memory = ""
    if any(spec.device.startswith("cuda") for spec in placement.executors):
        from llamarl.controller.device_memory import GpuMemory, held

        memory = GpuMemory(held(config, on_gpus), memory_of, in_turn)
        memory.check()
        gpu_memory = memory.table()
    try:
        _raise_all(
            lambda: check_parallel_sizes(config, folder),
            lambda: check_lora(config),
            lambda: check_engine(config),
            lambda: _check_gpus_of_vllm(config, on_gpus),
        )
    except ConfigError as error:
        if hosts is None or not hosts.absent:
            raise
        raise hosts.no_room(error) from error
    executors = tuple(
        dataclasses.replace(
            spec,
            config=config.for_executor(spec.name),
            process_group=group_backends(spec.device) if spec.process_group else "",
        )
        for spec in placement.executors
    )
    graph = Graph(executors, graph.channels)
    graph, weight_edges = choose_transports(config, graph, hosts=placement.hosts or None)
    _tell_of_the_rate(config)
    if not config.evaluation.every and config.evaluation.dp * config.evaluation.tp > 1:
        print("evaluation.dp and evaluation.tp do nothing: evaluation.every is 0", file=sys.stderr)
    return Prepared(recorded, config, graph, placement, weight_edges, hosts, facts, gpu_memory=gpu_memory)


def _check_gpus_of_vllm(config: RunConfig, executors: Sequence[ExecutorSpec]) -> None:
    """Refuse a vLLM over several GPUs where an executor is placed on one behind its first, which placement does not count.

    Raises:
        ConfigError: It names the GPU.
    """
    count = config.generator.engine.gpus
    users = {device: spec.name for spec in executors for device in spec.device.split(",") if device.startswith("cuda")}
    taken: dict[str, str] = {}
    runs_one = ("generator", "evaluator", *(["judge"] if config.judge.path else []))
    for device, name in users.items():
        first, at, host = device.removeprefix("cuda:").partition("@")
        for number in range(1, count) if name in runs_one else ():
            behind = f"cuda:{int(first) + number}{at}{host}"
            if other := users.get(behind) or taken.get(behind):
                raise ConfigError.at(
                    "generator.engine.options",
                    f"tensor_parallel_size is {count}, so vLLM of {name!r} on {device} takes {behind} too, where {other!r} is: put "
                    f"it by number ({ROLES[name].section}.device = 'cuda:N') where as many behind it are free",
                )
            taken[behind] = name


def _raise_all(*checks: Callable[[], None]) -> None:
    """Run every check; raise what one found, or what all found as one ConfigError."""
    found: list[ConfigError | ModelError] = []
    for check in checks:
        try:
            check()
        except (ConfigError, ModelError) as error:
            found.append(error)
    if len(found) == 1:
        raise found[0]
    if found:
        lines = "\n".join(f"  - {error}" for error in found)
        raise ConfigError(f"{len(found)} mistakes in the configuration:\n{lines}")


def _check_vocabularies(config: RunConfig, folder: Path) -> None:
    """The models beside the policy read its tokens, so they must know them."""
    from llamarl.models.loading import load_model_config

    def vocabulary(path: str | Path) -> int:
        return int(load_model_config(path).get_text_config().vocab_size)

    models = [role.model for role in present_roles(config) if role.model and not role.model.own_tokens]
    beside = {model.key: model.path(config) for model in models}
    beside |= {
        f"executors.{name}.settings.model.path": config.for_executor(name).model.path for name in config.executors
    }
    beside |= {
        f"executors.{name}.settings.reference.path": path
        for name, own in config.executors.items()
        if (path := own.settings.get("reference", {}).get("path"))
    }
    for key, path in beside.items():
        size = config.algorithm.teacher_top_k if key.endswith("reference.path") else 0
        if size > (most := min(vocabulary(folder), vocabulary(path))):
            raise ConfigError(f"algorithm.teacher_top_k: {size} is more than the {most} tokens that {path} can name")
        if path != config.model.path:
            if config.algorithm.distills and key.endswith("reference.path"):
                _check_tokenizer_of_teacher(config, key, path, folder)
                continue  # a family's models have one tokenizer, and embeddings padded to one size or another
            ours, theirs = vocabulary(folder), vocabulary(path)
            if ours != theirs:
                raise ConfigError(
                    f"{key}: {path} has a vocabulary of {theirs} tokens, {config.model.path} one of {ours}: "
                    "both must read the same tokens"
                )


def _check_tokenizer_of_teacher(config: RunConfig, key: str, path: str, folder: Path) -> None:
    """A teacher is shown the policy's tokens, so each must say the same to it.

    Raises:
        ConfigError: One does not.
    """
    from llamarl.models.loading import load_model_config, load_tokenizer

    trusted = config.model.trust_remote_code
    ours, theirs = (
        {number: token for token, number in load_tokenizer(f, trust_remote_code=trusted).get_vocab().items()}
        for f in (folder, path)
    )
    why = ""
    if other := [number for number in sorted(ours.keys() | theirs.keys()) if ours.get(number) != theirs.get(number)]:
        first, *_ = other
        why = f"{len(other)} tokens differ, such as {first}, {theirs.get(first)!r} there and {ours.get(first)!r} here"
    elif (size := load_model_config(path).get_text_config().vocab_size) <= max(ours):
        why = f"it has {size} embeddings, and the tokens go up to {max(ours)}"
    if why:
        raise ConfigError(
            f"{key}: the teacher {path} has another tokenizer than {config.model.path} ({why}): it cannot judge the "
            "policy's tokens; take a teacher of the policy's family"
        )


def _tell_of_the_rate(config: RunConfig) -> None:
    optimizer, num_ticks = config.optimizer, config.run.num_ticks
    if optimizer.lr > _HIGH_RATE:
        print(
            f"optimizer.lr {optimizer.lr:g} is far above what trains a language model: 1e-6 to 1e-4 is usual, ten times that "
            "for adapters; the policy may break at the first step",
            file=sys.stderr,
        )
    if optimizer.warmup_ticks >= num_ticks:
        print(
            f"optimizer.warmup_ticks {optimizer.warmup_ticks} outlasts run.num_ticks {num_ticks}: the rate ends at "
            f"{num_ticks / (optimizer.warmup_ticks + 1):.0%} of optimizer.lr",
            file=sys.stderr,
        )


def absolute_dir(config: RunConfig) -> Path:
    return user_path(config.run.dir, "run.dir").resolve()


def description(prepared: Prepared) -> dict[str, Any]:
    """What a checkpoint says of its run. Thread counts and devices are settled in the configuration."""
    return {"config": to_plain(prepared.config)}
