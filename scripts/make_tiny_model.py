"""Make the bundled tiny models: a small Llama, and one with experts, warm-started by supervised learning alone.

    python scripts/make_tiny_model.py            # a few minutes on one or two cores
    python scripts/make_tiny_model.py --sparse   # Qwen3 with eight experts a layer, two of which compute a token

Its task is ``llamarl.environments.sum_task``: add a list of digits, one written step a line. The demonstrations come from a
careless clerk, who forgets the carry in ``SLIP`` of the steps that have one and goes on from the wrong total. So the
warm-started policy knows how to write a step and knows both ways to finish one, and has no reason to prefer the right
one: sampled or greedy, most of its sums are wrong. Nothing here sees a reward. What reinforcement learning adds later is
the preference.

The folder holds what any Hugging Face loader reads: config.json, model.safetensors (float32), a tokenizer with one token
a character, and a README with the numbers that this script measured.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase
from string import digits as decimal_digits

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from llamarl.data.items import TaskItem
from llamarl.environments.factory import make_task
from llamarl.environments.sum_task import read_ledger
from llamarl.settings.environments import TaskConfig

__all__ = ["careless_steps", "main"]

SLIP = 0.52
"""Share of the carries that the demonstrations forget: over one half, so that greedy decoding forgets them too."""

ALPHABET = ["<pad>", "<eos>", "\n", " ", "#", "+", "=", *decimal_digits, *ascii_lowercase]
BATCH_SIZE = 64
LEARNING_RATE = 2e-3
IGNORED = -100


README = """\
# llamarl {name}

A {kind} of {parameters} parameters (float32) with one token a character, for `llamarl`'s own runs and tests. It adds up
ledgers of 2 to 9 digits, one written step a line:

```
a3 b9 c4 =
b+9=12
c+4=16
#16
```

Made by `python scripts/make_tiny_model.py{flag} --num-steps {num_steps} --seed {seed} --threads {threads}`: {num_steps} AdamW steps of
{batch_size} demonstrations, which forget each carry with probability {slip}; supervised learning alone, no reward.
On {count} held-out questions its sums are right in {sampled:.3f} of the cases sampled at temperature 1, and in {greedy:.3f} greedy.
Apache-2.0, as the rest of the repository; all data are made by the script.
"""


def careless_steps(digits: Sequence[int], rng: random.Random, slip: float = SLIP) -> str:
    """A response like ``written_steps``, in which each carry is forgotten with probability ``slip``."""
    lines, total = [], digits[0]
    for name, digit in zip(ascii_lowercase[1:], digits[1:], strict=False):
        after = total + digit
        if total % 10 + digit >= 10 and rng.random() < slip:
            after -= 10
        lines.append(f"{name}+{digit}={after}")
        total = after
    return "\n".join([*lines, f"#{total}"])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of the task; no beginning-of-sequence token, padding is 0 and the end is 1."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(ALPHABET)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def make_model() -> LlamaForCausalLM:
    """About 0.6 million parameters, freshly initialised."""
    config = LlamaConfig(
        vocab_size=len(ALPHABET),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.06,  # 0.02, the usual, is made for models of many times this width and starts slowly
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def make_sparse_model() -> Qwen3MoeForCausalLM:
    """About a million parameters, half of which compute a token."""
    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=len(ALPHABET),
        hidden_size=128,
        intermediate_size=352,  # of layers without experts, of which there are none
        moe_intermediate_size=96,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.06,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3MoeForCausalLM(config)


def make_batch(
    items: Sequence[TaskItem], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels), both [B, T]; prompts and padding are not labelled."""
    rows = []
    for item in items:
        prompt = tokenizer(item.question)["input_ids"]
        response = tokenizer(careless_steps(read_ledger(item.question), rng))["input_ids"] + [1]
        rows.append((prompt + response, [IGNORED] * len(prompt) + response))
    width = max(len(tokens) for tokens, _ in rows)
    tokens = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in rows])
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])
    return tokens, labels


def warm_start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, num_steps: int, seed: int) -> None:
    """Next-token learning on careless demonstrations of training-split questions, AdamW, cosine schedule.

    Ledgers grow from 3 entries to the task's 9 over the first half: short ones teach the look-up of an entry in a few
    dozen steps, where long ones alone take a thousand. Experts are kept in balance by the model's own auxiliary loss, as
    pre-training does.
    """
    balanced = {"output_router_logits": True} if isinstance(model, Qwen3MoeForCausalLM) else {}
    tasks = [make_task(TaskConfig(options={"max_terms": longest}), seed) for longest in range(3, 10)]
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    model.train()
    for step in range(num_steps):
        task = tasks[min(len(tasks) - 1, len(tasks) * 2 * step // num_steps)]
        items = [task.item("train", i) for i in range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)]
        tokens, labels = make_batch(items, tokenizer, rng)
        progress = step / num_steps
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / 50, 0.02 + 0.49 * (1 + math.cos(math.pi * progress)))
        loss = model(tokens, labels=labels, **balanced).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == num_steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - started:6.1f} s", flush=True)
    model.eval()


@torch.no_grad()
def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: Sequence[str], *, greedy: bool, seed: int
) -> list[str]:
    """One response a question, at temperature 1 or greedy."""
    tokenizer.padding_side = "left"
    inputs = tokenizer(list(questions), return_tensors="pt", padding=True)
    torch.manual_seed(seed)
    output = model.generate(  # type: ignore[operator]
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=96,
        do_sample=not greedy,
        temperature=None if greedy else 1.0,
        top_k=0 if not greedy else None,
        top_p=None,
    )
    responses = output[:, inputs["input_ids"].shape[1] :]
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in responses]


def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, items: Sequence[TaskItem], *, greedy: bool, seed: int
) -> float:
    """Share of right sums."""
    right = 0
    for start in range(0, len(items), 256):
        part = items[start : start + 256]
        responses = sample(model, tokenizer, [item.question for item in part], greedy=greedy, seed=seed + start)
        right += sum(r.rpartition("#")[2] == item.answer for r, item in zip(responses, part, strict=True))
    return right / len(items)


def main() -> None:
    """Train, measure, write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    assets = Path(__file__).resolve().parent.parent / "src" / "llamarl" / "assets"
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--out", type=Path, help="default: the folder that ships with the package")
    parser.add_argument("--num-steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer, model = make_tokenizer(), make_sparse_model() if args.sparse else make_model()
    name = "tiny_moe" if args.sparse else "tiny"
    out = args.out or assets / name
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters} parameters")
    warm_start(model, tokenizer, num_steps=args.num_steps, seed=args.seed)
    task = make_task(TaskConfig(), args.seed)
    held = [task.item("eval", i) for i in range(1024)]
    sampled = accuracy(model, tokenizer, held, greedy=False, seed=1)
    greedy = accuracy(model, tokenizer, held, greedy=True, seed=1)
    print(f"held-out accuracy of {len(held)}: sampled {sampled:.3f}, greedy {greedy:.3f}")
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    make_tokenizer().save_pretrained(out)  # a fresh one: the one used above remembers its padding
    readme = README.format(
        name=name,
        kind="Qwen3-MoE" if args.sparse else "Llama",
        flag=" --sparse" if args.sparse else "",
        parameters=num_parameters,
        slip=SLIP,
        num_steps=args.num_steps,
        batch_size=BATCH_SIZE,
        seed=args.seed,
        threads=args.threads,
        count=len(held),
        sampled=sampled,
        greedy=greedy,
    )
    (out / "README.md").write_text(readme)


if __name__ == "__main__":
    main()
