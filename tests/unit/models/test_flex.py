"""``flex_attention`` in the trainer's rows, against attention worked out token by token in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from tiny_models import tiny_model
from torch import Tensor
from training_fixtures import make_groups, write_model

from llamarl.models import flex
from llamarl.models.attention import PackedSequences, Segment, attending
from llamarl.models.flex import BLOCK, flex_attention, visible_blocks
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.settings.trainer import OptimizerConfig, TrainerConfig
from llamarl.trainer import shared_prompts
from llamarl.trainer.shared_prompts import SharedPrompts, row_attention
from llamarl.trainer.step import Trainer

UNITS = ((150, (200, 0, 90)), (1, (3, 1)), (40, ()), (130, (140, 5)))
"""Prompts and responses that begin and end within blocks of 128, at their edges and beyond them."""


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None) -> Tensor:
    """One query [H, D] over keys and values [n, KV, D] -> [H, D]."""
    share = query.shape[0] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = torch.einsum("hd,nhd->hn", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), value)


def _texts(units: tuple[tuple[int, tuple[int, ...]], ...]) -> dict[int, list[int]]:
    """Row -> the rows of its text up to itself."""
    seen: dict[int, list[int]] = {}
    row = 0
    for prompt, responses in units:
        head = list(range(row, row + prompt))
        for length, before in [(prompt, []), *((n, head) for n in responses)]:
            own = list(range(row, row + length))
            for i, at in enumerate(own):
                seen[at] = [*before, *own[: i + 1]]
            row += length
    return seen


@pytest.mark.parametrize(
    ("window", "softcap", "shared"),
    [(None, None, True), (None, None, False), (1, 2.0, True), (100, 2.0, False), (100, None, True)],
)
def test_a_row_equals_float64_token_by_token_and_so_do_its_gradients(
    window: int | None, softcap: float | None, shared: bool
) -> None:
    units = UNITS if shared else tuple((n, ()) for n in (150, 1, 128, 300))
    packing = SharedPrompts(units) if shared else PackedSequences.of([0, 150, 151, 279, 579])
    torch.manual_seed(0)
    T, H, KV, D = packing.num_tokens, 4, 2, 8
    shapes = ((1, H, T, D), (1, KV, T, D), (1, KV, T, D))
    exact = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found = [x.detach().float().requires_grad_() for x in exact]
    weights = torch.randn(1, T, H, D)
    out = flex_attention(
        torch.nn.Identity(), *found, scale=0.3, window=window, softcap=softcap, packing=packing
    )  # fmt: skip
    q, k, v = (x[0].transpose(0, 1) for x in exact)
    rows = _texts(units)
    true = torch.stack(
        [_attend(q[t], k[rows[t][-(window or T) :]], v[rows[t][-(window or T) :]], 0.3, softcap) for t in range(T)]
    )[None]
    torch.testing.assert_close(out.double(), true, rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # by torch's own kernel, which has no backward pass on a CPU
        plain = (x.detach() for x in found)
        kernel = flex_attention(torch.nn.Identity(), *plain, scale=0.3, window=window, softcap=softcap, packing=packing)
    torch.testing.assert_close(kernel.double(), true, rtol=1e-5, atol=1e-5)
    (out * weights).sum().backward()
    (true * weights).sum().backward()
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(
            ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5 * float(theirs.grad.abs().max())
        )


def test_a_kind_of_call_past_torchs_limit_is_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own function, uncompiled, would hold the scores of all with all: 13 GB for 16,384 tokens of 12 heads."""
    made: list[torch.fx.GraphModule] = []

    def traced(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, options=None, **how: real(call, **({"backend": traced} | how)))
    kernel = flex._kernel.__wrapped__("cuda")
    packing, x = PackedSequences.of([0, 3, 5]), torch.randn(1, 2, 5, 16)
    mask = flex._row_mask(packing.segments(), 5, torch.device("cpu"))
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        for softcap in (None, 2.0):
            score = flex._soft_cap(softcap)
            kernel(x, x, x, score_mod=score, block_mask=mask, scale=0.25, enable_gqa=False)
    assert len(made) == 2


@pytest.mark.parametrize("window", [1, 7, 127, 128, 129, 10_000])
def test_the_blocks_named_hold_every_row_that_is_seen_and_no_block_without_one(window: int) -> None:
    rows = _texts(UNITS)
    true: list[set[int]] = [set() for _ in range(-(-len(rows) // BLOCK))]
    for row, seen in rows.items():
        true[row // BLOCK].update(at // BLOCK for at in seen[-window:])
    assert visible_blocks(SharedPrompts(UNITS).segments(), window) == [sorted(blocks) for blocks in true]


def test_two_blocks_by_hand() -> None:
    assert visible_blocks([Segment(0, 256)], 1000) == [[0], [0, 1]]
    assert visible_blocks([Segment(0, 256)], 1) == [[0], [1]]
    # a prompt of one block, then two responses of a block each: neither looks at the other
    three = [Segment(0, 128), Segment(128, 128, 0, 128), Segment(256, 128, 0, 128)]
    assert visible_blocks(three, 1000) == [[0], [0, 1], [0, 2]]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2"])
def test_families_compute_the_librarys_logits(family: str) -> None:
    model, plain = tiny_model(family, "llamarl_flex"), tiny_model(family, "eager")
    units = SharedPrompts(((5, (9, 30)), (17, (4,))))
    tokens = torch.randint(
        3, model.config.vocab_size, (1, units.num_tokens), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad(), attending(units):
        together = model(tokens, position_ids=units.position_ids("cpu"), use_cache=False).logits[0]
    for rows in ([*range(14)], [*range(5), *range(14, 44)], [*range(44, 65)]):
        with torch.no_grad():
            alone = plain(tokens[:, rows], use_cache=False).logits[0]
        torch.testing.assert_close(together[rows], alone, atol=2e-5, rtol=1e-4)


def test_a_training_step_under_flex_has_the_gradient_of_the_kernels_that_are_usual(tmp_path: Path) -> None:
    folder, metrics = write_model(tmp_path / "model"), []
    for attention in ("auto", "flex"):
        config = TrainerConfig(attention=attention)  # type: ignore[arg-type]
        trainer = Trainer(folder, config, OptimizerConfig(), AlgorithmConfig(entropy_coef=0.1), temperature=0.9)
        metrics.append(trainer.train(make_groups(max_response=30), 0))
    assert metrics[1] == pytest.approx(metrics[0], rel=2e-5)


def test_windows_and_soft_caps_share_prompts_under_flex_which_asks_for_a_compiler_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(shared_prompts, "check_compiler", lambda user, otherwise: asked.append(otherwise))
    folder = tmp_path / "model"
    tiny_model("gemma2", "eager").save_pretrained(folder)
    assert row_attention(TrainerConfig(), "cpu", folder) == ("llamarl_packed", False)
    assert row_attention(TrainerConfig(attention="flex", share_prompts=False), "cpu", folder) == ("llamarl_flex", False)
    assert not asked
    assert row_attention(TrainerConfig(attention="flex"), "cuda", folder) == ("llamarl_flex", True)
    assert asked == ['trainer.attention = "auto"'], "what it compiles lies in the user's own folder then, not in /tmp"
