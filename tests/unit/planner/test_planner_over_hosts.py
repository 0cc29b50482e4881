"""Plans over several hosts: what their links cost, which hosts each role gets, and the recipe that says so."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.cli import plan as verb
from llamarl.config import validate
from llamarl.errors import PlanError
from llamarl.planner.choices import Options, Workload
from llamarl.planner.hardware import find_hardware
from llamarl.planner.lengths import constant
from llamarl.planner.model_spec import find_model
from llamarl.planner.over_hosts import hosts_needed, place_roles, with_network
from llamarl.planner.rooflines import GeneratorLayout, pulled_bytes, weight_sync_s
from llamarl.planner.search import Plan, search_all

H100 = find_hardware("h100")
MODEL = find_model("Llama-3.1-8B")
TP4 = GeneratorLayout(4, 1, "bf16", runnable=True)


def plan_of(devices: int) -> Plan:
    work = Workload(model=MODEL, response=constant(200), prompts_per_step=16, group_size=4)
    return next(p for p in search_all(H100, work, Options(max_segments=1), devices, [1]) if p.system == "separate")


def split(plan: Plan, *, tp: int, replicas: int, trainer: int) -> Plan:
    """``plan`` with other numbers of ranks."""
    return replace(
        plan,
        generator=replace(plan.generator, layout=replace(plan.generator.layout, tp=tp, pp=1), replicas=replicas),
        trainer=replace(plan.trainer, layout=replace(plan.trainer.layout, tp=1, pp=1, fsdp=trainer)),
    )


def ask(line: str) -> int:
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(line.split())
    return int(args.run(args))


def test_between_hosts_a_version_takes_its_bytes_over_a_devices_share_of_the_hosts_link() -> None:
    slow = with_network(H100, bytes_per_s=1e9, round_trip_s=0.02)  # eight devices share 1 GB/s
    received = pulled_bytes(slow, MODEL, TP4)
    across = weight_sync_s(slow, MODEL, trainer_devices=8, replicas=2, layout=TP4)
    assert across == pytest.approx(received / 125e6 + 0.01)
    inside = weight_sync_s(slow, MODEL, trainer_devices=4, replicas=1, layout=TP4)
    assert inside == weight_sync_s(H100, MODEL, trainer_devices=4, replicas=1, layout=TP4) < 0.1


@pytest.mark.parametrize(
    ("tp", "replicas", "trainer", "hosts", "expected"),
    [
        (8, 1, 8, "ab", {"generator": ["a"], "trainer": ["b"]}),
        (4, 4, 8, "abc", {"generator": ["a", "b"], "trainer": ["c"]}),
        (4, 4, 8, "abcd", {"generator": ["a", "b"], "trainer": ["c"]}),  # d stays free
        (2, 6, 4, "ab", {"generator": ["a", "b"], "trainer": ["a", "b"]}),  # 6 + 2 on each
        (8, 1, 4, "a", None),
        (4, 3, 4, "ab", None),  # 8 and 4 of the generator's, and 2 and 2 of the trainer's: ten on a
    ],
)
def test_each_role_gets_hosts_of_its_own_or_an_even_share_of_all(
    tp: int, replicas: int, trainer: int, hosts: str, expected: dict[str, list[str]] | None
) -> None:
    assert place_roles(split(plan_of(16), tp=tp, replicas=replicas, trainer=trainer), H100, list(hosts)) == expected


def test_hosts_are_counted_whole() -> None:
    assert [hosts_needed(devices, H100) for devices in (1, 8, 9, 256)] == [1, 1, 2, 32]


def test_a_plan_for_named_hosts_writes_a_recipe_that_places_its_roles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.toml"
    job = "plan --model Llama-3.1-8B --hardware h100 --prompts 32 --group-size 16 --response-tokens 1024 --staleness 1"
    ask(f"{job} --hosts a,b:4000 --link 100gbit --recipe {out}")
    text = capsys.readouterr().out
    assert "on 16 x NVIDIA H100" in text
    assert "joined by 12.50 GB/s a host (100gbit)" in text
    recipe = tomllib.loads(out.read_text())
    assert recipe["hosts"]["workers"] == ["a", "b:4000"]
    config = validate(recipe)
    assert set(config.hosts.on) == {"generator", "trainer"}
    ask(f"{job} --devices 16 --recipe {out}")
    assert "2 of 8" in capsys.readouterr().out
    assert "It takes 2 hosts" in out.read_text()
    with pytest.raises(PlanError, match="2 hosts of 8 have 16"):
        ask(f"{job} --hosts a,b --devices 17")


def test_a_recipes_own_hosts_are_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text('[model]\npath = "bundled:tiny"\n[task]\nname = "steps"\n[hosts]\nworkers = ["x", "y"]\n')
    ask(f"plan {recipe} --staleness 1")
    assert "  hosts      " in capsys.readouterr().out
