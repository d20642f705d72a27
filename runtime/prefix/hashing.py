"""What is a prefix called? Names that only those who may share it can work out.

    fingerprint   digest of everything the bits of a cache depend on, except the tokens
    scope key     32 random bytes of a tenant, or a public constant for the scope `shared`
    secret        digest of the fingerprint under the scope key: the chain's root; never stored, never logged
    block hash    h(i) = digest of (h(i - 1), block i's token ids, its images) under the secret

Every step is keyed by the secret, not just the first: otherwise one file's header (which names its parent) would let anyone
try guesses of the next block's tokens. Without the key, names and headers of two files say nothing about each other,
except that one continues the other; once the key is destroyed nobody can tell whose they were or what they were of.

Every digest is over a struct: domain, number of fields, and each field with its length, so that no two different lists of
fields are encoded alike.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NewType

from runtime.prefix.layout import Layout
from runtime.protocol.ids import TenantId
from runtime.protocol.tokens import TokenIds

BLOCK_TOKENS: Final = 256
FORMAT_VERSION: Final = 1
DIGEST_BYTES: Final = 32
KEY_BYTES: Final = 32

BlockHash = NewType("BlockHash", bytes)
Secret = NewType("Secret", bytes)
"""Secret of one scope and fingerprint. A worker gets it with the tokens it is to hash; no file holds it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What the bits of a cache depend on, beside the tokens.

    model: the engine's fingerprint (weights, config, tokenizer, template). adapter: None for none.
    numerics: who computes (library version, device, BLAS): bits of another are valid but would not equal a cold run's.
    layout: kinds, dtypes (also of quantised keys and values) and shapes of the layers.
    """

    model: str
    adapter: str | None
    numerics: str
    layout: Layout

    def fingerprint(self) -> str:
        """64 hex digits."""
        return _digest(
            b"",
            b"fingerprint",
            _number(FORMAT_VERSION),
            _number(BLOCK_TOKENS),
            _text(self.model),
            *([] if self.adapter is None else [_text(self.adapter)]),
            _text(self.numerics),
            self.layout.encoded(),
        ).hex()


@dataclass(frozen=True, slots=True)
class Scope:
    """Who may share entries. tenant: whose it is, None for `shared`."""

    tenant: TenantId | None
    key: bytes = field(repr=False)

    def secret(self, fingerprint: str) -> Secret:
        return Secret(_digest(self.key, b"root", _text(fingerprint)))

    def owner_tag(self, name: BlockHash) -> str:
        """By which a holder of the key recognises a segment of this scope, and nobody else does; different for each segment."""
        return _digest(self.key, b"owner", name).hex()


def tenant_scope(tenant: TenantId, key: bytes) -> Scope:
    """:raises ValueError: the key is no `KEY_BYTES` long."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a tenant's key has {KEY_BYTES} bytes, this one {len(key)}")
    # The tenant's name goes in too: two tenants that were given one key still share nothing.
    return Scope(tenant, _digest(key, b"tenant", _text(tenant)))


def shared_scope() -> Scope:
    """Anyone can work out these names: for prefixes that the host says are no secret."""
    return Scope(None, _digest(b"", b"shared"))


@dataclass(frozen=True, slots=True)
class Image:
    """first_index: position of its first placeholder token. digest: of its decoded or encoded bytes, any length."""

    first_index: int
    digest: bytes


def block_hashes(secret: Secret, tokens: TokenIds, images: Sequence[Image] = ()) -> list[BlockHash]:
    """One hash for each whole block; the incomplete one at the end has none. An image counts in the block it begins in."""
    data = memoryview(tokens.to_bytes())
    hashes: list[BlockHash] = []
    parent = b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        end = start + BLOCK_TOKENS
        seen = sorted((image.first_index, image.digest) for image in images if start <= image.first_index < end)
        encoded_images = [_struct(b"image", _number(index), digest) for index, digest in seen]
        parent = _digest(secret, b"block", parent, data[4 * start : 4 * end], *encoded_images)
        hashes.append(BlockHash(parent))
    return hashes


def seal_key(secret: Secret) -> bytes:
    """Key of the digests that protect a file against damage (and, in a tenant's scope, against forgery)."""
    return _digest(secret, b"seal")


def tenant_file_name(tenant: TenantId) -> str:
    """A plain file name for a tenant of any name; different for different names."""
    return _digest(b"", b"tenant file", _text(tenant)).hex()


def _digest(key: bytes, domain: bytes, *fields: bytes | memoryview) -> bytes:
    return blake2b(_struct(domain, *fields), digest_size=DIGEST_BYTES, key=key, person=b"troupe-prefix").digest()


def _struct(domain: bytes, *fields: bytes | memoryview) -> bytes:
    parts: list[bytes | memoryview] = [struct.pack("<QQ", len(domain), len(fields)), domain]
    for part in fields:
        parts += [struct.pack("<Q", len(part)), part]
    return b"".join(parts)


def _number(value: int) -> bytes:
    return struct.pack("<Q", value)


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")
