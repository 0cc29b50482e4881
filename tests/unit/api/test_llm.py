"""``llamarl.LLM``: what a prompt and a sampling value may be."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from llamarl.api.llm import LLM, Completion, _with_room, open_policy
from llamarl.config import load_config
from llamarl.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled:tiny")


def test_a_long_prompt_leaves_others_their_room(llm: LLM) -> None:
    long, short = llm.sequences(["a3 " * 80, "a3"])  # of 256 tokens 240, and 2
    assert (long.params.max_new_tokens, short.params.max_new_tokens) == (16, 254)


def test_one_response_as_long_as_the_model_takes_has_room_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.settings.engine.CPU_CACHE_BYTES", 1 << 12)
    (one,) = LLM("bundled:tiny").generate("a3", max_new_tokens=254, temperature=0)
    assert one.tokens


def test_room_is_made_in_no_engine_but_the_own(tmp_path: Path) -> None:
    """A model without attention, of which another engine knows what it keeps."""
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    settings = [f"--model.path={tmp_path}", "--task.name=steps", "--generator.engine.name=my.py:Engine"]
    config = load_config(None, settings)
    assert _with_room(config, 1000) is config


def test_a_seed_of_numpy_is_the_same_seed(llm: LLM) -> None:
    seed: Any = numpy.int64(3)
    assert llm.sequences(["a3"], seed=seed)[0].seed == llm.sequences(["a3"], seed=3)[0].seed


def test_types_and_devices_of_torch_are_taken() -> None:
    def generator(dtype: Any) -> Any:
        device = ("device", torch.device("cpu"))
        settings = {"generator.engine.dtype": ("dtype", dtype), "generator.device": device}
        return open_policy("bundled:tiny", settings=settings)[1].generator

    assert (generator(torch.bfloat16).engine.dtype, generator(None).device) == ("bfloat16", "cpu")
    with pytest.raises(ConfigError, match="^dtype: expected .*'bfloat16'.*, got 'int8'"):
        generator(torch.int8)


@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        ({"temperature": -1.0}, "temperature must be 0 (greedy) or at least 1e-06, got -1.0"),
        ({"top_p": 2.0, "max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"stop_strings": "#"}, "stop_strings: expected a list of text, got '#'"),
    ],
)
def test_a_wrong_value_is_told_in_words(llm: LLM, sampling: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        llm.generate("a3", **sampling)
    assert str(raised.value).startswith(sentence) and "pydantic" not in str(raised.value)


def test_one_message_is_a_conversation(llm: LLM) -> None:
    with pytest.raises(DataError, match="no chat template: give text instead of messages"):
        llm.generate({"role": "user", "content": "a3"})  # type: ignore[arg-type]


def test_calls_of_two_threads_give_each_what_it_gives_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(num_tokens: int) -> list[Completion]:
        return llm.generate("a3 b9 =", max_new_tokens=num_tokens, stop_strings=(), seed=num_tokens)

    lengths, step = (40, 4), llm._engine.step
    alone = [ask(num_tokens) for num_tokens in lengths]
    monkeypatch.setattr(llm._engine, "step", lambda: (time.sleep(0.001), step())[1])  # time for the other to begin
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(ask, lengths)) == alone
    assert all(len(completions) == 1 for completions in alone)
