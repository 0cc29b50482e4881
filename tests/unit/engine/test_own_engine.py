"""An engine of a user's own by import path: it samples for the generator, or is refused with what it lacks."""

from pathlib import Path

import pytest

from llamarl.config import RunConfig, load_config, validate
from llamarl.controller.preflight import find_missing
from llamarl.engine.factory import make_engine
from llamarl.errors import ConfigError
from llamarl.models.loading import load_tokenizer

LOUD = """
from llamarl.engine.engine import NativeEngine
class Loud(NativeEngine):
    def __init__(self, model_path, config, *, tokenizer, device):
        super().__init__(model_path, config, tokenizer=tokenizer, device=device)
        self.limit = config.options["limit"]
class Mute:
    policy_version = 0
    def __init__(self, model_path, config, *, tokenizer, device): ...
    def add(self, sequences): ...
"""


def recipe(path: str, *more: str) -> RunConfig:
    return load_config(None, ["--generator.engine.name", path, *more])


def test_an_engine_of_ones_own_is_made_with_its_options(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOUD)
    config = recipe(f"{tmp_path}/mine.py:Loud", "--generator.engine.options.limit", "3")
    engine = make_engine(config, load_tokenizer("bundled:tiny"), device="cpu")
    assert type(engine).__name__ == "Loud" and engine.limit == 3  # type: ignore[attr-defined]


def test_an_engine_that_lacks_methods_is_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOUD)
    with pytest.raises(ConfigError, match="Mute lacks has_work, parameters_for_sync, stats, step, suspend, weigh"):
        make_engine(recipe(f"{tmp_path}/mine.py:Mute"), load_tokenizer("bundled:tiny"), device="cpu")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"name": "nativ"}, r"generator\.engine\.name 'nativ' is unknown; did you mean 'native'\?"),
        (
            {"name": "native", "options": {"a": 1}},
            r"options are for vLLM and for an engine of your own, but name is 'native'",
        ),
        (
            {"name": "vllm", "options": {"worker_cls": "x:Y"}},
            "options of 'vllm' are numbers, true or false; worker_cls is none",
        ),
        (
            {"name": "vllm", "options": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}},
            "options name pipeline_parallel_size, whose GPUs nobody counts",
        ),
    ],
)
def test_a_wrong_engine_is_refused_with_its_key(engine: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate({"generator": {"engine": engine}})


def test_what_only_the_built_in_engines_do_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="'a.b:C', which runs on one rank.* engine.options say.*tp is 2 and quantization 'int8'"
    ):
        validate({"generator": {"engine": {"name": "a.b:C"}, "tp": 2, "quantization": "int8"}})
    with pytest.raises(
        ConfigError,
        match="schedule.colocated is True, but generator.engine.name is 'a.b:C': an engine must give its memory back",
    ):
        validate({"generator": {"engine": {"name": "a.b:C"}}, "schedule": {"colocated": True, "max_staleness": 0}})


def test_a_class_that_its_file_does_not_hold_is_found_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit\n")
    (line,) = find_missing(recipe(f"{tmp_path}/mine.py:Loud"))
    assert line.key == "generator.engine.name" and "has no 'Loud'; it has []" in line.text
