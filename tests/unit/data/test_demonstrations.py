"""Tokens to imitate, and which of them the assistant wrote; expected texts are written out by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_turn_template import CHATML, GEMMA, LLAMA3, MISTRAL, SPECIAL, make_tokenizer

from llamarl.data.demonstrations import DemonstrationStream
from llamarl.environments.demonstrations import DemonstrationsTask, demonstration_item
from llamarl.environments.items import tell
from llamarl.errors import DataError
from llamarl.settings.data import DataConfig
from llamarl.settings.environments import TaskConfig
from llamarl.types import Group

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "so"},
]


def stream(
    rows: list[dict[str, Any]], folder: Path, template: str | None = None, room: int | None = None, **settings: Any
) -> DemonstrationStream:
    folder.mkdir(exist_ok=True)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = DemonstrationsTask(TaskConfig(name="demonstrations", data=str(file), eval_fraction=0.0), seed=0)
    tokenizer = make_tokenizer(template)
    tokenizer.eos_token = "~"
    return DemonstrationStream(task, tokenizer, DataConfig(shuffle=False, **settings), 0, room=room)


def shown(group: Group, template: str | None = None) -> tuple[str, str, str]:
    """Prompt, whole continuation, and what of it is trained on, as text."""
    tokenizer, (response,) = make_tokenizer(template), group.responses
    return (
        tokenizer.decode(group.prompt.tokens),
        tokenizer.decode(response.tokens),
        tokenizer.decode(response.tokens[response.loss_mask]),
    )


def test_a_plain_row_is_its_prompt_its_completion_and_the_end_of_the_text(tmp_path: Path) -> None:
    rows = stream([{"prompt": "1+1=", "completion": "2"}, {"question": "why?", "answer": 7}], tmp_path)
    assert shown(rows.demonstration(0)) == ("1+1=", "2~", "2~")
    assert shown(rows.demonstration(1)) == ("why?", "7~", "7~")
    assert shown(rows.demonstration(2)) == ("1+1=", "2~", "2~"), "the second epoch"


@pytest.mark.parametrize(
    ("template", "prompt", "rest", "own"),
    [
        (
            CHATML,
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
            "ho<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\nso<|im_end|>",
            "ho<|im_end|>so<|im_end|>",
        ),
        (
            LLAMA3,
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "ho<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nand?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nso<|eot_id|>",
            "ho<|eot_id|>so<|eot_id|>",
        ),
        (
            GEMMA,
            "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
            "ho<end_of_turn>\n<start_of_turn>user\nand?<end_of_turn>\n<start_of_turn>model\nso<end_of_turn>",
            "ho<end_of_turn>so<end_of_turn>",
        ),
    ],
)
def test_every_turn_of_the_assistant_is_learned_and_nothing_else(
    template: str, prompt: str, rest: str, own: str, tmp_path: Path
) -> None:
    group = stream([{"messages": TALK}], tmp_path, template).demonstration(0)
    assert shown(group, template) == (prompt, rest, own)
    (response,) = group.responses
    assert (response.policy_versions >= 0).tolist() == response.loss_mask.tolist()
    assert np.isnan(response.behavior_logprobs[~response.loss_mask]).all()


def test_a_completion_that_brings_the_end_of_the_text_ends_once(tmp_path: Path) -> None:
    rows = stream([{"prompt": "1+1=", "completion": "2~"}], tmp_path)
    assert shown(rows.demonstration(0)) == ("1+1=", "2~", "2~")


def test_a_conversation_as_prompt_is_the_same_as_the_conversation_whole(tmp_path: Path) -> None:
    split = [{"prompt": TALK[:1], "completion": TALK[1:]}, {"prompt": TALK[:1], "completion": "ho"}]
    rows = ({"messages": TALK}, {"messages": TALK[:2]}, *split)
    whole, begin, one, two = (stream([row], tmp_path, MISTRAL).demonstration(0) for row in rows)
    assert shown(whole, MISTRAL) == shown(one, MISTRAL)
    assert shown(begin, MISTRAL) == shown(two, MISTRAL)


def test_what_the_assistant_says_in_a_prompt_is_shown_and_not_learned(tmp_path: Path) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    prompt += "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    for completion in ("so", TALK[3:]):
        group = stream([{"prompt": TALK[:3], "completion": completion}], tmp_path, CHATML).demonstration(0)
        assert shown(group, CHATML) == (prompt, "so<|im_end|>", "so<|im_end|>")


def test_what_follows_the_last_word_of_the_assistant_is_left_out(tmp_path: Path) -> None:
    thanks = [*TALK, {"role": "user", "content": "thanks"}]
    assert shown(stream([{"messages": thanks}], tmp_path, CHATML).demonstration(0), CHATML) == shown(
        stream([{"messages": TALK}], tmp_path, CHATML).demonstration(0), CHATML
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "a"}, "expected one of"),
        ({"prompt": "a", "completion": "  "}, "'completion' is blank"),
        ({"messages": TALK[:1]}, "needs a turn of the assistant after one of somebody else, its roles are user"),
        (
            {"messages": [{"role": "human", "content": "hi"}, TALK[1]]},
            "message 0 has the role 'human' .ShareGPT's.: write",
        ),
        (
            {"messages": [TALK[0], {"role": "assistant", "content": [{"type": "text", "text": "ho"}]}]},
            r"both text: message 1 is {'role': 'assistant', 'content': \[{'type'",
        ),
        ({"messages": TALK[1:2]}, "needs a turn of the assistant after one of somebody else"),
        ({"messages": [TALK[0], {"role": "assistant", "content": " "}]}, "message 1 is of the assistant and empty"),
        ({"messages": [*TALK[:2], TALK[1]]}, "two turns of the assistant follow each other"),
        ({"prompt": TALK[:1], "completion": 3}, "'completion' must be text or messages"),
        ({"messages": []}, "expected a list of"),
        (
            {"messages": [*TALK[:3], {**TALK[3], "weight": 0}]},
            "message 3 of the assistant has weight = 0, but each of its",
        ),
        ({"messages": [TALK[0], {**TALK[1], "train": False}]}, "message 1 of the assistant has train = False, but"),
        ({"messages": [TALK[0], {**TALK[1], "reasoning_content": "hm"}]}, "'reasoning_content' beside its content"),
        ({"prompt": TALK[:1], "completion": [{**TALK[1], "tool_calls": [{}]}]}, "'tool_calls' beside its content"),
        ({"messages": TALK, "tools": [{"name": "look"}]}, "was held with tools, which fine-tuning does not show"),
    ],
)
def test_a_row_from_which_nothing_can_be_learned_is_named(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said) as raised:
        demonstration_item(row, "rows.jsonl:3")
    assert "rows.jsonl:3" in str(raised.value)


def test_thoughts_that_a_table_has_room_for_and_does_not_hold_change_nothing() -> None:
    empty = [{**message, "thinking": None, "tool_calls": []} for message in TALK]
    assert demonstration_item({"messages": empty}, "w").question == "hi"


def test_variables_of_the_template_in_rows_are_told_to_be_unread(caplog: pytest.LogCaptureFixture) -> None:
    tell.cache_clear()
    for own in ({"enable_thinking": False}, {"enable_thinking": True}, None):
        demonstration_item({"messages": TALK, "chat_template_kwargs": own}, "w")
    told = "rows have chat_template_kwargs, which are not read: data.chat_template_kwargs is for all rows alike"
    assert caplog.messages == [told]


@pytest.mark.parametrize("settings", [{}, {"response_prefix": "<think>\n"}])
def test_a_completion_ends_and_does_not_open_the_thought_that_its_prompt_has_opened(
    settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    thinks = CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    assert thinks != CHATML
    template = CHATML if settings else thinks
    SPECIAL.setdefault(thinks, SPECIAL[CHATML])
    rows = [
        {"messages": [TALK[0], {"role": "assistant", "content": f"{begin}hm</think>so"}]} for begin in ("", "<think>")
    ]
    good, bad = (stream([row], tmp_path / str(n), template, **settings) for n, row in enumerate(rows))
    good.check_training_prompts()
    stream([{"messages": TALK}], tmp_path / "2", CHATML).check_training_prompts()
    told = "rows.jsonl:2: a completion has no </think>, though the chat template ends the prompt with <think>"
    assert "</think>" not in caplog.text
    stream([rows[0], {"messages": TALK}], tmp_path / "3", template, **settings).check_training_prompts()
    assert told in caplog.text
    with pytest.raises(DataError, match="rows.jsonl:1: a completion begins with <think>, with which the chat template"):
        bad.check_training_prompts()
    stream([rows[1]], tmp_path, CHATML).check_training_prompts()


def test_a_row_that_is_too_long_with_its_completion_is_refused_or_replaced(tmp_path: Path) -> None:
    rows = [{"prompt": "12", "completion": "1234567"}, {"prompt": "1", "completion": "2"}]
    with pytest.raises(DataError, match=r"rows.jsonl:1 \(10 tokens\)"):
        stream(rows, tmp_path, max_prompt_tokens=9).check_training_prompts()
    with pytest.raises(
        DataError, match="longer than 9 tokens .the model's context.: .* take a model of a longer context, "
    ):
        stream(rows, tmp_path, room=9).check_training_prompts()  # nothing is sampled, whose limit could be lowered
    kept = stream(rows, tmp_path, max_prompt_tokens=9, too_long="skip")
    assert {shown(kept.demonstration(i)) for i in range(6)} == {("1", "2~", "2~")}
    assert shown(stream(rows, tmp_path, max_prompt_tokens=10).demonstration(0))[1] == "1234567~"


def test_a_completion_of_text_that_the_vocabulary_lacks_is_told_with_its_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "1", "completion": "2"}, {"prompt": "3", "completion": "\N{SNOWMAN}"}]
    stream(rows, tmp_path).check_training_prompts()
    assert "1 of 2 training prompts hold text that the model's vocabulary has no token for" in caplog.text
    assert "rows.jsonl:2, '3', is one" in caplog.text
