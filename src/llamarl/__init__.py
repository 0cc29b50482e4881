"""llamarl: asynchronous reinforcement learning for language models in native PyTorch.

An open implementation of LlamaRL (arXiv:2505.24034). See ``docs/architecture.md`` for the map.
"""

__version__ = "0.1.0"
