"""Which token does the fake engine draw? A hash of every id fed so far, so that any foreign, missing or repeated one shows.

At temperature 0 only what can move an argmax is mixed in (penalties and bias); above 0 also temperature, filters, seed
and the absolute position of the draw. Hashed tokens are printable ASCII and, now and then, the bytes of one longer character.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from runtime.engine.fake_text import EOS
from runtime.protocol.commands import Sampling
from runtime.protocol.events import TokenLogprob

ENTRY_BYTES = 16
_POSITION = struct.Struct("<q")
_ID = struct.Struct("<I")
_SPECIAL_FIRST_CONTINUATION = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x9F, 0x9F), 0xF4: (0x80, 0x8F)}


def settings_key(sampling: Sampling) -> bytes:
    """What of the settings takes part in every draw of a sequence."""
    always = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias)
    none = (1.0, 0.0, 0.0, ())
    if sampling.temperature == 0:
        return b"" if always == none else msgspec.msgpack.encode(always)
    drawn = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed)
    return msgspec.msgpack.encode((always, drawn))


class Context:
    """The ids fed so far, and what stands for their keys and values: one entry a position, made of its id and all before.

    A draw depends on every entry, so that a single wrong one among restored ones shows, as would one put in another's place.
    """

    __slots__ = ("_hash", "entries", "ids")

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids: list[int] = []
        self.entries = bytearray()
        self._hash = blake2b(digest_size=16)
        self.feed(ids)

    @classmethod
    def restored(cls, ids: Sequence[int], entries: bytes) -> Context:
        """As if `ids` had been fed, if `entries` are what that would have made."""
        context = cls()
        context.ids.extend(ids)
        context._extend(entries)
        return context

    def feed(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)
        entry = bytes(self.entries[-ENTRY_BYTES:])
        entries = bytearray()
        for token in ids:
            entry = blake2b(entry + _ID.pack(token), digest_size=ENTRY_BYTES).digest()
            entries += entry
        self._extend(entries)

    def _extend(self, entries: bytes | bytearray) -> None:
        self.entries += entries
        self._hash.update(entries)

    def draw(self, key: bytes, *, with_position: bool, eos_one_in: int) -> int:
        """The token that follows. `with_position`: mix in the absolute position of the draw."""
        mixed = self._hash.copy()
        mixed.update(b"draw" + key)
        if with_position:
            mixed.update(_POSITION.pack(len(self.ids)))
        return _token(int.from_bytes(mixed.digest(), "little"), self.ids[-3:], eos_one_in)

    def disagrees(self, one_in: int) -> bool:
        """Whether this is one of the draws, once in so many, in which an engine is to say something else; 0: never."""
        if not one_in:
            return False
        mixed = self._hash.copy()
        mixed.update(b"disagree")
        return int.from_bytes(mixed.digest(), "little") % one_in == 0

    def logprobs(self, token: int, num_top: int) -> TokenLogprob:
        """Made-up but fixed: halving probabilities, the drawn token first."""
        top = tuple(((token + rank) % 256 if rank else token, -0.6931471805599453 * (rank + 1)) for rank in range(num_top))
        return TokenLogprob(token, -0.6931471805599453, top)


def another(token: int) -> int:
    """A printable token that is not this one."""
    return 33 if token == 32 else 32


def _token(value: int, tail: Sequence[int], eos_one_in: int) -> int:
    """`value`: 128 random bits. Inside a character its next byte, otherwise the end or the beginning of a character."""
    continuation = _continuation_range(tail)
    if continuation is not None:
        low, high = continuation
        return low + value % (high - low + 1)
    if eos_one_in and (value >> 64) % eos_one_in == 0:
        return EOS
    match (value >> 96) % 32:
        case 0:
            return 0xC3 + value % 13  # two bytes: Latin, Greek, Cyrillic
        case 1:
            return 0xE4 + value % 6  # three bytes: CJK
        case 2:
            return 0xF0  # four bytes: emoji and their neighbours
        case _:
            return 32 + value % 95


def _continuation_range(tail: Sequence[int]) -> tuple[int, int] | None:
    """The bytes that may follow when `tail` (the last three ids) ends inside a character, else None."""
    for num_seen, byte in enumerate(reversed(tail)):
        if 0x80 <= byte < 0xC0:
            continue
        num_needed = 1 if 0xC2 <= byte < 0xE0 else 2 if 0xE0 <= byte < 0xF0 else 3 if 0xF0 <= byte < 0xF5 else 0
        if num_seen >= num_needed:
            return None
        return _SPECIAL_FIRST_CONTINUATION.get(byte, (0x80, 0xBF)) if num_seen == 0 else (0x80, 0xBF)
    return None
