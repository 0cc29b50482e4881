"""Tells how far an executor's tick, or a verb, has come. A process has one; the controller asks its diagnostics
thread for it while the executor works (``runtime/commands.py``), so what is watched costs nothing until then."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llamarl.plural import plural

__all__ = ["SILENCE_S", "forget", "shown", "told", "watch"]

SILENCE_S = 30.0
"""Longest time without a line in a log."""


@dataclass(frozen=True)
class _Watched:
    verb: str
    noun: str
    num: int
    done: Callable[[], int]
    more: Callable[[], str]
    began_s: float


_watched: _Watched | None = None


def watch(verb: str, noun: str, num: int, done: Callable[[], int], more: Callable[[], str] = str) -> None:
    """Let whoever asks hear of work that begins now: ``sampling 5 of 8 groups, 2,100 tokens, about 7 s left``.

    Args:
        noun: What there are ``num`` of, in the singular.
        done: How many of them are done; called on another thread while the work goes on.
        more: Further words, called there too.
    """
    global _watched
    _watched = _Watched(verb, noun, num, done, more, time.monotonic())


def forget() -> None:
    """The work is over."""
    global _watched
    _watched = None


def told() -> str:
    """How far the work has come, in words; empty where none is watched. On any thread."""
    work = _watched
    if work is None:
        return ""
    done = min(work.done(), work.num)
    words = f"{work.verb} {f'{done:,} of ' if done else ''}{plural(work.num, work.noun)}"
    words = ", ".join(filter(None, (words, work.more())))
    if not work.num <= 5 * done < 5 * work.num:  # the first of many that go side by side foretells nothing
        return words
    left_s = (time.monotonic() - work.began_s) / done * (work.num - done)
    return f"{words}, about {left_s:.0f} s left" if left_s >= 1 else words


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """While the block runs, show on standard error what is watched: one line that changes on a terminal, else a line
    every half a minute."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    if (console := Console(stderr=True)).is_terminal:
        with Live(get_renderable=lambda: Text(told(), "dim"), console=console, transient=True, redirect_stdout=False):
            yield
        return
    over = threading.Event()

    def say() -> None:
        while not over.wait(SILENCE_S):
            if words := told():
                print(f"  {words}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
