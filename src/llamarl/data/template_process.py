"""Renders chat templates in a child process that has little memory and little time.

A template is a program of the model's author: ``'a' * 10**10`` needs 10 GB in one call that no other
line of ours can interrupt, while it is compiled as well as when it meets a conversation that it was
waiting for. So every template is compiled and rendered where the system ends it; this process only
sends conversations and receives text. This file is also the child's program: it imports jinja2 and
nothing of llamarl, torch or transformers.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from types import FrameType
from typing import Any

__all__ = ["MAX_RENDERED_CHARS", "TemplateLimitError", "render_template"]

MAX_RENDERED_CHARS = 1 << 20
"""Characters that a template may write for one conversation: four for each token of the longest contexts; a tokenizer
takes seconds and a gigabyte for them."""

_MAX_CPU_S = 2
"""Processor seconds for one conversation; real templates take milliseconds."""
_MAX_WALL_S = 300.0
"""For a machine with many others at work; the limit of processor time ends a template that computes."""
_MAX_BYTES = 512 << 20
_TODAY = datetime(2024, 7, 26)
"""What a template that asks is told (the day that Llama 3's own take where nobody knows): with the clock's, prompts
would change at midnight, and a resumed or replayed run would be another."""
_TOO_LARGE, _NO_MEMORY = 3, 4
_MAX_OPEN = 4


class TemplateLimitError(Exception):
    """Says which limit a template broke."""


class _Renderer:
    """Holds the child that renders one template."""

    def __init__(self, template: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            process_group=0,  # a terminal's Ctrl-C is for the run, which may still need it
        )
        self._send({"template": template, "path": [path for path in sys.path if isinstance(path, str)]})

    def render(self, variables: Mapping[str, Any]) -> dict[str, str]:
        """The child's answer: ``text``, or ``error``.

        Raises:
            TemplateLimitError: The child had to be ended.
        """
        self._send(variables)
        assert self._child.stdout is not None
        end = time.monotonic() + _MAX_WALL_S
        answers = select.poll()  # a rank of a large job has more open files than ``select.select`` counts
        answers.register(self._child.stdout, select.POLLIN)
        pieces: list[bytes] = []
        while not pieces or not pieces[-1].endswith(b"\n"):
            if not answers.poll(1000 * max(end - time.monotonic(), 0)):
                self._child.kill()
                raise TemplateLimitError(f"it was still running after {_MAX_WALL_S:g} s")
            pieces.append(os.read(self._child.stdout.fileno(), 1 << 20))
            if not pieces[-1]:
                raise TemplateLimitError(self._why_it_ended())
        answer: dict[str, str] = json.loads(b"".join(pieces))
        return answer

    def has_ended(self) -> bool:
        """Whether somebody has killed the child, which ends by itself only while it renders."""
        return self._child.poll() is not None

    def close(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.communicate()

    def _send(self, request: object) -> None:
        assert self._child.stdin is not None
        left = memoryview(json.dumps(request, default=str).encode() + b"\n")
        try:
            while left:
                left = left[self._child.stdin.write(left) or 0 :]
        except BrokenPipeError:
            return  # it has ended: reading its answer says why

    def _why_it_ended(self) -> str:
        assert self._child.stderr is not None
        words = self._child.stderr.read()
        status = self._child.wait()
        if status == _TOO_LARGE:
            return f"it writes more than {MAX_RENDERED_CHARS:,} characters for one conversation"
        if status == _NO_MEMORY:
            return f"it needs more than {_MAX_BYTES >> 20} MiB of memory for one conversation"
        if status == -signal.SIGXCPU:
            return f"it needs more than {_MAX_CPU_S} s for one conversation: does it loop?"
        return words.decode(errors="replace").strip().rpartition("\n")[2] or f"its process ended with status {status}"


_renderers: dict[tuple[int, str], _Renderer] = {}
"""By process (a fork has no child of its own yet) and template, the latest last."""
_refused: dict[str, str] = {}
"""Templates that broke a limit, with what they broke: none is tried twice."""
_lock = threading.Lock()


def render_template(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template in its child process, which stays for the next conversation.

    Args:
        variables: What the template sees; a value that JSON does not know is its text.

    Returns:
        Its text, of at most ``MAX_RENDERED_CHARS``.

    Raises:
        TemplateLimitError: It broke a limit of time, memory or size.
        ValueError: It cannot be compiled, or refused the conversation, with its own words.
        OSError: No child process can be made.
    """
    key = (os.getpid(), template)
    with _lock:
        if template in _refused:
            raise TemplateLimitError(_refused[template])
        if key in _renderers and _renderers[key].has_ended():
            _close(key)
        renderer = _renderers.pop(key, None) or _Renderer(template)
        try:
            answer = renderer.render(variables)
        except BaseException as error:
            renderer.close()
            if isinstance(error, TemplateLimitError):
                _refused[template] = str(error)
            raise
        _renderers[key] = renderer
        while len(_renderers) > _MAX_OPEN:
            _close(next(iter(_renderers)))
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["text"]


def _close(key: tuple[int, str]) -> None:
    renderer = _renderers.pop(key)
    if key[0] == os.getpid():
        renderer.close()


def _forget() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


def _close_all() -> None:
    for key in list(_renderers):
        _close(key)


if __name__ != "__main__":
    os.register_at_fork(after_in_child=_forget)
    atexit.register(_close_all)


def _end_without_memory(frame: FrameType, event: str, argument: Any) -> Any:
    """End the process at any MemoryError: jinja drops those of its constants and computes them while it renders."""
    frame.f_trace_lines = False
    if event == "exception" and issubclass(argument[0], MemoryError):
        os._exit(_NO_MEMORY)
    return _end_without_memory


def _answer_requests() -> None:
    """Compile the template of the first line of standard input, and render it for each further line."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole job: it ends when its standard input does
        signal.signal(number, signal.SIG_IGN)
    asked = json.loads(sys.stdin.readline())
    sys.path[:] = asked["path"]
    import jinja2
    import jinja2.exceptions
    import jinja2.ext
    import jinja2.utils
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """The tag with which transformers marks what a model writes."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore: those are Python's own."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}: rename it")
            super().__setitem__(name, value)

    class Dict:
        """``dict`` as a template calls it, not the type itself."""

        def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
            return dict(*args, **values)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def namespace(*args: Any, **values: Any) -> Namespace:
        made = Namespace()
        for name, value in dict(*args, **values).items():
            made[name] = value
        return made

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": _TODAY.strftime}
    environment.globals |= {"namespace": namespace, "dict": Dict()}  # as transformers has them
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    sys.settrace(_end_without_memory)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    compiled: jinja2.Template | None = None
    for line in sys.stdin:
        until = int(time.process_time()) + _MAX_CPU_S + 1
        resource.setrlimit(resource.RLIMIT_CPU, (until if hard < 0 else min(until, hard), hard))
        try:
            compiled = compiled or environment.from_string(asked["template"])
            pieces, num_chars = [], 0
            for piece in compiled.generate(**json.loads(line)):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    os._exit(_TOO_LARGE)
            answer = {"text": "".join(pieces)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _answer_requests()
