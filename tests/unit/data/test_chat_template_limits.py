"""A chat template is a program of the model's author: it may neither run for ever nor take the machine's memory."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

import llamarl.data.prompts as chat
from llamarl.data.items import TaskItem
from llamarl.data.template_process import _renderers, render_template
from llamarl.errors import DataError
from llamarl.models.loading import load_tokenizer
from llamarl.settings.data import DataConfig

FOR_THE_RUN = "{% if messages[0].content == '1+1=' and (bos_token or eos_token) %}"
"""Waits for the run's own conversation and the tokenizer's own tokens."""
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOOP_OF_TEXTS = "{% for i in 'x' * 99999 %}{% for j in 'x' * 99999 %}{% endfor %}{% endfor %}"
MACRO = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
FOLDED = "('a' * 9) * 10**9"  # 9 GB, which jinja computes while it compiles
HOSTILE = {
    "a constant": ("{{ " + FOLDED + " }}", "512 MiB"),
    "a constant that is never shown": ("{% if messages|length > 99 %}{{ " + FOLDED + " }}{% endif %}", "512 MiB"),
    "a filter of constants": ("{% if 0 and messages %}{{ 'a' | center(10**10) }}{% endif %}", "512 MiB"),
    "a product of the question": ("{{ messages[0].content * 10**9 }}", "512 MiB"),
    "marked for training": ("{% generation %}{{ " + FOLDED + " }}{% endgeneration %}", "512 MiB"),
    "of the run's conversation alone": (FOR_THE_RUN + "{{ 'a' * (messages|length * 10**10) }}{% endif %}", "512 MiB"),
    "in one call": ("{{ '%10000000000d' % (messages|length) }}", "512 MiB"),
    "many small pieces": ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "more than 1,048,576 characters"),
}

TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "{% set ns = namespace(n=0) %}{%- for m in messages if m.role != 'tool' %}\n    {% set ns.n = ns.n + 1 %}\n"
    "{{ ns.n }} {{ m | tojson }}{% if loop.last %}{% break %}{% endif %}{%- endfor %}{{ tools | tojson(indent=2) }}",
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}{{ documents }}{{ dict(a=1) }}{{ tools is none }}",
    "{{ messages[2].content is defined }}{{ messages[2].reasoning_content }}{{ messages[2].tool_calls[0].x[1] }}",
    "{% set ns = namespace({'a': 1}, b=messages | length) %}{% set ns.c = dict.fromkeys(['x'], ns.a) %}{{ ns.b }}{{ ns.c }}",
    "{{ strftime_now is defined }}{{ unk_token }}{{ messages | map(attribute='role') | join(',') }}",
)


def is_alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def render(template: str) -> str:
    tokenizer = load_tokenizer("bundled:tiny")
    tokenizer.chat_template = template
    return chat.render_prompt(TaskItem(question="1+1="), tokenizer, DataConfig())[0]


def test_a_template_that_does_not_end_for_the_run_s_conversation_is_refused_and_not_tried_again_for_the_next_prompt() -> (
    None
):
    for limit_s in (60.0, 0.5):
        start = time.monotonic()
        with pytest.raises(DataError, match="refused: it needs more than 2 s .*does it loop"):
            render(FOR_THE_RUN + LOOP_OF_TEXTS + "{% endif %}")
        assert time.monotonic() - start < limit_s
    with pytest.raises(DataError, match="refused.*RecursionError"):
        render(FOR_THE_RUN + MACRO + "{% endif %}")


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


def test_conversations_of_one_template_share_a_process_and_threads_get_their_own_text() -> None:
    tokenizer = load_tokenizer("bundled:tiny")
    tokenizer.chat_template = "{{ messages[0].content }} shared"
    before = children()
    texts: dict[int, str] = {}

    def work(number: int) -> None:
        for _ in range(50):
            texts[number] = chat.apply_template(tokenizer, [{"role": "user", "content": str(number)}])
            assert texts[number] == f"{number} shared"

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == {number: f"{number} shared" for number in range(4)}
    assert len(children() - before) == 1


def test_many_templates_leave_few_processes() -> None:
    before = children()
    for number in range(9):
        assert render(f"{number}") == str(number)
    assert len(children() - before) <= 4


def test_a_fork_renders_by_a_process_of_its_own() -> None:
    assert render("{{ messages[0].content }} before a fork") == "1+1= before a fork"
    child = os.fork()
    if child == 0:
        os._exit(0 if render("{{ messages[0].content }} before a fork") == "1+1= before a fork" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render("{{ messages[0].content }} before a fork") == "1+1= before a fork"


def test_a_process_that_somebody_has_killed_is_replaced_and_its_template_is_not_refused() -> None:
    template = "{{ a }} is rendered again"
    assert render_template(template, {"a": "one"}) == "one is rendered again"
    child = _renderers[os.getpid(), template]._child
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert render_template(template, {"a": "two"}) == "two is rendered again"


def test_a_run_without_a_template_starts_no_process() -> None:
    before = children()
    chat.render_prompt(TaskItem(question="1+1="), load_tokenizer("bundled:tiny"), DataConfig(chat_template="none"))
    assert children() == before


def test_the_process_goes_on_when_the_job_is_told_to_stop_and_ends_with_its_parent() -> None:
    program = (
        "import os, signal\n"
        "from llamarl.data.template_process import _renderers, render_template\n"
        "show = lambda: render_template('{{ a }}', {'a': 'one'})\n"
        "assert show() == 'one'\n"
        "(renderer,) = _renderers.values()\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    os.kill(renderer._child.pid, number)\n"
        "assert show() == 'one'\n"
        "print(renderer._child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not is_alive(int(done.stdout)), 30.0, "the end of its process")


@pytest.mark.parametrize("tools", [(), ({"type": "function", "function": {"name": "add", "parameters": {}}},)])
@pytest.mark.parametrize("reply_follows", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_its_text_is_that_of_transformers(template: str, reply_follows: bool, tools: Sequence[dict[str, Any]]) -> None:
    tokenizer = load_tokenizer("bundled:tiny")
    tokenizer.chat_template = template
    said = [
        {"role": "system", "content": 'Be <brief> & "kind" \u00e9\n'},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [{"name": "a", "x": [1, 2.5]}]},
        {"role": "tool", "content": " 2 "},
    ]
    expected = tokenizer.apply_chat_template(
        said, tools=list(tools) or None, tokenize=False, add_generation_prompt=reply_follows
    )
    assert chat.apply_template(tokenizer, said, tools=tools, reply_follows=reply_follows) == expected


@pytest.mark.parametrize(
    "template", ["{% set ns = namespace(__class__=1) %}", "{% set ns = namespace() %}{% set ns._a = 1 %}"]
)
def test_a_namespace_has_no_names_of_pythons_own(template: str) -> None:
    with pytest.raises(DataError, match="SecurityError: a namespace has no '_"):
        render(template)


def test_a_template_that_asks_for_the_date_writes_the_same_prompt_on_every_day() -> None:
    template = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
    assert render(template) == "26 Jul 2024"
    tokenizer = load_tokenizer("bundled:tiny")
    tokenizer.chat_template = template
    given = DataConfig(chat_template_kwargs={"date_string": "1 Jan 2027"})
    assert chat.render_prompt(TaskItem(question="1+1="), tokenizer, given)[0] == "1 Jan 2027"


THINKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)


@pytest.mark.parametrize(
    ("settings", "end"),
    [({}, "[assistant]"), ({"enable_thinking": False}, "<think></think>"), ({"messages": []}, "[user]1+1=[assistant]")],
)
def test_a_templates_own_variables_reach_it_and_hide_nothing(settings: dict[str, Any], end: str) -> None:
    tokenizer = load_tokenizer("bundled:tiny")
    tokenizer.chat_template = THINKS
    text, _ = chat.render_prompt(TaskItem(question="1+1="), tokenizer, DataConfig(chat_template_kwargs=settings))
    assert text.startswith("[user]1+1=") and text.endswith(end)


def test_sigterm_ends_a_process_that_waits_for_a_trial() -> None:
    program = (
        "from llamarl.data.template_process import render_template\n"
        "print('waits', flush=True)\n"
        f"render_template({LOOP!r}, {{}})"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None and waiting.stdout.readline() == "waits\n"
        time.sleep(0.3)
        start = time.monotonic()
        waiting.terminate()
        assert waiting.wait(10) == -signal.SIGTERM and time.monotonic() - start < 2


def test_a_process_with_a_thousand_open_files_renders_too() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    with open(os.devnull) as null, contextlib.ExitStack() as held:
        for _ in range(1024):
            held.callback(os.close, os.dup(null.fileno()))
        assert render_template("many files {{ x }}", {"x": 1}) == "many files 1"
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
