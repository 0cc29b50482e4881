"""A tokenizer cuts text as its file says."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from llamarl.models.loading import load_tokenizer

VOCABULARY = {word: number for number, word in enumerate(["<|endoftext|>", "0", "1", "2", "3", "20", "23", "202"])}


@pytest.mark.parametrize(
    ("kind", "named", "names_its_end"),
    [
        ("llama", "GPT2Tokenizer", True),
        ("llama", "LlamaTokenizerFast", True),
        ("qwen2", "Qwen2Tokenizer", True),
        ("gpt2", "GPT2Tokenizer", False),  # whose end the class knows
    ],
)
def test_digits_are_cut_by_threes_where_the_file_says_so_whatever_class_it_names(
    tmp_path: Path, kind: str, named: str, names_its_end: bool
) -> None:
    tokenizer = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[("2", "0"), ("2", "3"), ("20", "2")]))
    by_threes = pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_threes, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    end = {"eos_token": "<|endoftext|>"} if names_its_end else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named, **end}))
    loaded = load_tokenizer(tmp_path)
    assert loaded("2023", add_special_tokens=False)["input_ids"] == [7, 4]  # 202 3, where 20 23 would be merged
    assert loaded.eos_token_id == 0 and len(loaded) == len(VOCABULARY)
    assert loaded.decode([7, 4, 0], skip_special_tokens=True) == "2023"
