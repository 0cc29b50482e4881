"""The command line: ``llamarl VERB``. One file a verb; each teaches by ``--help``."""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import io
import os
import select
import signal
import sys
import tempfile
from collections.abc import Sequence
from types import FrameType
from typing import Any, TextIO

from llamarl import __version__
from llamarl.errors import TOLD, ConfigError, LlamaRLError, RunInterrupted
from llamarl.process_tree import end_process

__all__ = ["VERBS", "command", "main"]

_EVERY_DAY = {
    "train": "train a policy as a recipe says",
    "sft": "fine-tune a model on conversations or completions",
    "report": "one offline HTML page of a run: what looks wrong, curves, timeline, responses, tokens",
    "watch": "the report's page from 127.0.0.1, refreshed while the run goes on",
    "eval": "score a model or a run on a task",
    "generate": "sample responses from a model",
    "export": "write a checkpoint's policy as a model folder",
    "recipes": "list the recipes that ship with llamarl, or print one",
    "new": "write a task of your own to start from",
    "doctor": "report what works on this machine, or how far a generator is from the trainer",
}
_AT_SCALE = {
    "plan": "best split, layout and staleness for a model on given devices, with the step time",
    "simulate": "a job's schedule on a virtual clock: step time, idle shares and staleness when lengths vary",
    "cluster": "start or end a Ray cluster on machines of your own, by ssh",
}
VERBS = (*_EVERY_DAY, *_AT_SCALE)
_FIRST = """\
llamarl train tiny                a bundled model learns to add, in a minute
llamarl report runs/tiny          what happened, one page for the browser
llamarl new my-task               questions, a reward and a recipe of your own to change

llamarl --help lists every verb; llamarl VERB --help and llamarl --help WORD (of a recipe's keys) explain."""
_TAKE_SETTINGS = ("train", "sft", "eval", "simulate")
_NEED_TEMPORARY_FILES = ("train", "sft", "eval", "generate")


def command() -> int:
    """``llamarl`` as a process of its own; :func:`main` is for those who call it in theirs."""
    try:
        from llamarl.runtime.fork_server import allow_fork_of_this_process

        allow_fork_of_this_process()
        # who starts programs with it ignored hands that on: nobody would hear how a rank, or a worker, has ended
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # torch and transformers make a million objects that stay: to scan them every 700 is a seventh of a start
        gc.set_threshold(20_000, 10, 10)
        code = main()
    except KeyboardInterrupt:  # while modules were imported
        print("llamarl: stopped by the user", file=sys.stderr)
        code = RunInterrupted.exit_code
    end_process(code)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code. An expected error is printed once, without a traceback."""
    _open_missing_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="llamarl",
        description="Asynchronous, repeatable reinforcement learning for language models.",
        epilog="First steps: llamarl doctor; llamarl train tiny; llamarl new my-task; llamarl VERB --help; "
        "llamarl --help WORD explains the keys of a recipe that hold a word.",
        formatter_class=_InGroups,
    )
    parser.add_argument("--version", action="version", version=f"llamarl {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    words = _join_overrides(arguments)
    overrides = [word for word in words if _is_override(word)]
    words = [word for word in words if not _is_override(word)]  # argparse must not take them for the verb's own
    if text := _keys_asked_for(arguments) if arguments else _FIRST:
        return _print(text)
    named = next((a for a in words if not a.startswith("-")), None)
    if named is not None and named not in VERBS and (near := difflib.get_close_matches(named, VERBS, n=1, cutoff=0.6)):
        parser.error(f"there is no verb {named!r}; did you mean {near[0]!r}? There are {', '.join(VERBS)}")
    for verb, told in {**_EVERY_DAY, **_AT_SCALE}.items():
        of_verb = verbs.add_parser(verb, help=told, formatter_class=argparse.RawDescriptionHelpFormatter)
        if verb == named:  # nobody needs the others
            importlib.import_module(f"llamarl.cli.{verb}").add_arguments(of_verb)
    args, extra = parser.parse_known_args(words)
    flags = [flag for action in verbs.choices[args.verb]._actions for flag in action.option_strings]
    for word in extra:
        if word.startswith("--") and (
            near := difflib.get_close_matches(word.partition("=")[0], flags, n=1, cutoff=0.85)
        ):
            parser.error(f"there is no {word.partition('=')[0]}; did you mean {near[0]}?")
    args.overrides = [*extra, *overrides]
    if args.overrides and args.verb not in _TAKE_SETTINGS:
        takers = ", ".join(_TAKE_SETTINGS)
        hint = f"; settings of a recipe (--section.key VALUE) are taken by {takers}" if overrides else ""
        parser.error(f"unrecognized arguments: {' '.join(args.overrides)}{hint}")
    asked: list[int] = []

    def terminate(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    try:
        if args.verb in ("train", "sft"):
            _outlive_the_console()
        if args.verb in _NEED_TEMPORARY_FILES:
            _check_temporary_folder()
        return int(args.run(args))
    except LlamaRLError as error:
        if asked:  # torch makes errors of its own of what is raised while it reads a tensor
            print(f"llamarl {args.verb}: stopped by the user", file=sys.stderr)
            return RunInterrupted.exit_code
        print(f"llamarl {args.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        if args.verb in ("train", "sft"):  # whose streams outlive their readers: it is a run's own, and no end of it
            raise
        return _read_enough()
    except KeyboardInterrupt as error:
        if TOLD not in error.args:
            print(f"llamarl {args.verb}: stopped by the user", file=sys.stderr)
        return RunInterrupted.exit_code


def _print(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        return _read_enough()
    return 0


def _read_enough() -> int:
    """After ``llamarl plan ... | head``: nobody reads on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _keys_asked_for(arguments: Sequence[str]) -> str:
    """What ``--help WORD`` tells of a recipe's keys; empty: something else was asked."""
    place = next((place for place, word in enumerate(arguments[:-1]) if word in ("-h", "--help")), None)
    if place is None or (word := arguments[place + 1]) in VERBS or word.startswith("-"):
        return ""
    from llamarl.config import field_help, section_help

    return field_help("" if word == "keys" else word).strip() or (
        f"no key holds {word!r}; the sections are {section_help()}; llamarl --help keys prints all keys"
    )


class _InGroups(argparse.HelpFormatter):
    """Lists verbs under what they are for."""

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        for title, first in (("every day", next(iter(_EVERY_DAY))), ("at scale", next(iter(_AT_SCALE)))):
            if action.metavar == first or getattr(action, "dest", None) == first:
                return f"\n{' ' * (self._current_indent - 2)}{title}:\n{text}"
        return text


def _check_temporary_folder() -> None:
    """Raises ConfigError where the system gives no folder for temporary files, which every run needs."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise ConfigError(
            f"no folder for temporary files can be written ({error.strerror}): set TMPDIR to one"
        ) from error


def _join_overrides(arguments: Sequence[str]) -> list[str]:
    """``--section.key VALUE`` as one word, so that VALUE cannot be taken for a verb's own argument."""
    joined: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if _is_override(word) and "=" not in word and rest:
            word = f"{word}={rest.pop(0)}"
        joined.append(word)
    return joined


def _is_override(word: str) -> bool:
    return word.startswith("--") and "." in word.partition("=")[0]


def _open_missing_streams() -> None:
    """Give a process that was started with closed standard descriptors (``>&-``) the null device in their place.

    Without it the next file that is opened becomes standard output, and is written into by whoever prints.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            assert null == descriptor, f"descriptor {descriptor} was closed, the null device came as {null}"
            os.set_inheritable(descriptor, True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)


def _outlive_the_console() -> None:
    """Send what follows to the null device once standard output or error cannot be written: a long run must not end because ``| head``
    has read enough, the terminal is gone or the disk of a log file is full."""
    sys.stdout = _outliving(sys.stdout)
    sys.stderr = _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # a test's own stream
        return stream
    raw = _Outliving(descriptor)
    try:
        stream.flush()
    except OSError:
        raw.give_up()
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True, write_through=False
    )


class _Outliving(io.RawIOBase):
    """Writes to a descriptor until that fails, which it hides. A full one is waited for, also where
    whoever shares it (a terminal with a program beside this one) made it non-blocking."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        while True:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError:
                self.give_up()
                return memoryview(data).nbytes

    def give_up(self) -> None:
        """The descriptor stays open, so that nobody else gets its number, and children that share it may print."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._descriptor)
        os.close(null)


if __name__ == "__main__":
    sys.exit(command())
