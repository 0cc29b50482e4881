"""Throughput of the reward model executor against the same model inside a user's reward function, one sample a call.

    python benchmarks/reward_model.py --json reward_model.json

Both get what the bundled policy answers to its own task, and one core: the function runs in the real reward pool with one worker, as a
recipe has it by default, keeps its model between calls and uses one thread; the executor has one rank with one thread. More threads
help neither at this size, and more workers or ranks help both alike. A B A B, medians of the rounds' ratios; the scores must agree.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import claim, paired_ratio, spread, write_report
from transformers import AutoConfig, AutoModelForSequenceClassification

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import validate
from llamarl.engine.factory import make_engine, sampling_params
from llamarl.environments.factory import make_prompt_stream
from llamarl.environments.pool import RewardPool
from llamarl.executors.base import ExecutorContext
from llamarl.executors.evaluator import sample_groups
from llamarl.executors.reward_model import RewardModelExecutor
from llamarl.models.loading import load_tokenizer, resolve_model_path
from llamarl.types import Group, Score

FUNCTION = """\
import functools, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

@functools.cache
def model():
    torch.set_num_threads(1)
    return AutoModelForSequenceClassification.from_pretrained({path!r}).eval(), AutoTokenizer.from_pretrained({path!r})

def reward(prompt, response, answer):
    scorer, tokenizer = model()
    with torch.inference_mode():
        return float(scorer(**tokenizer(prompt + response, return_tensors="pt")).logits[0, 0])
"""
SIZES = {"tiny": {}, "12M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}}


def write_classifier(folder: Path, changes: dict[str, int]) -> int:
    """A random classifier with the bundled tokenizer; its number of parameters."""
    base = resolve_model_path("bundled:tiny")
    config = AutoConfig.from_pretrained(base, num_labels=1, **changes)
    config.num_attention_heads = config.num_key_value_heads = 4
    config.head_dim = config.hidden_size // 4
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, folder)
    return sum(p.numel() for p in model.parameters())


def make_groups(num_groups: int, group_size: int) -> list[Group]:
    """What the bundled policy itself answers to prompts of its task, as in the first tick of recipes/tiny.toml."""
    config = validate({"generator": {"sampling": {"max_new_tokens": 80}}})
    tokenizer = load_tokenizer(resolve_model_path("bundled:tiny"))
    stream = make_prompt_stream(config, tokenizer)
    return sample_groups(
        make_engine(config, tokenizer, device="cpu"),
        [stream.get(index) for index in range(num_groups)],
        sampling_params(config.generator.sampling, tokenizer),
        tokenizer,
        samples_per_prompt=group_size,
        seed=0,
    )


def make_executor(folder: Path) -> RewardModelExecutor:
    channels = [ChannelSpec(name=c, kind=ChannelKind.SCATTER, source="a", sink="b") for c in ("in", "out")]
    config = validate({"reward_model": {"path": str(folder), "device": "cpu"}})
    context = ExecutorContext(
        name="reward_model", rank=0, num_ranks=1, device="cpu", run_dir=None, seed=0, reads=(channels[0],),
        writes=(channels[1],),
    )  # fmt: skip
    executor = RewardModelExecutor(config, context)
    executor.setup()
    return executor


def scores_of(groups: list[Group], *, verdict: bool) -> list[float]:
    found = [r.verdict if verdict else r.outcome for g in groups for r in g.responses]
    assert all(isinstance(one, Score) for one in found), found
    return [one.value for one in found if isinstance(one, Score)]


WAYS = ("function", "executor")


def measure(size: str, groups: list[Group], *, rounds: int, folder: Path) -> dict[str, Any]:
    """Throughput of each way in each round."""
    parameters = write_classifier(folder / size, SIZES[size])
    executor = make_executor(folder / size)
    ours = scores_of(list(executor.step(0, {"in": groups}).outputs["out"]), verdict=True)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    file = folder / f"judge_{size.lower()}.py"
    file.write_text(FUNCTION.format(path=str(folder / size)))
    task = {"reward": f"{file}:reward", "pool": {"timeout_s": 120.0}}
    with RewardPool(validate({"task": task}).task) as pool:
        theirs = scores_of(pool.score(groups), verdict=False)  # the worker has read the model now
        gap = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        for _ in range(rounds):
            started = time.perf_counter()
            pool.score(groups)
            seconds["function"].append(time.perf_counter() - started)
            started = time.perf_counter()
            executor.step(0, {"in": groups})
            seconds["executor"].append(time.perf_counter() - started)
    assert gap < 1e-3, f"the ways disagree by {gap}"
    samples = sum(len(g.responses) for g in groups)
    return {
        "parameters": parameters,
        "samples": samples,
        "distinct_samples": sum(len({r.text for r in g.responses}) for g in groups),
        "mean_tokens": sum(len(g.prompt.tokens) + len(r.tokens) for g in groups for r in g.responses) / samples,
        "largest_gap": gap,
        "samples_per_s": {way: spread([samples / s for s in found]) for way, found in seconds.items()},
        "times_faster": paired_ratio(seconds["function"], seconds["executor"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    groups = make_groups(arguments.groups, arguments.group_size)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="llamarl-benchmark-") as name:
        for size in SIZES:
            found = measure(size, groups, rounds=arguments.rounds, folder=Path(name))
            results[size] = found
            rates = {way: found["samples_per_s"][way]["median"] for way in WAYS}
            print(f"{size}: " + ", ".join(f"{way} {rate:,.0f} samples/s" for way, rate in rates.items()), flush=True)
    claims = [
        claim(f"times the function's throughput, {size} model", found["times_faster"]["median"], bar)
        for (size, found), bar in zip(results.items(), (5.0, 5.0), strict=True)
    ]
    write_report(arguments.json, results, claims)


if __name__ == "__main__":
    main()
