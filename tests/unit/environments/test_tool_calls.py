"""Calls of tools in the formats that chat templates teach, whole and broken."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.environments.tool_calls import BadCall, Call, read_calls

ADD = Call("add", {"a": 1, "b": 2})
SUB = Call("sub", {"a": 5})
KNOWN = ("add", "sub")


@pytest.mark.parametrize(
    ("reply", "calls"),
    [
        # Hermes, Qwen
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', [ADD]),
        ('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><tool_call>{"name": "sub", '
         '"arguments": {"a": 5}}</tool_call>', [ADD, SUB]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}', [ADD]),  # the closing mark was cut off
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', [ADD]),
        ('<think><tool_call>{"name": "sub"}</tool_call></think><tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}'
         "</tool_call>", [ADD]),
        ('<tool_call>{"name": "now"}</tool_call>', [Call("now", {})]),
        # Qwen3-Coder
        ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n\n3\n</parameter>\n</function>\n"
         "</tool_call>", [Call("add", {"a": "1", "b": "2\n\n3"})]),
        ("So:<tool_call><function=now></function></tool_call><tool_call><function=sub><parameter=a>5</parameter>",
         [Call("now", {}), Call("sub", {"a": "5"})]),
        ('<tool_call>{"name": "sub", "arguments": {"a": "<function=x>"}}</tool_call>', [Call("sub", {"a": "<function=x>"})]),
        # Llama 3
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "sub", "parameters": {"a": 5}}', [ADD, SUB]),
        ('{"name": "other", "parameters": {}}', [Call("other", {})]),
        ('{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        # Mistral
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "sub", "arguments": {"a": 5}}]', [ADD, SUB]),
        ('[TOOL_CALLS][{"name": "sub", "arguments": {"a": 5}, "id": "abc123def"}]', [Call("sub", {"a": 5}, "abc123def")]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]sub[CALL_ID]x1[ARGS]{"a": 5}', [ADD, Call("sub", {"a": 5}, "x1")]),
        # the marker was a special token and is gone
        ('[{"name": "add", "arguments": {"a": 1, "b": 2}}]', [ADD]),
        ('I add. [{"name": "add", "arguments": {"a": 1, "b": 2}}]', [ADD]),
        ('I call {"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        ('add{"a": 1, "b": 2}', [ADD]),
        # fenced
        ('So:\n```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```\n', [ADD]),
        ('```json\n[{"name": "add", "arguments": {"a": 1, "b": 2}}]\n```\n```json\n{"name": "sub", "arguments": {"a": 5}}\n```',
         [ADD, SUB]),
        # no calls
        ("The answer is 3.", []),
        ("", []),
        ('The object is {"a": 1}.', []),
        ('{"answer": 3}', []),
        ('```json\n{"answer": 3}\n```', []),
        ('I could write {"name": "add", "arguments": {}} but I do not.', []),
        ('{"name": "Ada", "age": 36}', []),
        ('Her record: {"name": "Ada", "arguments": {}}', []),  # no such tool, and no marker
        ("[1, 2, 3]", []),
        ("[]", []),
        ("f{x} and {", []),
    ],
)  # fmt: skip
def test_calls_are_found(reply: str, calls: list[Call]) -> None:
    assert read_calls(reply, KNOWN) == calls


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "no JSON"),
        ("<tool_call>add(1, 2)</tool_call>", "no JSON"),
        ("<tool_call>\n<function=add\n</function>\n</tool_call>", "Expected <function=NAME>"),
        ("<tool_call></tool_call>", "no call behind the marker"),
        ('<tool_call>{"arguments": {}}</tool_call>', "no name"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "no name"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "no object"),
        ('<tool_call>{"name": "add", "arguments": "1 2"}</tool_call>', "no object"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "no JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "no JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "no JSON"),
        ("[TOOL_CALLS] nothing", "no JSON"),
        ('[TOOL_CALLS]add[ARGS]{"a": ', "no JSON"),
        ("<|python_tag|>import os", "no JSON"),
        ('{"name": "add", "parameters": {"a": 1', "no JSON"),
        ('```json\n{"name": "add", "arguments": {"a": }}\n```', "no JSON"),
    ],
)
def test_what_is_marked_as_a_call_and_is_none_says_why(reply: str, why: str) -> None:
    (call,) = read_calls(reply, KNOWN)
    assert isinstance(call, BadCall) and why in call.why and len(call.why) < 400


@pytest.mark.parametrize("none", ["null", '""', "{}"])
def test_a_call_without_arguments_may_say_so_in_other_ways(none: str) -> None:
    assert read_calls(f'<tool_call>{{"name": "look", "arguments": {none}}}</tool_call>', KNOWN) == [Call("look", {})]


def test_a_good_call_before_a_broken_one_is_kept() -> None:
    good, bad = read_calls(
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><tool_call>{</tool_call>', KNOWN
    )
    assert good == ADD and isinstance(bad, BadCall)


def test_a_policy_that_opens_one_parameter_after_another_costs_no_seconds() -> None:
    begun, closed = time.process_time(), "<parameter=a>5</parameter>"
    (call,) = read_calls(f"<tool_call><function=sub>{closed}{'<parameter=b>' * 2000}</function></tool_call>", KNOWN)
    assert call == Call("sub", {"a": "5"}) and time.process_time() - begun < 0.5


@given(st.text(alphabet='{}[]",:;<>/`abcjnotl_ \n0123\\', max_size=80))
def test_any_text_is_read_without_an_error(text: str) -> None:
    for marker in ("", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "```json\n"):
        for call in read_calls(marker + text, KNOWN):
            assert isinstance(call, (Call, BadCall))
