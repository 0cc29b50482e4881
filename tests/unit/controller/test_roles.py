"""A role is one entry of a table; whoever must know of it reads it there."""

import dataclasses

import pytest

from llamarl import roles
from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import RunConfig, load_config
from llamarl.controller.begun_settings import RESHARDABLE
from llamarl.controller.graph import colocated_group, llamarl_graph
from llamarl.controller.preflight import check_models, find_missing
from llamarl.controller.prepare import prepare
from llamarl.controller.settle import Machine, settle_on
from llamarl.errors import ModelError
from llamarl.executors.base import BaseExecutor, ExecutorContext, ExecutorSpec
from llamarl.import_path import resolve
from llamarl.models import precision
from llamarl.roles import ROLES, Model, Reads, Role
from llamarl.runtime.placement import here, place

SECOND = Role(
    name="second_reference",
    factory="a.module:Executor",
    does="a role that the standard job does not have",
    reads=(Reads(channels=("referenced", "scored"), kind="scatter"),),
    writes=("again",),
    section="reference",
    sizes=("fsdp", "tp"),
    model_sizes=("fsdp", "tp"),
    model=Model(key="critic.path", uses=lambda config: ("train",)),
)


@pytest.fixture
def one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table with an entry more, which stands right before the trainer."""
    trainer = ROLES["trainer"]
    (reads,) = trainer.reads
    after = dataclasses.replace(trainer, reads=(dataclasses.replace(reads, channels=("again",)),))
    table = {**ROLES, SECOND.name: SECOND, "trainer": after}
    monkeypatch.setattr(roles, "ROLES", table)


@pytest.mark.usefixtures("one_more")
def test_an_entry_of_the_table_is_all_that_graph_placement_and_preflight_need() -> None:
    config = load_config(None, ["--reference.tp", "2", "--critic.path", "nowhere", "--run.cores", "6"])
    graph = llamarl_graph(config)
    edges = {c.name: (c.source, c.sink, c.kind, c.delay, c.sink_replicas) for c in graph.channels}
    assert edges["scored"] == ("reward", "second_reference", ChannelKind.SCATTER, 0, 2)
    assert edges["again"] == ("second_reference", "trainer", ChannelKind.SCATTER, 0, 1)
    spec = next(spec for spec in graph.executors if spec.name == "second_reference")
    assert (spec.num_ranks, spec.process_group, spec.factory) == (2, "gloo", "a.module:Executor")
    assert any(mistake.key == "critic.path" for mistake in find_missing(config))
    with pytest.raises(ModelError, match="no folder nowhere"):
        check_models(config)


@pytest.mark.usefixtures("one_more")
def test_what_a_role_was_given_of_cores_is_settled_in_its_section() -> None:
    config = load_config(None, ["--run.cores", "8", "--generator.threads", "1", "--evaluation.every", "0"])
    assert prepare(config).config.reference.threads == 3  # 8 - 1 - 1 cores, shared with the trainer


def test_a_reader_takes_the_best_channel_that_somebody_writes() -> None:
    both = llamarl_graph(load_config(None, ["--algorithm.advantage", "gae", "--algorithm.kl_coef", "0.1"]))
    assert [c.name for c in both.inputs["critic"]] == ["referenced"]
    assert [c.name for c in both.inputs["trainer"]] == ["valued"]
    assert [c.name for c in llamarl_graph(load_config(None, [])).inputs["trainer"]] == ["scored"]


def test_everyone_on_the_cycle_of_generator_and_trainer_takes_turns_and_the_evaluator_does_not() -> None:
    colocated = ["--schedule.colocated", "true", "--schedule.max_staleness", "0", "--algorithm.kl_coef", "0.1"]
    config = load_config(None, colocated)
    group = colocated_group(config, llamarl_graph(config))
    assert (group.sharing, group.members) == (("generator", "trainer"), ("generator", "reward", "reference", "trainer"))


def channel(name: str, kind: ChannelKind = ChannelKind.GATHER) -> ChannelSpec:
    return ChannelSpec(name=name, kind=kind, source="s", sink="t")


def test_the_base_class_joins_what_it_reads_and_writes_on_data_channels_only() -> None:
    context = ExecutorContext(
        name="join",
        rank=0,
        num_ranks=1,
        device="cpu",
        run_dir=None,
        seed=0,
        reads=(channel("b"), channel("a"), channel("version", ChannelKind.WEIGHTS)),
        writes=(channel("x"), channel("y"), channel("policy", ChannelKind.WEIGHTS)),
    )
    executor = BaseExecutor(None, context)
    assert executor.items_of({"a": [1], "version": object(), "b": [2, 3]}) == [2, 3, 1]
    assert executor.outputs_of([7]) == {"x": [7], "y": [7]}
    with pytest.raises(ValueError, match="channel 'x' leaves 'join' with a delay, but BaseExecutor has no token"):
        executor.initial_token("x", -1)


def test_a_co_located_recipe_that_leaves_its_devices_open_is_settled() -> None:
    colocated = ["--schedule.colocated", "true", "--schedule.max_staleness", "0", "--evaluation.every", "0"]
    config = prepare(load_config(None, colocated)).config
    assert config.generator.device == config.trainer.device != "auto"


def test_the_gpu_that_was_asked_for_is_kept_with_the_run() -> None:
    def placed(config: RunConfig) -> list[ExecutorSpec]:
        return list(place(llamarl_graph(config).executors, [here(cores=8, cuda_devices=4)]).executors)

    asked = load_config(
        None, ["--generator.device", "cuda:1", "--trainer.device", "cuda", "--evaluation.device", "cpu"]
    )
    settled = settle_on(asked, Machine(placed(asked)))
    assert (settled.generator.device, settled.trainer.device, settled.evaluation.device) == ("cuda:1", "cuda", "cpu")
    devices, again = ({spec.name: spec.device for spec in placed(config)} for config in (asked, settled))
    assert again == devices and devices["generator"] == "cuda:1"


def test_a_run_starts_with_the_precisions_that_auto_stands_for_and_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "platform_facts", lambda: {"processor": "x86_64 avx512_bf16"})
    words = ["--generator.device", "cpu", "--trainer.device", "cpu", "--reference.device", "cpu"]
    words += ["--trainer.dtype", "auto", "--generator.engine.dtype", "auto"]
    config = load_config(None, [*words, "--algorithm.kl_coef", "0.1"])
    small = prepare(config)
    assert (small.config.trainer.dtype, small.config.generator.engine.dtype) == ("float32", "float32")
    monkeypatch.setattr(precision, "num_parameters", lambda model: 10**8)
    large = prepare(config)
    for found in (large.config, large.local):
        assert (found.trainer.dtype, found.generator.engine.dtype, found.reference.dtype) == ("bfloat16",) * 3
    executor = next(spec for spec in large.graph.executors if spec.name == "trainer")
    assert executor.config.trainer.dtype == "bfloat16"


def test_what_a_run_leaves_and_may_reshard_stands_in_the_table() -> None:
    folders = {name: [product.folder for product in role.products] for name, role in ROLES.items() if role.products}
    assert folders == {"critic": ["critic"], "trainer": ["adapter", "model"]}
    assert all(callable(resolve(product.writer)) for role in ROLES.values() for product in role.products)
    assert RESHARDABLE == {"trainer.fsdp", "trainer.tp", "trainer.pp", "trainer.cp", "trainer.ep", "trainer.threads"}
