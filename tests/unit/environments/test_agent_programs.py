"""Programs of the user's that ask an OpenAI-compatible endpoint, played as environments; they speak plain HTTP here."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

from llamarl.cli.doctor import first_difference, record_twice
from llamarl.data.items import TaskItem
from llamarl.environments.adapters import agent as agent_module
from llamarl.environments.adapters.agent import AgentFailed, AgentProgram
from llamarl.environments.adapters.chat_requests import (
    BadRequest,
    assistant_message,
    chunks,
    completion,
    new_messages,
    read_request,
    shown,
)
from llamarl.environments.episode import EpisodeOver, Observation, Step
from llamarl.environments.episode_pool import EpisodeOpener
from llamarl.environments.episodes import Ask, Play, digest_of, episode_item
from llamarl.environments.functions import NotANumber
from llamarl.environments.jobs import Player, checked_observation
from llamarl.environments.registry import check_environment, make_environment
from llamarl.errors import DataError
from llamarl.settings.environments import TaskSection
from llamarl.types import Opening, Prompt

ITEM = TaskItem(question="How much are 17 apples at 6?", answer="102")

PROGRAMS = '''
import json
import os
import random
import threading
import urllib.error
import urllib.request

TOOLS = [
    {"type": "function", "function": {"name": "multiply", "description": "a times b", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "price", "description": "Of a fruit", "parameters": {
        "type": "object", "properties": {"fruit": {"type": "string"}}}}},
]


class Refused(Exception):
    pass


def post(base_url, api_key, path="/chat/completions", **body):
    headers = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
    headers.update(body.pop("headers", {}))
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(base_url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
            return text if body.get("stream") else json.loads(text)
    except urllib.error.HTTPError as error:
        raise Refused(f"{error.code} {json.loads(error.read())['error']['message']}") from None


def tools(item, base_url, api_key, model, seed, bonus=0.0):
    messages = [{"role": "system", "content": "You are a shop."}, {"role": "user", "content": item.question}]
    calls = 0
    for _ in range(4):
        said = post(base_url, api_key, model=model, messages=messages, tools=TOOLS)["choices"][0]["message"]
        messages.append(said)
        if not said.get("tool_calls"):
            return {"reward": float(item.answer in said["content"]) + bonus, "calls": calls}
        for call in said["tool_calls"]:
            calls += 1
            given = json.loads(call["function"]["arguments"])
            result = given["a"] * given["b"] if call["function"]["name"] == "multiply" else 6
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    return 0.0


def branch(base_url, api_key):
    first = [{"role": "user", "content": "one"}]
    post(base_url, api_key, messages=first)
    try:
        post(base_url, api_key, messages=[{"role": "user", "content": "two"}])
    except Refused:
        return 1.0  # what a program makes of the refusal does not count


def one_call(base_url, api_key, **more):
    return post(base_url, api_key, messages=[{"role": "user", "content": "say"}], **more)


def raises(item, base_url, api_key):
    one_call(base_url, api_key)
    raise KeyError("no such fruit")


def leaves(base_url, api_key):
    one_call(base_url, api_key)
    raise SystemExit(3)


def without_key(base_url):
    one_call(base_url, "guessed")


def no_call(item, base_url):
    return 1.0


def lonely(item):
    return 1.0


def nothing(base_url, api_key):
    one_call(base_url, api_key)


def words(base_url, api_key):
    one_call(base_url, api_key)
    return "good"


def tries_again(base_url, api_key, until):
    try:
        one_call(base_url, api_key)
    except Refused:
        until.wait(30)


def hangs(base_url, api_key, ended):
    try:
        one_call(base_url, api_key)
    finally:
        open(ended, "w").close()


def two_at_once(base_url, api_key):
    def ask():
        try:
            one_call(base_url, api_key)
        except Refused:
            pass

    other = threading.Thread(target=ask, daemon=True)
    other.start()
    ask()
    other.join()


def streams(base_url, api_key):
    events = one_call(base_url, api_key, stream=True).split("\\n\\n")
    first = json.loads(events[0].removeprefix("data: "))
    assert events[2] == "data: [DONE]", events
    return float(first["choices"][0]["delta"]["content"])


async def asks_for_models(base_url, api_key, seed):
    listed = post(base_url, api_key, "/models")["data"][0]["id"]
    one = [{"role": "user", "content": f"{listed} {seed} {random.randrange(1000)}"}]
    reply = post(base_url, api_key, messages=one)["choices"][0]["message"]
    post(base_url, api_key, messages=[*one, reply, {"role": "user", "content": str(random.randrange(1000))}])
    return 0.25


def asks_again(base_url, api_key):
    """As a client does that had no answer in time."""
    first = one_call(base_url, api_key)
    again = one_call(base_url, api_key, headers={"x-stainless-retry-count": "1"})
    return float(first == again)


def unlike(base_url, api_key):
    one_call(base_url, api_key)
    return random.SystemRandom().random()
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "programs.py"
    path.write_text(PROGRAMS)
    return str(path)


@pytest.fixture
def agent(file: str) -> Iterator[Callable[..., AgentProgram]]:
    made: list[AgentProgram] = []

    def make(name: str, **options: Any) -> AgentProgram:
        made.append(AgentProgram(f"{file}:{name}", **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


TWO_CALLS = 'I look.\n<tool_call>{"name": "price", "arguments": {"fruit": "apple"}}</tool_call>\n<tool_call>{"name": "multiply", "arguments": {"a": 17, "b": 6}}</tool_call>'


def test_a_loop_over_two_tools_is_an_episode(agent: Callable[..., AgentProgram]) -> None:
    env = agent("tools", bonus=0.5)
    opened = env.reset(ITEM, 3)
    assert opened.messages == (
        {"role": "system", "content": "You are a shop."},
        {"role": "user", "content": "How much are 17 apples at 6?"},
    )
    assert [tool["function"]["name"] for tool in opened.tools] == ["multiply", "price"]
    step = env.step(TWO_CALLS)
    assert step.messages == (
        {"role": "tool", "content": "6", "tool_call_id": "call00000", "name": "price"},
        {"role": "tool", "content": "102", "tool_call_id": "call00001", "name": "multiply"},
    )
    assert (step.reward, step.done) == (0.0, False)
    end = env.step("They are 102.")
    assert (end.reward, end.done, end.parts) == (1.5, True, {"calls": 2.0})
    with pytest.raises(EpisodeOver):
        env.step("more")
    assert env.reset(ITEM, 3) == opened  # the next episode begins the same
    assert env.step("I do not know.").reward == 0.5


def test_a_request_that_does_not_go_on_fails_the_sample_whatever_the_program_makes_of_it(
    agent: Callable[..., AgentProgram],
) -> None:
    env = agent("branch")
    env.reset(ITEM, 0)
    with pytest.raises(AgentFailed, match=r"message 1 was .*'one'.* and now is .*'two'"):
        env.step("1")


def test_what_the_program_raises_is_raised(agent: Callable[..., AgentProgram]) -> None:
    env = agent("raises")
    env.reset(ITEM, 0)
    with pytest.raises(KeyError, match="no such fruit"):
        env.step("1")
    env = agent("leaves")
    env.reset(ITEM, 0)
    with pytest.raises(AgentFailed, match=r"SystemExit\(3\)"):
        env.step("1")


def test_an_agent_that_never_asks_the_model_is_no_episode(agent: Callable[..., AgentProgram]) -> None:
    with pytest.raises(AgentFailed, match="returned without asking the model"):
        agent("no_call").reset(ITEM, 0)


def test_the_key_must_be_shown(agent: Callable[..., AgentProgram]) -> None:
    with pytest.raises(Exception, match="401 the api_key that the agent was called with must be shown"):
        agent("without_key").reset(ITEM, 0)


def test_no_reward_is_for_task_reward_to_give_and_fails_where_nobody_judges(agent: Callable[..., AgentProgram]) -> None:
    env = agent("nothing")
    env.reset(ITEM, 0)
    end = env.step("1")
    assert end.done and end.reward == 0.0
    env = agent("nothing", judged=False)
    env.reset(ITEM, 0)
    with pytest.raises(AgentFailed, match=r"no reward, and task\.reward names nobody"):
        env.step("1")
    env = agent("words")
    env.reset(ITEM, 0)
    with pytest.raises(NotANumber, match="the agent's reward is str 'good', expected a number"):
        env.step("1")


def test_close_ends_the_open_request_and_the_program(agent: Callable[..., AgentProgram], tmp_path: Path) -> None:
    before = threading.active_count()
    env = agent("hangs", ended=str(tmp_path / "ended"))
    env.reset(ITEM, 0)
    env.close()
    assert (tmp_path / "ended").exists()
    wait_until(lambda: threading.active_count() == before, what="the end of its threads")


def test_programs_that_do_not_end_are_waited_for_once(
    agent: Callable[..., AgentProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker closes what was cut within the time of its next job: 2 s for each of ten would be all of it."""
    waited, join, until = [], threading.Thread.join, threading.Event()

    def recorded(thread: threading.Thread, timeout: float | None = None) -> None:
        waited.extend([timeout] if thread.name == "agent" else [])
        join(thread, timeout)

    monkeypatch.setattr(agent_module, "_END_S", 0.2)
    monkeypatch.setattr(agent_module, "_left", [])
    monkeypatch.setattr(threading.Thread, "join", recorded)
    for _ in range(3):
        program = agent("tries_again", until=until)
        program.reset(ITEM, 7)
        program.close()
    until.set()
    assert waited == pytest.approx([0.2, 0.01, 0.01])


def test_two_requests_at_once_fail_the_sample(agent: Callable[..., AgentProgram]) -> None:
    env = agent("two_at_once")
    env.reset(ITEM, 0)
    wait_until(lambda: not env._events.empty(), what="the second request")
    with pytest.raises(AgentFailed, match="another request of this episode is open"):
        env.step("1")


def test_a_client_that_had_no_answer_in_time_may_ask_again(agent: Callable[..., AgentProgram]) -> None:
    env = agent("asks_again")
    env.reset(ITEM, 0)
    assert env.step("1").reward == 1.0


def test_an_answer_may_be_streamed(agent: Callable[..., AgentProgram]) -> None:
    env = agent("streams")
    env.reset(ITEM, 0)
    assert env.step("0.75").reward == 0.75


def test_an_async_agent_draws_from_global_generators_of_its_own(agent: Callable[..., AgentProgram]) -> None:
    rng = random.Random(7)
    drawn = [rng.randrange(1000), rng.randrange(1000)]
    one, other = agent("asks_for_models"), agent("asks_for_models")
    for env in (one, other):
        assert env.reset(ITEM, 7).messages[0]["content"] == f"policy 7 {drawn[0]}"
        random.random()
    for env in (one, other):
        assert env.step("on").messages[0]["content"] == str(drawn[1])


def test_episodes_live_beside_each_other_and_are_played_again(file: str) -> None:
    config = TaskSection(name="episodes", environment=f"agent:{file}:tools", max_turns=4)

    def ask(key: int, replies: tuple[str, ...] = (), digests: tuple[str, ...] = ()) -> Ask:
        return Ask(key=(key,), play=Play(task="", item=ITEM, seed=key), replies=replies, digests=digests)

    player, second = Player(config), Player(config)
    opened = player.answer(ask(1), [])
    assert isinstance(opened, Observation) and opened.text == ""
    answers = [player.answer(ask(key, (TWO_CALLS,)), []) for key in (1, 2)]
    env = AgentProgram(f"{file}:tools")
    env.reset(ITEM, 1)
    digest = digest_of(env.step(TWO_CALLS))
    env.close()
    ended = [p.answer(ask(1, (TWO_CALLS, "102"), (digest,)), []) for p in (player, second)]
    assert answers[0] == answers[1] and ended[0] == ended[1]
    assert isinstance(ended[0], Step) and ended[0].reward == 1.0
    player.answer(ask(3), [(2,)])  # releases what is left


def test_an_environment_is_given_the_words_of_the_item_again_not_those_that_it_showed() -> None:
    opening = Opening(seed=5, max_turns=2, max_turn_tokens=0, question="2 + 2?")
    tokens = np.array([1], dtype=np.int32)
    shown_otherwise = Prompt(
        index=0, tokens=tokens, text="You may... 2 + 2?", question="You may... 2 + 2?", opening=opening
    )
    assert episode_item(shown_otherwise).question == "2 + 2?"
    assert (
        episode_item(replace(shown_otherwise, opening=replace(opening, question=None))).question == "You may... 2 + 2?"
    )


def test_who_judges_reads_what_an_agent_asked_without_the_tokens_of_a_template() -> None:
    class Pool:
        def wait(self, ask: Ask) -> Observation:
            return Observation(messages=({"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2?"}))

    opener = EpisodeOpener(Pool(), TaskSection(name="episodes", environment="agent:mine.py:run"))  # type: ignore[arg-type]
    assert opener.open(ITEM, 0).question == "Add.\n2 + 2?"


def test_doctor_sees_whether_a_program_repeats(file: str) -> None:
    def records(name: str) -> Any:
        return record_twice(f"agent:{file}:{name}", {}, {"question": "?", "answer": "1"}, episodes=2)

    first, second = records("tools")
    assert first["error"] == second["error"] == "" and first_difference(first["episodes"], second["episodes"]) is None
    first, second = records("unlike")
    assert first_difference(first["episodes"], second["episodes"]) is not None


def test_examples_of_the_assistant_may_stand_before_the_first_question() -> None:
    request = read_request(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]},
                {"role": "user", "content": "1 + 1?"},
                {"role": "assistant", "content": None, "tool_calls": [_call("x", "add", '{"a": 1, "b": 1}')]},
                {"role": "tool", "tool_call_id": "x", "content": "2"},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "2 + 2?"},
            ]
        }
    )
    told = shown(request.messages, ())
    assert told[0] == {"role": "system", "content": "Be short."}
    assert told[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 1}}
    assert told[3] == {"role": "tool", "content": "2", "tool_call_id": "x", "name": "add"}
    assert checked_observation(Observation(messages=told)).messages == told
    with pytest.raises(TypeError, match="its role must be user, tool or system"):
        checked_observation(Observation(messages=told[:5]))


def _call(number: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_replies_become_messages_with_calls_where_all_of_them_are_calls() -> None:
    request = read_request({"messages": [{"role": "user", "content": "?"}], "tools": [TOOL], "model": "m"})
    good = assistant_message('Well.\n<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>', request, 2)
    assert good == {
        "role": "assistant",
        "content": "Well.",
        "tool_calls": [_call("call00200", "add", '{"b": 2, "a": 1}')],
    }
    assert completion(good, request, 2)["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks(good, request, 2)[0]["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert assistant_message('{"name": "add", "arguments": {}}', request, 0)["content"] is None
    own = assistant_message('[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "abcdefghi"}]', request, 0)
    assert own["tool_calls"][0]["id"] == "abcdefghi"
    broken = '<tool_call>{"name": "add"</tool_call>'
    assert assistant_message(broken, request, 0) == {"role": "assistant", "content": broken}
    thought = '<think>maybe <tool_call></think><tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert assistant_message(thought, request, 0)["content"] == "<think>maybe <tool_call></think>"
    silent = read_request({"messages": [{"role": "user", "content": "?"}], "tools": [TOOL], "tool_choice": "none"})
    assert "tool_calls" not in assistant_message('{"name": "add", "arguments": {}}', silent, 0)


def test_values_in_text_are_what_the_schema_of_the_agents_tool_says() -> None:
    schemas = {
        **{
            "a": {"type": "integer"},
            "b": {"type": ["boolean", "null"]},
            "c": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        },
        **{"d": {"$ref": "#/$defs/D"}, "e": {"type": "string"}, "f": {}, "g": True, "h": {"type": "number"}},
    }
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": schemas}}}
    said = {"a": "1", "b": "True", "c": "null", "d": '{"x": 2}', "e": "3", "f": "4", "g": "5", "h": "many", "i": "6"}
    reply = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in said.items())
    for tools, wanted in (([tool], {**said, "a": 1, "b": True, "c": None, "d": {"x": 2}}), ([TOOL], said)):
        request = read_request({"messages": [{"role": "user", "content": "?"}], "tools": tools})
        (call,) = assistant_message(f"<tool_call><function=add>{reply}</function></tool_call>", request, 0)[
            "tool_calls"
        ]
        assert json.loads(call["function"]["arguments"]) == wanted


def test_what_clients_do_to_a_message_is_no_edit() -> None:
    first = {"role": "user", "content": "?"}
    said = {"role": "assistant", "content": None, "tool_calls": [_call("c", "add", '{"a": 1}')]}
    result = {"role": "tool", "tool_call_id": "c", "content": "1"}
    history = read_request({"messages": [first, said, result]}).messages[:2]
    again = {**said, "content": "", "refusal": None, "tool_calls": [_call("c", "add", '{"a":1}')]}
    added = new_messages(history, read_request({"messages": [first, again, result]}))
    assert added == ({"role": "tool", "content": "1", "tool_call_id": "c"},)
    for other in ({**said, "content": "hm"}, {**said, "tool_calls": [_call("c", "add", '{"a": 2}')]}):
        with pytest.raises(BadRequest, match="message 2 was"):
            new_messages(history, read_request({"messages": [first, other, result]}))
    with pytest.raises(BadRequest, match="cannot be asked again"):
        new_messages(history, read_request({"messages": [first]}))
    with pytest.raises(BadRequest, match="that the policy did not write"):
        new_messages(history, read_request({"messages": [first, said, result, said, result]}))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"n": 2}, "n is 2: an episode has one answer"),
        ({"tool_choice": "required"}, "cannot be made to call"),
        ({"response_format": {"type": "json_object"}}, "cannot be constrained"),
        ({"functions": [{}]}, "give tools"),
        ({"tools": ["add"]}, "expected a list of objects with type and function"),
        ({"tools": 5}, "expected a list of objects with type and function"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "expected a call of a function"),
        ({"messages": []}, "expected a list of messages"),
        ({"messages": [{"role": "function", "content": ""}]}, "whose role is one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "pictures"),
        ({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]}, "cannot be gone on"),
    ],
)
def test_requests_that_the_policy_cannot_answer_are_refused(change: dict[str, Any], cause: str) -> None:
    with pytest.raises(BadRequest, match=cause):
        read_request({"messages": [{"role": "user", "content": "?"}], **change})


def test_names_and_options_are_checked_without_running_the_file(file: str, tmp_path: Path) -> None:
    check_environment(f"agent:{file}:tools", {"bonus": 1.0})
    exits = tmp_path / "exits.py"
    exits.write_text("raise SystemExit\ndef run(base_url): ...\n")
    check_environment(f"agent:{exits}:run", {})
    assert TaskSection(name="episodes", environment="agent:a.py:run").own_environment == "a.py:run"
    for name, options, cause in (
        ("agent:", {}, "must name a class or function"),
        ("agent:tools", {}, "must name a class or function"),
        (f"agent:{file}:tool", {}, "has no 'tool'"),
    ):
        with pytest.raises(DataError, match=cause):
            check_environment(name, options)
    for name, options, cause in (
        ("hangs", {}, "cannot be called with base_url, api_key"),
        ("lonely", {}, "parameter base_url"),
        ("nothing", {"bonus": 1}, "unexpected keyword argument 'bonus'"),
        ("tools", {"seed": 1}, "seed is given by the episode"),
    ):
        with pytest.raises(DataError, match=cause):
            make_environment(f"agent:{file}:{name}", options)
