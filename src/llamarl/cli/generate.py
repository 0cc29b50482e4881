"""``llamarl generate``: continue prompts with a model; text in, text out, or JSONL both ways."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamarl.errors import DataError

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Samples responses with the native engine: many prompts at once, printed as they finish.

  llamarl generate bundled:tiny --prompt "..."             one prompt, streamed to the terminal
  echo "..." | llamarl generate path/to/model              one prompt a line on standard input
  llamarl generate path/to/model --input in.jsonl --output out.jsonl

A JSONL line is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}; other keys are carried over.
An answer line adds "response", "finish_reason", "tokens" and "logprobs" (of the distribution sampled from)."""


def add_parser(verbs: Any, full: bool = True) -> None:
    parser = verbs.add_parser(
        "generate",
        help="sample responses from a model",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="Hugging Face folder, bundled:tiny, or a run folder")
    parser.add_argument("--prompt", help="one prompt; default: read --input or standard input")
    parser.add_argument("--input", metavar="FILE.jsonl", help="prompts, one JSON object a line; - is standard input")
    parser.add_argument("--output", metavar="FILE.jsonl", help="where answers go (default: standard output)")
    parser.add_argument(
        "--max-new-tokens", type=int, help="longest response in tokens (default 256, or what the context leaves)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1.0)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens, 0 all (default 0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus probability (default 1.0)")
    parser.add_argument("--stop", action="append", default=[], help="stop at this text; may be given more than once")
    parser.add_argument("--samples", type=int, default=1, help="responses a prompt (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    parser.add_argument("--quantization", choices=("none", "int8", "fp8"), default="none")
    parser.add_argument("--no-chat-template", action="store_true", help="feed prompts as they are")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    requests = list(_requests(args))
    if not requests:
        raise DataError("no prompt: give --prompt, --input FILE.jsonl, or lines on standard input")
    from llamarl.engine.config import EngineConfig
    from llamarl.engine.engine import NativeEngine
    from llamarl.engine.sequence import SamplingParams, Sequence
    from llamarl.executors.generator import resolve_device
    from llamarl.models.loading import load_model_config, load_tokenizer
    from llamarl.seeding import derive_seed

    folder = Path(args.model)
    model = str(folder / "model") if (folder / "config.toml").is_file() else args.model
    tokenizer = load_tokenizer(model)
    engine = NativeEngine(
        model, EngineConfig(), tokenizer=tokenizer, device=resolve_device("auto"), quantization=args.quantization
    )
    eos = tokenizer.eos_token_id
    prompts = [_encode(request, tokenizer, chat=not args.no_chat_template) for request in requests]
    context = getattr(load_model_config(model), "max_position_embeddings", None) or 1 << 20
    default = max(1, min(256, context - max(map(len, prompts))))
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens or default,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        stop_strings=tuple(args.stop),
        stop_token_ids=() if eos is None else (int(eos),),
    )
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
    stream = len(sequences) == 1 and args.output is None and args.input is None
    output = open(args.output, "w", encoding="utf-8") if args.output else sys.stdout
    shown = 0
    try:
        while engine.has_work:
            finished = engine.step()
            if stream:
                text = str(tokenizer.decode(sequences[0].tokens, skip_special_tokens=True))
                if not text.endswith("\ufffd"):  # half of a multi-byte character
                    print(text[shown:], end="", flush=True)
                    shown = len(text)
            else:
                for sequence in finished:
                    _write(output, requests[sequence.prompt_index], sequence, tokenizer, as_json=_json_out(args))
        if stream:
            print()
    finally:
        if output is not sys.stdout:
            output.close()
    return 0


def _json_out(args: argparse.Namespace) -> bool:
    return args.input is not None or args.output is not None


def _requests(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if args.prompt is not None:
        yield {"prompt": args.prompt}
        return
    if args.input is None:
        if sys.stdin.isatty():
            print("one prompt a line, end with Ctrl-D:", file=sys.stderr)
        yield from ({"prompt": line.rstrip("\n")} for line in sys.stdin if line.strip())
        return
    try:
        lines = sys.stdin.readlines() if args.input == "-" else Path(args.input).read_text("utf-8").splitlines()
    except OSError as error:
        raise DataError(f"--input {args.input}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{args.input}:{number}: not JSON ({error.msg}), got {line[:80]!r}") from error
        if not isinstance(request, dict) or not ({"prompt", "messages"} & set(request)):
            raise DataError(f'{args.input}:{number}: expected an object with "prompt" or "messages", got {line[:80]!r}')
        yield request


def _encode(request: dict[str, Any], tokenizer: Any, *, chat: bool) -> list[int]:
    messages = request.get("messages")
    if messages is None:
        if not (chat and tokenizer.chat_template):
            return list(tokenizer(request["prompt"])["input_ids"])
        messages = [{"role": "user", "content": request["prompt"]}]
    if not tokenizer.chat_template:
        raise DataError('this model has no chat template: give "prompt" instead of "messages"')
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _write(output: Any, request: dict[str, Any], sequence: Any, tokenizer: Any, *, as_json: bool) -> None:
    text = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
    if as_json:
        answer = request | {
            "sample": sequence.sample_index,
            "response": text,
            "finish_reason": sequence.finish_reason,
            "tokens": sequence.tokens,
            "logprobs": sequence.logprobs,
        }
        print(json.dumps(answer), file=output, flush=True)
    else:
        print(text, file=output, flush=True)
