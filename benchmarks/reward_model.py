"""Throughput of the reward model executor against the same model inside a user's reward function, one sample a call.

    python benchmarks/reward_model.py --json reward_model.json

Both get the same groups of the bundled task and the same cores. The function runs in the real reward pool, one worker a core with
one thread each, and keeps its model between calls. The executor has one rank with as many threads. A B A B, medians; scores of
both must agree before anything is timed. The bound is the model's matrix products on these tokens, without anything around them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from harness import claim, paired_ratio, spread, write_report
from transformers import AutoConfig, AutoModelForSequenceClassification

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import validate
from llamarl.environments.pool import RewardPool
from llamarl.environments.steps import read_ledger, written_steps
from llamarl.executors.base import ExecutorContext
from llamarl.executors.prompts import make_prompt_stream
from llamarl.executors.reward_model import RewardModelExecutor
from llamarl.models.loading import load_tokenizer, resolve_model_path
from llamarl.types import Group, Response, Score

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
    """Prompts of the bundled task with the answers that it asks for, cut at different places."""
    import numpy as np

    tokenizer = load_tokenizer(resolve_model_path("bundled:tiny"))
    stream = make_prompt_stream(validate({}), tokenizer)
    groups = []
    for index in range(num_groups):
        prompt = stream.get(index)
        lines = written_steps(read_ledger(prompt.question)).splitlines()
        responses = []
        for sample in range(group_size):
            tokens = np.asarray(tokenizer("\n".join(lines[: 1 + sample % len(lines)]))["input_ids"], np.int32)
            responses.append(
                Response(
                    prompt_index=index, sample_index=sample, tokens=tokens, text=str(tokenizer.decode(tokens)),
                    behavior_logprobs=np.zeros(len(tokens), np.float32), loss_mask=np.ones(len(tokens), np.bool_),
                    policy_versions=np.zeros(len(tokens), np.int32), finish_reason="stop",
                )
            )  # fmt: skip
        groups.append(Group(prompt=prompt, responses=tuple(responses)))
    return groups


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


def measure(size: str, groups: list[Group], *, cores: int, rounds: int, folder: Path) -> dict[str, object]:
    """Seconds of each way in each round, and what they gave."""
    parameters = write_classifier(folder / size, SIZES[size])
    (folder / f"judge_{size.lower()}.py").write_text(FUNCTION.format(path=str(folder / size)))
    task = {"reward": f"{folder / f'judge_{size.lower()}.py'}:reward", "pool": {"timeout_s": 120.0}}
    executor = make_executor(folder / size)
    seconds: dict[str, list[float]] = {"executor": [], "function": []}
    with RewardPool(validate({"task": task}).task, num_workers=cores) as pool:
        theirs = scores_of(pool.score(groups), verdict=False)  # every worker has read the model
        ours = scores_of(list(executor.step(0, {"in": groups}).outputs["out"]), verdict=True)
        gap = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        assert gap < 1e-3, f"the two ways disagree by {gap}"
        for _ in range(rounds):
            started = time.perf_counter()
            pool.score(groups)
            seconds["function"].append(time.perf_counter() - started)
            started = time.perf_counter()
            executor.step(0, {"in": groups})
            seconds["executor"].append(time.perf_counter() - started)
    samples = sum(len(g.responses) for g in groups)
    return {
        "parameters": parameters,
        "samples": samples,
        "mean_tokens": sum(len(g.prompt.tokens) + len(r.tokens) for g in groups for r in g.responses) / samples,
        "largest_gap": gap,
        "executor_samples_per_s": spread([samples / s for s in seconds["executor"]]),
        "function_samples_per_s": spread([samples / s for s in seconds["function"]]),
        "times_faster": paired_ratio(seconds["function"], seconds["executor"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.cores)
    groups = make_groups(arguments.groups, arguments.group_size)
    results = {}
    with tempfile.TemporaryDirectory(prefix="llamarl-benchmark-") as name:
        for size in SIZES:
            results[size] = found = measure(
                size, groups, cores=arguments.cores, rounds=arguments.rounds, folder=Path(name)
            )
            print(
                f"{size}: executor {found['executor_samples_per_s']['median']:,.0f} samples/s, function "  # type: ignore[index]
                f"{found['function_samples_per_s']['median']:,.0f}, {found['times_faster']['median']:.1f} times",  # type: ignore[index]
                flush=True,
            )
    claims = [
        claim(f"the executor's throughput by the function's, {size} model", found["times_faster"]["median"], 5.0)  # type: ignore[index]
        for size, found in results.items()
    ]
    write_report(arguments.json, results, claims)


if __name__ == "__main__":
    main()
