"""What will a model need, by its files and spec alone, and what does it need by its own facts once it is loaded?

Reads config.json and the sizes of the weight files; no weights, and no library that knows them. Estimates may be wrong: the facts
of the load correct them (`Ledger.loaded`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from runtime.config import ModelSpec
from runtime.memory.ledger import Need
from runtime.protocol.events import ModelFacts

PROCESS_BYTES: Final = 128 << 20
"""Interpreter, libraries and the allocator's reserve (measured on Linux: 72 to 108 MiB beside the weights)."""
FAKE_PROCESS_BYTES: Final = 48 << 20
LEAST_TOKENS: Final = 1024
"""Of cache that a model has for itself, so that a sequence gets somewhere whatever the others take."""
CACHE_SLACK: Final = 1.5
"""Rows of a batch lie in one rectangle as long as the longest, with room to grow: more than their tokens."""
_FLOAT_BYTES: Final = 4
_DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


def of_facts(spec: ModelSpec, facts: ModelFacts, prefill_bytes: int) -> Need:
    """prefill_bytes: as estimated before, for nothing in the facts says better."""
    return _need(spec, facts.weights_bytes, 0, facts.bytes_per_token, facts.context_length, prefill_bytes)


def of_files(spec: ModelSpec, directory: Path | None, prefill_chunk_tokens: int) -> Need:
    """directory: of the checkpoint, None where it is not here yet: then only what every process takes is known."""
    if spec.fake is not None:
        return _need(spec, spec.fake.weight_bytes, 0, 0, spec.fake.context_length, 0)
    if directory is None:
        return _need(spec, 0, 0, 0, 0, 0)
    sizes = [path.stat().st_size for path in sorted(directory.glob("*.safetensors"))]
    config = _config(directory)
    context = min(_number(config, "max_position_embeddings", 1 << 20), spec.max_context_tokens or (1 << 20))
    widest = max(4 * _number(config, "intermediate_size", 0) + 8 * _number(config, "hidden_size", 0), 0)
    prefill_bytes = prefill_chunk_tokens * widest * _FLOAT_BYTES + _number(config, "vocab_size", 0) * _FLOAT_BYTES * spec.max_slots
    return _need(spec, sum(sizes), max(sizes, default=0), _bytes_per_token(config), context, prefill_bytes)


def max_tokens(need: Need, granted_bytes: int) -> int | None:
    """That a worker's sequences may hold together within so many bytes of cache; None: as many as they like."""
    if not need.bytes_per_token or granted_bytes >= need.kv_most_bytes:
        return None
    return max(1, int(granted_bytes / (need.bytes_per_token * CACHE_SLACK)))


def _need(spec: ModelSpec, weights: int, load: int, bytes_per_token: int, context: int, prefill: int) -> Need:
    per_token = int(bytes_per_token * CACHE_SLACK)
    return Need(
        weights_bytes=weights,
        process_bytes=PROCESS_BYTES if spec.fake is None else FAKE_PROCESS_BYTES,
        prefill_bytes=prefill,
        load_bytes=load,
        kv_least_bytes=per_token * min(LEAST_TOKENS, context),
        kv_most_bytes=per_token * context * spec.max_slots,
        bytes_per_token=bytes_per_token,
    )


def _config(directory: Path) -> dict[str, Any]:
    """Nothing where it cannot be read: what is wrong with it the load will say."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _number(config: dict[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 32 else default


def _bytes_per_token(config: dict[str, Any]) -> int:
    """Keys and values of all layers, as if all were of full attention: never too little for those that are not."""
    heads = _number(config, "num_attention_heads", 0)
    if not heads:
        return 0
    width = _number(config, "head_dim", _number(config, "hidden_size", 0) // heads)
    dtype = _DTYPE_BYTES.get(str(config.get("torch_dtype", config.get("dtype", ""))), _FLOAT_BYTES)
    return 2 * _number(config, "num_hidden_layers", 0) * _number(config, "num_key_value_heads", heads) * width * dtype
