"""The last that a process imports from which commands are forked: it has what a model's first loading makes, and no fork looks through
its modules for what could be collected."""

import gc
import importlib

importlib.import_module("transformers.models.llama.modeling_llama")
importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()
