"""Whatever lies where a file is read, the answer is a value or a ``LlamaRLError`` that names the place, at once.

Every reader gets a valid file, then hundreds of spoilt ones: what people's disks hold (empty, cut, binary, UTF-16, a folder, a
pipe), what breaks parsers (depth, digits, halves of pairs), and valid syntax with values of other kinds. Rounds are seeded;
``LLAMARL_FUZZ_ROUNDS=5000 pytest tests/unit/test_malformed_files.py`` looks for longer.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tomli_w

from llamarl.checkpoint.snapshot import canonical_json, checksum_bytes
from llamarl.checkpoint.storage import CheckpointStore
from llamarl.checkpoint.written import record_files
from llamarl.cli import generate
from llamarl.config import load_config
from llamarl.data.items import TaskItem
from llamarl.data.prompts import render_prompt
from llamarl.environments.factory import make_task
from llamarl.errors import LlamaRLError
from llamarl.forecast.calibrate import fit_run, lengths_of_run
from llamarl.forecast.hardware import this_machine
from llamarl.forecast.model import find_model
from llamarl.import_path import check
from llamarl.models.adapters import read_adapter_folder
from llamarl.models.loading import context_length, load_model, load_model_config, load_tokenizer
from llamarl.models.sharded_loading import where_stored
from llamarl.models.sizes import check_tensor_parallel_size
from llamarl.observability.events import EventLog, TickEvent, event_platform, read_events
from llamarl.observability.metrics import MetricsLog, read_metrics
from llamarl.observability.rollouts import read_rollouts
from llamarl.observability.trace import TraceWriter
from llamarl.settings.data import DataConfig
from llamarl.settings.environments import TaskConfig

ROUNDS = int(os.environ.get("LLAMARL_FUZZ_ROUNDS", "40"))
ROOT = Path(__file__).parents[2]
TINY = ROOT / "src" / "llamarl" / "assets" / "tiny"
DEEP = 20_000
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**40, 2**70, 10**400, -1e308, 1e308, float("nan"), float("inf"), "", "x", "\0", "\ud800", "1", [], [[]],
    [1, "x"], {}, {"x": {"y": []}}, ["\udc80"],
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reader:
    make: Callable[[Path], Path]
    """Writes what a run or a person leaves into a folder; returns the file to spoil."""
    read: Callable[[Path], object]
    """Reads it, as the program does."""
    rounds: float = 1.0


def sample(tick: int, num_tokens: int) -> dict[str, Any]:
    return {
        "tick": tick, "prompt_index": 0, "sample_index": 0, "task": "steps", "prompt": "1+1=", "response": "2", "answer": "2",
        "reward": 1.0, "reward_parts": {}, "failure": None, "finish_reason": "stop", "segments": [[0, 2]],
        "prompt_tokens": [1, 2, 3], "tokens": [7] * num_tokens, "behavior_logprobs": [-0.5] * num_tokens, "policy_versions": [0] * num_tokens,
        "loss_mask": [1] * num_tokens, "metadata": {"digits": 10**40},
    }  # fmt: skip


def run_folder(folder: Path) -> Path:
    """A finished run of eight ticks, as far as planner and simulator look at it."""
    shutil.copyfile(ROOT / "recipes" / "tiny.toml", folder / "config.toml")
    (folder / "rollouts").mkdir(exist_ok=True)
    rows = []
    for tick in range(8):
        lines = [json.dumps(sample(tick=tick, num_tokens=tick + size + 1)) for size in range(4)]
        (folder / "rollouts" / f"tick_{tick:06d}.jsonl").write_text("\n".join(lines) + "\n")
        seconds = {f"time/{role}_s": 0.1 + tick / 50 for role in ("generator", "trainer", "reward", "step")}
        rows.append({"step": tick, **seconds, "loss": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def in_run(name: str) -> Callable[[Path], Path]:
    return lambda folder: run_folder(folder) / name


def written(name: str, text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_text(text, encoding="utf-8")
        return folder / name

    return make


def plain_run(folder: Path) -> object:
    return fit_run(load_config(None), folder, this_machine(), {"generator": 1, "trainer": 1})


def resume_metrics(file: Path) -> None:
    read_metrics(file)
    MetricsLog(file.parent, resume_after_tick=3)


def events(folder: Path) -> Path:
    log = EventLog(folder)
    for tick in range(4):
        event = TickEvent(tick=tick, rank=0, swaps=((0, tick),), steps=5, delivered="0-3", digest="abc")
        log.append([event.to_plain()])
    return log.path


def resume_events(file: Path) -> None:
    for part in (
        lambda: event_platform(file),
        lambda: read_events(file, num_ticks=4),
        lambda: EventLog(file.parent, resume_after_tick=2),
    ):
        with contextlib.suppress(LlamaRLError):
            part()


def trace(folder: Path) -> Path:
    run_folder(folder)
    file = folder / "trace.json"
    spans = [
        {"name": "t", "ph": "X", "ts": 1.0, "dur": 1.0, "pid": 1, "tid": 1, "args": {"tick": 1}},
        {"name": "c", "ph": "C", "cat": "tick 2", "args": {}},
    ]
    file.write_text("[\n" + ",\n".join(json.dumps(span) for span in spans) + "\n]\n")
    return file


def checkpoint(folder: Path) -> Path:
    store = CheckpointStore(folder / "checkpoints")
    state = store.begin(0) / "state.json"
    state.write_text("{}")
    return (
        store.finish(0, {"me": record_files(state.parent, [state])}, {"config": {"run": {"seed": 1}}}).path
        / "manifest.json"
    )


def in_model(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        shutil.copytree(TINY, folder, dirs_exist_ok=True)
        if not (folder / name).exists():
            (folder / name).write_text("{}")
        return folder / name

    return make


def adapter_folder(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "base_model_name_or_path": "base",
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    factors = {f"base_model.model.q.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    save_file(factors, folder / "adapter_model.safetensors")
    return folder


def look_at_model(file: Path) -> None:
    for part in (context_length, find_model, lambda folder: check_tensor_parallel_size(load_model_config(folder), 2)):
        with contextlib.suppress(LlamaRLError):
            part(file.parent)


def load_whole_model(file: Path) -> None:
    import torch

    model = load_model(file.parent, dtype=torch.float32)
    where_stored(file.parent, model)


def render(file: Path) -> None:
    tokenizer = load_tokenizer(file.parent)
    render_prompt(TaskItem(question="1+1="), tokenizer, DataConfig(system_prompt="Add."))


def whole_task(file: Path, **kind: str) -> None:
    task = make_task(TaskConfig(data=str(file), eval_fraction=0.5, **kind), seed=0)  # type: ignore[arg-type]
    for index in range(task.num_items("train") or 0):
        task.item("train", index)


def prompts_of(file: Path) -> list[Any]:
    return list(generate._requests(argparse.Namespace(prompt=None, input=str(file))))


JSONL = '{"question": "1+1=", "answer": "#### 2", "n": 1}\n{"question": "2+2=", "answer": "#### 4", "n": 2.5}\n' * 3
READERS = {
    "recipe": Reader(in_run("config.toml"), load_config),
    "task's data": Reader(written("train.jsonl", JSONL), lambda file: whole_task(file, name="math")),
    "prompts to generate": Reader(
        written("in.jsonl", '{"prompt": "a", "id": 1}\n{"messages": [{"role": "user", "content": "b"}]}\n'), prompts_of
    ),
    "reward function": Reader(
        written("reward.py", "import math\ndef score(prompt, response, answer):\n    return 1.0\n"),
        lambda file: check(f"{file}:score", "task.reward"),
    ),
    "metrics": Reader(in_run("metrics.jsonl"), resume_metrics),
    "metrics of a measured run": Reader(in_run("metrics.jsonl"), lambda file: plain_run(file.parent)),
    "rollouts": Reader(in_run("rollouts/tick_000003.jsonl"), lambda file: list(read_rollouts(file.parent))),
    "rollouts of a measured run": Reader(in_run("rollouts/tick_000003.jsonl"), lambda file: plain_run(file.parents[1])),
    "rollouts that a plan looks at": Reader(
        in_run("rollouts/tick_000003.jsonl"), lambda file: lengths_of_run(file.parents[1])
    ),
    "event log": Reader(events, resume_events),
    "trace": Reader(trace, lambda file: TraceWriter(file, ("generator",), resume_after_tick=1).close()),
    "checkpoint manifest": Reader(checkpoint, lambda file: CheckpointStore(file.parents[1]).verify(file.parent)),
    "config.json": Reader(in_model("config.json"), look_at_model),
    "config.json of a whole model": Reader(in_model("config.json"), load_whole_model, rounds=0.25),
    "generation_config.json": Reader(in_model("generation_config.json"), load_whole_model, rounds=0.25),
    "weights": Reader(in_model("model.safetensors"), load_whole_model, rounds=0.25),
    "weights' index": Reader(in_model("model.safetensors.index.json"), load_whole_model, rounds=0.25),
    "adapter": Reader(
        lambda folder: adapter_folder(folder) / "adapter_config.json", lambda file: read_adapter_folder(file.parent)
    ),
    "adapter's weights": Reader(
        lambda folder: adapter_folder(folder) / "adapter_model.safetensors",
        lambda file: read_adapter_folder(file.parent),
    ),
    "tokenizer.json": Reader(in_model("tokenizer.json"), render, rounds=0.25),
    "tokenizer_config.json": Reader(in_model("tokenizer_config.json"), render, rounds=0.25),
    "chat template": Reader(in_model("chat_template.jinja"), render, rounds=0.25),
}


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still reading after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def told(reader: Reader, file: Path, what: str) -> str | None:
    """The error's text; None: it could be read."""
    try:
        with within(60.0):
            reader.read(file)
    except LlamaRLError as error:
        return str(error)
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error!s:.300}") from error
    return None


SPOILT: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n\n",
    "binary": bytes(range(256)) * 4,
    "NUL": b"\0" * 1000,
    "UTF-16": '{"question": "a"}\n'.encode("utf-16"),
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep TOML": b"a = " + b"[" * DEEP + b"]" * DEEP,
    "dotted TOML": b".".join([b"a"] * 5000) + b" = 1",
    "deep Python": b"a = " + b"-" * DEEP + b"1",
    "digits": b"9" * 5000,
    "digits in an object": b'{"question": "a", "answer": ' + b"9" * 5000 + b"}",
    "digits in TOML": b"[run]\nseed = " + b"9" * 5000,
    "half of a pair": b'{"question": "\\ud800", "answer": "\\udc00x", "prompt": "\\udfff"}',
    "another kind": b'"text"',
    "list": b"[1, 2, 3]\n",
    "null": b"null\n",
    "one long line": b'{"question": "' + b"x" * 300_000,
    "header of a huge safetensors file": (1 << 62).to_bytes(8, "little") + b"{}",
}
MADE: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: None,
    "folder": lambda file: file.mkdir(),
    "pipe": lambda file: os.mkfifo(file),
    "loop of links": lambda file: file.symlink_to(file),
    "link to nowhere": lambda file: file.symlink_to("nowhere"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_valid_file_is_read_also_with_a_byte_order_mark_and_windows_line_ends(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    file = reader.make(tmp_path)
    data = file.read_bytes()
    assert told(reader, file, "as written") is None or name == "weights' index"
    people = {"recipe", "task's data", "prompts to generate", "lengths"}
    if name in people:
        file.write_bytes(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"))
        assert told(reader, file, "as Windows writes it") is None


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_such_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    """A traceback, or a wait for a pipe's other end, fails."""
    reader = READERS[name]
    file = reader.make(tmp_path)
    for what, data in SPOILT.items():
        file.write_bytes(data)
        told(reader, file, what)
    for what, make in MADE.items():
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        else:
            file.unlink(missing_ok=True)
        make(file)
        told(reader, file, what)


def spoil(data: bytes, rng: random.Random) -> bytes:
    """Cut, flip, insert, or put another value into the JSON or TOML."""
    if rng.random() < 0.35:
        at, length = rng.randrange(len(data) + 1), rng.randrange(1, 9)
        middle = rng.choice(
            [b"", rng.randbytes(length), rng.choice([b"{", b"]", b'"', b"\n", b"\0", b"9" * 400, b"NaN"])]
        )
        return data[:at] + middle + (b"" if rng.random() < 0.3 else data[at + rng.randrange(length) :])
    lines = data.split(b"\n")
    for whole in (True, False):
        at = 0 if whole else rng.randrange(len(lines))
        with contextlib.suppress(ValueError):
            value = json.loads(data if whole else lines[at])
            dumped = json.dumps(replaced(value, rng)).encode()
            return dumped if whole else b"\n".join([*lines[:at], dumped, *lines[at + 1 :]])
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return tomli_w.dumps(replaced(tomllib.loads(data.decode()), rng)).encode("utf-8", "surrogatepass")
    return data[: rng.randrange(len(data))]


def replaced(value: Any, rng: random.Random) -> Any:
    """A copy with one part replaced or taken away, wherever it is."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        copy = dict(value) if isinstance(value, dict) else list(value)
        key = rng.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
        if rng.random() < 0.15:
            del copy[key]
        else:
            copy[key] = replaced(copy[key], rng)
        return copy
    return rng.choice(VALUES)


def sealed(name: str, data: bytes) -> bytes:
    """With its checksum made anew where it has one: a file that somebody wrote on purpose."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        if name == "checkpoint manifest":
            body = json.loads(data)
            body.pop("xxh3_128", None)
            return canonical_json(body | {"xxh3_128": checksum_bytes(canonical_json(body))})
    return data


@pytest.mark.parametrize("name", READERS)
def test_a_spoilt_file_is_a_value_or_an_error_of_ours(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    file = reader.make(tmp_path)
    data = file.read_bytes()
    for round_ in range(max(1, int(ROUNDS * reader.rounds))):
        rng = random.Random(f"{name} {round_}")
        changed = spoil(data, rng)
        file.write_bytes(sealed(name, changed) if round_ % 2 else changed)
        told(reader, file, f"round {round_}: {changed[:2000]!r}")
