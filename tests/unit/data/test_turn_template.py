"""What stands between two turns, for four shapes of chat template; expected texts are written out by hand."""

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llamarl.data.turn_template import TurnTemplate
from llamarl.errors import DataError
from llamarl.settings.data import DataConfig

CHATML = """\
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{%- set words = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}
{{- '<|im_start|>' + m.role + '\\n' + words + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

GEMMA = """\
{{- '<bos>' }}
{%- for m in messages %}
{%- if m.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + m.role) }}{%- endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

MISTRAL = """\
{{- '<s>' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role == 'assistant' and not messages[loop.index0 - 1].tool_calls %}
{{- raise_exception('a result without a call') }}
{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [{"name": "' + m.tool_calls[0].function.name + '", "arguments": {}}]</s>' }}
{%- else %}{{- ' ' + m.content + '</s>' }}
{%- endif %}
{%- endfor %}"""

SPECIAL = {
    CHATML: ("<|im_start|>", "<|im_end|>"),
    LLAMA3: ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    GEMMA: ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    MISTRAL: ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
}
END = {CHATML: "<|im_end|>", LLAMA3: "<|eot_id|>", GEMMA: "<end_of_turn>", MISTRAL: "</s>"}
USER = {"role": "user", "content": "and now?"}


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token a character, but for the template's own words."""
    vocabulary = {chr(code): code for code in range(128)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    if template is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[template])})
        tokenizer.chat_template = template
    return tokenizer


def between(template: str, messages: list[dict[str, Any]], *, wrote_the_end: bool, **config: Any) -> str:
    tokenizer = make_tokenizer(template)
    last = tokenizer.convert_tokens_to_ids(END[template]) if wrote_the_end else ord("x")
    tokens = TurnTemplate(tokenizer, DataConfig(**config)).between(last, messages)
    return str(tokenizer.decode(tokens, skip_special_tokens=False))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA3, "<|start_header_id|>user<|end_header_id|>\n\nand now?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        (GEMMA, "\n<start_of_turn>user\nand now?<end_of_turn>\n<start_of_turn>model\n"),
        (MISTRAL, "[INST] and now?[/INST]"),
    ],
    ids=["ChatML", "Llama 3", "Gemma", "Mistral"],
)  # fmt: skip
def test_the_end_of_a_turn_stands_once_and_the_separator_is_kept(template: str, expected: str) -> None:
    assert between(template, [USER], wrote_the_end=True) == expected
    assert between(template, [USER], wrote_the_end=False) == END[template] + expected


def test_a_space_before_the_end_of_a_turn_does_not_have_it_stand_twice() -> None:
    tokenizer = make_tokenizer(MISTRAL)
    tokenizer.chat_template = MISTRAL.replace("' ' + m.content + '</s>'", "' ' + m.content + ' </s>'")
    assert tokenizer.chat_template != MISTRAL
    template, end = TurnTemplate(tokenizer, DataConfig()), tokenizer.convert_tokens_to_ids("</s>")
    assert template.end_token == end
    for last, expected in ((end, "[INST] and now?[/INST]"), (ord("x"), "</s>[INST] and now?[/INST]")):
        assert tokenizer.decode(template.between(last, [USER]), skip_special_tokens=False) == expected


PHI = CHATML.removesuffix("{%- endif %}") + "{%- else %}{{- eos_token }}{%- endif %}"
OLMO = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{{- eos_token if loop.last and m.role == 'assistant' else '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.mark.parametrize("template", [PHI, OLMO], ids=["Phi 3", "OLMo"])
def test_the_end_of_a_turn_is_not_the_end_of_the_text_that_stands_behind_the_last_one(template: str) -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.chat_template = template
    turns, end = TurnTemplate(tokenizer, DataConfig()), tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert turns.end_token == end
    expected = "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(turns.between(end, [USER]), skip_special_tokens=False) == expected
    assert tokenizer.decode(turns.between(ord("x"), [USER]), skip_special_tokens=False) == "<|im_end|>" + expected


def test_the_head_of_the_next_message_stands_once_where_the_policy_ended_with_it() -> None:
    """GLM 4 ends no turn: the head of a user's message ends its responses."""
    tokenizer = make_tokenizer(LLAMA3)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|eot_id|>' + m.role + ' ' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|eot_id|>assistant {% endif %}"
    )
    turns, head = TurnTemplate(tokenizer, DataConfig()), tokenizer.convert_tokens_to_ids("<|eot_id|>")
    for last, expected in (
        (head, "user and now?<|eot_id|>assistant "),
        (ord("x"), "<|eot_id|>user and now?<|eot_id|>assistant "),
    ):
        assert tokenizer.decode(turns.between(last, [USER]), skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            CHATML,
            "\n<|im_start|>user\n<tool_response>\n12\n</tool_response>\n<tool_response>\na 'b'\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            LLAMA3,
            "<|start_header_id|>ipython<|end_header_id|>\n\n12<|eot_id|>"
            "<|start_header_id|>ipython<|end_header_id|>\n\na 'b'<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            MISTRAL,
            '[TOOL_RESULTS] {"content": "12", "call_id": "callid000"}[/TOOL_RESULTS]'
            '[TOOL_RESULTS] {"content": "a \'b\'", "call_id": "callid000"}[/TOOL_RESULTS]',
        ),
    ],
    ids=["ChatML", "Llama 3", "Mistral"],
)
def test_results_of_tools_are_grouped_as_the_template_groups_them(template: str, expected: str) -> None:
    results = [{"role": "tool", "name": "add", "content": words} for words in ("12", "a 'b'")]
    assert between(template, results, wrote_the_end=True) == expected


def test_a_template_that_knows_no_tools_refuses_their_results_with_a_way_out() -> None:
    with pytest.raises(DataError, match="tool cannot be put .* no role tool.*answer with text"):
        between(GEMMA, [{"role": "tool", "content": "12"}], wrote_the_end=True)


def test_a_template_that_leaves_a_message_out_is_refused() -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = CHATML.replace(
        "{%- for m in messages %}", "{%- for m in messages if m.role != 'system' %}"
    )
    template = TurnTemplate(tokenizer, DataConfig())
    with pytest.raises(DataError, match="leaves out"):
        template.between(None, [{"role": "system", "content": "be brief"}])


def test_a_template_without_earlier_turns_is_refused_when_it_is_looked_at() -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = "{{ messages[-1].content if messages[-1].role == 'user' else '' }}"
    with pytest.raises(DataError, match="does not show what the policy wrote"):
        TurnTemplate(tokenizer, DataConfig())


def test_words_that_are_no_word_of_the_template_are_not_looked_for_in_json() -> None:
    """A result is shown escaped by some templates: that it is there is found out with a plain word."""
    words = 'two\nlines "quoted"'
    shown = between(MISTRAL, [{"role": "tool", "content": words}], wrote_the_end=True)
    assert '"two\\nlines \\"quoted\\""' in shown


def test_what_is_put_into_the_policys_mouth_begins_each_turn() -> None:
    assert between(CHATML, [USER], wrote_the_end=True, response_prefix="<think>").endswith("assistant\n<think>")


def test_plain_text_stands_in_its_own_template() -> None:
    tokenizer = make_tokenizer(None)
    template = TurnTemplate(tokenizer, DataConfig(turn_template="\n> {text}\n"))
    assert (
        tokenizer.decode(template.between(ord("x"), [USER, {"role": "tool", "content": "12"}])) == "\n> and now?\n12\n"
    )
