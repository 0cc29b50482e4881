"""What ``import llamarl`` offers, and that it stays light."""

from __future__ import annotations

import sys
import typing

import llamarl


def test_the_names_are_few_and_these() -> None:
    assert llamarl.__all__ == ["LLM", "Completion", "LlamaRLError", "Run", "__version__", "train"]
    for name in llamarl.__all__:
        assert getattr(llamarl, name) is not None


def test_every_public_callable_is_typed() -> None:
    for member in (llamarl.train, llamarl.LLM.__init__, llamarl.LLM.generate, llamarl.Run.resume, llamarl.Run.generate):
        hints = typing.get_type_hints(member, vars(sys.modules[member.__module__]) | _typing_names())
        assert "return" in hints, member


def _typing_names() -> dict[str, object]:
    from llamarl.observability.rollouts import Rollout

    return {"LLM": llamarl.LLM, "Completion": llamarl.Completion, "Rollout": Rollout}


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(llamarl, "trian")
