"""A made-up model with all kinds of layers, and segments of it, for the tests of the cache files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from runtime.prefix.hashing import BLOCK_TOKENS, BlockHash, Identity, Scope, block_hashes, tenant_scope
from runtime.prefix.layout import TOKENS, Dense, Field, Layout, Recurrent, Sliding
from runtime.prefix.publish import Draft, Published, publish
from runtime.prefix.restore import Segment, Wanted
from runtime.protocol.ids import TenantId
from runtime.protocol.tokens import TokenIds

KEYS = Field("keys", "BF16", (2, TOKENS, 4))
VALUES = Field("values", "BF16", (2, TOKENS, 4))
SLIDING = Sliding((KEYS, VALUES), 100)
RECURRENT = Recurrent((Field("0", "F32", (3, 8)), Field("1", "U8", (5,))))
DENSE_LAYOUT = Layout((Dense((KEYS, VALUES)), Dense((KEYS, VALUES))))
MIXED_LAYOUT = Layout((Dense((KEYS, VALUES)), SLIDING, RECURRENT))
STATE_LAYOUT = Layout((RECURRENT, SLIDING))

ALICE = tenant_scope(TenantId("alice"), b"a" * 32)
BOB = tenant_scope(TenantId("bob"), b"b" * 32)


def fingerprint(layout: Layout = MIXED_LAYOUT) -> str:
    return Identity("model", None, "cpu", layout).fingerprint()


def tokens(num_tokens: int, seed: int = 0) -> TokenIds:
    """The same seed gives beginnings of one endless prompt."""
    generator = random.Random(seed)
    return TokenIds(generator.randrange(1 << 17) for _ in range(num_tokens))


def chain_of(prompt: TokenIds, scope: Scope = ALICE, layout: Layout = MIXED_LAYOUT) -> list[BlockHash]:
    return block_hashes(scope.secret(fingerprint(layout)), prompt)


def draft(prompt: TokenIds, start: int, end: int, *, scope: Scope = ALICE, layout: Layout = MIXED_LAYOUT, **changes: Any) -> Draft:
    """Contents are fixed by the chain's end, so that equal names mean equal contents."""
    chain = chain_of(prompt, scope, layout)
    generator = random.Random(chain[end // BLOCK_TOKENS - 1] + bytes([start // BLOCK_TOKENS]))
    contents = {name: (spec, generator.randbytes(spec.num_bytes)) for name, spec in layout.tensors(start, end).items()}
    arguments: dict[str, Any] = {
        "fingerprint": fingerprint(layout),
        "secret": scope.secret(fingerprint(layout)),
        "owner": scope.owner_tag(chain[end // BLOCK_TOKENS - 1]),
        "chain": chain,
        "start": start,
        "end": end,
        "layout": layout,
        "tensors": contents,
    }
    return Draft(**{**arguments, **changes})


def published(root: Path, of: Draft) -> Published:
    result = publish(root, of)
    assert isinstance(result, Published), result
    return result


def wanted(of: Draft, **changes: Any) -> Wanted:
    """All of a draft."""
    arguments: dict[str, Any] = {
        "fingerprint": of.fingerprint,
        "secret": of.secret,
        "layout": of.layout,
        "chain": of.chain,
        "name": of.chain[of.end // BLOCK_TOKENS - 1],
        "start": of.start,
        "end": of.end,
        "with_checkpoint": True,
    }
    return Wanted(**{**arguments, **changes})


def contents(segment: Segment) -> dict[str, bytes]:
    return {name: bytes(view) for name, (_, view) in segment.tensors.items()}


def written(of: Draft) -> dict[str, bytes]:
    return {name: bytes(data) for name, (_, data) in of.tensors.items()}


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())
