"""Train a tiny reward model for the bundled task: is the total that a response names the one that it has reached?

    python examples/reward_model/train_classifier.py models/adds_up

Right answers are the task's own; wrong ones name another total. The body starts from bundled:tiny. Under a minute on one core. ``reward_model.toml`` in this folder uses what it writes.
"""

from __future__ import annotations

import argparse
import random
import shutil
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from llamarl.environments.sum_task import read_ledger, write_ledger, written_steps
from llamarl.models.loading import load_tokenizer, resolve_model_path

__all__ = ["answer", "train_classifier"]


def answer(question: str, rng: random.Random, *, right: bool) -> str:
    """A response to a ledger as the task writes it, or with another total after the ``#``."""
    digits = read_ledger(question)
    lines, _, _ = written_steps(digits).rpartition("#")
    return f"{lines}#{max(0, sum(digits) + (0 if right else rng.choice([-3, -2, -1, 1, 2, 3])))}"


def _batch(rng: random.Random, size: int) -> tuple[list[str], torch.Tensor]:
    texts, labels = [], []
    for i in range(size):
        question = write_ledger([rng.randrange(10) for _ in range(rng.randint(2, 6))])
        texts.append(question + answer(question, rng, right=i % 2 == 0))
        labels.append(float(i % 2 == 0))
    return texts, torch.tensor(labels)


def _scores(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> torch.Tensor:
    rows = tokenizer(texts)["input_ids"]
    longest = max(map(len, rows))
    padding = model.config.pad_token_id
    ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return model(input_ids=ids, attention_mask=mask).logits[:, 0]


def train_classifier(folder: Path, *, steps: int = 160, seed: int = 0) -> float:
    """Write a classifier with its tokenizer; returns its accuracy on answers that it has not seen."""
    base = resolve_model_path("bundled:tiny")
    tokenizer = load_tokenizer(base)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it would warn of the new head
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    logging.set_verbosity(level)
    torch.nn.init.normal_(model.score.weight, std=0.02)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng = random.Random(seed)
    for _ in range(steps):
        texts, labels = _batch(rng, 32)
        loss = binary_cross_entropy_with_logits(_scores(model, tokenizer, texts), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        texts, labels = _batch(random.Random(seed + 1), 500)
        right = ((_scores(model, tokenizer, texts) > 0) == (labels > 0.5)).float().mean().item()
    model.save_pretrained(folder)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, folder)
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=160)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    accuracy = train_classifier(arguments.folder, steps=arguments.steps)
    print(f"{arguments.folder}: right about {accuracy:.1%} of 500 answers that it has not seen")


if __name__ == "__main__":
    main()
