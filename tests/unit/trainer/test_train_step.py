import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_fixtures import make_groups, make_response, poisoned, with_reference, write_model
from transformers import AutoModelForCausalLM

from llamarl.algorithms.base import TokenBatch, TokenLosses
from llamarl.algorithms.registry import LOSSES
from llamarl.errors import CheckpointError, ModelError, TrainingDiverged
from llamarl.executors.trainer import TokenLog
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import OptimizerConfig, ReferenceConfig, TrainerConfig
from llamarl.trainer.batch import Microbatch
from llamarl.trainer.policy import TokenScores
from llamarl.trainer.scoring import FrozenScorer
from llamarl.trainer.sharded_state import in_background
from llamarl.trainer.step import Trainer
from llamarl.types import Failure, Group, Prompt, Score


def _trainer(
    folder: Path, *, lr: float = 1e-2, temperature: float = 1.0, num_ticks: int | None = None, **kwargs: Any
) -> Trainer:
    algorithm = kwargs.pop("algorithm", AlgorithmConfig())
    optimizer = kwargs.pop("optimizer", OptimizerConfig(lr=lr))
    return Trainer(folder, TrainerConfig(**kwargs), optimizer, algorithm, temperature=temperature, num_ticks=num_ticks)


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.parameters_for_sync().items()}


def _by_hand(
    folder: Path, steps: list[list[Group]], *, lr: float, rho: float, temperature: float
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same steps with the library's own forward, one response at a time, and the objective written out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    adamw = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    norms = []
    for groups in steps:
        total = sum(int(r.loss_mask.sum()) for g in groups for r in g.responses if isinstance(r.outcome, Score))
        for group in groups:
            scored = [r for r in group.responses if isinstance(r.outcome, Score)]
            baseline = np.mean([r.outcome.value for r in scored if isinstance(r.outcome, Score)])
            for response in scored:
                ids = torch.tensor(np.concatenate([group.prompt.tokens, response.tokens]), dtype=torch.int64)[None]
                log_p = torch.log_softmax(model(ids).logits[0] / temperature, dim=-1)
                loss = torch.zeros(())
                for j in np.flatnonzero(response.loss_mask):
                    logprob = log_p[len(group.prompt.tokens) + j - 1, response.tokens[j]]
                    ratio = math.exp(logprob.item() - float(response.behavior_logprobs[j]))
                    loss = loss - min(ratio, rho) * (response.outcome.value - baseline) * logprob / total  # type: ignore[union-attr]
                loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        adamw.step()
        adamw.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_three_steps_equal_the_written_objective_response_by_response(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family)
    steps = [make_groups(seed=k) for k in range(3)]
    trainer = _trainer(folder, lr=1e-3, temperature=0.8, max_tokens_per_microbatch=40, logprob_chunk_tokens=7)
    norms = [trainer.train(groups, k)["grad_norm"] for k, groups in enumerate(steps)]
    expected, expected_norms = _by_hand(folder, steps, lr=1e-3, rho=4.0, temperature=0.8)
    assert norms == pytest.approx(expected_norms, rel=1e-3)
    got = trainer.parameters_for_sync()
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_loss_that_asks_for_logits_has_their_distribution_and_gradient(tmp_path: Path) -> None:
    """What AIPO computes from log-probs, computed from logits after soft cap and temperature."""
    folder = write_model(tmp_path / "model", "gemma2")
    plain, asking = (_trainer(folder, lr=1e-3, temperature=0.8, max_tokens_per_microbatch=40) for _ in range(2))
    aipo = asking.loss

    def from_logits(batch: TokenBatch, config: AlgorithmConfig) -> TokenLosses:
        log_pi = torch.log_softmax(batch.logits(), dim=-1)
        chosen = log_pi.gather(1, batch.tokens[:, None])[:, 0]
        torch.testing.assert_close(-(log_pi.exp() * log_pi).sum(dim=1), batch.entropy)
        return aipo(dataclasses.replace(batch, policy_logprobs=chosen), config)

    asking.loss = from_logits
    for k in range(2):
        ours, theirs = asking.train(make_groups(seed=k), k), plain.train(make_groups(seed=k), k)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    for name, tensor in plain.parameters_for_sync().items():
        torch.testing.assert_close(asking.parameters_for_sync()[name], tensor, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_two_trainers_agree_bit_for_bit_also_where_activations_are_computed_again(
    model_folder: Path, mode: str
) -> None:
    plain, recomputed = _trainer(model_folder), _trainer(model_folder, activation_checkpointing=mode)
    for k in range(2):
        assert plain.train(make_groups(seed=k), k) == recomputed.train(make_groups(seed=k), k)
    for name, tensor in plain.parameters_for_sync().items():
        assert torch.equal(tensor, recomputed.parameters_for_sync()[name])


def test_metrics_by_hand(model_folder: Path) -> None:
    """Version 2 consumes tokens of versions 0, 1 and 1 whose behaviour log-probs are exactly the policy's."""
    trainer = _trainer(model_folder, lr=1e-9)
    for k in range(2):
        trainer.train(make_groups(seed=k), k)
    prompt = Prompt(index=0, tokens=np.array([5, 6], dtype=np.int32), text="")
    model = trainer.policy.model

    def exact(tokens: list[int]) -> list[float]:
        with torch.no_grad():
            from llamarl.models.attention import PackedSequences, attending

            ids = torch.tensor([[5, 6, *tokens]])
            packed = PackedSequences.of([0, ids.shape[1]])
            with attending(packed):
                log_p = torch.log_softmax(model(ids, position_ids=packed.position_ids("cpu")).logits[0], dim=-1)
        return [log_p[1 + j, t].item() for j, t in enumerate(tokens)]

    # the second response's token was five times less likely under what sampled it
    second = [exact([9])[0] - math.log(5)]
    groups = [
        Group(
            prompt=prompt,
            responses=(
                make_response(0, 0, [7, 8], Score(value=1.0), versions=[0, 1], logprobs=exact([7, 8])),
                make_response(0, 1, [9], Score(value=0.0), versions=[1], logprobs=second),
                make_response(0, 2, [9], Failure(kind="timeout", detail=""), versions=[0]),
            ),
        )
    ]
    metrics = trainer.train(groups, 2)
    assert metrics["policy_version"] == 3.0
    assert metrics["tokens/trained"] == 3.0
    assert metrics["tokens/computed"] == 2.0 + 1.0  # the prompt once, and what predicts the second token
    assert metrics["samples/trained"] == 2.0
    assert metrics["staleness/mean"] == pytest.approx(4 / 3)
    assert metrics["staleness/max"] == 2.0
    assert metrics["ratio/mean"] == pytest.approx(7 / 3, rel=1e-4)
    assert metrics["ratio/max"] == pytest.approx(5.0, rel=1e-4)
    assert metrics["ratio/clipped_fraction"] == pytest.approx(1 / 3)
    assert metrics["mismatch/kl"] == pytest.approx((5 - 1 - math.log(5)) / 3, rel=1e-4)
    first = exact([7, 8])
    expected = -(0.5 * first[0] + 0.5 * first[1] - 4 * 0.5 * exact([9])[0]) / 3
    assert metrics["loss/policy"] == pytest.approx(expected, rel=1e-4)
    assert metrics["step/skipped"] == metrics["step/empty"] == 0.0
    assert metrics["lr"] == 1e-9


def test_a_non_finite_gradient_skips_the_step_and_makes_a_version(model_folder: Path, tmp_path: Path) -> None:
    trainer = _trainer(model_folder)
    trainer.train(make_groups(), 0)
    before = {key: value.clone() for key, value in trainer.weights.state().items()}
    metrics = trainer.train([poisoned()], 1)
    assert metrics["step/skipped"] == 1.0 and not math.isfinite(metrics["grad_norm"])
    assert metrics["policy_version"] == trainer.policy_version == 2
    after = trainer.weights.state()
    assert set(after) == set(before)
    for key, value in before.items():
        assert torch.equal(after[key], value), key
    assert trainer.train(make_groups(), 2)["step/skipped"] == 0.0


def _with_a_token_of_probability_0(trainer: Trainer) -> None:
    """From now on the first token of each micro-batch has log-prob -inf, and no gradient."""
    right = trainer.policy.forward

    def forward(microbatch: Microbatch, received: None = None) -> TokenScores:
        scores = right(microbatch, received)
        first = torch.arange(len(scores.logprobs)) == 0
        return scores._replace(logprobs=torch.where(first, -math.inf, scores.logprobs))

    trainer.policy.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["aipo", "reinforce"])
def test_a_loss_that_is_not_finite_skips_the_step_although_its_gradient_is_finite(
    model_folder: Path, name: str
) -> None:
    trainer = _trainer(model_folder, algorithm=AlgorithmConfig(name=name))  # type: ignore[arg-type]
    trainer.train(make_groups(), 0)
    before = {key: value.clone() for key, value in trainer.weights.state().items()}
    _with_a_token_of_probability_0(trainer)
    metrics = trainer.train(make_groups(), 1)
    assert math.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0
    assert not math.isfinite(metrics["loss/policy"])
    assert metrics["step/skipped"] == 1.0 and trainer.num_skipped_in_a_row == 1
    after = trainer.weights.state()
    assert set(after) == set(before)
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_too_many_skips_in_a_row_stop_the_run_with_the_weights_kept(model_folder: Path) -> None:
    trainer = _trainer(model_folder, max_skipped_steps=2)
    before = _weights(trainer)
    trainer.train([poisoned()], 0)
    trainer.train([poisoned()], 1)
    with pytest.raises(TrainingDiverged, match="tick 2: 3 steps in a row with a non-finite loss or gradient"):
        trainer.train([poisoned()], 2)
    metrics = trainer.metrics  # its tokens are accounted for all the same
    assert metrics["tokens/trained"] > 0 and metrics["tokens/unused"] == 0.0 and metrics["policy_version"] == 3.0
    for name, tensor in before.items():
        assert torch.equal(trainer.parameters_for_sync()[name], tensor)
    assert trainer.policy_version == 3


def test_a_finite_step_between_skips_starts_the_count_again(model_folder: Path) -> None:
    trainer = _trainer(model_folder, max_skipped_steps=1)
    for k in range(6):
        trainer.train([poisoned()] if k % 2 == 0 else make_groups(), k)
    assert trainer.policy_version == 6


def test_a_batch_in_which_all_failed_leaves_weights_and_moments(model_folder: Path) -> None:
    trainer = _trainer(model_folder)
    trainer.train(make_groups(), 0)
    before = {key: value.clone() for key, value in trainer.weights.state().items()}
    prompt = Prompt(index=0, tokens=np.array([5], dtype=np.int32), text="")
    failed = tuple(make_response(0, s, [7], Failure(kind="crash", detail="")) for s in range(2))
    metrics = trainer.train([Group(prompt=prompt, responses=failed)], 1)
    assert metrics["step/empty"] == 1.0 and metrics["step/skipped"] == 0.0
    assert metrics["tokens/trained"] == metrics["grad_norm"] == 0.0
    assert "ratio/mean" not in metrics  # nobody looked
    assert metrics["policy_version"] == 2.0
    for key, value in before.items():
        assert torch.equal(trainer.weights.state()[key], value), key
    assert trainer.train([], 2)["step/empty"] == 1.0


def test_gradients_are_clipped_to_the_given_norm(model_folder: Path) -> None:
    """AdamW hides the scale of its first step, so compare moments: exp_avg = (1 - beta1) * clipped gradient."""
    trainer = _trainer(model_folder, max_grad_norm=0.01)
    assert trainer.train(make_groups(), 0)["grad_norm"] > 0.01
    squares = sum(float(v.square().sum()) for k, v in trainer.weights.state().items() if k.startswith("exp_avg/"))
    assert math.sqrt(squares) == pytest.approx(0.1 * 0.01, rel=1e-4)


def test_entropy_bonus_raises_entropy_and_kl_starts_at_zero(model_folder: Path) -> None:
    algorithm = AlgorithmConfig(entropy_coef=1.0, kl_coef=0.01)
    trainer = _trainer(model_folder, algorithm=algorithm, lr=3e-3)
    reference = FrozenScorer(model_folder, ReferenceConfig(), algorithm, TrainerConfig(), temperature=1.0)
    history = [trainer.train(reference.score(make_groups()), k) for k in range(4)]
    assert history[0]["kl/reference"] == pytest.approx(0.0, abs=1e-6)
    assert history[3]["kl/reference"] > 1e-4
    assert history[3]["entropy"] > history[0]["entropy"]


def test_the_tick_must_be_the_next(model_folder: Path) -> None:
    with pytest.raises(ValueError, match="holds version 0.*got 1"):
        _trainer(model_folder).train(make_groups(), 1)


def test_resume_gives_the_same_bits_and_the_same_learning_rates(model_folder: Path, tmp_path: Path) -> None:
    optimizer = OptimizerConfig(lr=1e-2, warmup_ticks=2, schedule="cosine", weight_decay=0.01)
    whole = _trainer(model_folder, optimizer=optimizer, num_ticks=6)
    half = _trainer(model_folder, optimizer=optimizer, num_ticks=6)
    for k in range(3):
        whole.train(make_groups(seed=k), k)
        half.train(make_groups(seed=k), k)
    half.save(tmp_path)
    resumed = _trainer(model_folder, optimizer=optimizer, num_ticks=6)
    resumed.load(tmp_path)
    assert resumed.policy_version == 3
    for k in range(3, 6):
        assert whole.train(make_groups(seed=k), k) == resumed.train(make_groups(seed=k), k)
    for name, tensor in whole.parameters_for_sync().items():
        assert torch.equal(tensor, resumed.parameters_for_sync()[name]), name


def test_a_snapshot_before_the_first_step_resumes_too(model_folder: Path, tmp_path: Path) -> None:
    _trainer(model_folder).save(tmp_path)
    resumed = _trainer(model_folder)
    resumed.load(tmp_path)
    assert resumed.train(make_groups(), 0) == _trainer(model_folder).train(make_groups(), 0)


def test_a_snapshot_of_another_optimizer_is_refused_before_anything_changes(model_folder: Path, tmp_path: Path) -> None:
    trainer = _trainer(model_folder)
    trainer.train(make_groups(), 0)
    state = trainer.stage()
    renamed = {key.replace("exp_avg_sq/", "momentum_buffer/"): shard for key, shard in state.shards.items()}
    trainer.write(dataclasses.replace(state, shards=renamed), tmp_path)
    other = _trainer(model_folder)
    before = {name: tensor.clone() for name, tensor in other.parameters_for_sync().items()}
    with pytest.raises(CheckpointError, match="another optimizer: it holds 'momentum_buffer'"):
        other.load(tmp_path)
    assert other.policy_version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.parameters_for_sync().items())


def test_a_torn_or_foreign_snapshot_is_refused(model_folder: Path, tmp_path: Path) -> None:
    trainer = _trainer(model_folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        trainer.load(tmp_path)
    trainer.save(tmp_path)
    other = _trainer(write_model(tmp_path / "other", "qwen3"))
    with pytest.raises(CheckpointError, match="another model"):
        other.load(tmp_path)
    (state,) = tmp_path.glob("*.safetensors")
    state.write_bytes(state.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        trainer.load(tmp_path)


def test_a_staged_state_is_the_one_of_its_moment_though_training_goes_on(model_folder: Path, tmp_path: Path) -> None:
    trainer = _trainer(model_folder)
    trainer.train(make_groups(), 0)
    version_0 = {name: tensor.clone() for name, tensor in _trainer(model_folder).parameters_for_sync().items()}
    state = trainer.stage({"version_0": version_0})
    second = trainer.train(make_groups(seed=1), 1)
    in_background(lambda: trainer.write(state, tmp_path)).result(timeout=60)
    resumed = _trainer(model_folder)
    extra = resumed.load(tmp_path)
    assert resumed.policy_version == 1
    assert resumed.train(make_groups(seed=1), 1) == second
    for name, tensor in trainer.parameters_for_sync().items():
        assert torch.equal(tensor, resumed.parameters_for_sync()[name]), name
        assert torch.equal(extra["version_0"][name], version_0[name]), name


def test_sync_layout_of_one_rank_is_the_whole_model(model_folder: Path) -> None:
    trainer = _trainer(model_folder)
    layout, tensors = trainer.sync_layout(), trainer.parameters_for_sync()
    assert set(layout) == set(tensors) and "lm_head.weight" not in layout
    assert layout["model.embed_tokens.weight"].shape == (61, 32)
    for name, shard in layout.items():
        assert shard.box == tuple((0, size) for size in tensors[name].shape) and shard.cuts == ()
        assert tensors[name].dtype == torch.float32 and shard.dtype == "float32"


def test_bfloat16_compute_follows_float32_closely_and_keeps_float32_masters(model_folder: Path) -> None:
    exact, rounded = _trainer(model_folder, lr=1e-3), _trainer(model_folder, lr=1e-3, dtype="bfloat16")
    for k in range(2):
        a, b = exact.train(make_groups(seed=k), k), rounded.train(make_groups(seed=k), k)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.1)
    for name, tensor in rounded.parameters_for_sync().items():
        assert tensor.dtype == torch.float32
        parameter = rounded.policy.parameters_by_name()[name]
        assert torch.equal(parameter, tensor.to(torch.bfloat16))


def test_more_ranks_than_processes_are_refused(model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"2 \* 1 \* 1 \* 1 needs a process group of 2 ranks, found 1"):
        _trainer(model_folder, fsdp=2)


def test_an_unknown_transformation_of_the_logits_is_refused(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    original = LlamaForCausalLM.forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        out.logits = out.logits * 2
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    with pytest.raises(ModelError, match="changes its logits"):
        _trainer(model_folder)


def test_masked_ratios_leave_the_loss_and_are_counted(model_folder: Path) -> None:
    plain = _trainer(model_folder).train(make_groups(), 0)
    assert "ratio/masked_fraction" not in plain
    algorithm = AlgorithmConfig(ratio_mask="token", ratio_mask_low=0.0, ratio_mask_high=1.0)
    some = _trainer(model_folder, algorithm=algorithm).train(make_groups(), 0)
    assert 0.0 < some["ratio/masked_fraction"] < 1.0
    assert some["grad_norm"] != plain["grad_norm"] and some["ratio/mean"] == plain["ratio/mean"]
    none = AlgorithmConfig(ratio_mask="token", ratio_mask_low=1e8, ratio_mask_high=1e9)
    metrics = _trainer(model_folder, algorithm=none).train(make_groups(), 0)
    assert metrics["ratio/masked_fraction"] == 1.0 and metrics["grad_norm"] == metrics["loss/policy"] == 0.0


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_algorithm_trains_through_the_same_step(model_folder: Path, name: str) -> None:
    algorithm = AlgorithmConfig(name=name, normalization="sequence")  # type: ignore[arg-type]
    together = _trainer(model_folder, algorithm=algorithm).train(make_groups(), 0)
    split = _trainer(model_folder, algorithm=algorithm, max_tokens_per_microbatch=20).train(make_groups(), 0)
    assert together["grad_norm"] > 0
    del together["tokens/computed"], split["tokens/computed"]  # a prompt may be computed once a micro-batch
    assert split == pytest.approx(together, rel=1e-4)


def test_skipping_zero_advantages_changes_no_gradient(model_folder: Path) -> None:
    groups = make_groups()
    equal = [
        dataclasses.replace(r, outcome=Score(value=0.5)) for r in groups[1].responses
    ]  # one group without signal, between two with one
    groups[1] = dataclasses.replace(groups[1], responses=tuple(equal))
    all_computed = _trainer(model_folder, skip_zero_advantage=False).train(groups, 0)
    trainer, log = _trainer(model_folder), TokenLog(groups)
    trainer.on_tokens = log.add
    skipping = trainer.train(groups, 0)
    of_equal = [seen for seen in log.responses() if seen.prompt_index == groups[1].prompt.index]
    assert [(seen.advantage, len(seen.policy_logprobs)) for seen in of_equal] == [(0.0, 0)] * len(equal)
    assert skipping["grad_norm"] == pytest.approx(all_computed["grad_norm"], rel=1e-5)
    assert skipping["loss/policy"] == pytest.approx(all_computed["loss/policy"], rel=1e-5)
    assert skipping["tokens/trained"] == all_computed["tokens/trained"]
    assert skipping["tokens/computed"] < all_computed["tokens/computed"]
    only_equal = _trainer(model_folder).train([groups[1]], 0)
    assert only_equal["grad_norm"] == only_equal["tokens/computed"] == 0.0 and only_equal["step/empty"] == 0.0
    assert not {"entropy", "mismatch/kl", "ratio/mean", "ratio/max"} & only_equal.keys()  # nobody looked


@pytest.mark.parametrize("term", ["entropy_coef", "kl_coef"])
def test_responses_without_advantage_still_learn_from_an_entropy_bonus_and_from_kl(
    model_folder: Path, term: str
) -> None:
    """The library's own forward, one response at a time: the mean over tokens of -c H(pi), or of c k3(pi, reference)."""
    group = make_groups(failed=False)[1]
    equal = tuple(dataclasses.replace(r, outcome=Score(value=0.5)) for r in group.responses)
    (group,) = with_reference([dataclasses.replace(group, responses=equal)], shift=0.3)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    total = sum(int(r.loss_mask.sum()) for r in group.responses)
    for response in group.responses:
        ids = torch.tensor(np.concatenate([group.prompt.tokens, response.tokens]), dtype=torch.int64)[None]
        rows = len(group.prompt.tokens) - 1 + np.flatnonzero(response.loss_mask)
        log_p = torch.log_softmax(model(ids).logits[0, rows], dim=-1)
        if term == "entropy_coef":
            loss = (log_p.exp() * log_p).sum()
        else:
            kept = torch.tensor(response.tokens[response.loss_mask], dtype=torch.int64)
            policy = log_p.gather(1, kept[:, None])[:, 0]
            ratio = torch.tensor(response.reference_logprobs[response.loss_mask]) - policy  # type: ignore[index]
            loss = (ratio.exp() - ratio - 1).sum()
        (0.1 * loss / total).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    metrics = _trainer(model_folder, algorithm=AlgorithmConfig(**{term: 0.1})).train([group], 0)  # type: ignore[arg-type]
    assert norm > 1e-3 and metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_a_loss_of_the_users_own_sees_every_response(model_folder: Path, tmp_path: Path) -> None:
    code = tmp_path / "my_losses.py"
    code.write_text(
        "from llamarl.algorithms.base import TokenLosses\n"
        "def every_token(batch, config):\n"
        "    terms = -batch.policy_logprobs\n"
        "    return TokenLosses(losses=terms, clipped=terms.detach() > 1e9)\n"
    )
    algorithm = AlgorithmConfig(name=f"{code}:every_token")
    equal = [dataclasses.replace(r, outcome=Score(value=0.5)) for r in make_groups()[1].responses]
    groups = [dataclasses.replace(make_groups()[1], responses=tuple(equal))]
    metrics = _trainer(model_folder, algorithm=algorithm).train(groups, 0)
    assert metrics["tokens/computed"] > 0 and metrics["grad_norm"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_optimizer_makes_the_same_bits(model_folder: Path, dtype: str) -> None:
    kept = _trainer(model_folder, dtype=dtype, max_tokens_per_microbatch=40)
    offloaded = _trainer(model_folder, dtype=dtype, max_tokens_per_microbatch=40, offload_optimizer=True)
    for k in range(3):
        assert kept.train(make_groups(seed=k), k) == offloaded.train(make_groups(seed=k), k)
    for name, tensor in kept.parameters_for_sync().items():
        assert torch.equal(tensor, offloaded.parameters_for_sync()[name]), name
        parameter = offloaded.policy.parameters_by_name()[name]
        assert parameter.data_ptr() != offloaded.parameters_for_sync()[name].data_ptr()
        assert torch.equal(parameter, kept.policy.parameters_by_name()[name])
