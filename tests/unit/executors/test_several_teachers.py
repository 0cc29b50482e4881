"""A reference executor of some tasks scores their groups and hands the others on, in their order."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from training_fixtures import make_groups

from llamarl.channels.base import ChannelKind, ChannelSpec
from llamarl.config import validate
from llamarl.errors import ConfigError
from llamarl.executors import critic
from llamarl.executors.base import ExecutorContext
from llamarl.executors.critic import ReferenceExecutor
from llamarl.types import Group

TASKS = {"task": {"mixture": [{"name": "steps"}, {"name": "countdown"}], "name": "mixture"}}


class Marks:
    """Says -1 of every token."""

    def __init__(self, *_: object, **settings: object) -> None:
        self.layout = SimpleNamespace(is_data_leader=True)
        self.temperature = settings["temperature"]

    def score(self, groups: list[Group]) -> list[Group]:
        def marked(group: Group) -> Group:
            said = (np.full(len(r.tokens), -1.0, np.float32) for r in group.responses)
            responses = (
                dataclasses.replace(r, reference_logprobs=row) for r, row in zip(group.responses, said, strict=True)
            )
            return dataclasses.replace(group, responses=tuple(responses))

        return [marked(group) for group in groups]


def teacher(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], **more: Any) -> ReferenceExecutor:
    monkeypatch.setattr(critic, "FrozenScorer", Marks)
    reads, writes = (ChannelSpec(name=c, kind=ChannelKind.SCATTER, source="a", sink="b") for c in ("in", "out"))
    context = ExecutorContext(
        name="prose", rank=0, num_ranks=1, device="cpu", run_dir=None, seed=0, reads=(reads,), writes=(writes,),
        options=options,
    )  # fmt: skip
    made = ReferenceExecutor(validate({**TASKS, **more}), context)
    made.setup()
    return made


@pytest.mark.parametrize(
    ("options", "scored"), [({}, [True] * 4), ({"tasks": ["countdown"]}, [False, True, False, True])]
)
def test_groups_of_its_tasks_are_scored_and_all_are_handed_on_in_order(
    options: dict[str, Any], scored: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = ["steps", "countdown", "steps", "countdown"]
    groups = [
        dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, index=i, task=task))
        for i, (group, task) in enumerate(zip(make_groups(4, 2), tasks, strict=True))
    ]
    found = teacher(monkeypatch, options).step(0, {"in": list(groups)}).outputs["out"]
    assert [group.prompt.index for group in found] == [0, 1, 2, 3]
    assert [all(r.reference_logprobs is not None for r in group.responses) for group in found] == scored


def test_a_reference_says_its_log_probs_at_the_temperature_that_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of sampling; rows to imitate train at 1, and at another one the KL of equal weights would not be 0."""
    warm = {"generator": {"sampling": {"temperature": 0.7}}}
    rows = {"name": "demonstrations", "data": "rows.jsonl"}
    assert teacher(monkeypatch, {}, **warm).scorer.temperature == 0.7
    imitates = {"task": rows, "algorithm": {"name": "sft", "kl_coef": 0.1}}
    assert teacher(monkeypatch, {}, **warm, **imitates).scorer.temperature == 1.0


@pytest.mark.parametrize("tasks", [["stesp"], [], "steps"])
def test_a_task_that_is_none_is_refused(tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"prose.options: tasks must be some of \['steps', 'countdown'\]"):
        teacher(monkeypatch, {"tasks": tasks})


def test_a_second_teacher_that_is_not_named_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    itself = {"algorithm": {"advantage": "distillation"}, "reference": {"template": "{question}{answer}"}}
    with pytest.raises(ConfigError, match=r"executors.prose: it has no teacher: name one \(settings.reference.path\)"):
        teacher(monkeypatch, {}, **itself)
