"""The adapter to vLLM against a stand-in with its interface: requests, deltas, aborts, weights; and what is said without it."""

import math
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny_models import tiny_model

from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.engine.vllm import VllmEngine, import_vllm
from llamarl.errors import ConfigError, LlamaRLError
from llamarl.settings.engine import EngineConfig


class _FakeLLM:
    """Each step gives every request one token: the number of tokens before it. Weights are what was loaded last."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.visible = settings, os.environ.get("CUDA_VISIBLE_DEVICES")
        self.llm_engine = self
        self.model_config = SimpleNamespace(max_model_len=64)
        torch.set_num_threads = lambda count: None  # as vLLM does on CPU
        self.requests: dict[str, tuple[list[int], Any]] = {}
        self.loaded: dict[str, torch.Tensor] = {}
        self.prefix_resets = self.models_visited = 0
        self.can_reset = True
        self.logprob = -0.5

    def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> str:
        self.requests[name] = ([*prompt["prompt_token_ids"]], params)
        params.left = params.max_tokens
        return f"{name}-random"

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.requests[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        outputs = []
        for name, (tokens, params) in list(self.requests.items()):
            token = len(tokens)
            tokens.append(token)
            params.left -= 1
            reason = "stop" if token in (params.stop_token_ids or []) else None if params.left else "length"
            if reason:
                del self.requests[name]
            position = {token: SimpleNamespace(logprob=self.logprob)}
            output = SimpleNamespace(token_ids=[token], logprobs=[position], finish_reason=reason)
            outputs.append(SimpleNamespace(request_id=name, outputs=[output]))
        return outputs

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        self.loaded = {name: tensor.clone() for name, tensor in kwargs["weights_iterator"]}

    def apply_model(self, function: Any) -> None:
        self.models_visited += 1

    def reset_prefix_cache(self) -> bool:
        self.prefix_resets += 1
        return self.can_reset


def _install(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.1", *, on_cpu: bool = True) -> None:
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    monkeypatch.setitem(sys.modules, "vllm", _fake_module(version))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)


def _fake_module(version: str) -> ModuleType:
    module: Any = ModuleType("vllm")
    module.__version__ = version
    module.LLM = _FakeLLM
    module.TokensPrompt = dict
    module.SamplingParams = SimpleNamespace
    module.sampling_params = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    return module


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    _install(monkeypatch)
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    return VllmEngine(tmp_path, EngineConfig(), eos_token_ids=())


def _sequence(index: int, sample: int = 0, **params: Any) -> Sequence:
    settings = SamplingParams(**{"max_new_tokens": 4, **params})
    return Sequence(prompt_index=index, sample_index=sample, prompt_tokens=[7] * 5, params=settings, seed=3)


def test_every_token_is_recorded_with_its_logprob_and_version(engine: VllmEngine) -> None:
    plain, filtered, greedy, stopped = (
        _sequence(0), _sequence(1, top_k=5), _sequence(2, temperature=0.0), _sequence(3, stop_token_ids=(6,)),
    )  # fmt: skip
    engine.add([plain, filtered, greedy, stopped])
    assert engine.step() == []
    assert engine.step() == [stopped]
    while engine.has_work:
        engine.step()
    assert plain.tokens == [5, 6, 7, 8] and plain.finish_reason == "length"
    assert plain.logprobs == filtered.logprobs == [-0.5] * 4
    assert greedy.logprobs == [0.0] * 4
    assert stopped.tokens == [5, 6] and stopped.finish_reason == "stop"
    assert plain.policy_versions == [0] * 4 and plain.loss_mask == [True] * 4
    assert engine.stats()["tokens_sampled"] == 14


class _Letters:
    """Token 5 is "f", and a special one like every other."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(chr(ord("a") + token) for token in tokens)


def test_a_stop_string_ends_a_response_also_where_an_interruption_cut_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(monkeypatch)
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    engine = VllmEngine(tmp_path, EngineConfig(), tokenizer=cast(Any, _Letters()), eos_token_ids=())
    engine.add([_sequence(0, stop_strings=("gh",)), _sequence(1)])
    engine.step(), engine.step()
    engine.add(engine.suspend())
    (stopped,) = engine.step()
    assert (stopped.prompt_index, stopped.tokens, stopped.finish_reason) == (0, [5, 6, 7], "stop")
    assert [*engine._llm.requests] == ["3"]  # vLLM was told


def test_stop_strings_need_a_tokenizer(engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match="sequence 0/0: stop_strings .* need an engine that was given a tokenizer"):
        engine.add([_sequence(0, stop_strings=("gh",))])


def test_new_weights_reach_vllm_by_name_and_running_sequences_go_on_under_them(engine: VllmEngine) -> None:
    sequence = _sequence(0)
    engine.add([sequence])
    engine.step()
    seed = engine._llm.requests["0"][1].seed
    for tensor in engine.parameters_for_sync().values():
        tensor.fill_(2.0)
    engine.weights_updated(3)
    assert engine._llm.prefix_resets == engine._llm.models_visited == 1
    assert set(engine._llm.loaded) == {name for name, _ in tiny_model("llama", "sdpa").named_parameters()}
    assert all(bool((tensor == 2.0).all()) for tensor in engine._llm.loaded.values())
    (request,) = engine._llm.requests.values()
    assert request[0] == [7] * 5 + [5] and request[1].max_tokens == 3 and request[1].seed != seed
    while engine.has_work:
        engine.step()
    assert sequence.policy_versions == [0, 3, 3, 3] and sequence.tokens == [5, 6, 7, 8]


def test_what_weights_are_written_into_holds_the_folders_at_first(engine: VllmEngine) -> None:
    expected = dict(tiny_model("llama", "sdpa").named_parameters())
    given = engine.parameters_for_sync()
    assert set(given) == set(expected) and all(torch.equal(given[name], expected[name]) for name in given)


def test_a_prefix_cache_that_vllm_does_not_drop_is_an_error(engine: VllmEngine) -> None:
    engine._llm.can_reset = False
    with pytest.raises(LlamaRLError, match="kept the keys and values of earlier weights"):
        engine.weights_updated(1)


@pytest.mark.parametrize(
    ("on_cpu", "budget", "expected"),
    [(True, 2048, (False, 256)), (True, 256, (False, 256)), (True, 100, (False, 100)), (False, 100, (True, -1))],
)
def test_prompts_are_cut_into_chunks_only_where_a_draw_can_be_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool, budget: int, expected: tuple[bool, int]
) -> None:
    _install(monkeypatch, on_cpu=on_cpu)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)  # its context is 256 tokens
    settings = VllmEngine(tmp_path, EngineConfig(max_batch_tokens=budget, max_sequences=8))._llm.settings
    assert (settings["enable_chunked_prefill"], settings["max_model_len"]) == expected


@pytest.mark.parametrize(
    ("ranks", "device", "visible", "seen"),
    [(1, "cuda:1", None, "1"), (2, "cuda:2", None, "2,3"), (2, "cuda:1", "6,4,5", "4,5"), (1, "", "7", "7")],
)
def test_vllms_processes_see_their_own_gpus_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, device: str, visible: str | None, seen: str
) -> None:
    _install(monkeypatch, on_cpu=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    config = EngineConfig(name="vllm", options={"tensor_parallel_size": ranks})
    made = VllmEngine(tmp_path, config, device=device)._llm
    assert made.visible == seen and os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert made.settings["tensor_parallel_size"] == ranks and made.settings["distributed_executor_backend"] == "mp"
    with pytest.raises(ConfigError, match="tensor_parallel_size is 4, but from cuda:2 on there are"):
        VllmEngine(tmp_path, EngineConfig(name="vllm", options={"tensor_parallel_size": 4}), device="cuda:2")


def test_options_do_not_take_what_the_recipe_says_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch)
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="generator.engine.options: seed follow from the recipe's other keys"):
        VllmEngine(tmp_path, EngineConfig(name="vllm", options={"seed": 1}))


def test_a_cache_smaller_than_the_models_context_may_be_given_a_shorter_one_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    config = EngineConfig(name="vllm", options={"max_model_len": 64})
    _install(monkeypatch, on_cpu=False)
    assert VllmEngine(tmp_path, config)._llm.settings["max_model_len"] == 64
    _install(monkeypatch)
    with pytest.raises(ConfigError, match="max_model_len follow from the recipe's other keys"):
        VllmEngine(tmp_path, config)


def test_vllm_does_not_take_the_choice_of_threads_from_the_process(engine: VllmEngine) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_suspend_takes_requests_out_of_vllm(engine: VllmEngine) -> None:
    kept = _sequence(2)
    engine.add([kept])
    engine.step()
    assert engine.suspend() == [kept] and kept.finish_reason is None and len(kept.tokens) == 1
    assert not engine.has_work and not engine._llm.requests


def test_a_logprob_that_is_not_finite_ends_the_request_with_an_error(engine: VllmEngine) -> None:
    sequence = _sequence(0)
    engine.add([sequence])
    engine._llm.logprob = math.nan
    assert engine.step() == [sequence]
    assert sequence.finish_reason == "error" and "not finite at token 0" in str(sequence.error)
    assert not engine._llm.requests


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (_sequence(0, max_new_tokens=60), "exceed the 64 tokens that vLLM holds of one here"),
        (_sequence(0, temperature=0.005), "at temperature 0 .greedy. or between 0.01 and 2, not at 0.005"),
        (_sequence(0, temperature=3.0), "not at 3"),
        (Sequence(prompt_index=1, sample_index=0, prompt_tokens=[], params=SamplingParams(max_new_tokens=1), seed=0), "is empty"),
    ],
)  # fmt: skip
def test_a_sequence_that_cannot_run_is_refused(engine: VllmEngine, sequence: Sequence, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add([sequence])


def test_absence_and_age_are_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "0.9.2")
    with pytest.raises(ConfigError, match="vllm 0.9.2 is installed: llamarl needs 0.32 or later"):
        import_vllm()
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr(sys, "meta_path", [_Refuse(), *sys.meta_path])
    with pytest.raises(ConfigError, match="not installed here: pip install vllm"):
        import_vllm()


class _Refuse:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "vllm":
            raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
