"""What a recipe asks of model, machine and files is refused before any process starts."""

import dataclasses
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import RunConfig, validate
from llamarl.controller import preflight
from llamarl.controller.preflight import (
    _check_temperature_of_rollouts,
    check_architectures,
    check_engine,
    check_parallel_sizes,
    check_prompts,
    check_reward,
    find_missing,
)
from llamarl.controller.prepare import plan_run
from llamarl.engine.engine import NativeEngine
from llamarl.engine.factory import sampling_params
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.environments.factory import make_prompt_stream
from llamarl.errors import ConfigError, DataError, ModelError
from llamarl.models.folders import resolve_model_path
from llamarl.models.loading import load_tokenizer

FOLDER = resolve_model_path("bundled:tiny")


def mesh(fsdp: int, tp: int, runtime: str = "local") -> RunConfig:
    plain = RunConfig()
    return dataclasses.replace(
        plain,
        run=dataclasses.replace(plain.run, runtime=runtime),
        trainer=dataclasses.replace(plain.trainer, fsdp=fsdp, tp=tp, device="cpu"),
    )


def test_a_dry_run_refuses_a_size_that_does_not_divide_the_model_and_names_those_that_do() -> None:
    with pytest.raises(ModelError, match=r"trainer.tp = 7 does not divide.*sizes that fit: 1, 2"):
        plan_run(mesh(1, 7))


def test_a_model_of_the_hub_of_which_some_shards_have_come_is_fetched_and_not_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    for folder in (tmp_path / "models--lab--tiny" / "snapshots" / ("0" * 40), tmp_path / "mine"):
        folder.mkdir(parents=True)
        shutil.copy(FOLDER / "config.json", folder)
        shutil.copy(FOLDER / "model.safetensors", folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_architectures(validate({"model": {"path": str(next(tmp_path.glob("models--*/*/*")))}}))
    with pytest.raises(ModelError, match="model-00002-of-00002.safetensors is not a usable safetensors file"):
        check_architectures(validate({"model": {"path": str(tmp_path / "mine")}}))


def test_one_process_cannot_hold_a_mesh() -> None:
    with pytest.raises(ConfigError, match="run.runtime 'inline'.*trainer has 2 ranks: set run.runtime to 'local'"):
        check_parallel_sizes(mesh(2, 1, "inline"), FOLDER)


@pytest.mark.parametrize(
    "on",
    [
        {"reference": {"enabled": True, "fsdp": 16, "device": "cpu"}},
        {"algorithm": {"advantage": "gae"}, "critic": {"fsdp": 16, "device": "cpu"}},
    ],
)
def test_reference_and_critic_meshes_are_refused_like_the_trainers(on: dict[str, Any]) -> None:
    section = list(on)[-1]
    with pytest.raises(ConfigError, match=rf"'inline' holds one rank.*{section} has 16 ranks: set"):
        check_parallel_sizes(validate(on | {"run": {"runtime": "inline"}}), FOLDER)


@pytest.mark.parametrize(
    ("section", "on"),
    [
        ("generator", {}),
        ("reference", {"reference": {"enabled": True, "tp": 7}}),
        ("critic", {"algorithm": {"advantage": "gae"}, "critic": {"tp": 7}}),
    ],
)
def test_every_tensor_parallel_size_must_divide_the_model(section: str, on: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=rf"{section}.tp = 7 does not divide.*sizes that fit: 1, 2"):
        check_parallel_sizes(validate(on or {section: {"tp": 7}}), FOLDER)


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        (
            {"quantization": "fp8", "device": "cpu"},
            r"'fp8'.*native engine.*on cpu \(generator.device.*one of none, int8",
        ),
        ({"quantization": "int8", "device": "cuda"}, r"'int8'.*native engine.*on cuda.*one of none, fp8"),
        ({"quantization": "int8", "device": "cuda:0,cuda:1"}, "'int8'.*native engine.*on cuda"),
        ({"quantization": "int8", "device": "cpu"}, None),
        ({"quantization": "fp8", "device": "cuda"}, None),
        ({"engine": {"cuda_graphs": "on"}, "device": "cpu"}, "cuda_graphs is 'on'.*generator.device = 'cpu'.*'auto'"),
        ({"engine": {"cuda_graphs": "on"}, "device": "cuda", "tp": 2}, "collectives"),
        ({"engine": {"cuda_graphs": "padded"}, "device": "cpu", "tp": 2}, None),
        ({"engine": {"cuda_graphs": "on"}, "device": "cuda"}, None),
        ({"engine": {"name": "vllm"}}, "engine.name is 'vllm', which is not installed here: pip install vllm"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(
    generator: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = validate({"generator": generator, "evaluation": {"every": 0}})
    if message is None:
        check_engine(config)
        return
    with pytest.raises(ConfigError, match=message):
        check_engine(config)


def test_the_evaluators_device_must_have_the_generators_quantization() -> None:
    raw = {"generator": {"quantization": "fp8", "device": "cuda"}, "evaluation": {"device": "cpu"}}
    with pytest.raises(ConfigError, match=r"on cpu \(evaluation.device = 'cpu'\)"):
        check_engine(validate(raw))
    check_engine(validate(raw | {"evaluation": {"device": "cpu", "every": 0}}))


def test_pipeline_stages_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    section = "trainer"

    def of(pp: int) -> RunConfig:
        return validate({section: {"pp": pp, "device": "cpu"}})

    layers = json.loads((FOLDER / "config.json").read_text())["num_hidden_layers"]
    check_parallel_sizes(of(layers), FOLDER)
    refusal = rf"{section}.pp = {layers + 1} is more than the {layers} layers of this model.*set {section}.pp to at most {layers}"
    with pytest.raises(ConfigError, match=refusal):
        check_parallel_sizes(of(layers + 1), FOLDER)


def test_an_evaluator_that_is_switched_off_keeps_its_ranks_which_are_checked_and_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    off = {"evaluation": {"every": 0, "tp": 2}, "generator": {"device": "cpu"}}
    plan_run(validate(off))
    assert "evaluation.dp and evaluation.tp do nothing: evaluation.every is 0" in capsys.readouterr().err
    with pytest.raises(ModelError, match=r"evaluation.tp = 7 does not divide.*sizes that fit: 1, 2"):
        check_parallel_sizes(validate({"evaluation": {"every": 0, "tp": 7}}), FOLDER)


def test_experts_are_spread_over_no_more_ranks_than_there_are(tmp_path: Path) -> None:
    section = "trainer"
    for described, wanted in (
        ({"model_type": "llama"}, f"{section}.ep = 4: this model has no experts; set it to 1"),
        (
            {"model_type": "qwen3_moe", "num_experts": 6},
            f"{section}.ep = 4: it does not divide 6 experts; .* 1, 2, 3, 6",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(described))
        with pytest.raises(ConfigError, match=wanted):
            of = {section: {"fsdp": 4, "ep": 4, "device": "cpu"}}
            check_parallel_sizes(validate(of), tmp_path)
    with pytest.raises(ConfigError, match=f"{section}.ep is 3, which does not divide the 4 ranks of fsdp 4 and cp 1"):
        validate({section: {"fsdp": 4, "ep": 3}})


def test_what_cannot_lie_in_stages_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 4}))
    with pytest.raises(
        ConfigError, match="trainer.pp = 2: architecture 'gpt2' does not support pipeline stages.*set trainer.pp to 1"
    ):
        check_parallel_sizes(validate({"trainer": {"pp": 2, "device": "cpu"}}), tmp_path)


def test_rows_are_cut_over_ranks_that_divide_the_heads() -> None:
    heads = json.loads((FOLDER / "config.json").read_text())["num_attention_heads"]
    assert heads == 4

    def of(cp: int, tp: int) -> RunConfig:
        return validate({"trainer": {"cp": cp, "tp": tp, "device": "cpu"}})

    check_parallel_sizes(of(4, 1), FOLDER)
    check_parallel_sizes(of(2, 2), FOLDER)
    with pytest.raises(ConfigError, match="trainer.cp = 3: .*the 4 do not divide by 3; sizes that fit: 1, 2, 4"):
        check_parallel_sizes(of(3, 1), FOLDER)
    with pytest.raises(ConfigError, match="trainer.cp = 4: .*the 2 that tp 2 leaves on a rank .* fit: 1, 2"):
        check_parallel_sizes(of(4, 2), FOLDER)


def test_everything_missing_is_found_and_named_by_its_key(tmp_path: Path) -> None:
    raw = {
        "model": {"path": f"{tmp_path}/policy"},
        "reference": {"enabled": True, "path": f"{tmp_path}/reference"},
        "critic": {"path": f"{tmp_path}/critic, which no executor reads"},
        "task": {
            "name": "function",
            "data": f"{tmp_path}/train.jsonl",
            "eval_data": f"{tmp_path}/eval.jsonl",
            "reward": f"{tmp_path}/mine.py:score",
        },
        "run": {"seed": -1},
    }
    with pytest.raises(ConfigError, match="6 mistakes") as caught:
        validate(raw, [find_missing])
    heads = [line.split(" ")[3].rstrip(":") for line in str(caught.value).splitlines()[1:]]
    assert heads == [
        "run.seed", "model.path", "reference.path", "task.data", "task.eval_data", "task.reward",
    ]  # fmt: skip


def questions(folder: Path, *lengths: int, **sections: Any) -> RunConfig:
    """A run on questions of so many words; the bundled model has a context of 256 tokens."""
    train, held = folder / "train.jsonl", folder / "eval.jsonl"
    lines = [
        json.dumps({"question": f"{number} " + "1+" * length, "answer": "2"}) for number, length in enumerate(lengths)
    ]
    train.write_text("\n".join(lines) + "\n")
    held.write_text('{"question": "1+1=", "answer": "2"}\n')
    raw = {
        "task": {"name": "math", "data": str(train), "eval_data": str(held)},
        "schedule": {"prompts_per_step": 1},
        "generator": {"sampling": {"max_new_tokens": 200}},
        **sections,
    }
    return validate(raw)


def test_a_prompt_that_is_too_long_is_found_wherever_it_stands_and_its_line_is_named(tmp_path: Path) -> None:
    config = questions(tmp_path, *[1] * 40, 30, *[1] * 40, 2000)
    with pytest.raises(DataError, match=r"2 of 82 training prompts are longer than 56 tokens \(all that the model's context "
                                        r"leaves.*train.jsonl:41 \(\d+ tokens\), .*train.jsonl:82"):  # fmt: skip
        check_prompts(config, FOLDER)
    config = questions(tmp_path, 1, 30, generator={"sampling": {"max_new_tokens": 20}}, data={"max_prompt_tokens": 50})
    with pytest.raises(
        DataError, match=r"1 of 2 .* longer than data.max_prompt_tokens=50: .*:2 .*raise data.max_prompt"
    ):
        check_prompts(config, FOLDER)


IMITATED: dict[str, Any] = {"algorithm": {"name": "sft"}, "generator": {}}


def test_a_held_out_row_that_is_too_long_is_found_before_the_run(tmp_path: Path) -> None:
    rows = {"data": str(tmp_path / "train.jsonl"), "eval_data": str(tmp_path / "eval.jsonl")}
    config = questions(tmp_path, 1, task={"name": "demonstrations", **rows}, evaluation={"every": 1}, **IMITATED)
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "1" * 300}) + "\n")
    with pytest.raises(DataError, match=r"eval item 0 .*eval.jsonl:1.*: the prompt has \d+ tokens, limit 256 "):
        check_prompts(config, FOLDER)


@pytest.mark.parametrize("meant", [False, True])
def test_conversations_for_a_model_without_a_chat_template_are_told(
    meant: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"name": "demonstrations", "data": str(tmp_path / "train.jsonl")}
    data = {"chat_template": "none"} if meant else {}
    config = questions(tmp_path, 1, task=task, data=data, **IMITATED)
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    check_prompts(config, FOLDER)
    assert ("this model has no chat template, so of conversations" in capsys.readouterr().err) is not meant


def test_prompts_that_are_too_long_are_counted_where_they_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_prompts(questions(tmp_path, 1, 30, 1, data={"too_long": "skip"}), FOLDER)
    assert "1 of 3 training prompts" in caplog.text and "train.jsonl:2" in caplog.text
    with pytest.raises(DataError, match="2 of 2 .* none is left"):
        check_prompts(questions(tmp_path, 30, 30, data={"too_long": "skip"}), FOLDER)


TAUGHT: dict[str, Any] = {
    "algorithm": {"advantage": "distillation"},
    "reference": {"template": "{question}{question}{answer}"},
}
"""The policy teaches itself."""


def test_a_teacher_that_is_shown_answers_has_room_for_every_prompt_and_not_for_the_first_alone(tmp_path: Path) -> None:
    check_prompts(questions(tmp_path, 1, 1, 10, data={"shuffle": False}, **TAUGHT), FOLDER)
    with pytest.raises(ConfigError, match=r"reference.template makes a prompt of \d+ tokens, which leaves no room"):
        check_prompts(questions(tmp_path, 1, 1, 20, data={"shuffle": False}, **TAUGHT), FOLDER)


def test_of_a_recorded_prompt_nobody_knows_where_a_teacher_would_be_shown_the_answer(tmp_path: Path) -> None:
    config = questions(tmp_path, 1, **TAUGHT)
    sample = {
        "prompt_index": 0, "sample_index": 0, "task": "math", "prompt": "1+1=", "response": "2", "answer": "2", "reward": 1.0,
        "reward_parts": {}, "failure": None, "finish_reason": "stop", "metadata": {}, "tokens": [5], "loss_mask": [1],
        "prompt_tokens": load_tokenizer(FOLDER)("1+1=")["input_ids"], "behavior_logprobs": [-1.0], "policy_versions": [0],
    }  # fmt: skip
    (tmp_path / "tick_000000.jsonl").write_text(json.dumps(sample) + "\n")
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, rollouts=str(tmp_path)))
    with pytest.raises(
        DataError, match="reference.template stands in place of a question, and of prompt 0, '1.1=', only"
    ):
        check_prompts(config, FOLDER)


@pytest.mark.parametrize("kept", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}])
def test_training_on_the_likeliest_tokens_alone_is_refused(tmp_path: Path, kept: dict[str, float]) -> None:
    (name, value), *_ = kept.items()
    config = questions(tmp_path, 1, generator={"sampling": {"max_new_tokens": 20, **kept}})
    with pytest.raises(
        ConfigError, match=rf"generator.sampling.{name} is {value:g}: samples would come from the likeliest"
    ):
        check_prompts(config, FOLDER)


def test_training_on_equal_responses_is_refused_and_one_of_each_is_not(tmp_path: Path) -> None:
    greedy = {"max_new_tokens": 20, "temperature": 0}
    with pytest.raises(
        ConfigError, match=r"sampling.temperature is 0 \(greedy\), so all .* \(group_size 8\) are equal"
    ):
        check_prompts(questions(tmp_path, 1, generator={"sampling": greedy}), FOLDER)
    alone = questions(tmp_path, 1, generator={"sampling": greedy, "group_size": 1}, algorithm={"advantage": "reward"})
    check_prompts(alone, FOLDER)


def test_a_response_that_leaves_no_room_for_a_prompt_is_refused(tmp_path: Path) -> None:
    config = questions(tmp_path, 1, generator={"sampling": {"max_new_tokens": 256}})
    with pytest.raises(ConfigError, match="max_new_tokens = 256 leaves no room .*256 tokens"):
        check_prompts(config, FOLDER)


def test_a_reward_module_is_run_by_a_worker_before_the_job_starts(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\ndef score(p, r, a): ...\nsys.exit(0)\n")
    with pytest.raises(DataError, match="mine.py ends its process when it is imported"):
        check_reward(validate({"task": {"reward": f"{tmp_path}/mine.py:score"}}))


def test_a_cache_that_cannot_hold_one_sequence_is_refused_with_the_bytes_that_do(tmp_path: Path) -> None:
    def config(size: int) -> RunConfig:
        engine = {"kv_cache_bytes": size}
        return questions(tmp_path, 1, generator={"sampling": {"max_new_tokens": 40}, "engine": engine})

    with pytest.raises(ConfigError, match="too few for one sequence: .* set it to at least") as told:
        check_prompts(config(5000), FOLDER)
    found = re.search(r"at least (\d+)", str(told.value))
    assert found
    enough = int(found.group(1))
    check_prompts(config(enough), FOLDER)
    prompt = make_prompt_stream(config(enough), load_tokenizer(FOLDER)).get(0)
    for size in (enough, enough - 1):
        engine = NativeEngine(FOLDER, config(size).generator.engine, eos_token_ids=())
        sequence = Sequence(
            prompt_index=0, sample_index=0, prompt_tokens=prompt.tokens.tolist(), seed=0,
            params=SamplingParams(max_new_tokens=40),
        )  # fmt: skip
        if size < enough:
            with pytest.raises(ValueError, match="KV blocks"):
                engine.add([sequence])
        else:
            engine.add([sequence])


def test_a_cache_that_is_left_open_to_the_gpus_of_a_cluster_is_not_measured_by_a_head_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "CPU_CACHE_BYTES", 5000)
    monkeypatch.setattr(preflight, "may_have_gpus", lambda: False)
    long: dict[str, Any] = {"generator": {"sampling": {"max_new_tokens": 40}}}
    with pytest.raises(ConfigError, match="too few for one sequence"):
        check_prompts(questions(tmp_path, 1, **long), FOLDER)
    check_prompts(questions(tmp_path, 1, **long, hosts={"cluster": "auto"}), FOLDER)


def test_stop_tokens_join_the_tokenizers_own(tmp_path: Path) -> None:
    def config(*tokens: int) -> RunConfig:
        return questions(tmp_path, 1, generator={"sampling": {"max_new_tokens": 40, "stop_token_ids": list(tokens)}})

    tokenizer = load_tokenizer(FOLDER)
    eos = tokenizer.eos_token_id
    params = sampling_params(config(5, eos, 7).generator.sampling, tokenizer)
    assert params.stop_token_ids == (eos, 5, 7)
    assert sampling_params(config().generator.sampling, tokenizer).stop_token_ids == (eos,)


def test_each_environment_of_a_mixture_must_begin_an_episode(tmp_path: Path) -> None:
    """Also that of a task that gives one prompt in nine."""
    (tmp_path / "broken.py").write_text(
        "class Broken:\n"
        "    def reset(self, item, seed):\n        raise OSError('no board')\n"
        "    def step(self, reply): ...\n"
        "    def close(self): ...\n"
    )
    tasks = [
        {"name": "steps", "weight": 8.0},
        {"name": "episodes", "label": "game", "environment": f"{tmp_path / 'broken.py'}:Broken", "weight": 1.0},
    ]
    config = validate({"task": tasks, "evaluation": {"every": 0}})
    with pytest.raises(DataError, match="did not begin an episode: .*no board"):
        check_prompts(config, FOLDER)


@pytest.mark.parametrize("named", ["run", "run/rollouts", "."])
def test_rollouts_of_another_temperature_are_refused_however_their_folder_is_named(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text("[generator.sampling]\ntemperature = 0.5\n")
    monkeypatch.chdir(tmp_path / "run" / "rollouts" if named == "." else tmp_path)
    for temperature in (0.5, 1.0):
        sampling = {"sampling": {"temperature": temperature}}
        config = validate({"task": {"rollouts": named}, "generator": sampling})
        if temperature == 0.5:
            _check_temperature_of_rollouts(config)
            continue
        with pytest.raises(ConfigError, match=r"temperature is 1, but .* was sampled at 0\.5"):
            _check_temperature_of_rollouts(config)


def test_rollouts_in_a_folder_of_another_name_belong_to_no_run_beside_them(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "config.toml").write_text("[generator.sampling]\ntemperature = 0.5\n")
    _check_temperature_of_rollouts(validate({"task": {"rollouts": str(tmp_path / "kept")}}))


def test_evaluations_over_ranks_beside_recorded_samples_take_no_filters(tmp_path: Path) -> None:
    prompt = "a1 b2 =\n"
    sample: dict[str, Any] = dict(prompt_index=0, sample_index=0, task="", prompt=prompt, answer="3", reward=1.0)
    sample |= dict(prompt_tokens=load_tokenizer(FOLDER)(prompt)["input_ids"], response="x", metadata={})
    sample |= dict(reward_parts={}, failure=None, finish_reason="stop")
    sample |= dict(tokens=[1], behavior_logprobs=[-1.0], policy_versions=[0], loss_mask=[1])
    (tmp_path / "tick_000000.jsonl").write_text(json.dumps(sample) + "\n")
    recipe = {"task": {"rollouts": str(tmp_path)}, "generator": {"sampling": {"top_p": 0.9}}}
    check_prompts(validate(recipe), FOLDER)  # one rank evaluates by it
    with pytest.raises(ConfigError, match=r"generator.sampling.top_p is 0\.9: .* nor do tensor-parallel ranks draw so"):
        check_prompts(validate({**recipe, "evaluation": {"tp": 2}}), FOLDER)
