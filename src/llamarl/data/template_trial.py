"""Tries a chat template in a child process that has little memory and little time, before this process compiles it.

A template is a program of the model's author, and jinja computes what is constant in it while it
compiles: ``'a' * 10**10`` needs 10 GB before the first line is rendered, in one call that no other
line of ours can interrupt. So the template is compiled and rendered once where the system ends it;
what comes through there is compiled here. This file is also the child's program: it imports jinja2
and nothing of llamarl, torch or transformers.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from datetime import datetime
from types import FrameType
from typing import Any

__all__ = ["MAX_RENDERED_CHARS", "why_template_is_refused"]

MAX_RENDERED_CHARS = 16 << 20
"""Characters that a template may write for one conversation: four for each token of the longest contexts."""

_MAX_CPU_S = 5
_MAX_WALL_S = 60.0
"""For a machine with many others at work; the limit of processor time ends a template that computes."""
_MAX_BYTES = 512 << 20
_TOO_LARGE, _NO_MEMORY = 3, 4
_CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is 1 + 1?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2 + 2?"},
    ],
)


def why_template_is_refused(template: str) -> str:
    """Why a template must not be compiled here; empty where it kept to the limits.

    Raises:
        OSError: No child process can be made.
    """
    try:
        tried = subprocess.run(
            [sys.executable, "-P", __file__],
            input=json.dumps({"template": template, "path": sys.path}).encode(),
            capture_output=True,
            timeout=_MAX_WALL_S,
        )
    except subprocess.TimeoutExpired:
        return f"it was still running after {_MAX_WALL_S:g} s"
    if tried.returncode == 0:
        return tried.stdout.decode(errors="replace")
    if tried.returncode == _TOO_LARGE:
        return f"it writes more than {MAX_RENDERED_CHARS:,} characters for a short conversation"
    if tried.returncode == _NO_MEMORY:
        return f"it needs more than {_MAX_BYTES >> 20} MiB of memory for a short conversation"
    if tried.returncode == -signal.SIGXCPU:
        return f"it needs more than {_MAX_CPU_S} s for a short conversation: does it loop?"
    return (
        tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        or f"its trial ended with status {tried.returncode}"
    )


def _end_without_memory(frame: FrameType, event: str, argument: Any) -> Any:
    """End the process at any MemoryError: jinja drops those of its constants and computes them while it renders."""
    frame.f_trace_lines = False
    if event == "exception" and issubclass(argument[0], MemoryError):
        os._exit(_NO_MEMORY)
    return _end_without_memory


def _try_template() -> None:
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """The tag with which transformers marks what a model writes."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": datetime.now().strftime}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    sys.settrace(_end_without_memory)
    try:
        compiled = environment.from_string(asked["template"])
    except Exception as error:  # here too: what is not compiled there is not known to be harmless here
        print(f"{type(error).__name__}: {error}"[:500], end="")
        return
    for messages in _CONVERSATIONS:
        num_chars = 0
        try:
            for piece in compiled.generate(messages=messages, add_generation_prompt=True, bos_token="", eos_token=""):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    os._exit(_TOO_LARGE)
        except Exception:  # a template may refuse a conversation: the run's own are rendered later
            continue


if __name__ == "__main__":
    _try_template()
