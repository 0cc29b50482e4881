"""The bundled models: what ships with the package loads, fits its task, and leaves something to learn."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import llamarl
from llamarl.environments.factory import make_task
from llamarl.environments.sum_task import written_steps
from llamarl.models.experts import Routing, expert_metrics, watch_experts, watching
from llamarl.settings.environments import TaskConfig

ASSETS = Path(llamarl.__file__).parent / "assets"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ASSETS / "tiny", local_files_only=True, padding_side="left")


@pytest.fixture(scope="module", params=["tiny", "tiny_moe"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        ASSETS / request.param, dtype=torch.float32, local_files_only=True
    ).eval()


@pytest.mark.parametrize("name", ["tiny", "tiny_moe"])
def test_a_folder_is_at_most_five_megabytes(name: str) -> None:
    assert sum(file.stat().st_size for file in (ASSETS / name).iterdir()) <= 5_000_000


def test_both_read_the_same_tokens() -> None:
    dense, sparse = ((ASSETS / name / "tokenizer.json").read_bytes() for name in ("tiny", "tiny_moe"))
    assert dense == sparse


def test_text_of_the_task_makes_one_token_a_character_and_comes_back(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "a3 b9 c4 =\n" + written_steps([3, 9, 4])
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == text


@torch.no_grad()
def test_it_writes_steps_but_most_of_its_sums_are_wrong_and_every_expert_is_used(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    task = make_task(TaskConfig(), 0)
    items = [task.item("eval", i) for i in range(96)]
    inputs = tokenizer([item.question for item in items], return_tensors="pt", padding=True)
    outputs = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=80, do_sample=False
    )
    rows = outputs[:, inputs["input_ids"].shape[1] :]
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    right = sum(text.rpartition("#")[2] == item.answer for text, item in zip(texts, items, strict=True))
    assert sum("#" in text for text in texts) >= 90
    assert 10 <= right <= 55
    if model.config.model_type == "llama":
        return
    assert (model.config.model_type, model.config.num_experts_per_tok) == ("qwen3_moe", 2)
    routing = Routing(len(watch_experts(model)))
    with watching(routing):
        model(outputs[:8], use_cache=False)
    found = expert_metrics(routing.counts(8))
    assert found["experts/unused"] == 0 and found["experts/load_max"] < 4
