"""Ranks of meshes that no test machine has, one after another in this process, over a process group that moves nothing.

What arrives is no number to look at; who is called, in which order and of which shape is what a card's ranks would do.
A rank that calls a group's collectives in another order than its neighbours, or waits for what nobody sends, hangs a
job on GPUs: here the calls of all ranks are played against each other.
"""

import functools
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_fixtures import make_groups, write_model
from transformers import LlamaConfig

from llamarl.models.loading import load_model
from llamarl.models.parallel import local_tensor
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import OptimizerConfig, ReferenceConfig, TrainerConfig
from llamarl.trainer.scoring import FrozenScorer
from llamarl.trainer.step import Trainer

MESHES = ["fsdp 2 x cp 2 x tp 2", "pp 2 x fsdp 2"]


class Call(NamedTuple):
    """One call of a collective, or of one end of a transfer."""

    name: str
    ranks: tuple[int, ...]
    """Of its group."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    peer: int = -1
    """Of a transfer."""


_TENSOR = {  # name -> where its tensor stands among the arguments; torch has renamed two of them
    "all_reduce": 0, "broadcast": 0, "all_gather_into_tensor": 1, "all_gather_single": 1, "reduce_scatter_tensor": 1,
    "reduce_scatter_single": 1, "all_to_all_single": 1,
}  # fmt: skip


class _OthersAreMissing(Exception):
    """A stage needs to know of others, which have not been here."""


class _Left:
    """A transfer: NCCL holds up the host while it waits with a limit of its own, and gloo's group has one."""

    def wait(self, timeout: object = None) -> bool:
        assert timeout is None, "the host would wait between GPUs, and stages on CPUs not for deadlines.step_s"
        return True


@contextmanager
def fake_ranks(rank: int, world: int, calls: list[Call], stages: list[Any]) -> Iterator[None]:
    """Be ``rank`` of ``world``.

    Args:
        calls: Gets what it calls.
        stages: Of pipeline stages, what each says of itself: it gets this rank's, and answers once all are there.
    """

    def ranks_of(group: Any) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))

    def collective(name: str, place: int, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            tensor = args[place] if len(args) > place else kwargs.get("input", kwargs.get("input_tensor"))
            calls.append(Call(name, ranks_of(group), tuple(tensor.shape), tensor.dtype))
            return real(*args, group=group, **kwargs)

        return call

    def transfer(name: str) -> Callable[..., _Left]:
        def call(tensor: Tensor, dst: int = -1, src: int = -1, group: Any = None) -> _Left:
            calls.append(Call(name, ranks_of(group), tuple(tensor.shape), tensor.dtype, max(dst, src)))
            return _Left()

        return call

    def gather(found: list[Any], own: Any, group: Any) -> None:
        stages[ranks_of(group).index(rank)] = own
        if None in stages:
            raise _OthersAreMissing
        found[:] = stages

    def from_last(found: list[Any], **_: Any) -> None:
        found[0] = {} if found[0] is None else found[0]

    make_group = dist.new_group
    real = {name: getattr(dist, name) for name in _TENSOR if hasattr(dist, name)}
    fakes: dict[str, Any] = {name: collective(name, _TENSOR[name], call) for name, call in real.items()}
    fakes |= {"isend": transfer("isend"), "irecv": transfer("irecv")}
    fakes |= {"all_gather_object": gather, "broadcast_object_list": from_last}
    fakes["new_group"] = lambda *args, backend=None, **kwargs: make_group(*args, backend="fake", **kwargs)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        with mock.patch.multiple(dist, **fakes):
            yield
    finally:
        dist.destroy_process_group()


def stuck(programs: Sequence[Sequence[Call]]) -> str:
    """Play all ranks' calls against each other; empty if all of them come to their end.

    A collective takes place when it is the next call of every rank of its group; a transfer leaves at once.
    """
    left = [deque(program) for program in programs]
    under_way: dict[tuple[int, int, tuple[int, ...]], deque[Call]] = defaultdict(deque)
    moved = True
    while moved:
        moved = False
        for rank, calls in enumerate(left):
            while calls:
                head = calls[0]
                if head.name == "isend":
                    under_way[rank, head.peer, head.ranks].append(head)
                    calls.popleft()
                elif head.name == "irecv":
                    waiting = under_way[head.peer, rank, head.ranks]
                    if not waiting or waiting[0][2:4] != head[2:4]:
                        break
                    waiting.popleft()
                    calls.popleft()
                elif all(left[other] and left[other][0] == head for other in head.ranks):
                    for other in head.ranks:
                        left[other].popleft()
                else:
                    break
                moved = True
    ends = [f"rank {rank} at {calls[0]}" for rank, calls in enumerate(left) if calls]
    lost = [f"{sent} from {key}" for key, sent in under_way.items() if sent]
    return "\n".join(ends + lost)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (["sum", "max"], ""),
        (["max", "sum"], "rank 0 at .*'sum'"),  # two calls in another order
        (["sum", "max", "sum"], "rank 1 at .*'sum'"),  # one call more
        (["sum"], "rank 0 at .*'max'"),
    ],
)
def test_ranks_that_call_otherwise_than_their_neighbours_are_stuck(second: list[str], why: str) -> None:
    first, other = ([Call(name, (0, 1), (3,), torch.float32) for name in names] for names in (["sum", "max"], second))
    found = stuck([first, other])
    assert re.search(why, found) if why else found == ""


def test_a_transfer_that_nobody_takes_or_of_another_shape_is_seen() -> None:
    sent, awaited = (Call(name, (0, 1), (1, 4, 8), torch.bfloat16, peer) for name, peer in (("isend", 1), ("irecv", 0)))
    assert stuck([[sent], [awaited]]) == ""
    assert "rank 1" in stuck([[], [awaited]]) and "isend" in stuck([[sent], []])
    assert "rank 1" in stuck([[sent], [awaited._replace(dtype=torch.float32)]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)


def walk(model: Path, mesh: str) -> tuple[list[list[Call]], list[int]]:
    """Every rank's calls of a tick, and how many of them passed before it."""
    sizes = {axis: int(size) for axis, size in (part.split() for part in mesh.split(" x "))}
    config = TrainerConfig(**sizes, max_tokens_per_microbatch=48)  # type: ignore[arg-type]
    stages: list[Any] = [None] * config.pp
    programs: list[list[Call]] = []
    begun: list[int] = []
    ranks = list(range(config.num_ranks))
    for first in ranks[:: config.num_ranks // config.pp] if config.pp > 1 else []:
        with suppress(_OthersAreMissing), fake_ranks(first, config.num_ranks, [], stages):
            Trainer(model, config, OptimizerConfig(lr=1e-3), AlgorithmConfig(), temperature=0.9)
    for rank in ranks:
        calls: list[Call] = []
        with fake_ranks(rank, config.num_ranks, calls, stages):
            trainer = Trainer(model, config, OptimizerConfig(lr=1e-3), AlgorithmConfig(), temperature=0.9)
            begun.append(len(calls))
            trainer.train(make_groups(), 0)
        programs.append(calls)
    return programs, begun


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
@pytest.mark.parametrize("mesh", MESHES)
def test_every_rank_calls_what_its_neighbours_wait_for(mesh: str, model: Path) -> None:
    programs, _ = walk(model, mesh)
    assert all(programs)
    assert stuck(programs) == ""


def test_stages_have_spoken_in_both_directions_before_their_first_step(tmp_path: Path) -> None:
    """NCCL makes a pair's communicator at its first transfer, and both hosts stand still until it is there."""
    programs, begun = walk(write_model(tmp_path, num_hidden_layers=3), "pp 3")
    for calls, before in zip(programs, begun, strict=True):
        met, needed = (
            {(call.name, call.peer) for call in part if call.name in ("isend", "irecv")}
            for part in (calls[:before], calls[before:])
        )
        assert met == needed
    assert stuck(programs) == ""


def test_a_frozen_model_over_ranks_takes_the_bytes_that_it_computes_with(model: Path) -> None:
    config, algorithm = ReferenceConfig(fsdp=2, dtype="bfloat16"), AlgorithmConfig()
    with fake_ranks(0, 2, [], []):
        scorer = FrozenScorer(model, config, algorithm, TrainerConfig(), temperature=1.0)
        found = {name: local_tensor(tensor) for name, tensor in scorer.tensors.items()}
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    stored = dict(load_model(model, dtype=torch.float32).named_parameters())
    for name, tensor in found.items():
        assert torch.equal(tensor, stored[name].chunk(2)[0].to(torch.bfloat16)), name


def test_an_embedding_that_the_plan_names_is_cut_as_one_that_it_leaves_out(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers 5.17 has it for tied weights."""
    plan = dict(LlamaConfig.base_model_tp_plan)
    calls = walk(model, "tp 2")
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", {**plan, "embed_tokens": "embedding_rowwise"})
    assert walk(model, "tp 2") == calls


def test_a_micro_batch_gathers_and_reduces_each_unit_once(model: Path) -> None:
    """A layer is a unit, the rest is one: gathered for the forward pass, a layer again for the backward one."""
    programs, begun = walk(model, "fsdp 2")
    names = [call.name for call in programs[1][begun[1] :]]
    num_microbatches = 3
    gathers = sum(name.startswith("all_gather") for name in names)
    reductions = sum(name.startswith("reduce_scatter") for name in names)
    assert (gathers, reductions) == (num_microbatches * (3 + 2), num_microbatches * 3)
    assert len(names) - gathers - reductions == 9  # counts, losses and the norm, once a step
