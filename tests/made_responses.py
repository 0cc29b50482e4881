"""Responses and groups of which a test says what it looks at."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from llamarl.types import Group, Prompt, Response

__all__ = ["made_group", "made_response"]


def made_response(
    sample: int = 0,
    *,
    index: int = 0,
    tokens: Sequence[int] = (1,),
    logprobs: float | Sequence[float] = -1.0,
    versions: int | Sequence[int] = 0,
    mask: bool | Sequence[bool] = True,
    **more: Any,
) -> Response:
    """Make one; a single number stands for every token."""
    return Response(
        prompt_index=index,
        sample_index=sample,
        tokens=np.array(tokens, np.int32),
        behavior_logprobs=np.full(len(tokens), logprobs, np.float32),
        policy_versions=np.full(len(tokens), versions, np.int32),
        loss_mask=np.full(len(tokens), mask, np.bool_),
        **{"text": "", "finish_reason": "stop"} | more,
    )


def made_group(responses: Iterable[Response], *, index: int = 0, tokens: Sequence[int] = (1,), **more: Any) -> Group:
    """Make one; ``more`` is of its prompt."""
    prompt = Prompt(index=index, tokens=np.array(tokens, np.int32), **{"text": ""} | more)
    return Group(prompt=prompt, responses=tuple(responses))
