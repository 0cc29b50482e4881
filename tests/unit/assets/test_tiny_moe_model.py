"""The bundled model with experts: it loads, reads the other one's text, and leaves something to learn."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import llamarl
from llamarl.environments.config import TaskConfig
from llamarl.environments.factory import make_task
from llamarl.models.experts import Routing, expert_metrics, watch_experts, watching

ASSETS = Path(llamarl.__file__).parent / "assets"
FOLDER = ASSETS / "tiny_moe"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()


def test_the_folder_is_at_most_five_megabytes_with_eight_experts_a_layer(model: PreTrainedModel) -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 5_000_000
    assert model.config.model_type == "qwen3_moe"
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (8, 2)


def test_it_reads_the_tokens_of_the_dense_one() -> None:
    assert (FOLDER / "tokenizer.json").read_bytes() == (ASSETS / "tiny" / "tokenizer.json").read_bytes()


def test_most_of_its_sums_are_wrong_and_every_expert_is_used(model: PreTrainedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    task = make_task(TaskConfig(), 0)
    items = [task.item("eval", i) for i in range(64)]
    tokenizer.padding_side = "left"
    inputs = tokenizer([item.question for item in items], return_tensors="pt", padding=True)
    with torch.no_grad():
        outputs = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=80, do_sample=False
        )
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in outputs[:, inputs["input_ids"].shape[1] :]]
    right = sum(text.rpartition("#")[2] == item.answer for text, item in zip(texts, items, strict=True))
    assert sum("#" in text for text in texts) >= 60
    assert 6 <= right <= 32
    routing = Routing(len(watch_experts(model)))
    with torch.no_grad(), watching(routing):
        model(outputs[:8], use_cache=False)
    found = expert_metrics(routing.counts(8))
    assert found["experts/unused"] == 0 and found["experts/load_max"] < 4
