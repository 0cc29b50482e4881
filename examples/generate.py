"""Sample from a model folder with the native engine.

python examples/generate.py build/smollm2 "What is the capital of France?"
"""

import argparse

from llamarl.engine.engine import NativeEngine
from llamarl.engine.sequence import SamplingParams, Sequence
from llamarl.models.loading import load_tokenizer
from llamarl.settings.engine import EngineConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="Hugging Face folder, or bundled:NAME")
parser.add_argument("prompts", nargs="+")
parser.add_argument("--quantization", default="none", help="none, or int8 on CPU")
arguments = parser.parse_args()

tokenizer = load_tokenizer(arguments.model)
engine = NativeEngine(arguments.model, EngineConfig(), tokenizer=tokenizer, quantization=arguments.quantization)
params = SamplingParams(max_new_tokens=64, temperature=0.0)
for index, text in enumerate(arguments.prompts):
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    engine.add([Sequence(prompt_index=index, sample_index=0, prompt_tokens=tokens, params=params, seed=index)])
while engine.has_work:
    for done in engine.step():
        answer = tokenizer.decode(done.tokens, skip_special_tokens=True)
        print(f"[{done.prompt_index}] {answer} ({done.finish_reason})")
