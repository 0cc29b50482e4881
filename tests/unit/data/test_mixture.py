"""Mixtures: which task a prompt comes from, what each task's own stream gives, and how each is judged and told."""

from pathlib import Path

import numpy as np
import pytest
from made_responses import made_group, made_response

from llamarl.api.settings import run_config
from llamarl.config import RunConfig, load_config, save_config
from llamarl.data.mixture import MixedStream, choose_tasks
from llamarl.data.prompts import PromptStream
from llamarl.environments.factory import make_prompt_stream
from llamarl.environments.pool import RewardPool
from llamarl.errors import ConfigError
from llamarl.executors.evaluator import evaluate, standard_error
from llamarl.executors.reward import reward_metrics
from llamarl.models.loading import load_tokenizer
from llamarl.types import EVAL_INDEX_OFFSET, Failure, Group, Prompt, Response, Score


class Count:
    """A stream whose prompt number i says i."""

    def __init__(self, held: int = 100) -> None:
        self.held = held

    def get(self, index: int, item: int | None = None) -> Prompt:
        text = f"item {index if item is None else item}"
        return Prompt(index=index, tokens=np.array([1]), text=text, answer=None, task="own", metadata={})

    def candidates(self, index: int) -> tuple[str, list[int]]:
        return "own", [2 * index, 2 * index + 1]

    @property
    def holds_out(self) -> bool:
        return self.held > 0

    def eval_prompts(self, num_prompts: int) -> list[Prompt]:
        return [self.get(index) for index in range(min(num_prompts, self.held))]


def mixed(seed: int = 0, **weights: float) -> MixedStream:
    streams: dict[str, PromptStream] = {label: Count() for label in weights}  # type: ignore[misc]
    return MixedStream(streams, weights, seed)


def test_a_prompts_task_depends_on_the_seed_and_its_number_alone() -> None:
    weights = np.array([1.0, 3.0])
    whole = choose_tasks(weights, 7, 0, 10_000)
    assert np.array_equal(whole[4990:5010], choose_tasks(weights, 7, 4990, 20))
    assert np.array_equal(whole, choose_tasks(weights * 10, 7, 0, 10_000))
    assert 0.73 < whole.mean() < 0.77  # three quarters, to five standard deviations
    assert not np.array_equal(whole, choose_tasks(weights, 8, 0, 10_000))


def test_candidates_are_of_the_task_whose_turn_it_is_each_once_and_the_chosen_one_is_given() -> None:
    stream = mixed(math=1.0, code=2.0)
    found: dict[str, list[int]] = {"math": [], "code": []}
    for index in range(300):
        label, places = stream.candidates(index)
        assert label == stream.get(index).task
        assert stream.get(index, places[1]).text == f"item {places[1]}"
        found[label] += places
    assert all(places == list(range(len(places))) for places in found.values())


def test_each_task_gives_its_items_in_its_own_order_without_a_gap() -> None:
    stream = mixed(math=1.0, code=2.0)
    prompts = [stream.get(index) for index in range(9000)]
    assert [prompt.index for prompt in prompts] == list(range(9000))
    for label in ("math", "code"):
        texts = [prompt.text for prompt in prompts if prompt.task == label]
        assert texts == [f"item {number}" for number in range(len(texts))]
    again = mixed(math=1.0, code=2.0)  # as after a resume: nothing before it has been asked for
    assert (again.get(8191).text, again.get(8191).task) == (prompts[8191].text, prompts[8191].task)


def test_held_out_prompts_are_shared_out_evenly_and_numbered_through() -> None:
    prompts = mixed(math=1.0, code=9.0).eval_prompts(5)
    assert [prompt.task for prompt in prompts] == ["math"] * 3 + ["code"] * 2
    assert [prompt.index - EVAL_INDEX_OFFSET for prompt in prompts] == [0, 1, 2, 3, 4]


def test_a_task_that_holds_nothing_out_leaves_its_share_to_the_others() -> None:
    streams: dict[str, PromptStream] = {"math": Count(), "lone": Count(0), "code": Count()}  # type: ignore[dict-item]
    stream = MixedStream(streams, {"math": 1.0, "lone": 1.0, "code": 1.0}, 0)
    assert [prompt.task for prompt in stream.eval_prompts(3)] == ["math", "math", "code"]
    assert stream.holds_out


def group(task: str, *rewards: float) -> Group:
    return made_group((response(Score(value=reward)) for reward in rewards), answer=None, task=task, metadata={})


def response(outcome: Score | None = None, text: str = "7") -> Response:
    return made_response(tokens=[5], text=text, outcome=outcome)


def test_metrics_and_evaluations_tell_each_task() -> None:
    groups = [group("math", 1.0, 0.0), group("math", 1.0, 1.0), group("code", 0.5, 0.0)]
    told = reward_metrics(groups, ["math", "code"])
    assert told["reward/mean"] == pytest.approx(3.5 / 6)
    assert [told[f"reward/tasks/{t}/{k}"] for t in ("math", "code") for k in ("mean", "accuracy", "groups")] == [
        0.75, 0.75, 2.0, 0.25, 0.0, 1.0,
    ]  # fmt: skip
    assert not any(key.startswith("reward/tasks") for key in reward_metrics(groups))
    scores = evaluate(groups, ["math", "code"])
    assert (scores["tasks/math/accuracy"], scores["tasks/math/pass_at_k"]) == (0.75, 1.0)
    assert (scores["tasks/code/accuracy"], scores["tasks/code/reward_mean"]) == (0.0, 0.25)


def test_evaluations_tell_the_mean_of_each_part_over_the_samples_that_have_it() -> None:
    outcomes = [Score(value=1.0, parts={"first_try": 1.0, "correct": 1.0}), Score(value=0.5, parts={"correct": 1.0})]
    prompt = Prompt(index=0, tokens=np.array([1]), text="", answer=None, metadata={})
    failed = response(Failure(kind="timeout", detail="too late"))
    scores = evaluate([Group(prompt=prompt, responses=(*map(response, outcomes), failed))])
    assert {key: value for key, value in scores.items() if key.startswith("parts/")} == {
        "parts/correct": 1.0,
        "parts/first_try": 1.0,
    }
    assert scores["accuracy"] == 0.5


def test_the_standard_error_is_that_of_the_prompts_shares() -> None:
    """Shares 1, 1/2, 1 and 0: variance 11/48 by hand, over four prompts."""
    groups = [group("t", 1.0, 1.0), group("t", 1.0, 0.0), group("t", 1.0), group("t", 0.0, 0.0)]
    assert standard_error(groups) == pytest.approx((11 / 48 / 4) ** 0.5)
    assert np.isnan(standard_error(groups[:1]))


RECIPE = """
[[task]]
name = "steps"
weight = 2.0

[[task]]
name = "function"
label = "sums"
data = "q.jsonl"
reward = "judge.py:judge"
reward_batch_size = 2
eval_fraction = 0.3
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [f'{{"question": "{n}+{n}?", "answer": "{2 * n}"}}\n' for n in range(20)]
    (tmp_path / "q.jsonl").write_text("".join(lines))
    (tmp_path / "judge.py").write_text("def judge(responses, answers):\n    return [0.5] * len(responses)\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


def test_a_recipe_of_several_tables_is_a_mixture_and_each_task_judges_its_own(recipe: Path) -> None:
    config = load_config(recipe)
    assert config.task.titles == "steps + sums"
    save_config(config, recipe.with_name("saved.toml"))
    assert load_config(recipe.with_name("saved.toml")).task == config.task
    stream = make_prompt_stream(config, load_tokenizer("bundled:tiny"))
    prompts = [stream.get(index) for index in range(60)]
    assert 30 < sum(prompt.task == "steps" for prompt in prompts) < 50
    first = {label: next(prompt for prompt in prompts if prompt.task == label) for label in ("steps", "sums")}
    right = f"#{first['steps'].answer}\n"
    with RewardPool(config.task, seed=config.run.seed) as pool:
        groups = pool.score([
            Group(prompt=first["sums"], responses=(response(), response(), response())),
            Group(prompt=first["steps"], responses=(response(text=right), response(text="none"))),
        ])  # fmt: skip
    values = [[r.outcome.value for r in found.responses if isinstance(r.outcome, Score)] for found in groups]
    assert values == [[0.5, 0.5, 0.5], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("weight = 2.0", "weight = 0.0"), "task.mixture.0.weight must be > 0, got 0.0"),
        (("weight = 2.0", "wieght = 2.0"), "did you mean 'task.mixture.0.weight'"),
        (('label = "sums"', 'label = "steps"'), "task.mixture: more than one task is called 'steps'"),
        (('reward = "judge.py:judge"\nreward_batch_size = 2', ""), "task.mixture.1.reward must name a function"),
    ],
    ids=["weight", "key", "labels", "reward"],
)  # fmt: skip
def test_mistakes_name_the_task_that_they_are_in(change: tuple[str, str], words: str, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace(*change))
    with pytest.raises(ConfigError) as caught:
        load_config(recipe)
    assert words in str(caught.value)


def test_python_names_a_mixture_by_a_list(recipe: Path) -> None:
    tasks = [{"name": "steps", "weight": 3.0}, {"name": "steps", "label": "long", "options": {"min_terms": 5}}]
    config = run_config(None, {"task": tasks, "dir": "run"})
    assert {label: task.options for label, task in config.task.tasks.items()} == {"steps": {}, "long": {"min_terms": 5}}


def test_one_task_is_no_mixture() -> None:
    assert not RunConfig().task.tasks and RunConfig().task.titles == "steps"
