"""Agent programs with real clients: OpenAI's, in a loop over two tools."""

import time
from pathlib import Path

import pytest

from llamarl.cli.doctor import first_difference, record_twice
from llamarl.data.items import TaskItem
from llamarl.environments.adapters.agent import AgentFailed, AgentProgram

pytest.importorskip("openai", reason="openai is not installed: make test-environments")

PROGRAM = '''
import asyncio
import json

import openai

TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}
    for name in ("add", "multiply")
]


def answered(call):
    given = json.loads(call.function.arguments)
    a, b = given["a"], given["b"]
    return {"role": "tool", "tool_call_id": call.id, "content": str(a + b if call.function.name == "add" else a * b)}


def loop(item, base_url, api_key, model):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    assert client.models.list().data[0].id == model
    messages = [{"role": "user", "content": item.question}]
    for calls in range(8):
        reply = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, temperature=0.7)
        message = reply.choices[0].message
        messages.append(message)
        assert (reply.choices[0].finish_reason == "tool_calls") == bool(message.tool_calls)
        if not message.tool_calls:
            return {"reward": float(item.answer in message.content), "calls": calls}
        messages += map(answered, message.tool_calls)
    return 0.0


async def streamed(item, base_url, api_key, model):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": item.question}]
    stream = await client.chat.completions.create(model=model, messages=messages, stream=True)
    words = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    return float(item.answer in words)


def branch(item, base_url, api_key, model):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    for question in ("one", "two"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}])
    return 1.0


def impatient(item, base_url, api_key, model):
    """Sends its request again while the policy is writing."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, timeout=0.2, max_retries=5)
    said = client.chat.completions.create(model=model, messages=[{"role": "user", "content": item.question}])
    return float(said.choices[0].message.content == item.answer)
'''

ITEM = TaskItem(question="2 * 3 + 4?", answer="10")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_agent.py"
    path.write_text(PROGRAM)
    return str(path)


def call(name: str, a: int, b: int) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def test_openais_client_loops_over_two_tools(file: str) -> None:
    env = AgentProgram(f"{file}:loop")
    assert env.reset(ITEM, 1).messages == ({"role": "user", "content": "2 * 3 + 4?"},)
    results = [
        env.step(f"So:\n{call('multiply', 2, 3)}{call('add', 1, 1)}").messages,
        env.step(call("add", 6, 4)).messages,
    ]
    assert [[(m["name"], m["content"]) for m in messages] for messages in results] == [
        [("multiply", "6"), ("add", "2")],
        [("add", "10")],
    ]
    end = env.step("It is 10.")
    assert (end.done, end.reward, end.parts) == (True, 1.0, {"calls": 2.0})


def test_the_loop_repeats_in_another_process(file: str) -> None:
    replies = [call("multiply", 2, 3), call("add", 6, 4), "10"]
    item = {"question": "2 * 3 + 4?", "answer": "10"}
    first, second = record_twice(f"agent:{file}:loop", {}, item, replies, episodes=2)
    assert first["error"] == second["error"] == ""
    assert first_difference(first["episodes"], second["episodes"]) is None
    assert [episode[-1]["reward"] for episode in first["episodes"]] == [1.0, 1.0]


def test_an_async_client_streams(file: str) -> None:
    env = AgentProgram(f"{file}:streamed")
    env.reset(ITEM, 1)
    assert env.step("It is 10.").reward == 1.0


def test_a_branch_is_refused_with_the_cause(file: str) -> None:
    env = AgentProgram(f"{file}:branch")
    env.reset(ITEM, 1)
    with pytest.raises(AgentFailed, match=r"message 1 was .*one.* and now is .*two"):
        env.step("1")


def test_a_client_that_sends_again_gets_the_answer(file: str) -> None:
    env = AgentProgram(f"{file}:impatient")
    env.reset(ITEM, 1)
    time.sleep(1.0)  # the policy writes, and the client loses its patience
    assert env.step("10").reward == 1.0
