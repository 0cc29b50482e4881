"""The bundled tiny model: what ships with the package loads, fits its task, and leaves something to learn."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import llamarl
from llamarl.environments.config import TaskConfig
from llamarl.environments.factory import make_task
from llamarl.environments.sum_task import written_steps

FOLDER = Path(llamarl.__file__).parent / "assets" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()


def test_the_folder_is_at_most_five_megabytes_and_a_llama(model: PreTrainedModel) -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 5_000_000
    assert model.config.model_type == "llama"


def test_text_of_the_task_makes_one_token_a_character_and_comes_back(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "a3 b9 c4 =\n" + written_steps([3, 9, 4])
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_it_writes_steps_but_most_of_its_sums_are_wrong(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    task = make_task(TaskConfig(), 0)
    items = [task.item("eval", i) for i in range(96)]
    tokenizer.padding_side = "left"
    inputs = tokenizer([item.question for item in items], return_tensors="pt", padding=True)
    outputs = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=80, do_sample=False
    )
    rows = outputs[:, inputs["input_ids"].shape[1] :]
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    marked = sum("#" in text for text in texts)
    right = sum(text.rpartition("#")[2] == item.answer for text, item in zip(texts, items, strict=True))
    assert marked >= 90
    assert 10 <= right <= 55
