"""Are a checkpoint's weight files whole? Read from their headers in plain Python, before MLX maps any of them.

MLX trusts a header's offsets; a truncated file shows there as a late error without a file's name, or not at all.
Format: u64 little-endian header length, JSON header, then the tensors' bytes without gaps up to the end of the file.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.engine.engine import LoadError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

INDEX_NAME = "model.safetensors.index.json"

_ITEM_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class Shard:
    """One sound weight file. `spans`: (name, first byte, end byte) of each tensor, absolute in the file, in order of place."""

    path: Path
    header: bytes
    num_bytes: int
    spans: tuple[tuple[str, int, int], ...]


def check_weights(directory: Path) -> list[Shard]:
    """All weight files that mlx-lm will read (`model*.safetensors`), sorted by name.

    :raises LoadError: "missing_weights" (none, or some that the index names are absent), "corrupt_weights".
    """
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise LoadError("not_found", f"cannot read {directory}: {error.strerror or error}") from error
    found = [name for name in names if name.startswith("model") and name.endswith(".safetensors")]
    if INDEX_NAME in names:
        _check_index(directory / INDEX_NAME, set(names))
    if not found:
        others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors", ".npz"))]
        hint = f" It has {_listed(others)}; convert that with 'mlx_lm.convert'." if others else " Fetch the checkpoint again."
        raise LoadError("missing_weights", f"no weight files (model*.safetensors) in {directory}.{hint}")
    return [read_shard(directory / name) for name in found]


def read_shard(path: Path) -> Shard:
    """:raises LoadError: "corrupt_weights", naming the file and the bytes it should and does have."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise _corrupt(path, f"it has {num_bytes} bytes, too few for a header")
            (header_bytes,) = struct.unpack("<Q", start)
            if start == b"version ":
                raise _corrupt(path, "it is a Git LFS pointer, not the weights; run 'git lfs pull' in the checkpoint")
            if header_bytes > MAX_HEADER_BYTES:
                raise _corrupt(path, f"its first 8 bytes claim a header of {header_bytes} bytes; this is no safetensors file")
            if 8 + header_bytes > num_bytes:
                raise _corrupt(path, f"expected at least {8 + header_bytes} bytes for its header, found {num_bytes}")
            header = file.read(header_bytes)
    except OSError as error:
        raise _corrupt(path, f"it cannot be read: {error.strerror or error}") from error
    spans = _spans(path, header)
    end = max((end for _, _, end in spans), default=8 + header_bytes)
    if end != num_bytes:
        what = "truncated" if num_bytes < end else "longer than its header says"
        raise _corrupt(path, f"it is {what}: expected {end} bytes, found {num_bytes}")
    return Shard(path, header, num_bytes, spans)


def _spans(path: Path, header: bytes) -> tuple[tuple[str, int, int], ...]:
    try:
        tensors = json.loads(header.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"its header is no JSON ({error})") from error
    if not isinstance(tensors, dict):
        raise _corrupt(path, "its header is no JSON object")
    first_byte = 8 + len(header)
    spans = []
    for name, entry in tensors.items():
        if name == "__metadata__":
            continue
        begin, end = _offsets(path, name, entry)
        spans.append((name, first_byte + begin, first_byte + end))
    spans.sort(key=lambda span: (span[1], span[2], span[0]))
    expected = first_byte
    for name, begin, end in spans:
        if begin != expected:
            what = (
                "overlaps the tensor before it" if begin < expected else f"begins {begin - expected} bytes after the one before it"
            )
            raise _corrupt(path, f"tensor {name!r} {what}, by the header's offsets")
        expected = end
    return tuple(spans)


def _offsets(path: Path, name: str, entry: Any) -> tuple[int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)) and begin <= end
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise _corrupt(path, f"the header's entry of {name!r} is malformed: {str(entry)[:200]}")
    bits = _ITEM_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is not None and (end - begin) * 8 != math.prod(shape) * bits:
        raise _corrupt(
            path, f"tensor {name!r} of {dtype} {shape} needs {math.prod(shape) * bits // 8} bytes, its header gives {end - begin}"
        )
    return begin, end


def _check_index(index: Path, names: set[str]) -> None:
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        absent = sorted(shards - names)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise LoadError("corrupt_weights", f"{index} is not a weight index ({error}); fetch it again") from error
    if absent:
        raise LoadError(
            "missing_weights",
            f"{len(absent)} of the {len(shards)} weight files that {index.name} names are absent from {index.parent}: "
            f"{_listed(absent)}; the download is incomplete, fetch the checkpoint again",
        )


def _corrupt(path: Path, what: str) -> LoadError:
    return LoadError("corrupt_weights", f"weight file {path.name} in {path.parent} is damaged: {what}; fetch it again")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
