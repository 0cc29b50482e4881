import gc
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch import nn

from llamarl.errors import ConfigError
from llamarl.models.parallel import ParallelLayout
from llamarl.settings.trainer import OptimizerConfig
from llamarl.trainer.optimizer import MasterWeights, learning_rate

ONE_RANK = ParallelLayout(fsdp=1, tp=1, mesh=None)


def test_learning_rate_by_hand() -> None:
    warm = OptimizerConfig(lr=1.0, warmup_ticks=3)
    assert [learning_rate(warm, k, None) for k in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = OptimizerConfig(lr=2.0, schedule="linear", min_lr_ratio=0.5)
    assert [learning_rate(linear, k, 5) for k in range(6)] == [2.0, 1.75, 1.5, 1.25, 1.0, 1.0]
    cosine = OptimizerConfig(lr=1.0, warmup_ticks=1, schedule="cosine", min_lr_ratio=0.0)
    assert learning_rate(cosine, 0, 4) == 0.5
    ends = OptimizerConfig(lr=2.0, schedule="linear", min_lr_ratio=0.5, decay_ticks=5)
    assert [learning_rate(ends, k, 9) for k in range(7)] == [
        2.0,
        1.75,
        1.5,
        1.25,
        1.0,
        1.0,
        1.0,
    ]  # not the run's length
    assert [learning_rate(cosine, k, 4) for k in (1, 2, 3)] == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_last_tick_of_every_schedule_trains_unless_a_recipe_asks_for_a_rate_of_zero(schedule: str) -> None:
    config = OptimizerConfig(lr=2.0, schedule=schedule)  # type: ignore[arg-type]
    assert learning_rate(config, 99, 100) == pytest.approx(2.0 if schedule == "constant" else 0.2)


def test_a_falling_schedule_needs_an_end() -> None:
    with pytest.raises(ValueError, match="number of ticks"):
        learning_rate(OptimizerConfig(schedule="cosine"), 0, None)


def _masters(parameter: nn.Parameter, config: OptimizerConfig, **kwargs: object) -> MasterWeights:
    return MasterWeights({"w": parameter}, config, ONE_RANK, tensor_parallel_cuts={}, **kwargs)  # type: ignore[arg-type]


def test_adamw_by_hand_and_only_matrices_decay() -> None:
    config = OptimizerConfig(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.5)
    matrix, vector = nn.Parameter(torch.full((1, 1), 2.0)), nn.Parameter(torch.full((1,), 2.0))
    masters = MasterWeights({"m": matrix, "v": vector}, config, ONE_RANK, tensor_parallel_cuts={})
    matrix.grad, vector.grad = torch.full((1, 1), 3.0), torch.full((1,), 3.0)
    masters.collect_gradients()
    masters.step(0.1)
    # the first bias-corrected update is the gradient's sign; decay takes 0.1 * 0.5 of the weight before
    assert matrix.item() == pytest.approx(2.0 * (1 - 0.05) - 0.1)
    assert vector.item() == pytest.approx(2.0 - 0.1)


def test_gradient_norm_and_scaling() -> None:
    a, b = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3))
    masters = MasterWeights({"a": a, "b": b}, OptimizerConfig(), ONE_RANK, tensor_parallel_cuts={})
    a.grad, b.grad = torch.full((2, 2), 1.0), torch.full((3,), 2.0)
    masters.collect_gradients()
    assert masters.gradient_norm().item() == pytest.approx(4.0)  # sqrt(4 * 1 + 3 * 4)
    masters.scale_gradients(0.5)
    assert masters.gradient_norm().item() == pytest.approx(2.0)


def test_small_updates_survive_in_the_master_of_a_bfloat16_weight() -> None:
    original = torch.tensor([[1.0]])
    parameter = nn.Parameter(original.to(torch.bfloat16))
    masters = _masters(parameter, OptimizerConfig(lr=1e-4), initial={"w": original})
    for _ in range(100):  # each update is 1e-4, below bfloat16's spacing of 0.0078 at 1
        (parameter * 1.0).sum().backward()
        masters.collect_gradients()
        masters.step(1e-4)
        masters.drop_gradients()
    assert masters.tensors["w"].item() == pytest.approx(0.99, abs=1e-5)
    assert parameter.item() == torch.tensor(0.99).to(torch.bfloat16).item()


def test_the_master_of_a_rounded_weight_is_its_original_and_no_copy() -> None:
    original = torch.ones(2, 2)
    masters = _masters(nn.Parameter(original.to(torch.bfloat16)), OptimizerConfig(), initial={"w": original})
    assert masters.tensors["w"].data_ptr() == original.data_ptr()


def test_microbatch_gradients_of_a_bfloat16_weight_add_up_in_float32() -> None:
    parameter = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    masters = _masters(parameter, OptimizerConfig(), initial={"w": torch.ones(1, 1)})
    for value in (256.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        (parameter * value).sum().backward()
    masters.collect_gradients()
    assert masters.gradient_norm().item() == 258.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_nobody_holds_are_freed(dtype: torch.dtype) -> None:
    """A next run in the same process has the memory of a first one again: 14 bytes a parameter."""
    parameter = nn.Parameter(torch.ones(2, 2, dtype=dtype))
    masters = _masters(parameter, OptimizerConfig(), initial={"w": torch.ones(2, 2)})
    (parameter * 2.0).sum().backward()
    masters.collect_gradients()
    masters.step(1e-4)
    left = [ref(one) for one in (parameter, masters, masters.tensors["w"])]
    del parameter, masters
    gc.collect()
    assert [one() for one in left] == [None, None, None]


OWN = """
import torch
from llamarl.trainer.optimizer import Optimizer

def heavy_ball(config, weights, **mesh):
    sgd = torch.optim.SGD(weights.values(), lr=config.lr, momentum=config.options["momentum"])
    return Optimizer(sgd, dict.fromkeys(weights, ("momentum_buffer",)))

def bare(config, weights, **mesh):
    return torch.optim.SGD(weights.values(), lr=config.lr)

def forgetful(config, weights, **mesh):
    return Optimizer(bare(config, weights), {})

def without_mesh(config, weights):
    return heavy_ball(config, weights)

def silent(config, weights, **mesh):
    return Optimizer(heavy_ball(config, weights).update, dict.fromkeys(weights, ()))

class Counting(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for weight in group["params"]:
                self.state[weight]["count"] = 1 if self.defaults["momentum"] else torch.ones(())

def in_groups(config, weights, **mesh):
    return Optimizer(Counting(weights.values(), lr=1.0), dict.fromkeys(weights, ("count",)))

def in_ints(config, weights, **mesh):
    return Optimizer(Counting(weights.values(), lr=1.0, momentum=0.5), dict.fromkeys(weights, ("count",)))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_an_optimizer_of_a_users_file_moves_the_weights_and_is_restored_by_the_kinds_that_it_names(file: Path) -> None:
    config = OptimizerConfig(name=f"{file}:heavy_ball", options={"momentum": 0.5})
    first = nn.Parameter(torch.tensor([1.0]))
    masters = _masters(first, config)
    assert masters.kinds == {"weight", "momentum_buffer"}
    assert masters.state().keys() == {"weight/w"}
    first.grad = torch.tensor([4.0])
    masters.collect_gradients()
    masters.step(0.25)
    assert first.item() == 0.0  # 1 - 0.25 * 4
    state = {key: value.clone() for key, value in masters.state().items()}
    assert state == {"weight/w": 0.0, "momentum_buffer/w": 4.0}
    second = nn.Parameter(torch.tensor([7.0]))
    again = _masters(second, config)
    again.load_state(state)
    second.grad = torch.tensor([2.0])
    again.collect_gradients()
    again.step(0.5)
    assert second.item() == -2.0  # 0 - 0.5 * (0.5 * 4 + 2)


def test_an_optimizer_that_does_not_say_what_it_keeps_is_refused(file: Path) -> None:
    for name, got in (("bare", "a SGD"), ("forgetful", "kinds of 0 weights")):
        with pytest.raises(ConfigError, match=rf"optimizer.name '.*own.py:{name}' returned {got}: .* of the 1 weights"):
            _masters(nn.Parameter(torch.zeros(1)), OptimizerConfig(name=f"{file}:{name}"))


def test_state_of_an_optimizer_that_no_checkpoint_would_hold_is_refused_in_its_first_step(file: Path) -> None:
    why = {
        "silent": r"keeps .'momentum_buffer': \(2, 3\)} of w",
        "in_ints": "keeps {'count': 1} of w",
        "in_groups": "changes its groups",
    }
    for name, words in why.items():
        parameter = nn.Parameter(torch.ones(2, 3))
        masters = _masters(parameter, OptimizerConfig(name=f"{file}:{name}", options={"momentum": 0.5}))
        parameter.grad = torch.ones(2, 3)
        masters.collect_gradients()
        with pytest.raises(ConfigError, match=words):
            masters.step(0.25)


def test_an_optimizer_that_raises_is_told_with_its_key(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer.name '.*:without_mesh' raised TypeError: .* 'shards'"):
        _masters(nn.Parameter(torch.zeros(1)), OptimizerConfig(name=f"{file}:without_mesh"))


def test_names_and_options_of_no_optimizer_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'adam' is unknown; did you mean 'adamw'\? It is one of adamw, muon, or your own"
    ):
        OptimizerConfig(name="adam")
    with pytest.raises(ValueError, match=r"options are for an optimizer of your own, but name is 'muon'; got \['a'\]"):
        OptimizerConfig(name="muon", options={"a": 1})


def test_state_that_lacks_a_moment_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    masters = _masters(parameter, OptimizerConfig())
    parameter.grad = torch.ones(2, 2)
    masters.collect_gradients()
    masters.step(0.1)
    for kind in ("step", "exp_avg", "exp_avg_sq"):
        torn = {key: value for key, value in masters.state().items() if key != f"{kind}/w"}
        with pytest.raises(KeyError, match=f"{kind}/w"):
            masters.load_state(torn)


def test_state_of_another_shape_is_refused() -> None:
    masters = _masters(nn.Parameter(torch.zeros(2, 2)), OptimizerConfig())
    with pytest.raises(ValueError, match="w has shape"):
        masters.load_state({"weight/w": torch.zeros(3, 2)})
