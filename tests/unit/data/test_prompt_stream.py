"""The prompt stream is a pure function of (configuration, seed, index)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from llamarl import progress
from llamarl.data.items import Split, TaskItem
from llamarl.data.prompts import Opened, PromptStream, plain_tokens, with_answer
from llamarl.determinism import _splitmix64, derive_seed
from llamarl.environments.math import MathTask
from llamarl.errors import DataError
from llamarl.models.loading import load_tokenizer
from llamarl.settings.data import DataConfig
from llamarl.settings.environments import TaskConfig
from llamarl.types import EVAL_INDEX_OFFSET, Opening


class Items:
    """``size`` items a split; item i asks for ``i`` letters."""

    name = "letters"

    def __init__(self, size: int | None) -> None:
        self._size = size

    def num_items(self, split: Split) -> int | None:
        return self._size

    def item(self, split: Split, index: int) -> TaskItem:
        return TaskItem(question="x" * index, answer=str(index), metadata={"split": split})


TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


class Letters:
    """One token a character, and one at the beginning where special tokens are asked for."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, Any]:
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    special_tokens_map: Mapping[str, str] = {}

    def get_chat_template(self, chat_template: str | None, tools: object) -> str | None:
        return self.chat_template

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], **given: Any) -> str:
        return json.dumps({"messages": conversation, "add_generation_prompt": given["add_generation_prompt"]})


def _stream(size: int | None, seed: int = 0, **config: Any) -> PromptStream:
    return PromptStream(Items(size), Letters(), DataConfig(**config), seed)


def test_a_fresh_stream_gives_the_same_prompt_at_any_index_asked_first() -> None:
    prompts = [_stream(50).get(i) for i in (131, 7, 0)]
    running = _stream(50)
    expected = [running.get(i) for i in range(132)]
    for prompt, index in zip(prompts, (131, 7, 0), strict=True):
        assert (prompt.index, prompt.text, prompt.answer) == (index, expected[index].text, expected[index].answer)
        assert prompt.tokens.tolist() == expected[index].tokens.tolist()


def test_candidates_of_prompts_pass_over_the_items_in_the_order_of_prompts() -> None:
    in_turn = [_stream(12, seed=3).get(index).item for index in range(24)]
    stream = _stream(12, seed=3, candidates=3)
    blocks = [stream.candidates(index) for index in range(8)]
    assert [place for _, places in blocks for place in places] == in_turn
    assert {name for name, _ in blocks} == {"letters"}
    chosen = stream.get(5, 7)
    assert (chosen.index, chosen.item, chosen.answer) == (5, 7, "7")
    with pytest.raises(ValueError, match="task 'letters' has no training item 12"):
        stream.get(5, 12)


def test_an_item_that_is_too_long_keeps_its_place_when_another_one_is_asked() -> None:
    stream = _stream(12, max_prompt_tokens=6, too_long="skip")
    prompt = stream.get(0, 11)
    assert prompt.item == 11 and len(prompt.tokens) <= 6


def test_items_without_end_are_not_chosen_by_what_is_known_of_them() -> None:
    with pytest.raises(DataError, match=r"data.candidates is 3, but task 'letters' makes its items without end"):
        _stream(None, candidates=3).check_training_prompts()


def test_the_order_sorts_the_places_by_splitmix64_keys_of_the_seed_and_epoch() -> None:
    def key(seed: int, epoch: int, place: int) -> int:  # integers of any size: no wrap-around to get wrong
        return _splitmix64((derive_seed(seed, epoch) + (place - 1) * 0x9E3779B97F4A7C15) % 2**64)

    for seed, epoch in ((5, 0), (5, 1), (6, 0)):
        expected = sorted(range(40), key=lambda place, seed=seed, epoch=epoch: key(seed, epoch, place))  # type: ignore[misc]
        got = [_stream(40, seed=seed).get(40 * epoch + i).answer for i in range(40)]
        assert got == list(map(str, expected))


def test_endless_tasks_and_unshuffled_ones_go_in_order() -> None:
    assert [_stream(None).get(i).answer for i in (0, 1, 900)] == ["0", "1", "900"]
    assert [_stream(3, shuffle=False).get(i).answer for i in range(5)] == ["0", "1", "2", "0", "1"]


def test_a_prompt_over_the_limit_is_an_error_that_names_prompt_length_limit_and_fix() -> None:
    stream = _stream(None, max_prompt_tokens=10)
    assert len(stream.get(9).tokens) == 10
    with pytest.raises(DataError, match=r"item 10 \(prompt 10\).*11 tokens.*max_prompt_tokens=10.*too_long = 'skip'"):
        stream.get(10)


class Opens:
    """Shows twice as many letters as the item has."""

    def ask(self, item: TaskItem, seed: int) -> None: ...

    def open(self, item: TaskItem, seed: int) -> Opened:
        opening = Opening(seed=seed, max_turns=2, max_turn_tokens=0, question=item.question)
        return Opened(question="y" * (2 * len(item.question)), messages=(), tools=(), opening=opening)


def test_an_episode_that_opens_with_too_much_costs_its_samples_and_not_the_run() -> None:
    stream = PromptStream(Items(None), Letters(), DataConfig(max_prompt_tokens=10), 0, opener=Opens())
    fits, long = stream.get(4), stream.get(6)
    assert (len(fits.tokens), fits.opening and fits.opening.failure) == (9, "")  # one more, where a text begins
    assert long.opening is not None and len(long.tokens) == 7
    assert "makes a prompt of 13 tokens, limit data.max_prompt_tokens=10: raise" in long.opening.failure
    with pytest.raises(DataError, match="11 tokens"):  # the item alone has as many: it could be told before
        stream.get(10)
    skipping = PromptStream(Items(5), Letters(), DataConfig(max_prompt_tokens=8, too_long="skip"), 0, opener=Opens())
    shown = [skipping.get(index) for index in range(10)]
    assert skipping.num_skipped and all(one.opening and not one.opening.failure for one in shown)


def test_skipping_replaces_long_prompts_by_the_seed_and_leaves_the_others_alone() -> None:
    stream, again = (_stream(12, max_prompt_tokens=10, too_long="skip") for _ in range(2))
    whole = _stream(12)
    for index in range(24):
        prompt = stream.get(index)
        assert len(prompt.tokens) <= 10
        assert prompt.answer == again.get(index).answer
        if len(whole.get(index).tokens) <= 10:
            assert prompt.answer == whole.get(index).answer


def test_the_room_that_the_context_leaves_is_a_limit_too() -> None:
    def stream(room: int, **config: Any) -> PromptStream:
        return PromptStream(Items(12), Letters(), DataConfig(shuffle=False, **config), 0, room=room)

    assert len(stream(10).get(9).tokens) == 10
    with pytest.raises(
        DataError, match=r"item 10 \(prompt 10\).*11 tokens, limit 10 tokens.*lower generator.sampling.max"
    ):
        stream(10).get(10)
    with pytest.raises(DataError, match=r"limit data.max_prompt_tokens=9: raise data.max_prompt_tokens"):
        stream(10, max_prompt_tokens=9).get(10)
    skipping, limited = stream(10, too_long="skip"), _stream(12, shuffle=False, max_prompt_tokens=10, too_long="skip")
    assert [skipping.get(i).answer for i in range(24)] == [limited.get(i).answer for i in range(24)]
    assert skipping.num_skipped >= 4  # two of twelve are too long, in two epochs, besides replacements that are
    assert [len(p.tokens) for p in skipping.eval_prompts(12)] == list(range(1, 11))


def test_the_check_of_training_prompts_says_how_far_it_is() -> None:
    said: list[str] = []

    class Watched(Items):
        def item(self, split: Split, index: int) -> TaskItem:
            said.append(progress.told())
            return super().item(split, index + 1)

    PromptStream(Watched(3), Letters(), DataConfig(), 0).check_training_prompts()
    assert said == [f"checking {done}3 training prompts" for done in ("", "1 of ", "2 of ")]


def test_all_prompts_of_a_finite_task_are_checked_and_none_of_an_endless_one() -> None:
    _stream(10, max_prompt_tokens=10).check_training_prompts()
    with pytest.raises(DataError, match=r"2 of 12 training prompts.*: item 10 \(11 tokens\), item 11 \(12 tokens\)"):
        _stream(12, max_prompt_tokens=10).check_training_prompts()
    with pytest.raises(DataError, match=r"item 6 \(7 tokens\), \.\.\.: raise"):
        _stream(12, max_prompt_tokens=2).check_training_prompts()
    asked = [_stream(12).get(index) for index in range(4)]
    longest = max(len(prompt.tokens) for prompt in asked)
    _stream(12, max_prompt_tokens=longest).check_training_prompts(4)  # who asks for 4 of them looks at no other
    with pytest.raises(DataError, match="1 of 4 training prompts are longer"):
        _stream(12, max_prompt_tokens=longest - 1).check_training_prompts(4)
    _stream(None, max_prompt_tokens=1).check_training_prompts()


def test_skipping_ends_with_an_error_when_nothing_fits() -> None:
    with pytest.raises(DataError, match="100 items in a row"):
        PromptStream(
            Items(3),
            Letters(),
            DataConfig(question_template="long {question}", max_prompt_tokens=2, too_long="skip"),
            0,
        ).get(0)


def test_eval_prompts_have_indices_of_their_own_and_do_not_change_with_their_number() -> None:
    stream = _stream(50)
    five, twenty = stream.eval_prompts(5), stream.eval_prompts(20)
    assert [p.index for p in five] == [EVAL_INDEX_OFFSET + i for i in range(5)]
    assert [p.answer for p in five] == [p.answer for p in twenty[:5]]
    assert len({p.answer for p in twenty}) == 20
    assert {p.metadata["split"] for p in twenty} == {"eval"}
    assert len(stream.eval_prompts(100)) == 50
    assert len(_stream(None).eval_prompts(7)) == 7


def test_no_eval_prompt_within_the_limit_is_an_error_that_names_it() -> None:
    with pytest.raises(
        DataError, match="no eval prompt within data.max_prompt_tokens=2: .*raise data.max_prompt_tokens"
    ):
        _stream(3, question_template="long {question}", max_prompt_tokens=2, too_long="skip").eval_prompts(5)


def test_a_split_that_held_nothing_out_is_told_as_that_and_not_as_prompts_too_long(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "1+1?", "answer": "2"}\n')
    stream = PromptStream(MathTask(TaskConfig(name="math", data=str(file)), seed=0), Letters(), DataConfig(), 0)
    assert stream.eval_prompts(0) == [] and not stream.holds_out
    told = "'math' holds out nothing to evaluate on: all 1 items are trained on. Set task.eval_fraction.*task.eval_data"
    with pytest.raises(DataError, match=told):
        stream.eval_prompts(5)


def test_plain_text_gets_the_tokenizers_special_tokens_the_system_prompt_and_the_prefix() -> None:
    config = DataConfig(system_prompt="Be brief.", question_template="Q: {question} {}", response_prefix="A:")
    prompt = PromptStream(Items(None), Letters(), config, 0).get(2)
    assert prompt.text == "Be brief.\n\nQ: xx {}A:"
    assert prompt.tokens[0] == 1
    assert "".join(map(chr, prompt.tokens[1:])) == prompt.text


def test_plain_text_begins_with_one_token_of_the_beginning_and_is_not_ended() -> None:
    tokenizer = load_tokenizer("bundled:tiny")
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing("<bos> $A <eos>", None, [("<bos>", bos), ("<eos>", eos)])
    own = tokenizer("1+", add_special_tokens=False)["input_ids"]
    for text, expected in (("1+", [bos, *own]), ("<bos>1+", [bos, *own]), ("", [bos])):
        assert plain_tokens(tokenizer, text).tolist() == expected, text


def test_prompts_that_have_been_through_a_template_are_told(caplog: pytest.LogCaptureFixture) -> None:
    class Rendered(Items):
        def item(self, split: Split, index: int) -> TaskItem:
            return TaskItem(question="<pad>user\n1+<pad>" if index else "1+", where=f"f:{index}")

    tokenizer = load_tokenizer("bundled:tiny")
    for template, told in (
        ("{{ messages[0].content }}<pad>", True),
        ("{{ messages[0].content }}", False),
        (None, False),
    ):
        caplog.clear()
        tokenizer.chat_template = template
        PromptStream(Rendered(3), tokenizer, DataConfig(), 0).check_training_prompts()
        assert ("2 of 3 training prompts hold tokens that the chat template writes" in caplog.text) is told, template


def test_a_template_that_knows_no_system_message_is_told_with_the_key_that_put_it_there() -> None:
    tokenizer = load_tokenizer("bundled:tiny")
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system.') }}{% endif %}."
    with pytest.raises(DataError, match=r"No system.; some templates know no system message \(data.system_prompt\)"):
        PromptStream(Items(3), tokenizer, DataConfig(system_prompt="S"), 0).get(1)


def test_a_chat_template_is_used_where_there_is_one_and_writes_its_own_special_tokens() -> None:
    config = DataConfig(system_prompt="S", response_prefix="<think>")
    prompt = PromptStream(Items(None), Letters(TEMPLATE), config, 0).get(2)
    assert prompt.text == "[system]S[user]xx[assistant]<think>"
    assert "".join(map(chr, prompt.tokens)) == prompt.text
    plain = PromptStream(Items(None), Letters(TEMPLATE), DataConfig(chat_template="none"), 0).get(2)
    assert plain.text == "xx"


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"question_template": "no place"}, "question_template"), ({"max_prompt_tokens": 0}, "max_prompt_tokens")],
)
def test_a_wrong_configuration_names_the_field(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataConfig(**fields)


def test_prompts_that_hold_unknown_text_are_counted_once_with_an_example(caplog: pytest.LogCaptureFixture) -> None:
    class Words(Letters):
        unk_token_id = 1

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [1 if letter == "x" else 2 for letter in text]}

    class Endings(Words):
        eos_token_id = 1  # as in tokenizers of bytes, which write any text

    for tokenizer, told in ((Words(), 1), (Endings(), 0), (Letters(), 0)):
        caplog.clear()
        PromptStream(Items(12), tokenizer, DataConfig(question_template="{question}b"), 0).check_training_prompts()
        assert len(caplog.records) == told
        if told:
            assert "11 of 12 training prompts hold text that the model's vocabulary has no token for" in caplog.text
            assert "item 1, 'x', is one" in caplog.text


def test_who_knows_the_answer_is_shown_it_where_the_question_or_the_last_message_stood() -> None:
    template = "{question}{question} is {answer}, {x}"
    config = DataConfig(system_prompt="S", question_template="Q: {question}", response_prefix="<")
    prompt = PromptStream(Items(None), Letters(TEMPLATE), config, 0).get(2)
    shown = with_answer(prompt, template, Letters(TEMPLATE), config)
    assert shown.text == "[system]S[user]Q: xxxx is 2, {x}[assistant]<" and shown.index == prompt.index
    assert shown.tokens.tolist() == [ord(letter) for letter in shown.text]
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    of_talk = replace(prompt, metadata={"messages": talk}, answer="{question}")  # words are no templates
    shown = with_answer(of_talk, template, Letters(TEMPLATE), config)
    assert shown.text == "[system]S[user]a[assistant]b[user]cc is {question}, {x}[assistant]<"
    with pytest.raises(DataError, match="reference.template shows the teacher answers, and prompt 2, 'xx', has none"):
        with_answer(replace(prompt, answer=None), template, Letters(), config)
