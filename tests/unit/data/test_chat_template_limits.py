"""A chat template is a program of the model's author: it may not run for ever."""

from __future__ import annotations

import sys
import threading

import pytest

import llamarl.data.chat as chat
from llamarl.data.config import DataConfig
from llamarl.data.items import TaskItem
from llamarl.errors import DataError
from llamarl.models.loading import load_tokenizer

LOOPS = {
    "ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "texts": "{% for i in 'x' * 99999 %}{% for j in 'x' * 99999 %}a{% endfor %}{% endfor %}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


def render(template: str) -> str:
    tokenizer = load_tokenizer("bundled:tiny")
    tokenizer.chat_template = template
    return chat.render_prompt(TaskItem(question="1+1="), tokenizer, DataConfig())[0]


@pytest.mark.parametrize("template", LOOPS.values(), ids=LOOPS)
def test_a_template_that_does_not_end_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_MAX_TEMPLATE_S", 0.05)
    with pytest.raises(DataError, match="chat template refused .*(does it loop|recursion)"):
        render(template)
    assert sys.gettrace() is None


def test_the_limit_holds_in_every_thread_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_MAX_TEMPLATE_S", 0.05)
    told: list[str] = []

    def work() -> None:
        try:
            render(LOOPS["ranges"])
        except DataError as error:
            told.append(str(error))
        told.append(str(sys.gettrace()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert len(told) == 2 and "does it loop?" in told[0] and told[1] == "None"


def test_a_template_that_ends_gives_what_it_gave() -> None:
    assert render("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}") == "<user>1+1="
