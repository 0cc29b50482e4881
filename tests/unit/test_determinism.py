"""What of the machine decides bits."""

import os
import sys
from pathlib import Path

import pytest

from llamarl import determinism
from llamarl.data.template_process import render_template
from llamarl.determinism import describe_processor, joint_facts, platform_differences, platform_facts


def test_a_processor_is_its_name_and_the_instruction_sets_that_choose_kernels() -> None:
    text = (
        "processor\t: 0\nmodel name\t: AMD EPYC 9R14\nflags\t\t: fpu sse2 avx avx2 avx512f avx512_bf16 smep\n\n"
        "processor\t: 1\nmodel name\t: Another\nflags\t\t: amx_tile\n"
    )
    assert describe_processor("x86_64", text) == "x86_64 AMD EPYC 9R14 avx2 avx512_bf16 avx512f"


def test_an_arm_processor_without_a_name_is_told_by_its_part() -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd sve bf16\nCPU part\t: 0xd40\n"
    assert describe_processor("aarch64", text) == "aarch64 0xd40 bf16 sve"


def test_each_fact_that_differs_is_named_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"torch": "2.13.0", "numpy": "2.4.6", "processor": "x86_64 A avx2"}
    monkeypatch.setattr(determinism, "platform_facts", lambda: here)
    assert platform_differences(here) == []
    assert platform_differences({**here, "torch": "2.11.0", "processor": "x86_64 B"}) == [
        "processor: it has 'x86_64 B', here it is 'x86_64 A avx2'",
        "torch: it has '2.11.0', here it is '2.13.0'",
    ]
    assert platform_differences({"torch": "2.13.0", "numpy": "2.4.6"}) == [
        "processor: it has 'absent', here it is 'x86_64 A avx2'"
    ]


def test_this_machine_knows_itself() -> None:
    facts = platform_facts()
    assert set(facts) == {"llamarl", "python", "torch", "transformers", "numpy", "processor"}
    assert all(facts.values())


def test_hosts_that_are_alike_have_the_facts_of_each_and_others_all_values() -> None:
    one, other = {"torch": "2.13.0", "processor": "x86_64 A"}, {"torch": "2.13.0", "processor": "x86_64 B"}
    assert joint_facts([one, one]) == one
    assert joint_facts([other, one, other]) == {"torch": "2.13.0", "processor": "x86_64 A and x86_64 B"}


def test_a_checkpoint_of_hosts_is_compared_with_hosts() -> None:
    assert platform_differences({"torch": "2.13.0"}, {"torch": "2.13.0"}) == []
    assert platform_differences({"torch": "2.13.0"}, {"torch": "2.11.0"}) == [
        "torch: it has '2.13.0', here it is '2.11.0'"
    ]


def test_another_kind_of_gpu_is_a_difference_where_both_are_known() -> None:
    here = {"torch": "2.13.0", "gpu": "NVIDIA H100 80GB HBM3"}
    assert platform_differences(here, here) == []
    assert platform_differences({**here, "gpu": "NVIDIA L40S"}, here) == [
        "gpu: it has 'NVIDIA L40S', here it is 'NVIDIA H100 80GB HBM3'"
    ]
    assert platform_differences({"torch": "2.13.0"}, here) == [], "a device that changed is told as a key"


def test_sums_by_the_switch_of_gpus_which_do_not_repeat_are_off_unless_the_user_wants_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    assert determinism.environment(1)["NCCL_NVLS_ENABLE"] == "0"
    assert determinism.rank_environment(1)["NCCL_NVLS_ENABLE"] == "0"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert determinism.rank_environment(1)["NCCL_NVLS_ENABLE"] == "1"


def test_a_path_object_among_the_folders_of_imports_is_passed_over_as_python_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path, tmp_path / "mine", str(tmp_path)])
    folders = determinism.rank_environment(1)["PYTHONPATH"].split(os.pathsep)
    assert folders[0] == str(tmp_path) and folders.count(str(tmp_path)) == 1 and str(tmp_path / "mine") not in folders
    assert render_template("{{ name }} with a Path on sys.path", {"name": "one"}) == "one with a Path on sys.path"
