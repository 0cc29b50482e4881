"""A verifiers 0.4 agent (its null harness, a subprocess that uv starts) as an agent program: its calls are the episode's turns."""

import shutil
from pathlib import Path

import pytest

from llamarl.data.items import TaskItem
from llamarl.environments.adapters.agent import AgentProgram

pytest.importorskip("verifiers.v1", reason="verifiers is not installed: make test-verifiers")

PROGRAM = """
import os

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str = ""


class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


def configured(base_url, api_key, model):
    variable = f"AGENT_KEY_{base_url.split(':')[-1].split('/')[0]}"  # verifiers reads keys from variables
    os.environ[variable] = api_key
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
    return vf.AgentConfig(harness={"id": "null"}, runtime=vf.SubprocessConfig(), model=model, client=client)


def judged(trace):
    if not trace.ok:
        raise RuntimeError(str(trace.errors))
    return trace.reward


async def once(item, base_url, api_key, model):
    async with vf.Agent(configured(base_url, api_key, model)) as agent:
        return judged(await agent.run(Sum(Data(prompt=item.question, answer=item.answer))))


async def twice(item, base_url, api_key, model):
    async with vf.Agent(configured(base_url, api_key, model)) as agent:
        async with agent.interaction(Sum(Data(prompt=item.question, answer=item.answer))) as talk:
            await talk.turn()
            await talk.turn("Are you sure?")
        return judged(talk.trace)
"""

ITEM = TaskItem(question="2 + 2?", answer="4")


@pytest.fixture
def file(tmp_path: Path) -> str:
    assert shutil.which("uv"), "verifiers starts its programs by uv: make test-verifiers"
    path = tmp_path / "my_agent.py"
    path.write_text(PROGRAM)
    return str(path)


def test_a_run_of_a_verifiers_agent_is_an_episode_with_its_reward(file: str) -> None:
    for reply, reward in (("It is 4.", 1.0), ("It is 5.", 0.0)):
        env = AgentProgram(f"{file}:once", timeout_s=200)
        assert env.reset(ITEM, 1).messages == ({"role": "user", "content": "2 + 2?"},)
        end = env.step(reply)
        assert end.done and end.reward == reward


def test_an_interaction_of_verifiers_is_an_episode_of_several_turns(file: str) -> None:
    env = AgentProgram(f"{file}:twice", timeout_s=200)
    env.reset(ITEM, 1)
    assert env.step("It is 5.").messages == ({"role": "user", "content": "Are you sure?"},)
    end = env.step("No, it is 4.")
    assert end.done and end.reward == 1.0
