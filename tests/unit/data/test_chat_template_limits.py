"""A chat template is a program of the model's author: it may neither run for ever nor take the machine's memory."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
import time

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


LOOPS = {name: "{% if messages[0].content == '1+1=' %}" + loop + "{% endif %}" for name, loop in LOOPS.items()}
"""Of the run's conversation alone: its trial with another one ends."""
FOLDED = "('a' * 9) * 10**9"  # 9 GB, which jinja computes while it compiles
HOSTILE = {
    "a constant": ("{{ " + FOLDED + " }}", "512 MiB"),
    "a constant that is never shown": ("{% if messages|length > 99 %}{{ " + FOLDED + " }}{% endif %}", "512 MiB"),
    "a filter of constants": ("{% if 0 and messages %}{{ 'a' | center(10**10) }}{% endif %}", "512 MiB"),
    "a product of the question": ("{{ messages[0].content * 10**9 }}", "512 MiB"),
    "marked for training": ("{% generation %}{{ " + FOLDED + " }}{% endgeneration %}", "512 MiB"),
    "many small pieces": ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "more than 16,777,216 characters"),
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


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_takes_much_memory_is_refused_before_this_process_compiles_it(name: str) -> None:
    template, why = HOSTILE[name]
    before_kb, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(
        DataError, match=f"template of .*tiny .*tokenizer_config.json\\) is refused: .*{why}"
    ) as refused:
        render(template)
    assert time.monotonic() - start < 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 200_000
    assert "\n" not in str(refused.value)


def test_a_template_that_only_computes_is_ended_by_its_trial() -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match="refused: it needs more than 5 s"):
        render(loops)


def test_what_a_template_writes_for_the_run_s_own_conversation_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED_CHARS", 100)
    assert len(render("{{ messages[0].content * 25 }}")) == 100
    with pytest.raises(DataError, match="wrote 104 characters"):
        render("{{ messages[0].content * 26 }}")


def test_a_template_is_tried_once_and_a_run_without_one_tries_none(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def count(template: str) -> str:
        tried.append(template)
        return ""

    monkeypatch.setattr(chat, "why_template_is_refused", count)
    for _ in range(3):
        render("{{ messages[0].content }} once")
    assert tried == ["{{ messages[0].content }} once"]
    chat.render_prompt(TaskItem(question="1+1="), load_tokenizer("bundled:tiny"), DataConfig(chat_template="none"))
    assert len(tried) == 1


def test_sigterm_ends_a_process_that_waits_for_a_trial() -> None:
    program = (
        "from llamarl.data.template_trial import why_template_is_refused as try_it\n"
        "print('waits', flush=True)\n"
        "try_it('{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}')"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None and waiting.stdout.readline() == "waits\n"
        time.sleep(0.3)
        start = time.monotonic()
        waiting.terminate()
        assert waiting.wait(10) == -signal.SIGTERM and time.monotonic() - start < 2
