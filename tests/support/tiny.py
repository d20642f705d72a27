"""Makes tiny random checkpoints: real directories that mlx-lm loads in a tenth of a second.

Vocabulary: id b is the byte b for b < 256, then the special tokens below (`VOCABULARY_SIZE` = 263 in all). The two tool-call
markers are added tokens that are *not* special. Weights are three times the usual size, so that outputs vary; with the usual
ones a random model repeats one token. The same arguments give the same bytes on every machine.
"""

from __future__ import annotations

import importlib
import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

BOS_ID = 256
EOS_ID = 257
PAD_ID = 258
IM_START_ID = 259
IM_END_ID = 260
TOOL_CALL_ID = 261
TOOL_CALL_END_ID = 262
VOCABULARY_SIZE = 263
SPECIAL_TOKENS = {"<s>": BOS_ID, "</s>": EOS_ID, "<pad>": PAD_ID, "<|im_start|>": IM_START_ID, "<|im_end|>": IM_END_ID}
PLAIN_ADDED_TOKENS = {"<tool_call>": TOOL_CALL_ID, "</tool_call>": TOOL_CALL_END_ID}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ATTENTION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _ATTENTION | {"architectures": ["LlamaForCausalLM"]},
    "qwen3": _ATTENTION | {"architectures": ["Qwen3ForCausalLM"]},
    "gemma3_text": _ATTENTION
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
    },
    "gpt_oss": _ATTENTION
    | {
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": 64,
        "max_position_embeddings": 131072,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "lfm2": _ATTENTION
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "num_hidden_layers": 3,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "qwen3_next": _ATTENTION
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": 4,
        "max_position_embeddings": 2048,
    },
    "mamba": {
        "architectures": ["MambaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
    },
}


def make_tiny(
    directory: Path | str, family: str, *, seed: int = 0, chat_template: bool = True, scale: float = 3.0, **overrides: Any
) -> Path:
    """Write a checkpoint of `family` (see `FAMILIES`) into `directory` (made if absent) and return it.

    `overrides` replace keys of config.json before the weights are made; None removes a key. `scale`: of the weights.
    Without a chat template the tokenizer has none at all, and generation ends at `</s>` alone instead of also at `<|im_end|>`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCABULARY_SIZE,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        **FAMILIES[family],
        **overrides,
    }
    config = {key: value for key, value in config.items() if value is not None}
    _write_json(directory / "config.json", config)
    _write_tokenizer(directory, chat_template)
    mx.save_safetensors(str(directory / "model.safetensors"), _weights(config, seed, scale), metadata={"format": "mlx"})
    return directory


class TinyShelf:
    """Makes each checkpoint once and keeps it: `shelf("llama", seed=3)`. Callers must not change what they get."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Path] = {}

    def __call__(self, family: str, **options: Any) -> Path:
        key = json.dumps([family, options], sort_keys=True)
        if key not in self._made:
            self._made[key] = make_tiny(self._root / f"{family}-{len(self._made)}", family, **options)
        return self._made[key]


def _weights(config: dict[str, Any], seed: int, scale: float) -> dict[str, mx.array]:
    """Matrices uniform in ±scale/√(inputs), each from a generator of its own; vectors (norms, decays) as the model makes them."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    weights: dict[str, mx.array] = {}
    for name, value in tree_flatten(model.parameters()):
        if value.ndim < 2 or name.endswith("A_log"):
            weights[name] = value
            continue
        bound = scale / math.sqrt(_num_inputs(name, value.shape))
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        weights[name] = mx.array(random.uniform(-bound, bound, value.shape).astype(np.float32))
    mx.eval(weights)
    return weights


def _num_inputs(name: str, shape: tuple[int, ...]) -> int:
    is_convolution = "conv" in name and len(shape) == 3
    return shape[1] * shape[2] if is_convolution else shape[-1]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def _byte_characters() -> list[str]:
    """The stand-in of each byte in byte-level vocabularies: itself where printable, else the next free one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _write_tokenizer(directory: Path, chat_template: bool) -> None:
    added = [_added_token(text, id_, special=True) for text, id_ in SPECIAL_TOKENS.items()]
    added += [_added_token(text, id_, special=False) for text, id_ in PLAIN_ADDED_TOKENS.items()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, first],
            "pair": [bos, first, second],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS_ID], "tokens": ["<s>"]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }
    _write_json(directory / "tokenizer.json", tokenizer)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE
        _write_json(directory / "generation_config.json", {"eos_token_id": [EOS_ID, IM_END_ID]})
    _write_json(directory / "tokenizer_config.json", settings)


def _added_token(text: str, id_: int, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id_, "content": text, **flags, "special": special}


MakeTiny = Callable[..., Path]
"""Type of the `tiny` fixture: (family, **options of make_tiny) → checkpoint directory, made once per test session."""
