"""Ten sequences for an engine, and a run to their end."""

from typing import Any

from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams, Sequence

__all__ = ["make_sequences", "run"]


def make_sequences(temperature: float = 0.0, **params: Any) -> list[Sequence]:
    """Five prompts, two responses each, that end after 20, 30, ... 60 tokens."""
    prompts = [[5 + (7 * i + j) % 90 for j in range(3 + 4 * i)] for i in range(5)]
    return [
        Sequence(
            prompt_index=i,
            sample_index=j,
            prompt_tokens=list(p),
            params=SamplingParams(max_new_tokens=20 + 10 * i, temperature=temperature, **params),
            seed=100 * i + j,
        )
        for i, p in enumerate(prompts)
        for j in range(2)
    ]


def run(engine: NativeEngine, sequences: list[Sequence]) -> list[Sequence]:
    engine.add(sequences)
    for _ in range(2000):
        if not engine.has_work:
            return sequences
        engine.step()
    raise AssertionError("the engine did not finish")
