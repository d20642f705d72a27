"""What does a segment file say of itself, and where does it lie?

    <root>/v1/<fingerprint>/<hh>/<hash>.safetensors     hash: of the segment's last block; hh: its first two digits
    <root>/tmp/                                         files being written, see `temporary`
    <root>/keys/                                        tenants' keys, see `keys`

A segment is a run of whole blocks [start, end). Its name alone fixes tokens, model and scope of everything up to `end`, so a
file that is there already is as good as a new one; it may begin elsewhere (cut at another block), which readers allow for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from runtime.prefix import container
from runtime.prefix.container import ContainerError, Parsed
from runtime.prefix.hashing import BLOCK_TOKENS, DIGEST_BYTES, FORMAT_VERSION, BlockHash, Secret, seal_key
from runtime.prefix.layout import Layout, TensorSpec

SUFFIX: Final = ".safetensors"
FORMAT_DIRECTORY: Final = f"v{FORMAT_VERSION}"
_FORMAT_NAME: Final = "troupe-prefix"


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a segment says of itself; digests in hex.

    parent: hash of the block before `start`, empty at the start of a context. blocks: one hash a block, each a digest of its
    tokens and of all before them. owner: see `Scope.owner_tag`. checksums: of each tensor's bytes.
    """

    version: int = FORMAT_VERSION
    block_tokens: int = BLOCK_TOKENS
    fingerprint: str
    owner: str
    parent: str
    start: int
    end: int
    blocks: tuple[str, ...]
    layout: Layout
    checksums: dict[str, str]

    @property
    def name(self) -> BlockHash:
        return self.block_hashes[-1]

    @property
    def block_hashes(self) -> tuple[BlockHash, ...]:
        return tuple(BlockHash(bytes.fromhex(block)) for block in self.blocks)

    @property
    def parent_hash(self) -> BlockHash | None:
        return BlockHash(bytes.fromhex(self.parent)) if self.parent else None


class _Version(msgspec.Struct, frozen=True):
    version: int
    block_tokens: int


class OtherFormat(ValueError):
    """A header of another format version or block size: not damaged, but not ours to use."""


_decode_version = msgspec.json.Decoder(_Version).decode
_decode_header = msgspec.json.Decoder(Header).decode


def segment_path(root: Path, fingerprint: str, name: BlockHash) -> Path:
    digits = name.hex()
    return root / FORMAT_DIRECTORY / fingerprint / digits[:2] / f"{digits}{SUFFIX}"


def make_header(
    *,
    fingerprint: str,
    owner: str,
    chain: Sequence[BlockHash],
    start: int,
    end: int,
    layout: Layout,
    checksums: Mapping[str, str],
) -> Header:
    """`chain`: block hashes of the context from its beginning, at least up to `end`."""
    first, last = start // BLOCK_TOKENS, end // BLOCK_TOKENS
    return Header(
        fingerprint=fingerprint,
        owner=owner,
        parent=chain[first - 1].hex() if first else "",
        start=start,
        end=end,
        blocks=tuple(block.hex() for block in chain[first:last]),
        layout=layout,
        checksums=dict(checksums),
    )


def encode_head(header: Header, specs: Mapping[str, TensorSpec], secret: Secret) -> bytes:
    """Everything of the file before the tensors."""
    metadata = {"format": _FORMAT_NAME, "segment": msgspec.json.encode(header).decode()}
    return container.build(metadata, specs, seal_key(secret))


def most_head_bytes(layout: Layout) -> tuple[int, int]:
    """What `encode_head` gives at most for a segment of this layout: so much, and so much more for each of its blocks.

    Nearly exact: digits are reckoned for segments of up to a million positions at the far end of a thousand million.
    """
    block, far = bytes(DIGEST_BYTES).hex(), 1 << 30
    specs = layout.tensors(far, far + (1 << 20))
    header = Header(
        fingerprint=block,
        owner=block,
        parent=block,
        start=far,
        end=far + (1 << 20),
        blocks=(),
        layout=layout,
        checksums=dict.fromkeys(specs, container.checksum("", memoryview(b""), b"")),
    )
    # Each block is its digits, two quotes that are escaped in the text inside a text, and a comma.
    return len(encode_head(header, specs, Secret(bytes(DIGEST_BYTES)))) + container.ALIGNMENT, len(block) + 5


def is_sealed(head: bytes, secret: Secret) -> bool:
    return container.is_sealed(head, seal_key(secret))


def decode_head(head: bytes) -> tuple[Header, Parsed]:
    """What a header says, whether true or not: compare `is_sealed`.

    :raises ContainerError: it says nothing coherent.
    :raises OtherFormat: it is of another version or block size.
    """
    parsed = container.parse(head)
    if parsed.metadata.get("format") != _FORMAT_NAME:
        raise ContainerError(f"this is no file of ours but of format {parsed.metadata.get('format')!r}")
    text = parsed.metadata.get("segment", "")
    try:
        version = _decode_version(text)
        if version != _Version(FORMAT_VERSION, BLOCK_TOKENS):
            raise OtherFormat(f"it has version {version.version} and blocks of {version.block_tokens} tokens")
        header = _decode_header(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ContainerError(f"the segment's description is damaged: {error}") from error
    problem = _incoherence(header)
    if problem is not None:
        raise ContainerError(problem)
    return header, parsed


def _incoherence(header: Header) -> str | None:
    start, end = header.start, header.end
    if start < 0 or end <= start or start % BLOCK_TOKENS or end % BLOCK_TOKENS:
        return f"its positions {start}..{end} are no run of blocks"
    if len(header.blocks) != (end - start) // BLOCK_TOKENS:
        return f"it has {len(header.blocks)} block hashes for positions {start}..{end}"
    if (header.parent == "") != (start == 0):
        return f"a segment from position {start} with parent {header.parent!r}"
    if not all(_is_digest(digits) for digits in (*header.blocks, *([header.parent] if start else []))):
        return "its hashes are no hashes"
    return None


def _is_digest(digits: str) -> bool:
    try:
        return len(digits) == 2 * DIGEST_BYTES and bytes.fromhex(digits).hex() == digits
    except ValueError:
        return False


def open_regular(path: Path) -> int:
    """A descriptor of a regular file; never waits (as opening a pipe would) and follows no link.

    :raises OSError: there is none, or it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return descriptor


def read_head(descriptor: int) -> bytes:
    """Length and header of an open file.

    :raises ContainerError: the file is too short for the header it claims, or claims an absurd one.
    :raises OSError: it cannot be read.
    """
    length = os.pread(descriptor, container.LENGTH_BYTES, 0)
    header_bytes = int.from_bytes(length, "little")
    if len(length) < container.LENGTH_BYTES or header_bytes > container.MAX_HEADER_BYTES:
        raise ContainerError("the first 8 bytes are no length of a header")
    # One call reads at most 2 GiB and a header is far less, so a short read means the end of the file.
    header = os.pread(descriptor, header_bytes, container.LENGTH_BYTES)
    if len(header) < header_bytes:
        raise ContainerError(f"it ends inside its header of {header_bytes} bytes")
    return length + header
