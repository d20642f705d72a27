"""How does a llama-style GGUF file become a checkpoint directory that mlx-lm loads?

Run as a child process: `python -m runtime.engine.convert GGUF OUT --form float32|4bit`. Prints one JSON object per line,
{"stage", "done", "total"}; on failure a one-line reason on stderr and exit code 1.

Facts of the format: MLX reads Q4_1 tensors as quantised triples (weight, scales, biases; groups of 32). GGUF keeps the rows of
q and k in interleaved rotary order, (heads, dim/2, 2), where the checkpoint wants halves, (heads, 2, dim/2); without the swap
the model speaks fluent nonsense. The tokenizer is byte-level BPE in the metadata.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GROUP_SIZE = 32
_SPECIAL = 3  # tokenizer.ggml.token_type of control tokens

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class ConversionError(Exception):
    """The file is not what this conversion understands; the message says where."""


def report(stage: str, done: int, total: int) -> None:
    print(json.dumps({"stage": stage, "done": done, "total": total}), flush=True)


def halves(rows: mx.array, num_heads: int) -> mx.array:
    """Rows of a q or k tensor from interleaved to halved rotary order; any trailing shape (weight, scales, biases)."""
    half = rows.shape[0] // num_heads // 2
    return mx.swapaxes(rows.reshape(num_heads, half, 2, *rows.shape[1:]), 1, 2).reshape(rows.shape)


def checkpoint_name(base: str) -> str:
    """The checkpoint's name of a GGUF tensor without its leaf ("blk.3.attn_q" → "model.layers.3.self_attn.q_proj")."""
    parts = base.split(".")
    if parts[0] == "blk" and len(parts) == 3 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}"
    if base in _OUTER_NAMES:
        return _OUTER_NAMES[base]
    raise ConversionError(f"unknown tensor {base!r}")


def rename(tensors: dict[str, mx.array], num_heads: int, num_kv_heads: int) -> dict[str, mx.array]:
    renamed = {}
    for name, value in tensors.items():
        base, leaf = name.rsplit(".", 1)
        if base.endswith(".attn_q"):
            value = halves(value, num_heads)
        elif base.endswith(".attn_k"):
            value = halves(value, num_kv_heads)
        renamed[f"{checkpoint_name(base)}.{leaf}"] = value
    return renamed


def bits_of(tensors: dict[str, mx.array], layer: str) -> int:
    """Bits per weight of a quantised layer, from the widths of its packed words and its scales."""
    return tensors[f"{layer}.weight"].shape[1] * 32 // (tensors[f"{layer}.scales"].shape[1] * GROUP_SIZE)


def dequantised(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    plain = {}
    for name, value in tensors.items():
        layer, leaf = name.rsplit(".", 1)
        scales = tensors.get(f"{layer}.scales")
        if scales is None:
            plain[name] = value.astype(mx.float32)
        elif leaf == "weight":
            biases = tensors[f"{layer}.biases"]
            whole = mx.dequantize(value, scales, biases, group_size=GROUP_SIZE, bits=bits_of(tensors, layer))
            plain[name] = whole.astype(mx.float32)
    return plain


def quantization_config(tensors: dict[str, mx.array]) -> dict[str, Any]:
    config: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4}
    for name in tensors:
        if name.endswith(".scales"):
            layer = name.removesuffix(".scales")
            bits = bits_of(tensors, layer)
            if bits != 4:
                config[layer] = {"group_size": GROUP_SIZE, "bits": bits}
    return config


def model_config(meta: dict[str, Any], tensors: dict[str, mx.array]) -> dict[str, Any]:
    if meta.get("general.architecture") != "llama":
        raise ConversionError(f"architecture {meta.get('general.architecture')!r}; only 'llama' is understood")

    def number(key: str) -> Any:
        return meta[f"llama.{key}"].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": number("block_count"),
        "intermediate_size": number("feed_forward_length"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base"),
        "max_position_embeddings": number("context_length"),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"].item(),
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"].item(),
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"].item(),
    }


def write_tokenizer(meta: dict[str, Any], out: Path, context_length: int) -> None:
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    kinds = meta["tokenizer.ggml.token_type"].tolist()
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [text for text, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.save(str(out / "tokenizer.json"))

    def text_of(role: str) -> str:
        return tokens[meta[f"tokenizer.ggml.{role}_token_id"].item()]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": text_of("bos"),
        "eos_token": text_of("eos"),
        "pad_token": text_of("padding"),
        "unk_token": text_of("unknown"),
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False), encoding="utf-8")


def convert(gguf: Path, out: Path, form: str) -> None:
    """Write config.json, model.safetensors and the tokenizer files of `form` into the existing directory `out`."""
    total = 4
    report("convert", 0, total)
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    tensors, meta = loaded
    tensors = rename(tensors, meta["llama.attention.head_count"].item(), meta["llama.attention.head_count_kv"].item())
    config = model_config(meta, tensors)
    report("convert", 1, total)
    if form == "4bit":
        config["quantization"] = quantization_config(tensors)
    else:
        tensors = dequantised(tensors)
    mx.save_safetensors(str(out / "model.safetensors"), tensors, metadata={"format": "mlx"})
    report("convert", 2, total)
    (out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_tokenizer(meta, out, config["max_position_embeddings"])
    report("convert", total, total)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.engine.convert", description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--form", choices=["float32", "4bit"], required=True)
    options = parser.parse_args(arguments)
    os.umask(0o077)
    mx.set_default_device(mx.cpu)  # copies only; and no second process on a Mac's GPU
    try:
        convert(options.gguf, options.out, options.form)
    except Exception as error:  # the process boundary: the parent shows this line to a person
        what = f"metadata key {error} is missing" if isinstance(error, KeyError) else str(error)
        print(f"cannot convert {options.gguf.name}: {what}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
