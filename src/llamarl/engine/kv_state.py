"""The KV cache of unfinished sequences as plain values and tensors, for a checkpoint of an engine that keeps it.

A cache that has outlived a change of weights cannot be computed again from tokens: it is the work
of several versions. So its blocks are saved as they are, with everything in the scheduler that
decides a later bit: queues, block tables, prompts.

    Scheduler, cache ──export_state──▶ (JSON values, tensors) ──import_state──▶ a new Scheduler, a new cache
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llamarl.engine.expert_record import joined
from llamarl.engine.model_runner import ModelRunner
from llamarl.engine.scheduler import Member, Prompt, Scheduler
from llamarl.engine.sequence import Sequence

__all__ = ["export_state", "import_state"]


def export_state(scheduler: Scheduler, runner: ModelRunner) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Between two steps: (plain JSON values, tensors by name)."""
    members = [*scheduler.running, *scheduler.waiting]
    prompts: list[Prompt] = list(scheduler.prompts.values())
    for member in members:
        if member.prompt is not None and not any(member.prompt is prompt for prompt in prompts):
            prompts.append(member.prompt)  # one that all its members have forked from
    tables = [member.blocks for member in members] + [prompt.blocks for prompt in prompts]
    used = sorted({block for table in tables for block in table})
    tensors = {"blocks": runner.read_blocks(used)}
    for i, prompt in enumerate(prompts):
        if isinstance(prompt.end_state, Tensor):
            tensors[f"end_state_{i}"] = prompt.end_state.detach().to("cpu", copy=True)
        if prompt.experts:
            tensors[f"experts_{i}"] = torch.from_numpy(joined(prompt.experts).copy())
    state = {
        "next_order": scheduler.next_order,
        "used": used,
        "num_running": len(scheduler.running),
        "members": [
            {
                "order": member.order,
                "sequence": [member.sequence.prompt_index, member.sequence.sample_index],
                "prompt": None if member.prompt is None else _index(prompts, member.prompt),
                "forked": member.forked,
                "blocks": member.blocks,
                "num_computed": member.num_computed,
            }
            for member in members
        ],
        "prompts": [
            {
                "index": next((key[0] for key, p in scheduler.prompts.items() if p is prompt), None),
                "tokens": prompt.tokens,
                "blocks": prompt.blocks,
                "num_computed": prompt.num_computed,
                "kept": prompt.kept,
                "running": [member.order for member in prompt.running],
            }
            for prompt in prompts
        ],
        "unforked": [[key[0], list(key[1]), count] for key, count in scheduler.unforked.items()],
    }
    return state, tensors


def import_state(
    scheduler: Scheduler,
    runner: ModelRunner,
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    sequences: Mapping[tuple[int, int], Sequence],
) -> list[Member]:
    """Put what ``export_state`` gave into an empty engine of the same configuration; returns its members in order.

    Args:
        sequences: (prompt index, sample index) -> the sequence, with the tokens that it had.
    """
    prompts = [Prompt(saved["tokens"], list(saved["blocks"]), saved["num_computed"]) for saved in state["prompts"]]
    for i, prompt in enumerate(prompts):
        prompt.kept = state["prompts"][i].get("kept", False)
        if f"end_state_{i}" in tensors:
            prompt.end_state = tensors[f"end_state_{i}"].to(runner.device)
        if f"experts_{i}" in tensors:
            prompt.experts = [tensors[f"experts_{i}"].numpy()]
    members = []
    for saved in state["members"]:
        sequence = sequences[saved["sequence"][0], saved["sequence"][1]]
        member = Member(saved["order"], sequence, (sequence.prompt_index, tuple(sequence.prompt_tokens)))
        member.prompt = None if saved["prompt"] is None else prompts[saved["prompt"]]
        member.forked, member.blocks = saved["forked"], list(saved["blocks"])
        member.num_computed = saved["num_computed"]
        members.append(member)
    by_order = {member.order: member for member in members}
    for prompt, saved in zip(prompts, state["prompts"], strict=True):
        prompt.running = [by_order[order] for order in saved["running"]]
    count = state["num_running"]
    scheduler.restore(
        running=members[:count],
        waiting=deque(members[count:]),
        prompts={
            (saved["index"], tuple(saved["tokens"])): prompt
            for prompt, saved in zip(prompts, state["prompts"], strict=True)
            if saved["index"] is not None
        },
        unforked={(index, tuple(tokens)): number for index, tokens, number in state["unforked"]},
        next_order=state["next_order"],
    )
    runner.write_blocks(state["used"], tensors["blocks"])
    return sorted(members, key=lambda member: member.order)


def _index(prompts: list[Prompt], prompt: Prompt) -> int:
    return next(i for i, other in enumerate(prompts) if other is prompt)
