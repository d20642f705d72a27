"""Which model is this, whatever its path? A digest that changes when a checkpoint's meaning does, and is cheap to make.

Whole contents of the config, tokenizer and template files; of each weight file its name, size and whole header (names, shapes,
types of all tensors); and of each tensor the first, middle and last `SAMPLE_BYTES`. Retraining, requantising or merging an
adapter touches a tensor everywhere, so the samples show it; someone who wants to hide one changed weight can.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from runtime.engine.safetensors_check import Shard

SAMPLE_BYTES = 256
_VERSION = b"troupe-fingerprint-1"
_TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".jsonl")
_IRRELEVANT = ("README", "LICENSE", "model.safetensors.index.json")


def fingerprint(directory: Path, shards: Sequence[Shard]) -> str:
    """SHA-256 in hex.

    :raises OSError: a file vanished or cannot be read.
    """
    digest = hashlib.sha256(_VERSION)
    for name in sorted(os.listdir(directory)):
        path = directory / name
        if name.endswith(_TEXT_SUFFIXES) and not name.startswith(_IRRELEVANT) and path.is_file():
            _add(digest, name.encode(), path.read_bytes())
    for shard in shards:
        _add(digest, shard.path.name.encode(), str(shard.num_bytes).encode(), shard.header)
        with shard.path.open("rb", buffering=0) as file:
            for _, begin, end in shard.spans:
                digest.update(_samples(file.fileno(), begin, end))
    return digest.hexdigest()


def _samples(descriptor: int, begin: int, end: int) -> bytes:
    if end - begin <= 3 * SAMPLE_BYTES:
        return os.pread(descriptor, end - begin, begin)
    middle = begin + (end - begin - SAMPLE_BYTES) // 2
    return b"".join(os.pread(descriptor, SAMPLE_BYTES, place) for place in (begin, middle, end - SAMPLE_BYTES))


def _add(digest: hashlib._Hash, *parts: bytes) -> None:
    for part in parts:  # each with its length, so that no two lists of parts look alike
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
