"""A reward model's scores: whose they are, what becomes of them, and what is refused before a run."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_responses import made_group, made_response
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from llamarl.algorithms.advantages import compute_advantages
from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import RunConfig, validate
from llamarl.controller.graph import llamarl_graph
from llamarl.controller.prepare import plan_run
from llamarl.controller.settle import MODELS_FILE, frozen_paths, record_models, refuse_other_models
from llamarl.errors import ConfigError, ModelError
from llamarl.executors.base import ExecutorContext
from llamarl.executors.conversations import TextFor, conversation, special_tokens, transcript, without
from llamarl.executors.judging import add_verdicts, with_score, zero_rewards
from llamarl.executors.reward_model import RewardModelExecutor
from llamarl.models.folders import resolve_model_path
from llamarl.models.loading import load_tokenizer
from llamarl.settings.algorithms import AlgorithmConfig
from llamarl.trainer.credit import token_advantages
from llamarl.trainer.reward_scoring import RewardScorer, distinct, padded_batches
from llamarl.types import Failure, Group, Prompt, Response, Score, Turn

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", ":", "two", "plus", "is", "four", "five", "well"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} </s> {% endfor %}"


def write_classifier(
    folder: Path, family: str = "llama", *, labels: int = 1, template: str = "", seed: int = 0
) -> Path:
    """A random classifier with a tokenizer of whole words."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family,
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        num_labels=labels,
    )
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="</s>")
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("models") / "chatting", template=TEMPLATE, seed=1)


def respond(text: str, sample: int = 0, **changes: Any) -> Response:
    return dataclasses.replace(made_response(sample, tokens=[5, 6], text=text), **changes)


def ask(*responses: Response, **changes: Any) -> Group:
    prompt = Prompt(index=0, tokens=np.array([1], np.int32), text="two plus two is ", question="two plus two", task="t")
    return Group(prompt=dataclasses.replace(prompt, **changes), responses=responses)


def executor(path: Path, *, name: str = "reward_model", **settings: Any) -> RewardModelExecutor:
    config = validate({"reward_model": {"path": str(path), "device": "cpu", "threads": 1, **settings}})
    channels = [ChannelSpec(name=c, kind=ChannelKind.SCATTER, source="a", sink="b") for c in ("in", "out")]
    context = ExecutorContext(
        name=name, rank=0, num_ranks=1, device="cpu", run_dir=None, seed=0, reads=(channels[0],), writes=(channels[1],)
    )
    made = RewardModelExecutor(config, context)
    made.setup()
    return made


def library_score(path: Path, tokens: list[int]) -> float:
    """By transformers alone, one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        return float(model(torch.tensor([tokens])).logits[0, 0])


def ids(*words: str) -> list[int]:
    return [WORDS.index(word) for text in words for word in text.split()]


def rate(of: RewardModelExecutor, *groups: Group) -> tuple[list[Group], dict[str, float]]:
    result = of.step(0, {"in": list(groups)})
    return result.outputs["out"], dict(result.metrics)


def test_the_score_is_that_of_prompt_and_response_times_the_weight(plain: Path) -> None:
    rated, metrics = rate(executor(plain, weight=0.5), ask(respond("four"), respond("five well", 1)))
    for response, words in zip(rated[0].responses, ("four", "five well"), strict=True):
        expected = library_score(plain, ids("two plus two is", words))
        assert response.outcome is None and response.verdict is not None
        assert response.verdict.parts == {"reward_model": pytest.approx(expected, abs=1e-5)}
        assert response.verdict.value == pytest.approx(0.5 * expected, abs=1e-5)
    assert metrics == {"reward_model/num_scored": 2, "reward_model/num_tokens": 5 + 6, "reward_model/num_failed": 0}


def test_a_chat_template_renders_question_and_response_as_a_conversation(chatting: Path) -> None:
    rated, _ = rate(executor(chatting), ask(respond("four")))
    tokens = ids("user : two plus two </s> assistant : four </s>")
    verdict = rated[0].responses[0].verdict
    assert verdict is not None and verdict.value == pytest.approx(library_score(chatting, tokens), abs=1e-5)


def test_a_prompt_that_begins_with_the_beginning_gets_no_second_one(plain: Path) -> None:
    tokenizer = load_tokenizer(plain)
    tokenizer.bos_token = "<s>"
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    text_for = TextFor(tokenizer, "plain")
    for begin in ("", "<s> "):
        (response,) = (group := ask(respond("four"), text=f"{begin}two plus two is ")).responses
        assert text_for(group.prompt, response).tokens == ids("<s> two plus two is four")


def test_a_policy_that_spells_a_special_token_ends_no_turn_of_its_own() -> None:
    tokenizer = load_tokenizer(resolve_model_path("bundled:tiny"))
    mark = next(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special and len(str(t)) > 1)
    plain = f"{mark[0]} {mark[1:]}"
    turn = Turn(start=0, end=1, finish_reason="stop", reply=mark, observation=f"{mark}{mark}")
    told = without(special_tokens(tokenizer), respond(f"well {mark} user : five", turns=(turn,)))
    assert told.text == f"well {plain} user : five"
    assert (told.turns[0].reply, told.turns[0].observation) == (plain, plain + plain)
    group = ask()
    for template in ("plain", "pair"):
        texts = [TextFor(tokenizer, template)(group.prompt, respond(f"four{end}")) for end in (mark, plain)]
        assert texts[0].tokens == texts[1].tokens


def test_a_conversation_is_the_items_messages_where_it_has_them() -> None:
    group = ask(metadata={"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]})
    assert conversation(group.prompt, respond("r"))[1:] == [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "r"},
    ]
    begun = ask(metadata={"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "Well, "}]})
    assert conversation(begun.prompt, respond("r"))[1:] == [{"role": "assistant", "content": "Well, r"}]
    assert conversation(ask(question="").prompt, respond("r"))[0]["content"] == "two plus two is "


def test_an_episode_is_a_conversation_with_its_environment() -> None:
    turns = tuple(
        Turn(start=n, end=n + 1, finish_reason="stop", reply=reply, observation=seen)
        for n, (reply, seen) in enumerate([("left", "a wall"), ("right", "a door")])
    )
    episode = respond("left right", turns=turns)
    expected = [("user", "two plus two"), ("assistant", "left"), ("user", "a wall"), ("assistant", "right")]
    assert [(m["role"], m["content"]) for m in conversation(ask().prompt, episode)] == expected
    assert transcript(episode) == "assistant: left\n\nuser: a wall\n\nassistant: right"
    assert transcript(respond("left")) == "left"


def test_equal_responses_of_a_group_have_equal_scores_to_the_bit(plain: Path) -> None:
    """Or a group without a signal would have one, of rounding."""
    assert distinct([(1, 2), (3,), (1, 2), (3,), (4,)]) == ([0, 1, 4], [0, 1, 0, 1, 2])
    texts = ["four", "five well", "four", "four", "five well"]
    (group,), metrics = rate(executor(plain), ask(*(respond(text, n) for n, text in enumerate(texts))))
    scores = [r.verdict.value for r in group.responses if r.verdict]
    assert scores[0] == scores[2] == scores[3] and scores[1] == scores[4] and len(set(scores)) == 2
    assert scores[:2] == pytest.approx(
        [library_score(plain, ids("two plus two is", text)) for text in texts[:2]], abs=1e-5
    )
    assert metrics["reward_model/num_scored"] == 5


def test_what_has_failed_stays_failed_and_is_not_asked_about(plain: Path) -> None:
    failed = respond("four", outcome=Failure(kind="timeout", detail="late"))
    rated, metrics = rate(executor(plain), ask(failed, respond("four", 1, finish_reason="error"), respond("five", 2)))
    assert rated[0].responses[0] is failed and rated[0].responses[1].verdict is None
    assert (metrics["reward_model/num_scored"], metrics["reward_model/num_failed"]) == (1, 0)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_no_number_fails_the_sample(score: float) -> None:
    outcome = with_score(respond("four"), score, name="helpful", weight=1.0).outcome
    assert outcome == Failure(kind="not_a_number", detail=f"helpful gave {score}")


def test_a_text_that_is_too_long_fails(plain: Path) -> None:
    model = executor(plain)
    model._limit = 4
    rated, metrics = rate(model, ask(respond("four"), respond("", 1)))
    outcome = rated[0].responses[0].outcome
    assert isinstance(outcome, Failure) and outcome.kind == "judge" and "4 tokens that it reads" in outcome.detail
    assert rated[0].responses[1].outcome is None and metrics["reward_model/num_failed"] == 1


def test_rewards_add_up_with_their_weights_and_are_named() -> None:
    judged = with_score(respond("four"), 3.0, name="helpful", weight=0.5)
    judged = with_score(judged, -1.0, name="polite", weight=2.0)
    judged = dataclasses.replace(judged, outcome=Score(value=1.0, parts={"correct": 1.0}))
    (group,) = add_verdicts([ask(judged)], weight=4.0)
    # 4 * 1 + 0.5 * 3 - 2 * 1
    expected = Score(value=3.5, parts={"helpful": 3.0, "polite": -1.0, "task": 1.0, "correct": 1.0})
    assert group.responses[0].outcome == expected and group.responses[0].verdict is None


def test_without_models_that_judge_a_reward_is_the_tasks_own() -> None:
    judged = respond("four", outcome=Score(value=1.0, parts={"correct": 1.0}))
    own = add_verdicts([ask(judged)], weight=1.0)[0].responses[0]
    assert all(getattr(own, field.name) is getattr(judged, field.name) for field in dataclasses.fields(judged))
    failed = respond("four", outcome=Failure(kind="crash", detail="x"), verdict=Score(value=3.0))
    assert add_verdicts([ask(failed)], weight=1.0)[0].responses[0].outcome == failed.outcome


def test_models_alone_judge_where_the_tasks_weight_is_0() -> None:
    rated = with_score(respond("four"), 3.0, name="helpful", weight=0.5)
    cut = respond("", 1, finish_reason="error")
    (group,) = add_verdicts(zero_rewards([ask(rated, cut, respond("five", 2))]), weight=0.0)
    first, second, third = (r.outcome for r in group.responses)
    assert first == Score(value=1.5, parts={"helpful": 3.0})
    assert isinstance(second, Failure) and second.kind == "generation"
    assert isinstance(third, Failure) and third.kind == "judge"  # nobody judged it: never a zero


@pytest.mark.parametrize(("weight", "what"), [(-0.5, "turn its sign and its weight"), (0.0, "leave it out")])
def test_a_penalty_is_no_part_for_gdpo_which_would_seek_it(weight: float, what: str) -> None:
    """Right 1 0 1 0, long 1 1 0 0 with weight -1: by arXiv:2601.05242 the short right answer is worth most, 1.22 and the long
    wrong one -1.22; of parts without their weights the long right one would be, and the short wrong one least."""
    table = np.array([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    (found,) = compute_advantages([table @ [1.0, -1.0]], AlgorithmConfig(advantage="gdpo"), parts=[table])
    assert found.tolist() == pytest.approx([math.sqrt(1.5), 0.0, 0.0, -math.sqrt(1.5)], abs=1e-4)
    (signed,) = compute_advantages(
        [table @ [1.0, -1.0]], AlgorithmConfig(advantage="gdpo"), parts=[table * [1.0, -1.0]]
    )
    assert signed.tolist() == pytest.approx([0.0, -math.sqrt(1.5), math.sqrt(1.5), 0.0], abs=1e-4)
    parts = [{"function": "r.py:right"}, {"function": "r.py:long", "weight": weight}]
    settings = {"task": {"rewards": parts}, "algorithm": {"advantage": "gdpo"}}
    with pytest.raises(ConfigError, match=rf"task\.rewards: 'long' has the weight .*{what}"):
        validate(settings)
    with pytest.raises(ConfigError, match=r"reward_model\.weight: .*turn its sign"):
        validate({"reward_model": {"path": "m", "weight": -1.0}, "algorithm": {"advantage": "gdpo"}})
    validate(settings | {"algorithm": {"advantage": "group_std"}})


@pytest.mark.parametrize(("weight", "expected"), [(0.0, [0.0, 0.6]), (0.5, [0.5, 0.7]), (1.0, [1.0, 0.8])])
def test_what_an_environment_paid_counts_with_the_tasks_weight_where_turns_are_credited(
    weight: float, expected: list[float]
) -> None:
    """It paid 1 and 0.2 for two turns of one token each, a judge gives the whole 0.6; with lambda 0 and values of 0 a turn's
    advantage is what it earned: its weighted pay, and the last one the verdict too."""
    turns = tuple(
        Turn(start=i, end=i + 1, finish_reason="stop", reply="", reward=pay) for i, pay in enumerate((1.0, 0.2))
    )
    played = made_response(tokens=[5, 6], turns=turns, values=np.zeros(2, np.float32))
    judged = with_score(played, 0.6, name="helpful", weight=1.0)
    own = [made_group([dataclasses.replace(judged, outcome=Score(value=1.2) if weight else Score(value=0.0))])]
    response = add_verdicts(own, weight=weight)[0].responses[0]
    assert isinstance(response.outcome, Score) and response.outcome.value == pytest.approx(1.2 * weight + 0.6)
    found = token_advantages(response, 0.0, AlgorithmConfig(advantage="turn_gae", gae_lambda=0.0))
    assert found is not None and found.tolist() == pytest.approx(expected)


def test_an_architecture_outside_the_table_runs_padded_to_the_librarys_scores(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "bert", vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
        num_labels=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    texts = [[[5, 6, 7], [5, 6]], [[9, 8, 7, 6, 5]]]
    scores = RewardScorer(tmp_path, max_tokens=6).score(texts)
    assert scores == pytest.approx([library_score(tmp_path, t) for g in texts for t in g], abs=1e-5)


def test_padded_batches_hold_similar_lengths_within_the_budget() -> None:
    assert padded_batches([3, 9, 1, 2, 20], 10) == [[2, 3, 0], [1], [4]]


def test_a_text_that_ends_in_the_padding_token_is_read_where_the_library_reads_it(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "padded")
    texts = [[[7, 8, 0], [7, 8, 9, 0, 0], [0, 0]]]
    assert RewardScorer(folder).score(texts) == pytest.approx([library_score(folder, t) for t in texts[0]], abs=1e-5)


def test_what_is_not_computed_as_the_library_does_is_refused(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.trainer.reward_scoring.last_token", lambda tokens, config: 0)
    with pytest.raises(ModelError, match="is not computed here as transformers computes it: scores differ by"):
        RewardScorer(plain)


def recipe(path: Path | str, **sections: Any) -> RunConfig:
    return validate({"reward_model": {"path": str(path)}, "evaluation": {"every": 0}, **sections})


def test_a_dry_run_shows_it_between_generator_and_reward(plain: Path) -> None:
    graph = llamarl_graph(recipe(plain, reward_model={"path": str(plain), "fsdp": 2}))
    edges = {c.name: (c.source, c.sink, c.kind) for c in graph.channels}
    assert edges["completions"] == ("generator", "reward_model", ChannelKind.SCATTER)
    assert edges["rated"] == ("reward_model", "reward", ChannelKind.GATHER)
    spec = next(spec for spec in graph.executors if spec.name == "reward_model")
    assert (spec.num_ranks, spec.process_group) == (2, "gloo")
    text = plan_run(recipe(plain))  # its vocabulary is another than the policy's, and may be
    assert "reward_model  0 of 1" in text


def test_a_tokenizer_without_a_limit_on_lengths_is_read(plain: Path) -> None:
    """transformers writes 10**30 for that, which is beyond 64 bits."""
    assert json.loads((plain / "tokenizer_config.json").read_text())["model_max_length"] > 1 << 64
    assert load_tokenizer(plain).model_max_length > 1 << 64


def test_what_is_no_classifier_with_one_label_is_refused_before_anything_starts(tmp_path: Path) -> None:
    two = write_classifier(tmp_path / "two", labels=2)
    with pytest.raises(ModelError, match=r"reward_model.path: .*two has 2 labels, a reward is one number"):
        plan_run(recipe(two))
    with pytest.raises(ModelError, match="holds LlamaForCausalLM, which has no score for a text"):
        plan_run(recipe("bundled:tiny"))
    with pytest.raises(ModelError, match="reward_model.path: no folder"):
        plan_run(recipe(tmp_path / "nowhere"))
    headless = tmp_path / "headless"
    shutil.copytree(resolve_model_path("bundled:tiny"), headless)
    config = json.loads((headless / "config.json").read_text())
    changed = config | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "x"}}
    (headless / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ModelError, match=r"lacks 1 tensors of LlamaForSequenceClassification: score.weight"):
        RewardScorer(headless)


def test_sizes_need_an_architecture_that_can_be_cut(tmp_path: Path) -> None:
    config = AutoConfig.for_model("bert", num_labels=1).to_dict() | {"architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(resolve_model_path("bundled:tiny") / "tokenizer.json", tmp_path)
    with pytest.raises(ModelError, match="'bert' does not support a reward model in packed batches"):
        plan_run(recipe(tmp_path, reward_model={"path": str(tmp_path), "fsdp": 2}))


def test_names_and_weights_that_do_not_go_together_are_refused(plain: Path) -> None:
    with pytest.raises(ConfigError, match="reward.weight is 0, so models alone judge, but there is none"):
        validate({"reward": {"weight": 0}})
    assert recipe(plain, reward={"weight": 0}).reward.weight == 0
    with pytest.raises(ConfigError, match="reward_model.name is 'task', which another part of the reward is called"):
        recipe(plain, reward_model={"path": str(plain), "name": "task"})


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({}, set()),  # the policy's own states are in checkpoints
        ({"lora": {"rank": 4}}, {"model.path"}),  # adapters alone are
        ({"algorithm": {"kl_coef": 0.1}}, {"model.path"}),  # it is read again as the reference
        ({"algorithm": {"kl_coef": 0.1}, "reference": {"path": "other"}}, {"reference.path"}),
    ],
)
def test_the_policys_files_are_proved_where_they_are_read_again_at_a_resume(
    settings: dict[str, Any], keys: set[str]
) -> None:
    assert {key for key, _ in frozen_paths(validate(settings))} == keys


def test_the_bytes_of_frozen_models_are_written_down_and_proved(tmp_path: Path) -> None:
    model, run = write_classifier(tmp_path / "model"), tmp_path / "run"
    run.mkdir()
    second = {"factory": "llamarl.executors.reward_model:RewardModelExecutor", "reads": ["rated"], "writes": ["more"],
              "settings": {"reward_model": {"path": str(model), "name": "second"}}}  # fmt: skip
    config = recipe(model, executors={"second": second, "reward": {"reads": ["more"]}})
    assert {key for key, _ in frozen_paths(config)} == {
        "reward_model.path",
        "executors.second.settings.reward_model.path",
    }
    record_models(config, run)
    refuse_other_models(config, run)
    assert {len(facts["xxh3_128"]) for facts in json.loads((run / MODELS_FILE).read_text()).values()} == {32}
    weights = (model / "model.safetensors").rename(tmp_path / "not_fetched")
    refuse_other_models(config, run)  # as a dry-run, and a fork before it fetches, find a model of the Hub
    weights.rename(model / "model.safetensors")
    write_classifier(model, seed=5)
    with pytest.raises(ConfigError, match=r"reward_model.path: .*model is not what .* was when the run began"):
        refuse_other_models(config, run)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1", "answer": "2"}\n')
    of_data = validate({"task": {"name": "math", "data": str(rows)}})
    record_models(of_data, run)
    refuse_other_models(of_data, run)
    with rows.open("a") as file:
        file.write('{"question": "1 + 2", "answer": "3"}\n')
    with pytest.raises(ConfigError, match=r"task.data: .*rows.jsonl is not what .* was when the run began"):
        refuse_other_models(of_data, run)
    sampled = tmp_path / "sampled" / "rollouts"
    sampled.mkdir(parents=True)
    (sampled / "tick_000000.jsonl").write_text("{}\n")
    of_samples = validate({"task": {"rollouts": str(sampled.parent)}})
    record_models(of_samples, run)
    refuse_other_models(of_samples, run)
    (sampled / "tick_000001.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"task.rollouts: .*sampled is not what .* was when the run began"):
        refuse_other_models(of_samples, run)
    record_models(validate({}), tmp_path)
    assert not (tmp_path / MODELS_FILE).exists()  # the policy's own states are in checkpoints
