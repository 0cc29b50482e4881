"""Unlike replicas in one generator: what each samples is what a generator of its kind samples, by shares that the recipe gives."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lone_generators import Version, ranks_of

from llamarl.config import RunConfig, to_plain, validate
from llamarl.controller.begun_settings import differences
from llamarl.controller.graph import llamarl_graph
from llamarl.errors import ConfigError
from llamarl.executors.generator import GeneratorExecutor
from llamarl.executors.generator_ranks import generator_weights, replicas_of
from llamarl.executors.in_flight import digest_of
from llamarl.models.precision import resolve_precision
from llamarl.strict import Effect
from llamarl.types import Group

TICKS = 4
PARTIAL = {"max_segments": 2, "oversubscription": 1.5}


def recipe(*kinds: Mapping[str, Any], prompts: int = 6, **generator: Any) -> RunConfig:
    return validate(
        {
            "run": {"num_ticks": TICKS},
            "schedule": {"prompts_per_step": prompts, "max_staleness": 1},
            "generator": {
                "group_size": 2,
                "replicas": [dict(kind) for kind in kinds],
                "device": "cpu",
                "threads": 1,
                "sampling": {"max_new_tokens": 16},
                "engine": {"kv_cache_bytes": 1 << 21},
                **generator,
            },
        }
    )


def step(ranks: Sequence[GeneratorExecutor], tick: int) -> list[list[Group]]:
    """[ranks] groups that each delivers."""
    weights = {"weights": Version(max(0, tick - 1))}
    return [list(rank.step(tick, weights).outputs["completions"]) for rank in ranks]


def run(config: RunConfig) -> list[list[list[Group]]]:
    ranks = ranks_of(config)
    return [step(ranks, tick) for tick in range(TICKS)]


def digests(run: Sequence[Sequence[Sequence[Group]]]) -> list[list[str]]:
    return [[digest_of(groups) for groups in tick] for tick in run]


@pytest.fixture(scope="module")
def alike() -> list[list[list[Group]]]:
    return run(recipe(dp=2, **PARTIAL))


def test_alike_replicas_of_equal_shares_make_the_bits_of_dp(alike: list[list[list[Group]]]) -> None:
    assert digests(run(recipe({"dp": 2, "share": 3.5}, **PARTIAL))) == digests(alike)


def test_each_replica_samples_what_it_would_beside_others_of_its_kind(alike: list[list[list[Group]]]) -> None:
    """Tokens and log-probs, those of the bfloat16 replica too: nothing of the other replica's precision reaches them."""
    rounded = run(recipe(dp=2, **PARTIAL, engine={"kv_cache_bytes": 1 << 21, "dtype": "bfloat16"}))
    mixed = digests(run(recipe({}, {"dtype": "bfloat16"}, **PARTIAL)))
    assert [tick[0] for tick in mixed] == [tick[0] for tick in digests(alike)]
    assert [tick[1] for tick in mixed] == [tick[1] for tick in digests(rounded)]
    assert [tick[1] for tick in mixed] != [tick[1] for tick in digests(alike)]


def test_shares_that_do_not_divide_are_delivered_tick_by_tick_with_partial_rollouts() -> None:
    """Quotas 3.75 and 2.25: a quarter of a group more is carried to each tick."""
    config = recipe({"share": 5}, {"share": 3}, **PARTIAL)
    ranks = ranks_of(config)
    told, active = [], []
    for tick in range(TICKS):
        told.append(step(ranks, tick))
        active.append([len(rank.shards[0].active) for rank in ranks])
    assert [[len(groups) for groups in tick] for tick in told] == [[4, 2], [4, 2], [3, 3], [4, 2]]
    assert any(map(sum, active))
    for tick, shares in enumerate(told):
        for group in (group for groups in shares for group in groups):
            versions = {int(v) for r in group.responses for v in r.policy_versions if v >= 0}
            assert len(versions) <= 2 and min(versions) >= max(0, tick - 2)
    found = [group.prompt.index for tick in told for groups in tick for group in groups]
    assert len(set(found)) == len(found) == 6 * TICKS
    assert max(found) < 6 * (TICKS + 1)


def test_a_replica_that_is_brought_up_again_goes_on_with_its_share(tmp_path: Path) -> None:
    """From its journal, and from its saved state, between two ticks of unequal counts."""
    config = recipe({"share": 5}, {"share": 3, "dtype": "bfloat16"}, **PARTIAL)
    expected = digests(run(config))
    ranks, found = ranks_of(config), []
    for tick in range(TICKS):
        found.append([digest_of(groups) for groups in step(ranks, tick)])
        again = ranks_of(config) if tick in (0, 1) else ranks
        for number, (old, new) in enumerate(zip(ranks, again, strict=True)):
            if tick == 0:
                new.restore(old.journal(tick) or b"", tick)
            elif tick == 1:
                folder = tmp_path / f"rank_{number}"
                folder.mkdir()
                old.save(folder, tick)
                new.load(folder, tick)
        ranks = again
    assert found == expected


# -- ranks and weights ------------------------------------------------------------------------------------------------


def test_ranks_of_unlike_replicas_stand_one_after_the_other() -> None:
    config = recipe({"tp": 2}, {"dp": 2}, tp=1)
    assert llamarl_graph(config).executors[0].num_ranks == 4
    assert llamarl_graph(config).executors[0].process_group == "gloo"
    assert [(r.kind, r.first_rank, r.num_ranks) for r in replicas_of(config, 4)] == [(0, 0, 2), (1, 2, 1), (1, 3, 1)]
    assert llamarl_graph(recipe({}, {"dtype": "bfloat16"})).executors[0].process_group == ""


def test_each_rank_is_handed_what_its_replica_holds() -> None:
    layout = generator_weights(recipe({"tp": 2}, {}, {"tp": 4}))
    held = [{p.parameter: p.box for p in pieces} for pieces in map(layout.pieces_of, range(layout.num_ranks))]
    name = "model.layers.0.self_attn.o_proj.weight"
    rows, columns = layout.parameters[name].shape
    half, quarter = columns // 2, columns // 4
    ends = [(0, half), (half, columns), (0, columns), *((i * quarter, (i + 1) * quarter) for i in range(4))]
    assert [pieces[name] for pieces in held] == [((0, rows), end) for end in ends]
    assert generator_weights(recipe({}, {"share": 2})) is None


def test_weights_travel_in_the_precision_of_all_replicas_or_in_float32() -> None:
    assert recipe({"dtype": "bfloat16"}, {"dtype": "bfloat16"}).generator.served_dtype == "bfloat16"
    assert recipe({"dtype": "bfloat16"}, {}).generator.served_dtype == "float32"
    assert recipe({"dtype": "bfloat16"}, {"dtype": "float16"}).generator.served_dtype == "float32"
    assert recipe(engine={"dtype": "bfloat16"}).generator.served_dtype == "bfloat16"


def test_auto_is_settled_kind_by_kind() -> None:
    config = recipe({"dtype": "auto"}, {"quantization": "int8"}, engine={"dtype": "auto"})
    settled = resolve_precision(config, "x86_64 a processor without such products")
    assert [kind.dtype for kind in settled.generator.replicas] == ["float32", "float32"]
    assert settled.generator.engine.dtype == "float32"
    settled = resolve_precision(recipe({"dtype": "bfloat16"}, {}))
    assert [kind.dtype for kind in settled.generator.replicas] == ["bfloat16", "float32"]
    assert settled.generator.engine.dtype == "float32" and resolve_precision(settled) == settled


# -- what a recipe may say --------------------------------------------------------------------------------------------


def test_a_kind_takes_what_it_does_not_say_from_the_section() -> None:
    config = recipe(
        {"tp": 2, "max_sequences": 16},
        {"quantization": "int8", "dtype": "bfloat16"},
        quantization="none",
        engine={"kv_cache_bytes": 1 << 21, "dtype": "float32"},
    )
    first, second = config.generator.as_of_kind(0), config.generator.as_of_kind(1)
    assert (first.tp, first.engine.max_sequences, first.engine.dtype, first.quantization) == (2, 16, "float32", "none")
    assert (second.tp, second.engine.max_sequences, second.engine.dtype) == (1, 256, "bfloat16")
    assert second.quantization == "int8" and second.engine.kv_cache_bytes == 1 << 21


@pytest.mark.parametrize(
    ("kinds", "generator", "words"),
    [
        ([{"share": 0}], {}, r"generator.replicas.0.share must be > 0.*, got 0"),
        ([{"share": -1.0}], {}, "generator.replicas.0.share must be > 0"),
        ([{"dp": 0}], {}, "generator.replicas.0.dp must be >= 1, got 0"),
        ([{"tpp": 2}], {}, "did you mean 'generator.replicas.0.tp'"),
        ([{"dp": 7}], {}, "replica 0 of 7 would get 0.86 of the 6 groups"),
        ([{"share": 9}, {}], {}, "replica 1 of 2 would get 0.6 of the 6 groups of a tick, and each needs one"),
        ([{}], {"dp": 2}, "generator.dp is 2, but each kind in replicas says itself"),
        ([{}], {"shards": 2}, "generator.shards is 2, for any replica to decode"),
        ([{}, {"max_sequences": 4096}], {}, r"generator.replicas\[1\]: max_sequences \(4096\) must be <="),
        (
            [{"tp": 2}],
            {"engine": {"name": "vllm"}},
            r"generator.replicas\[0\]: engine.name is 'vllm', which runs on one rank",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(kinds: list[dict[str, Any]], generator: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe(*kinds, **generator)


def test_another_generator_of_the_job_has_alike_replicas() -> None:
    own = {"factory": "llamarl.executors.generator:GeneratorExecutor", "reads": ["more"], "ranks": 2}
    config = recipe({"tp": 2}, {})
    raw = to_plain(config)
    raw["executors"] = {"other": own, "reward": {"reads": ["completions", "others"]}}
    raw["executors"]["other"] = {**own, "reads": [], "writes": ["others"]}
    assert validate(raw).for_executor("other").generator.replicas == ()
    raw["executors"]["other"]["settings"] = {"generator": {"replicas": [{}]}}
    with pytest.raises(ConfigError, match="generator.replicas are of the job's own generator"):
        validate(raw)


def test_dynamic_sampling_keeps_equal_shares_equal() -> None:
    more = {"dynamic_sampling": {"enabled": True, "oversample": 1.5}}
    assert validate({**to_plain(recipe({"dp": 4}, prompts=6)), **more}).groups_per_tick == 12
    assert validate({**to_plain(recipe({"share": 2}, {}, prompts=6)), **more}).groups_per_tick == 9


# -- going on with a run ----------------------------------------------------------------------------------------------


def changed(had: RunConfig, asked: RunConfig) -> list[tuple[str, Effect]]:
    return [(d.key, d.effect) for d in differences(to_plain(had), to_plain(asked))]


def test_other_tables_of_replicas_are_in_the_states() -> None:
    base = recipe({}, {"dtype": "bfloat16"})
    assert changed(base, recipe({"share": 2}, {"dtype": "bfloat16"})) == [("generator.replicas", Effect.IN_STATE)]
    assert changed(base, recipe({}, {"dtype": "bfloat16"}, {})) == [("generator.replicas", Effect.IN_STATE)]
    assert changed(base, recipe({}, {"tp": 2, "dtype": "bfloat16"})) == [("generator.replicas", Effect.IN_STATE)]
    assert changed(base, recipe({}, {})) == [("generator.replicas", Effect.IN_STATE)]
    assert not changed(base, base)
    assert changed(recipe(dp=2), recipe(dp=3)) == [("generator.dp", Effect.IN_STATE)]
