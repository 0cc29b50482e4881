"""``llamarl generate``: continue prompts with a model; text in, text out, or JSONL both ways."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from llamarl.cli.flags import OutputFile
from llamarl.errors import DataError, FileError, Mistake
from llamarl.progress import shown
from llamarl.reading import parse_json, read_text

if TYPE_CHECKING:
    from llamarl.api.llm import LLM
    from llamarl.engine.sequence import Sequence as TokenSequence

__all__ = ["add_arguments", "run"]

_DESCRIPTION = """\
Samples responses with the native engine: many prompts at once, answers in the order of the prompts.

  llamarl generate bundled:tiny --prompt "..."             one prompt, streamed to the terminal
  echo "..." | llamarl generate path/to/model              one prompt a line on standard input
  llamarl generate path/to/model --input in.jsonl --output out.jsonl

Where there are several answers, each is printed under a line "[prompt 3]" or "[prompt 3, sample 1]".
A JSONL line is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}; other keys are carried over.
An answer line adds "sample", "response", "finish_reason", "tokens" and "logprobs" (of the distribution sampled from), and
"error" where an answer failed; then the exit status is 1. A run folder brings its own settings, which flags change: prompts go
through its data section, and engine, precision and sampling are those of its generator."""

_ADDED = ("sample", "response", "finish_reason", "tokens", "logprobs", "error")


class _Request(NamedTuple):
    where: str
    """File and line, for errors."""
    record: dict[str, Any]
    """What the user gave: "prompt" or "messages", and keys that are carried over."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument(
        "model",
        help="run folder, Hugging Face folder, id of the Hub (org/name[@REVISION]), LoRA adapter folder, or bundled:tiny",
    )
    parser.add_argument("--base", metavar="FOLDER", help="base model of an adapter (default: the one that it names)")
    parser.add_argument("--prompt", help="one prompt; default: read --input or standard input")
    parser.add_argument("--input", metavar="FILE.jsonl", help="prompts, one JSON object a line; - is standard input")
    parser.add_argument("--output", metavar="FILE.jsonl", help="where answers go (default: standard output)")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        help="longest response in tokens (default: the run's; else 256, or what the context leaves)",
    )
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the run's, else 1.0)")
    parser.add_argument("--top-k", type=int, help="keep the k likeliest tokens, 0 all (default: the run's, else 0)")
    parser.add_argument("--top-p", type=float, help="nucleus probability (default: the run's, else 1.0)")
    parser.add_argument(
        "--stop", action="append", help="stop behind this text; may be given more than once (default: the run's)"
    )
    parser.add_argument("--samples", type=int, default=1, help="responses a prompt (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="to compute in (default: the run's, else as a run would)",
    )
    parser.add_argument("--quantization", choices=("none", "int8", "fp8"), help="default: the run's, else none")
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, or auto for CUDA where there is one (default auto)"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run a tokenizer that is Python code of the model's folder"
    )
    parser.add_argument("--no-chat-template", action="store_true", help="feed prompts as they are")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from llamarl.api.llm import LLM, open_policy

    settings = {
        "generator.sampling.max_new_tokens": ("--max-new-tokens", args.max_new_tokens),
        "generator.sampling.temperature": ("--temperature", args.temperature),
        "generator.sampling.top_k": ("--top-k", args.top_k),
        "generator.sampling.top_p": ("--top-p", args.top_p),
        "generator.sampling.stop_strings": ("--stop", args.stop),
        "generator.engine.dtype": ("--dtype", args.dtype),
        "generator.quantization": ("--quantization", args.quantization),
        "generator.device": ("--device", args.device),
        "model.trust_remote_code": ("--trust-remote-code", args.trust_remote_code or None),
    }
    named, config = open_policy(args.model, base=args.base, settings=settings, checks=[lambda config: _refused(args)])
    requests = list(_requests(args))
    if not requests:
        raise DataError("no prompt: give --prompt, --input FILE.jsonl, or lines on standard input")
    with OutputFile(args.output, "--output") if args.output else contextlib.nullcontext() as output:
        failed = _generate(args, LLM.of(named, config), requests, output)
    return 1 if failed else 0


def _refused(args: argparse.Namespace) -> Iterator[Mistake]:
    """Flags that are wrong, or do not go with another; those of sampling are keys of a recipe, which is checked."""
    if args.samples < 1:
        yield Mistake("--samples", f"must be >= 1, got {args.samples}")
    if args.seed < 0:
        yield Mistake("--seed", f"must be >= 0, got {args.seed}")
    if args.prompt is not None and args.input is not None:
        yield Mistake("--prompt", "and --input: give one of them", ("--input",))
    if args.output is not None and args.input not in (None, "-"):
        with contextlib.suppress(OSError):  # one is not there (yet)
            if os.path.samefile(args.input, args.output):
                yield Mistake("--output", f"{args.output} is the file of --input: answers would replace the prompts")


def _generate(args: argparse.Namespace, llm: LLM, requests: list[_Request], output: OutputFile | None) -> int:
    """How many answers failed."""
    from llamarl.data.prompts import holds_unknown, unknown_text_warning, unknown_token_id

    names = [request.where for request in requests]
    prompts = [request.record.get("messages") or request.record["prompt"] for request in requests]
    longest = {} if args.max_new_tokens is None else {"max_new_tokens": args.max_new_tokens}
    sequences = llm.sequences(
        prompts, names=names, samples=args.samples, seed=args.seed, chat_template=not args.no_chat_template, **longest
    )
    unknown = unknown_token_id(llm.tokenizer)
    if unread := [s.prompt_index for s in sequences[:: args.samples] if holds_unknown(s.prompt_tokens, unknown)]:
        first = "--prompt" if args.prompt is not None else f"that of {names[unread[0]]}"
        print(unknown_text_warning(len(unread), len(prompts), "prompts", first), file=sys.stderr)
    as_json = args.input is not None or args.output is not None
    if len(sequences) == 1 and not as_json:
        _stream(llm, sequences)
    else:
        with shown() if output is not None or not sys.stdout.isatty() else contextlib.nullcontext():
            for sequence in llm.decode(sequences):
                answer = _answer(requests[sequence.prompt_index], sequence, llm.tokenizer, as_json=as_json)
                text = answer if as_json else f"{_label(sequence, args.samples)}\n{answer}"
                print(text, flush=True) if output is None else output.write_line(text)
    failed = [sequence for sequence in sequences if sequence.finish_reason == "error"]
    for sequence in failed:
        print(f"{names[sequence.prompt_index]}: no answer: {sequence.error}", file=sys.stderr)
    return len(failed)


def _stream(llm: LLM, sequences: Sequence[TokenSequence]) -> None:
    """Print a single answer as it comes."""
    shown = ""

    def show(sequences: Sequence[TokenSequence]) -> None:
        nonlocal shown
        text = str(llm.tokenizer.decode(sequences[0].tokens, skip_special_tokens=True))
        if not text.endswith("\ufffd") or sequences[0].finished:  # half of a multi-byte character
            print(text[len(shown) :], end="", flush=True)
            shown = text

    for _ in llm.decode(sequences, show):
        print()


def _label(sequence: TokenSequence, samples: int) -> str:
    """Which prompt the answer below is for, counted from 1."""
    sample = f", sample {sequence.sample_index + 1}" if samples > 1 else ""
    return f"[prompt {sequence.prompt_index + 1}{sample}]"


def _requests(args: argparse.Namespace) -> Iterator[_Request]:
    if args.prompt is not None:
        try:
            args.prompt.encode()
        except UnicodeEncodeError as error:  # bytes of the command line that are no text
            raise DataError(f"--prompt: not UTF-8 text (character {error.start + 1})") from error
        yield _Request("--prompt", {"prompt": args.prompt})
        return
    name = args.input or "standard input"
    if hasattr(sys.stdin, "reconfigure"):  # else the locale decides, and bytes that are no text pass
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        if args.input is None:
            if sys.stdin.isatty():
                print("one prompt a line, end with Ctrl-D:", file=sys.stderr)
            for number, line in enumerate(sys.stdin, start=1):
                if line.strip():
                    yield _Request(f"{name}:{number}", {"prompt": line.rstrip("\n")})
            return
        text = sys.stdin.read() if args.input == "-" else read_text(args.input, max_bytes=None)
    except FileError as error:
        raise DataError(f"--input {error}; - reads standard input") from error
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 text (byte {error.start})") from error
    # Lines end at newlines alone: splitlines would also cut at U+2028, which JSON allows inside text.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if line.strip():
            yield _Request(f"{name}:{number}", _request_of(line, f"{name}:{number}"))


def _request_of(line: str, where: str) -> dict[str, Any]:
    try:
        record = parse_json(line, where, big_integers=True)
    except FileError as error:
        raise DataError(str(error)) from error
    if not isinstance(record, dict) or not ({"prompt", "messages"} & set(record)):
        raise DataError(f'{where}: expected an object with "prompt" or "messages", got {line[:80]!r}')
    if "messages" in record or isinstance(record["prompt"], list):  # as rows that are trained on have it
        from llamarl.data.items import read_messages

        read_messages(record, where, "messages" if "messages" in record else "prompt")
    elif not isinstance(record["prompt"], str):
        value = record["prompt"]
        raise DataError(f"{where}: field 'prompt' is {type(value).__name__} {value!r:.60}, expected text")
    if taken := sorted(set(record) & set(_ADDED)):
        raise DataError(f"{where}: answers add {', '.join(_ADDED)}: rename {', '.join(taken)}, which would be lost")
    try:
        json.dumps(record, allow_nan=False)
    except ValueError as error:
        raise DataError(f"{where}: holds infinity or NaN, which JSON cannot") from error
    return record


def _answer(request: _Request, sequence: TokenSequence, tokenizer: Any, *, as_json: bool) -> str:
    text = str(tokenizer.decode(sequence.tokens, skip_special_tokens=True))
    if not as_json:
        return text
    answer = {
        "sample": sequence.sample_index,
        "response": text,
        "finish_reason": sequence.finish_reason,
        "tokens": sequence.tokens,
        "logprobs": sequence.logprobs,
    }
    if sequence.error is not None:
        answer["error"] = sequence.error
    return json.dumps(request.record | answer)
