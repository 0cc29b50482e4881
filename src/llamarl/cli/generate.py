"""``llamarl generate``: continue prompts with a model; text in, text out, or JSONL both ways."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from llamarl.cli.flags import OutputFile, in_flags, refuse_flags
from llamarl.errors import ConfigError, DataError, FileError, Mistake
from llamarl.models.folders import local_model_path
from llamarl.models.named import NamedModel, find_model
from llamarl.reading import parse_json, read_text

if TYPE_CHECKING:
    from llamarl.config import RunConfig
    from llamarl.data.config import DataConfig

__all__ = ["add_parser", "run"]

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

_PROGRESS_EVERY_S = 5.0


class _Request(NamedTuple):
    where: str
    """File and line, for errors."""
    record: dict[str, Any]
    """What the user gave: "prompt" or "messages", and keys that are carried over."""


def add_parser(verbs: Any, full: bool = True) -> None:
    parser = verbs.add_parser(
        "generate",
        help="sample responses from a model",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", help="run folder, Hugging Face folder, id of the Hub (org/name), LoRA adapter folder, or bundled:tiny"
    )
    parser.add_argument("--revision", default="", help="branch, tag or commit of a model of the Hub (default: main)")
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
        "--stop", action="append", help="stop at this text; may be given more than once (default: the run's)"
    )
    parser.add_argument(
        "--stop-token-id",
        action="append",
        type=int,
        metavar="ID",
        help="stop at this token; may be given more than once (default: the run's)",
    )
    parser.add_argument("--samples", type=int, default=1, help="responses a prompt (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="to compute in (default: the run's, else float32)",
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
    _check_flags(args)
    named = find_model(args.model, args.base)
    path = local_model_path(named.path, revision=args.revision, code=args.trust_remote_code)
    requests = list(_requests(args))
    if not requests:
        raise DataError("no prompt: give --prompt, --input FILE.jsonl, or lines on standard input")
    config = _config(args, named, path)
    with OutputFile(args.output, "--output") if args.output else contextlib.nullcontext() as output:
        failed = _generate(args, config, named, requests, output)
    return 1 if failed else 0


def _check_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError with every value that no sampling could have, in the words of a recipe's sampling section."""
    from pydantic import ValidationError

    from llamarl.executors.config import SamplingConfig
    from llamarl.mistakes import mistakes_of

    lines: list[Mistake | str] = [f"--{name} must be >= {least}, got {value}" for name, least, value in
             (("samples", 1, args.samples), ("seed", 0, args.seed)) if value < least]  # fmt: skip
    values = _given_sampling(args)
    if args.prompt is not None and args.input is not None:
        lines.append("give --prompt or --input, not both")
    if args.output is not None and args.input not in (None, "-") and _same_file(args.input, args.output):
        lines.append(f"--output {args.output} is the file of --input: answers would replace the prompts")
    try:
        SamplingConfig(**values)
    except ValidationError as error:
        names = {name: f"--{name.replace('_', '-')}" for name in values} | {
            "stop_strings": "--stop",
            "stop_token_ids": "--stop-token-id",
        }
        lines += in_flags(mistakes_of(error, SamplingConfig), names)
    refuse_flags(lines)


def _same_file(a: str, b: str) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False  # one is not there (yet)


def _given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """What the user said of sampling, by the names of a recipe."""
    values = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    values["stop_strings"] = None if args.stop is None else tuple(args.stop)
    values["stop_token_ids"] = None if args.stop_token_id is None else tuple(args.stop_token_id)
    return {name: value for name, value in values.items() if value is not None}


def _config(args: argparse.Namespace, named: NamedModel, path: str | None = None) -> RunConfig:
    """The run's own configuration, or the defaults, with what the user said of engine and prompts on top."""
    from llamarl.config import ModelConfig, RunConfig, load_config

    config = RunConfig() if named.recipe is None else load_config(named.recipe)
    generator, data = config.generator, config.data
    if args.dtype is not None:
        generator = dataclasses.replace(generator, engine=dataclasses.replace(generator.engine, dtype=args.dtype))
    if args.quantization is not None:
        generator = dataclasses.replace(generator, quantization=args.quantization)
    if args.no_chat_template:
        data = dataclasses.replace(data, chat_template="none")
    code = args.trust_remote_code or config.model.trust_remote_code
    model = ModelConfig(path=path or named.path, trust_remote_code=code)
    return dataclasses.replace(config, model=model, generator=generator, data=data)


def _check_quantization(config: RunConfig, device: str) -> None:
    from llamarl.engine.config import QUANTIZATIONS

    engine, quantization = config.generator.engine.name, config.generator.quantization
    choices = QUANTIZATIONS[engine, device.partition(":")[0]]
    if quantization not in choices:
        raise ConfigError(
            f"--quantization {quantization} is not available on {device}: use one of {', '.join(choices)}"
        )


def _generate(
    args: argparse.Namespace, config: RunConfig, named: NamedModel, requests: list[_Request], output: OutputFile | None
) -> int:
    """How many answers failed."""
    from llamarl.data.prompts import holds_unknown, unknown_text_warning, unknown_token_id
    from llamarl.engine.factory import make_engine, resolve_device, sampling_params
    from llamarl.engine.sequence import Sequence
    from llamarl.executors.self_check import check_generated
    from llamarl.executors.version_loader import load_adapter
    from llamarl.models.loading import context_length, load_tokenizer
    from llamarl.seeding import derive_seed

    device = resolve_device(args.device)
    _check_quantization(config, device)
    model = config.model.path
    check_generated(config)
    tokenizer = load_tokenizer(model, trust_remote_code=config.model.trust_remote_code)
    prompts = [_encode(request, tokenizer, config.data) for request in requests]
    unknown = unknown_token_id(tokenizer)
    if unread := [i for i, prompt in enumerate(prompts) if holds_unknown(prompt, unknown)]:
        first = "--prompt" if args.prompt is not None else f"that of {requests[unread[0]].where}"
        print(unknown_text_warning(len(unread), len(prompts), "prompts", first), file=sys.stderr)
    context = context_length(model) or 1 << 20
    sampling = _given_sampling(args)
    if named.run is None:
        sampling.setdefault("max_new_tokens", max(1, min(256, context - max(map(len, prompts)))))
    params = sampling_params(dataclasses.replace(config.generator.sampling, **sampling), tokenizer)
    refuse_flags([
        f"{request.where}: {len(prompt)} prompt tokens and --max-new-tokens {params.max_new_tokens} exceed the model's context "
        f"of {context} tokens: shorten the prompt or lower --max-new-tokens"
        for request, prompt in zip(requests, prompts, strict=True)
        if len(prompt) + params.max_new_tokens > context
    ])  # fmt: skip
    engine = make_engine(config, tokenizer, device=device)
    if named.adapter is not None:
        load_adapter(engine, named.adapter, model_path=model)
    sequences = [
        Sequence(
            prompt_index=index,
            sample_index=sample,
            prompt_tokens=list(prompt),
            params=params,
            seed=derive_seed(args.seed, index, sample),
        )
        for index, prompt in enumerate(prompts)
        for sample in range(args.samples)
    ]
    try:
        engine.add(sequences)
    except ValueError as error:
        raise DataError(str(error)) from error
    as_json = args.input is not None or args.output is not None
    if len(sequences) == 1 and not as_json:
        _stream(engine, sequences[0], tokenizer)
        return _tell_failures(requests, sequences)
    write = _print if output is None else output.write_line
    progress = _Progress(len(sequences)) if output is not None or not sys.stdout.isatty() else None
    written = 0
    while engine.has_work:
        engine.step()
        while written < len(sequences) and sequences[written].finished:  # in order; later ones wait for their turn
            sequence = sequences[written]
            answer = _answer(requests[sequence.prompt_index], sequence, tokenizer, as_json=as_json)
            write(answer if as_json else f"{_label(sequence, args.samples)}\n{answer}")
            written += 1
        if progress is not None:
            progress.show(sequences)
    return _tell_failures(requests, sequences)


def _tell_failures(requests: list[_Request], sequences: list[Any]) -> int:
    failed = [sequence for sequence in sequences if sequence.finish_reason == "error"]
    for sequence in failed:
        print(f"{requests[sequence.prompt_index].where}: no answer: {sequence.error}", file=sys.stderr)
    return len(failed)


def _stream(engine: Any, sequence: Any, tokenizer: Any) -> None:
    """A single answer, as it comes."""
    shown = 0
    while engine.has_work:
        engine.step()
        text = str(tokenizer.decode(sequence.tokens, skip_special_tokens=True))
        if not text.endswith("\ufffd"):  # half of a multi-byte character
            print(text[shown:], end="", flush=True)
            shown = len(text)
    print(str(tokenizer.decode(sequence.tokens, skip_special_tokens=True))[shown:])


def _label(sequence: Any, samples: int) -> str:
    """Which prompt the answer below is for, counted from 1."""
    sample = f", sample {sequence.sample_index + 1}" if samples > 1 else ""
    return f"[prompt {sequence.prompt_index + 1}{sample}]"


class _Progress:
    """A line on standard error every few seconds, where answers do not go to the terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began = self._shown = time.monotonic()

    def show(self, sequences: list[Any]) -> None:
        now = time.monotonic()
        if now - self._shown < _PROGRESS_EVERY_S:
            return
        self._shown = now
        finished = sum(sequence.finished for sequence in sequences)
        rate = sum(len(sequence.tokens) for sequence in sequences) / (now - self._began)
        print(f"{finished} of {self._total} answers, {rate:.0f} tokens/s", file=sys.stderr, flush=True)


def _print(text: str) -> None:
    print(text, flush=True)


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
    if "messages" in record:
        from llamarl.data.items import read_messages

        read_messages(record, where)
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


def _encode(request: _Request, tokenizer: Any, config: DataConfig) -> list[int]:
    """The tokens of a request, as a run's prompts are made."""
    from llamarl.data.chat import render_prompt
    from llamarl.data.items import TaskItem

    messages = request.record.get("messages")
    if messages is not None and not tokenizer.chat_template:
        raise DataError(f'{request.where}: this model has no chat template: give "prompt" instead of "messages"')
    item = TaskItem(question=request.record.get("prompt", ""), messages=None if messages is None else tuple(messages))
    if messages is not None:
        config = dataclasses.replace(config, chat_template="auto")
    try:
        _, tokens = render_prompt(item, tokenizer, config)
    except DataError as error:
        raise DataError(f"{request.where}: {error}") from error
    return [int(token) for token in tokens]


def _answer(request: _Request, sequence: Any, tokenizer: Any, *, as_json: bool) -> str:
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
