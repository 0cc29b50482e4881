"""llamarl: asynchronous reinforcement learning for language models in native PyTorch.

    run = llamarl.train("tiny", num_ticks=20)              # a recipe, or model=, task=, reward= in its place
    run.metrics["reward/mean"], run.generate("a3 b9 =\\n")
    llamarl.LLM("bundled:tiny").generate(["a3 b9 =\\n"])

An open implementation of LlamaRL (arXiv:2505.24034). See ``docs/python.md``, and ``docs/architecture.md`` for the map.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarl.api.llm import LLM, Completion
    from llamarl.api.run import Run, train
    from llamarl.errors import LlamaRLError

__version__ = "0.1.0"

__all__ = ["LLM", "Completion", "LlamaRLError", "Run", "__version__", "train"]

_HOMES = {
    "LLM": "llamarl.api.llm",
    "Completion": "llamarl.api.llm",
    "LlamaRLError": "llamarl.errors",
    "Run": "llamarl.api.run",
    "train": "llamarl.api.run",
}


def __getattr__(name: str) -> Any:
    """Imported when first used: the command line and the worker processes want the package without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
