"""Muon on one rank: against ``torch.optim.Muon``, what it keeps, and who owns what on a mesh.
Over real meshes: ``tests/multiprocess/test_trainer_meshes.py``."""

import torch
from torch import Tensor, nn

from llamarl.models.parallel import ParallelLayout
from llamarl.settings.trainer import OptimizerConfig
from llamarl.trainer.muon import Muon, orthogonal, owners_in_turn
from llamarl.trainer.optimizer import MasterWeights

ONE_RANK = ParallelLayout(fsdp=1, tp=1, mesh=None)
CONFIG = OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.1)
SHAPES = {
    "model.layers.0.q_proj.weight": (24, 16),
    "model.layers.0.down_proj.weight": (8, 40),
    "model.layers.0.mlp.experts.up": (3, 10, 6),
    "model.layers.0.norm.weight": (16,),
    "model.embed_tokens.weight": (30, 16),
}
MATRICES = [name for name in SHAPES if CONFIG.is_matrix(name, len(SHAPES[name]))]


def _weights(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def _gradients(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _step(masters: MasterWeights, seed: int, lr: float = 1e-2) -> None:
    for name, gradient in _gradients(seed).items():
        masters.parameters[name].grad = gradient
    masters.collect_gradients()
    masters.step(lr)
    masters.drop_gradients()


def _by_torch(steps: int) -> dict[str, Tensor]:
    """What PyTorch's own Muon makes of the matrices, each expert's apart, and its AdamW of the rest."""
    weights = _weights()
    parts = {name: [nn.Parameter(p.detach().clone()) for p in _matrices(weights[name])] for name in MATRICES}
    muon = torch.optim.Muon(
        [p for each in parts.values() for p in each],
        lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    rest = {name: p for name, p in weights.items() if name not in MATRICES}
    groups = [{"params": [p], "weight_decay": 0.1 if p.ndim >= 2 else 0.0} for p in rest.values()]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for seed in range(steps):
        gradients = _gradients(seed)
        for name, each in parts.items():
            for part, gradient in zip(each, _matrices(gradients[name]), strict=True):
                part.grad = gradient.clone()
        for name, parameter in rest.items():
            parameter.grad = gradients[name]
        muon.step()
        adamw.step()
    made = {name: torch.stack(list(each)).reshape(SHAPES[name]) for name, each in parts.items()}
    return {name: tensor.detach() for name, tensor in {**made, **rest}.items()}


def _matrices(tensor: Tensor) -> list[Tensor]:
    return list(tensor.detach()) if tensor.ndim == 3 else [tensor.detach()]


def test_in_bfloat16_it_is_pytorchs_own_to_the_bit() -> None:
    weights = _weights()
    muon = Muon(
        {name: weights[name] for name in MATRICES}, torch.optim.AdamW([weights["model.embed_tokens.weight"]]),
        lr=1e-2, weight_decay=0.1, shards={}, layout=ONE_RANK, device=torch.device("cpu"),
    )  # fmt: skip
    muon._dtype = torch.bfloat16  # as on a GPU
    for seed in range(4):
        for name, gradient in _gradients(seed).items():
            weights[name].grad = gradient
        muon.step()
    expected = _by_torch(4)
    for name in MATRICES:
        assert torch.equal(weights[name], expected[name]), name


def test_on_a_cpu_it_differs_from_pytorchs_own_by_the_rounding_of_bfloat16_and_the_rest_not_at_all() -> None:
    masters = MasterWeights(_weights(), CONFIG, ONE_RANK, tensor_parallel_cuts={})
    for seed in range(4):
        _step(masters, seed)
    expected, before = _by_torch(4), _weights()
    for name, tensor in masters.tensors.items():
        if name in MATRICES:
            moved = (expected[name] - before[name]).norm()
            assert 0 < (tensor - expected[name]).norm() < 0.02 * moved, name
        else:
            assert torch.equal(tensor, expected[name]), name


def test_nothing_to_go_by_moves_nothing() -> None:
    assert torch.equal(orthogonal(torch.zeros(4, 3)), torch.zeros(4, 3))


def test_it_keeps_one_moment_of_a_matrix_and_goes_on_from_it_bit_for_bit() -> None:
    one = MasterWeights(_weights(), CONFIG, ONE_RANK, tensor_parallel_cuts={})
    for seed in range(3):
        _step(one, seed)
    state = {key: value.clone() for key, value in one.state().items()}
    kept = {key.partition("/")[0] for key in state if key.endswith("q_proj.weight")}
    assert kept == {"weight", "momentum_buffer"}
    assert {key.partition("/")[0] for key in state if "embed" in key} == {"weight", "step", "exp_avg", "exp_avg_sq"}
    other = MasterWeights(_weights(seed=9), CONFIG, ONE_RANK, tensor_parallel_cuts={})
    other.load_state(state)
    _step(one, 7, lr=3e-3)
    _step(other, 7, lr=3e-3)
    assert all(torch.equal(tensor, other.state()[key]) for key, tensor in one.state().items())


def test_matrices_are_shared_out_once_each_largest_first_to_whom_has_least() -> None:
    owned = owners_in_turn({"a": 8, "b": 5, "c": 4, "d": 1, "e": 1}, 2)
    assert owned == [["a", "d", "e"], ["b", "c"]]
    assert owners_in_turn({}, 3) == [[], [], []]
    assert owners_in_turn({"a": 1}, 3) == [["a"], [], []]
