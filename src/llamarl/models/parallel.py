"""A decoder over several devices: FSDP2 x tensor parallelism, from the model's own plan.

    mesh (pp, fsdp, cp, tp), rank = ((pp_index * fsdp + fsdp_index) * cp + cp_index) * tp + tp_index

    tensor parallelism cuts first, inside a layer           FSDP2 then cuts what is left by rows
    colwise  W[out/tp, in]   x copied in, y stays cut       every parameter [d0, ...] -> [d0/(fsdp*cp), ...]
    rowwise  W[out, in/tp]   x comes cut, y summed          gathered layer by layer while it computes
    experts  [E/tp, ., .]    x copied in, y summed          (models/expert_parallel.py)
             [E/(tp*ep), ..] x sent where they are          [E/(tp*ep) / (fsdp*cp/ep), ..]
    adapter  beside colwise  A whole, A x copied in, B[out/tp, r]
             beside rowwise  A[r, in/tp], A x summed, B whole

Tensor parallelism works on plain local tensors (``collectives.py``): the module keeps its code and
holds a slice, two hooks carry the sums. So FSDP2 wraps it like any other module, and a mesh of one
needs no process group at all. Embedding and output layer are cut along the vocabulary
(``vocabulary.py``), which the models' plans leave whole; norms are whole on every tensor-parallel
rank.

Context-parallel ranks have the same samples and compute a part of each token row
(``context_parallel.py``), so their gradients are parts of a sum as those of data-parallel ranks
are: FSDP2 shards over both at once, the axis ``shard`` here.

Where there are more ranks than key-value heads, each holds one head of ``k_proj`` and ``v_proj``, the same as its
neighbours. Its queries are then a part of those that read that head, so its gradient is a part of a sum over these
neighbours, who all make the same step with it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from llamarl.errors import ModelError
from llamarl.model_support import why_unsupported
from llamarl.models.collectives import CopyToRanks, SharedInput, SumOverRanks
from llamarl.models.expert_parallel import cut_experts, exchange
from llamarl.models.experts import expert_layers
from llamarl.models.sizes import KEY_VALUE_LAYERS, check_tensor_parallel_size, part_of_rank
from llamarl.models.vocabulary import cut_vocabulary

__all__ = [
    "AXES",
    "EXPERTS",
    "EXPERT_SHARD",
    "SHARD",
    "Cut",
    "ParallelLayout",
    "ParameterShard",
    "apply_fully_shard",
    "apply_tensor_parallel",
    "holds_first",
    "local_tensor",
    "make_layout",
    "new_group",
    "parameter_shards",
    "shard_box",
    "shards_of_all_stages",
]

_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce")

T = TypeVar("T")

AXES = ("pp", "fsdp", "cp", "tp")
"""Axes of the mesh, outermost first: the fewer bytes travel along one, the farther apart its
neighbours may stand. Ranks count row by row, so the last axis has neighbouring ranks."""

SHARD = "shard"
"""The axes ``fsdp`` and ``cp`` as one, over which FSDP2 cuts."""

EXPERTS, EXPERT_SHARD = "experts", "expert_shard"
"""With ``ep``, neighbours along ``SHARD`` have different experts: ``tp`` and ``ep`` as one, over
which experts are spread, and the rest of ``SHARD``, over which FSDP2 cuts those of one rank."""


@dataclass(frozen=True)
class ParallelLayout:
    """Where this rank stands on the mesh of ``AXES``. ``mesh`` is None for a single rank, and lacks axes of size 1."""

    fsdp: int
    tp: int
    mesh: DeviceMesh | None
    pp: int = 1
    cp: int = 1
    ep: int = 1
    shard_mesh: DeviceMesh | None = None
    """(pp, ``SHARD``, tp) of the same ranks, those of size 1 too; None where ``SHARD`` is one of
    ``AXES``, or of size 1."""
    expert_mesh: DeviceMesh | None = None
    """(pp, ``EXPERT_SHARD``, ep, tp) of the same ranks, those of size 1 too; None where ``ep`` is 1."""

    def size(self, axis: str) -> int:
        """Ranks along one of ``AXES``, or of the axes that are made of them."""
        shard = self.fsdp * self.cp
        sizes = {"pp": self.pp, "fsdp": self.fsdp, "cp": self.cp, "tp": self.tp, SHARD: shard}
        return {**sizes, "ep": self.ep, EXPERTS: self.tp * self.ep, EXPERT_SHARD: shard // self.ep}[axis]

    def index(self, axis: str) -> int:
        """Where this rank stands along one of ``AXES``."""
        return 0 if self.mesh is None or self.size(axis) == 1 else self.mesh.get_local_rank(axis)

    def index_of(self, rank: int, axis: str) -> int:
        """Where any rank stands along one of ``AXES``, or of the axes that are made of them."""
        if axis == SHARD:
            return self.index_of(rank, "fsdp") * self.cp + self.index_of(rank, "cp")
        if axis in ("ep", EXPERT_SHARD):
            rest, place = divmod(self.index_of(rank, SHARD), self.ep)
            return place if axis == "ep" else rest
        if axis == EXPERTS:
            return self.index_of(rank, "tp") * self.ep + self.index_of(rank, "ep")
        inner = AXES[AXES.index(axis) + 1 :]
        return rank // math.prod(map(self.size, inner)) % self.size(axis)

    @property
    def num_ranks(self) -> int:
        return math.prod(map(self.size, AXES))

    @property
    def pp_rank(self) -> int:
        return self.index("pp")

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes log-probs and losses."""
        return self.pp_rank == self.pp - 1

    @property
    def fsdp_rank(self) -> int:
        return self.index("fsdp")

    @property
    def cp_rank(self) -> int:
        return self.index("cp")

    @property
    def tp_rank(self) -> int:
        return self.index("tp")

    @property
    def is_data_leader(self) -> bool:
        """Whether this rank reports for all that hold its samples: their first on the last stage."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def ranks_of_stage(self) -> int:
        """Ranks from one pipeline stage to the next."""
        return self.num_ranks // self.pp

    @property
    def rank(self) -> int:
        rank = 0
        for axis in AXES:
            rank = rank * self.size(axis) + self.index(axis)
        return rank

    def along(self, axis: str) -> DeviceMesh:
        """The mesh of the ranks beside this one along one of ``AXES`` of more than one rank, or ``SHARD``."""
        mesh, named = self._mesh_of(axis)
        return mesh[named]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Process group of ``along``."""
        mesh, named = self._mesh_of(axis)
        return mesh.get_group(named)

    def _mesh_of(self, axis: str) -> tuple[DeviceMesh, str]:
        """The mesh that has an axis, and what that one calls it."""
        if axis == SHARD and self.shard_mesh is not None:
            return self.shard_mesh, SHARD
        assert self.mesh is not None, "a single rank has no mesh"
        return self.mesh, axis if axis != SHARD else "fsdp" if self.cp == 1 else "cp"

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Sum over the ranks that hold other samples, in place."""
        if self.fsdp > 1:
            dist.all_reduce(values, group=self.group("fsdp"))
        return values

    def max_over_data(self, values: Tensor) -> Tensor:
        """Maximum over the ranks that hold other samples, in place."""
        if self.fsdp > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group("fsdp"))
        return values

    def sum_over_context(self, values: Tensor) -> Tensor:
        """Sum over the ranks that compute other parts of this rank's samples, in place."""
        if self.cp > 1:
            dist.all_reduce(values, group=self.group("cp"))
        return values

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Sum over the ranks over which FSDP2 cuts, in place."""
        if self.size(SHARD) > 1:
            dist.all_reduce(values, group=self.group(SHARD))
        return values

    def sum_over_stages(self, values: Tensor) -> Tensor:
        """Sum over the stages of this rank's samples, in place."""
        if self.pp > 1:
            dist.all_reduce(values, group=self.group("pp"))
        return values

    def from_last_stage(self, make: Callable[[], T]) -> T:
        """What the last stage makes, on every stage. Small values that can be pickled; only the
        last stage calls ``make``."""
        if self.pp == 1:
            return make()
        found = [make() if self.is_last_stage else None]
        last = self.rank + (self.pp - 1 - self.pp_rank) * self.ranks_of_stage
        dist.broadcast_object_list(found, src=last, group=self.group("pp"))
        return cast(T, found[0])


class Cut(NamedTuple):
    """A dimension of a parameter is cut over the ranks of a mesh axis, in even parts."""

    axis: str
    """One of ``AXES``, or ``SHARD``."""
    dim: int
    at_most: int | None = None
    """Into no more parts than these: of more ranks, neighbours hold the same. None: a part a rank."""
    size: int | None = None
    """Of the whole dimension, where the last part may be smaller. None: all parts are alike."""


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """One parameter and the part of it that this rank holds."""

    shape: tuple[int, ...]
    """Global."""
    dtype: str
    """Of the tensors that are handed over: a torch dtype's name without ``torch.``."""
    box: tuple[tuple[int, int], ...]
    """Global (start, stop) a dimension of this rank's part; empty where there are more ranks than rows."""
    cuts: tuple[Cut, ...]
    """In the order in which they were made; the same on every rank."""
    stages: tuple[int, ...] | None = None
    """Pipeline stages that hold it; None: all."""


def make_layout(
    *,
    fsdp: int,
    tp: int,
    device: str,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    keys: tuple[str, ...] = ("trainer.fsdp", "trainer.tp"),
) -> ParallelLayout:
    """The mesh over the default process group; no process group is needed for one rank.

    Args:
        fsdp: Ranks along the data axis. A generator's replicas, which hold whole copies, count here too.
        pp: Stages into which the layers are cut.
        cp: Ranks over which each row of tokens is cut.
        ep: Of the ranks of ``fsdp`` and ``cp``, how many share the experts of a sparse model; divides their product.
        keys: The configuration keys of these sizes (fsdp, tp, pp, cp), to name in the error.

    Raises:
        ValueError: The process group is missing or has another size.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    layout = ParallelLayout(fsdp=fsdp, tp=tp, mesh=None, pp=pp, cp=cp, ep=ep)
    assert layout.size(SHARD) % ep == 0, "the sizes have been checked"
    if world != layout.num_ranks:
        sizes = " * ".join(str(size) for _, size in zip(keys, (fsdp, tp, pp, cp), strict=False))
        raise ValueError(
            f"{' * '.join(keys)} = {sizes} needs a process group of {layout.num_ranks} ranks, found {world}"
        )
    if world == 1:
        return layout

    def of_axes(*axes: str) -> DeviceMesh:
        return init_device_mesh(torch.device(device).type, tuple(map(layout.size, axes)), mesh_dim_names=axes)

    mesh = of_axes(*(axis for axis in AXES if layout.size(axis) > 1))
    shard_mesh = of_axes("pp", SHARD, "tp") if fsdp > 1 and cp > 1 else None
    expert_mesh = of_axes("pp", EXPERT_SHARD, "ep", "tp") if ep > 1 else None
    return dataclasses.replace(layout, mesh=mesh, shard_mesh=shard_mesh, expert_mesh=expert_mesh)


def apply_tensor_parallel(
    model: PreTrainedModel, layout: ParallelLayout, *, key: str = "trainer.tp", training: bool = True
) -> dict[str, Cut]:
    """Cut the model's linear layers and vocabulary over the tensor-parallel ranks, in place, and install the sums.

    Call it on whole weights, before ``apply_fully_shard``.

    Args:
        key: The configuration key of the size, to name in errors.
        training: Also sum the gradients of what is whole on every rank.

    Returns:
        Parameter name -> how it was cut.

    Raises:
        ModelError: The architecture has no plan that is carried out here, or does not divide.
    """
    if layout.tp == 1:
        return _spread_experts(model, layout)
    kv_heads, experts = _check_size(model, layout.tp, key), expert_layers(model)
    columns = Cut("tp", 0)
    heads_apart = Cut("tp", 0, kv_heads) if layout.tp > kv_heads else columns
    sharing = _group_of_same_part(layout, kv_heads) if training and layout.tp > kv_heads else None
    base, embedding = model.base_model, model.get_input_embeddings()
    plan: Mapping[str, str] = getattr(base.config, "base_model_tp_plan", None) or {}
    prefix = f"{model.base_model_prefix}."
    cut = _spread_experts(model, layout)
    group = layout.group("tp")
    shared_input = SharedInput(group)
    for name, module in list(base.named_modules()):
        if module in experts or module is embedding:  # which some releases of transformers name, for tied weights
            continue
        style = plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if style is None:
            continue
        linear, a, b, own = _with_adapter(module)
        if style not in _STYLES or (style != _STYLES[2] and linear is None):
            raise ModelError(
                f"{type(model).__name__}: tensor-parallel style {style!r} of {name} is not supported: set {key} to 1"
            )
        if style == "colwise":
            assert linear is not None
            of_head = name.rpartition(".")[2] in KEY_VALUE_LAYERS
            how = heads_apart if of_head else columns
            for part, copied in ((linear, shared_input), (b, lambda x: CopyToRanks.apply(x, group))):
                if part is not None:
                    _cut_columns(part, layout, copied, how, sharing if of_head else None)
                    cut |= {f"{prefix}{name}.{own[part]}{p}": how for p, _ in part.named_parameters(recurse=False)}
        elif style == "rowwise":
            assert linear is not None
            for part in (linear, a):
                if part is not None:
                    _cut_rows(part, layout)
                    cut[f"{prefix}{name}.{own[part]}weight"] = Cut("tp", 1)
        elif training:
            _sum_gradients(module, group)
    if not cut:
        raise ModelError(f"{type(model).__name__}: its tensor-parallel plan fits none of its layers: set {key} to 1")
    sizes_of = cut_vocabulary(model, rank=layout.tp_rank, num_ranks=layout.tp, group=group)
    cut |= {name: Cut("tp", 0, size=size) for name, size in sizes_of.items()}
    return cut


def _check_size(model: PreTrainedModel, tp: int, key: str) -> int:
    """Refuse a size that does not divide the model; its key-value heads."""
    if reason := why_unsupported(model.config.to_dict(), "tensor_parallel"):
        raise ModelError(f"{key} = {tp}: {reason}; set {key} to 1")
    text = model.config.get_text_config()
    check_tensor_parallel_size(text, tp, key=key)
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def _spread_experts(model: PreTrainedModel, layout: ParallelLayout) -> dict[str, Cut]:
    """Leave this rank the experts that are its own among tensor-parallel ranks and those of ``ep``, in place.

    Returns:
        Parameter name -> how it was cut; nothing where every rank has all of them.
    """
    if layout.size(EXPERTS) == 1:
        return {}
    experts = expert_layers(model)
    options: dict[str, Any] = {"ranks": layout.tp, "rank": layout.tp_rank, "copied": lambda x: x, "summed": lambda x: x}
    if layout.tp > 1:
        same_tokens = layout.group("tp")
        options["copied"] = lambda x: CopyToRanks.apply(x, same_tokens)
        options["summed"] = lambda x: SumOverRanks.apply(x, same_tokens)
    if layout.expert_mesh is not None:
        other_tokens, place = layout.expert_mesh.get_group("ep"), layout.index_of(layout.rank, "ep")
        options |= {"num_exchanging": layout.ep, "exchanging": place}
        options["exchanged"] = lambda compute, own: exchange(
            compute, own=own, rank=place, num_ranks=layout.ep, group=other_tokens
        )
    cut: dict[str, Cut] = {}
    for name, module in model.named_modules():
        if module in experts:
            how = Cut("tp" if layout.ep == 1 else EXPERTS, 0)
            cut |= {f"{name}.{p}": how for p in cut_experts(module, **options)}
    return cut


def apply_fully_shard(root: nn.Module, layers: list[nn.Module], layout: ParallelLayout, dtype: torch.dtype) -> None:
    """FSDP2 over the data-parallel and context-parallel ranks: one unit a layer, one for the rest.

    Gradients are *summed* over ranks, in float32: every token already carries its weight in the whole step's mean.
    """
    if layout.size(SHARD) == 1:
        return
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    experts = expert_layers(root) if layout.expert_mesh is not None else []
    for module in experts:  # units of their own: other ranks along the axis have other experts
        assert layout.expert_mesh is not None
        fully_shard(module, mesh=layout.expert_mesh[EXPERT_SHARD], mp_policy=policy)
    for module in [*layers, root]:
        fully_shard(module, mesh=layout.along(SHARD), mp_policy=policy)
    for module in [*experts, *layers, root]:
        module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo has no scaled sum


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part, sharing storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameter_shards(
    parameters: Mapping[str, Tensor], tensor_parallel_cuts: Mapping[str, Cut], layout: ParallelLayout, dtype: str
) -> dict[str, ParameterShard]:
    """What this rank holds of every parameter; agrees with PyTorch's ``torch.chunk`` sharding."""
    shards = {}
    for name, parameter in parameters.items():
        shape = list(parameter.shape)  # of a DTensor: after tensor parallelism, before FSDP
        cuts: list[Cut] = []
        if (cut := tensor_parallel_cuts.get(name)) is not None:
            shape[cut.dim] = cut.size or shape[cut.dim] * part_of_rank(layout.size(cut.axis), 0, cut.at_most)[0]
            cuts.append(cut)
        rest = EXPERT_SHARD if cut is not None and cut.axis == EXPERTS else SHARD
        if layout.size(rest) > 1:
            cuts.append(Cut(rest, 0))
        box = shard_box(shape, cuts, layout, layout.rank)
        stages = None if layout.pp == 1 else (layout.pp_rank,)
        shards[name] = ParameterShard(shape=tuple(shape), dtype=dtype, box=box, cuts=tuple(cuts), stages=stages)
        held = tuple(stop - start for start, stop in box)
        assert math.prod(held) == local_tensor(parameter).numel(), f"{name}: {held} is not what this rank holds"
    return shards


def shards_of_all_stages(
    own: Mapping[str, ParameterShard], names: Sequence[str], layout: ParallelLayout
) -> dict[str, ParameterShard]:
    """Every parameter of the model, of those that other stages hold an empty part. Every rank calls it.

    Args:
        own: Of this stage.
        names: Of the whole model, in its order.
    """
    if layout.pp == 1:
        return dict(own)
    of_stages: list[Mapping[str, ParameterShard] | None] = [None] * layout.pp
    dist.all_gather_object(of_stages, dict(own), group=layout.group("pp"))
    found = {}
    for name in names:
        held = {stage: shards[name] for stage, shards in enumerate(of_stages) if shards and name in shards}
        shard = dataclasses.replace(next(iter(held.values())), stages=tuple(held))
        box = shard_box(shard.shape, shard.cuts, layout, layout.rank, shard.stages)
        found[name] = dataclasses.replace(shard, box=box)
    return found


def shard_box(
    shape: Sequence[int], cuts: Sequence[Cut], layout: ParallelLayout, rank: int, stages: Collection[int] | None = None
) -> tuple[tuple[int, int], ...]:
    """Global (start, stop) a dimension of what ``rank`` holds of a parameter cut by ``cuts``, in that order.

    Args:
        stages: That hold it; None: all. Elsewhere the box is empty.
    """
    if stages is not None and layout.index_of(rank, "pp") not in stages:
        return tuple((0, 0) for _ in shape)
    box = [(0, size) for size in shape]
    for cut in cuts:
        parts, part = part_of_rank(layout.size(cut.axis), layout.index_of(rank, cut.axis), cut.at_most)
        start, stop = box[cut.dim]
        step = -(-(stop - start) // parts)
        box[cut.dim] = (min(stop, start + part * step), min(stop, start + (part + 1) * step))
    return tuple(box)


def holds_first(cut: Cut, layout: ParallelLayout) -> bool:
    """Whether this rank is the first along the tensor-parallel axis to hold its part."""
    if cut.at_most is None:
        return True
    parts, _ = part_of_rank(layout.tp, 0, cut.at_most)
    return layout.tp_rank % (layout.tp // parts) == 0


def _group_of_same_part(layout: ParallelLayout, parts: int) -> dist.ProcessGroup:
    """The ranks that hold the same of ``parts`` parts as this one."""
    ranks = dist.get_process_group_ranks(layout.group("tp"))
    part = part_of_rank(layout.tp, layout.tp_rank, parts)[1]
    copies = layout.tp // parts
    return new_group(ranks[part * copies : (part + 1) * copies], use_local_synchronization=True)


def new_group(ranks: list[int] | None = None, **settings: Any) -> dist.ProcessGroup:
    """``torch.distributed.new_group`` of ranks of which this is one: since torch 2.14 its type says that others get a number."""
    made: Any = dist.new_group(ranks, **settings)
    group: dist.ProcessGroup = made
    return group


def _keep_slice(module: nn.Module, name: str, cut: Cut, layout: ParallelLayout) -> None:
    parameter = module._parameters.get(name)
    if parameter is not None:
        parts, part = part_of_rank(layout.tp, layout.tp_rank, cut.at_most)
        held = parameter.detach().chunk(parts, cut.dim)[part].clone()
        module._parameters[name] = nn.Parameter(held, requires_grad=parameter.requires_grad)


def _with_adapter(
    module: nn.Module,
) -> tuple[nn.Linear | None, nn.Linear | None, nn.Linear | None, dict[nn.Module, str]]:
    """A linear layer, A and B of the adapter around it if there is one, and what each is called
    inside ``module``; None if it is none."""
    if isinstance(module, nn.Linear):
        return module, None, None, {module: ""}
    linear = getattr(module, "base_layer", None)  # as peft calls it
    if not isinstance(linear, nn.Linear):
        return None, None, None, {}
    named = dict(module.named_modules())
    a, b = named["lora_A.default"], named["lora_B.default"]
    assert isinstance(a, nn.Linear) and isinstance(b, nn.Linear)
    return linear, a, b, {linear: "base_layer.", a: "lora_A.default.", b: "lora_B.default."}


def _cut_columns(
    module: nn.Linear,
    layout: ParallelLayout,
    copied: Callable[[Tensor], Tensor],
    cut: Cut,
    sharing: dist.ProcessGroup | None,
) -> None:
    """
    Args:
        copied: The input to the ranks, whose gradients are summed.
        sharing: The ranks that hold the same part, each with some of the queries that read it: its
            gradient is summed over them.
    """
    _keep_slice(module, "weight", cut, layout)
    _keep_slice(module, "bias", cut, layout)
    module.out_features = len(module.weight)

    def forward(x: Tensor) -> Tensor:
        weight, bias = module.weight, module.bias
        if sharing is not None:
            weight = CopyToRanks.apply(weight, sharing)
            bias = None if bias is None else CopyToRanks.apply(bias, sharing)
        return F.linear(copied(x), weight, bias)

    module.forward = forward  # type: ignore[method-assign, assignment]


def _cut_rows(module: nn.Linear, layout: ParallelLayout) -> None:
    _keep_slice(module, "weight", Cut("tp", 1), layout)
    module.in_features //= layout.tp
    group = layout.group("tp")

    def forward(x: Tensor) -> Tensor:
        y = SumOverRanks.apply(F.linear(x, module.weight), group)
        return y if module.bias is None else y + module.bias  # the bias once, after the sum

    module.forward = forward  # type: ignore[method-assign, assignment]


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """A module that is whole on every rank but sees only this rank's heads: its gradients are parts of a sum."""
    original: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept = {name: p for name, p in module._parameters.items() if p is not None}
        try:
            for name, parameter in kept.items():
                module._parameters[name] = CopyToRanks.apply(parameter, group)
            return original(*args, **kwargs)
        finally:
            module._parameters.update(kept)

    module.forward = forward  # type: ignore[method-assign]
