"""The last that a process imports from which commands are forked: it has what a model's first loading and first tokens make, and no fork
looks through its modules for what could be collected."""

import gc
import importlib
import os

import torch

from llamarl.api.llm import LLM

for verb in ("cluster", "doctor", "eval", "export", "generate", "plan", "report", "simulate", "watch"):
    importlib.import_module(f"llamarl.cli.{verb}")
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads: a process that has any is not forked
model = LLM("bundled:tiny")
model.generate(["1+1="], max_new_tokens=2)
del model, os.environ["TOKENIZERS_PARALLELISM"]
torch.manual_seed(torch.initial_seed())  # as when torch is imported
assert len(os.listdir("/proc/self/task")) == 1
gc.collect()
gc.freeze()
