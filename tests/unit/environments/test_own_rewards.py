"""Several rewards that are added up, and rewards written for TRL."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_responses import made_response

from llamarl.api.settings import run_config
from llamarl.config import load_config, save_config
from llamarl.data.items import TaskItem
from llamarl.environments.functions import FunctionTask, NotANumber, Tokens, as_score
from llamarl.environments.jobs import _verdict
from llamarl.environments.pool import RewardPool, _sample
from llamarl.errors import ConfigError, DataError
from llamarl.settings.environments import RewardPart, TaskConfig
from llamarl.types import Failure, Group, Prompt, Score

CODE = """
import asyncio

def format(response):
    return float(response.startswith("<"))

def right(response, answer):
    return float(answer in response)

def broken(response):
    raise KeyError("nothing")

def infinite(response):
    return float("inf")

# as TRL's documentation writes them
def plain(completion_ids, **kwargs):
    return [float([type(i) for i in ids] == [int, int]) for ids in completion_ids]

def lengths(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def solved(completions, solution, **kwargs):
    return [None if s is None else float(s in c) for c, s in zip(completions, solution)]

def spoken(prompts, completions):
    return [float(p[-1]["role"] == "user" and c[0]["role"] == "assistant") for p, c in zip(prompts, completions)]

loops = set()

async def later(completions, answer, **kwargs):
    loops.add(asyncio.get_running_loop())
    assert len(loops) == 1  # a client's connections belong to one
    return [float(a in c) for a, c in zip(answer, completions)]

def never(completions, **kwargs):
    return [None] * len(completions)

# as verl calls them
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info == {"level": 2}
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}

def plain_score(solution_str, ground_truth, **kwargs):
    return float(ground_truth in solution_str)

def more_score(data_source, solution_str, ground_truth, sandbox):
    return 0.0

async def later_score(solution_str, ground_truth):
    loops.add(asyncio.get_running_loop())
    return {"score": float(solution_str in ground_truth["target"])}

async def later_right(response, answer):
    return float(answer in response)

async def later_rights(responses, answers):
    return [float(a in r) for a, r in zip(answers, responses)]

def all_of_them(completions, **kwargs):
    return [float(sorted(kwargs) == ["answer", "completion_ids", "level", "prompts"]) for _ in completions]
"""


class Items:
    name = "questions"

    def num_items(self, split: str) -> int:
        return 1

    def item(self, split: str, index: int) -> TaskItem:
        return TaskItem(question="q")

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Score:
        raise AssertionError("the functions judge")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "judges.py").write_text(textwrap.dedent(CODE))
    monkeypatch.chdir(tmp_path)
    return "judges.py"


def prompt(metadata: Mapping[str, Any] | None = None, answer: str | None = "7") -> Prompt:
    return Prompt(index=0, tokens=np.array([1]), text="3+4?", answer=answer, task="t", metadata=dict(metadata or {}))


def judged(judges: Sequence[RewardPart], text: str, of: Prompt, tokens: Tokens = (), batch_size: int = 0) -> Score:
    task = FunctionTask(Items(), judges, batch_size)
    (value,) = task.respond_to_batch([(of, (text,), tokens)])
    return as_score(value)


def test_rewards_are_added_up_by_weight_and_each_is_a_part(module: str) -> None:
    judges = [
        RewardPart(function=f"{module}:format", weight=0.25, name="shape"),
        RewardPart(function=f"{module}:right", weight=2.0),
    ]
    assert judged(judges, "<7>", prompt()) == Score(value=2.25, parts={"shape": 1.0, "right": 1.0})
    assert judged(judges, "7", prompt()) == Score(value=2.0, parts={"shape": 0.0, "right": 1.0})


def test_one_that_fails_fails_the_sample_by_its_name(module: str) -> None:
    def verdict(name: str) -> Score | Failure:
        judges = [RewardPart(function=f"{module}:right"), RewardPart(function=f"{module}:{name}", name="second")]
        (value,) = FunctionTask(Items(), judges).respond_to_batch([(prompt(), ("7",), [])])
        return _verdict(value)

    told = "reward 'second': reward is inf, expected a finite number"
    assert verdict("infinite") == Failure(kind="not_a_number", detail=told)
    with pytest.raises(RuntimeError, match="'second': KeyError: 'nothing'"):
        verdict("broken")


def test_tokens_go_to_judges_without_a_number_each_and_reach_them_as_plain_numbers(module: str) -> None:
    response = made_response(tokens=(5, 6), text="7")
    assert _sample(prompt(), response)[2] is response.tokens
    assert judged([RewardPart(function=f"{module}:plain")], "7", prompt(), response.tokens).value == 1.0


def test_a_reward_of_trl_gets_columns_ids_and_conversations_by_name(module: str) -> None:
    def one(name: str) -> list[RewardPart]:
        return [RewardPart(function=f"{module}:{name}")]

    assert judged(one("solved"), "it is 7", prompt({"solution": "7"})).value == 1.0
    assert judged(one("solved"), "it is 8", prompt({"solution": "7"}), batch_size=4).value == 0.0
    talk = {"messages": [{"role": "user", "content": "3+4?"}]}
    assert judged(one("spoken"), "7", prompt(talk)).value == 1.0
    assert judged(one("all_of_them"), "7", prompt({"level": 1})).value == 1.0
    assert [judged(one("later"), "it is 7", prompt()).value for _ in range(2)] == [1.0] * 2
    with pytest.raises(
        TypeError, match="needs 'solution', but there are only answer, completion_ids, completions, level"
    ):
        judged(one("solved"), "7", prompt({"level": 1}))


def test_a_reward_of_verl_gets_its_parameters_by_name(module: str) -> None:
    def one(name: str) -> list[RewardPart]:
        return [RewardPart(function=f"{module}:{name}")]

    of = prompt({"data_source": "sums", "extra_info": {"level": 2}})
    assert judged(one("compute_score"), "7", of) == Score(value=1.0, parts={"acc": 1.0})
    assert judged(one("compute_score"), "8", of) == Score(value=0.0, parts={"acc": 0.0})
    assert judged(one("plain_score"), "it is 7", prompt()).value == 1.0
    kept = {"reward_model": {"style": "rule", "ground_truth": {"target": ["7", "seven"]}}}
    assert [judged(one("later_score"), text, prompt(kept, answer=None)).value for text in ("7", "8")] == [1.0, 0.0]
    with pytest.raises(DataError, match="as verl does, and judges one sample a call: set task.reward_batch_size to 0"):
        judged(one("compute_score"), "7", of, batch_size=4)
    with pytest.raises(DataError, match="called with data_source, .*, as verl does, and needs other parameters"):
        judged(one("more_score"), "7", of)


def test_an_async_reward_is_waited_for(module: str) -> None:
    for name, batch_size in (("later_right", 0), ("later_rights", 4)):
        judges = [RewardPart(function=f"{module}:{name}")]
        assert [judged(judges, text, prompt(), batch_size=batch_size).value for text in ("7", "8")] == [1.0, 0.0]


def test_none_is_a_reward_that_does_not_apply(module: str) -> None:
    judges = [RewardPart(function=f"{module}:{name}") for name in ("solved", "right", "never")]
    both = FunctionTask(Items(), judges, batch_size=0)
    found = [as_score(both.respond_to_batch([(prompt({"solution": s}), ("7",), ())])[0]) for s in ("7", None)]
    assert found == [Score(value=2.0, parts={"solved": 1.0, "right": 1.0}), Score(value=1.0, parts={"right": 1.0})]
    for alone in ([RewardPart(function=f"{module}:never")], [RewardPart(function=f"{module}:never", name="n")]):
        with pytest.raises(NotANumber, match="every reward function returned None"):
            judged(alone, "7", prompt())


def test_workers_judge_so_and_know_the_tokens(module: str, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "3+4?", "answer": "7"}\n{"question": "1+1?", "answer": "2"}\n')
    judges = [RewardPart(function=f"{module}:lengths", weight=0.5), RewardPart(function=f"{module}:right")]
    config = TaskConfig(name="function", data=str(tmp_path / "q.jsonl"), rewards=judges, eval_fraction=0.0)
    response = made_response(tokens=[5, 6, 7], text="7")
    with RewardPool(config, seed=0) as pool:
        (group,) = pool.score([Group(prompt=prompt(), responses=(response,))])
    assert not isinstance(group.responses[0].outcome, Failure)
    assert group.responses[0].outcome == Score(value=2.5, parts={"lengths": 3.0, "right": 1.0})


def test_recipes_and_python_name_several(module: str, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "3+4?", "answer": "7"}\n{"question": "1+1?", "answer": "2"}\n')
    (tmp_path / "recipe.toml").write_text(
        f"""
        [task]
        name = "function"
        data = "{tmp_path}/q.jsonl"
        [[task.rewards]]
        function = "judges.py:format"
        weight = 0.5
        [[task.rewards]]
        function = "judges.py:right"
        """
    )
    config = load_config(tmp_path / "recipe.toml")
    assert [(part.part, part.weight) for part in config.task.rewards] == [("format", 0.5), ("right", 1.0)]
    save_config(config, tmp_path / "saved.toml")
    assert load_config(tmp_path / "saved.toml").task == config.task
    assert ("task.rewards.right", f"{tmp_path}/judges.py:right") in config.own_code  # beside the recipe
    data = str(tmp_path / "q.jsonl")
    named = run_config(
        None, {"data": data, "reward": ["judges.py:format", {"function": "judges.py:right", "weight": 2.0}]}
    )
    assert [(part.part, part.weight) for part in named.task.rewards] == [("format", 1.0), ("right", 2.0)]


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ('[[task.rewards]]\nfunction = "judges.py:right"\nwieght = 1', "task.rewards.0.wieght: unknown key; did you mean 'task.rewards.0.weight'"),
        ('[[task.rewards]]\nfunction = "judges.py:right"\nweight = "a"', "task.rewards.0.weight: expected a number, got 'a'"),
        ("[[task.rewards]]\nweight = 1.0", "task.rewards.0.function must name one"),
        ('[task]\nrewards = ["judges.py:right"]', "task.rewards.0: expected a section with keys such as task.rewards.0.function"),
    ],
    ids=["key", "type", "none", "text"],
)  # fmt: skip
def test_a_wrong_table_of_a_reward_is_named(tables: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(tables)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "recipe.toml")
    assert words in str(caught.value)
