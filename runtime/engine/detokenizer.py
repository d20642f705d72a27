"""How do token ids become text while they arrive, never half a character, at a cost that does not grow with the text?

The text is that of the tokenizer's own `decode(ids, skip_special_tokens=True)` without any clean-up of spaces: special tokens
(end, padding, role markers) are left out, added tokens that are not special (tool-call markup and the like) are shown. An id
that the vocabulary does not have shows as nothing.

Most tokenizers need only a table from id to bytes. It is used when it is seen to agree with `decode` on a sample of the
vocabulary; any other tokenizer is decoded in a small window that slides along. Where bytes are invalid for good, U+FFFD stands
for them; `decode` of byte-fallback tokenizers also destroys valid characters beside such bytes, here they are kept.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from runtime.engine.engine import Detokenizer

Decode = Callable[[Sequence[int]], str]

_NUM_SAMPLES = 256
_PATIENCE_TOKENS = 8
"""Tokens without a whole character after which the pending bytes are known to be invalid: a character has at most four."""
_KEPT_TOKENS = 12
"""What is kept of a window then: three replacements not shown yet stand for at most nine bytes, and the first three tokens may be
the rest of a character whose beginning was cut off."""

_REPLACEMENT = "\ufffd"
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("troupe_replace_each_byte", _replace_each_byte)


class TableDetokenizer:
    """From a table of each id's bytes. About a microsecond per token."""

    __slots__ = ("_decode", "_decoder", "_drop_space", "_drops_space", "_table")

    def __init__(self, table: Sequence[bytes], *, errors: str, drops_space: bool) -> None:
        """errors: how invalid bytes decode. drops_space: one space at the very beginning of the text is not shown."""
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._decode = self._decoder.decode
        self._drops_space = self._drop_space = drops_space

    def push(self, token: int) -> str:
        try:
            text = self._decode(self._table[token])
        except IndexError:
            return ""
        if self._drop_space and text:
            return self._first(text)
        return text

    def flush(self) -> str:
        text = self._decode(b"", True)
        self._decoder.reset()
        if self._drop_space and text:
            text = self._first(text)
        self._drop_space = self._drops_space
        return text

    def _first(self, text: str) -> str:
        self._drop_space = False
        return text.removeprefix(" ")


class WindowDetokenizer:
    """For any tokenizer: decodes the last few tokens again with each new one and shows what was added.

    The window begins where the last but one whole character ended, so that `decode` sees the same beginning before and after.
    """

    __slots__ = ("_decode", "_num_given", "_num_settled", "_shown_ids", "_window")

    def __init__(self, decode: Decode, shown_ids: frozenset[int]) -> None:
        """shown_ids: ids that are in the vocabulary and not special."""
        self._decode = decode
        self._shown_ids = shown_ids
        self._window: list[int] = []
        self._num_settled = 0
        """Leading tokens of the window that ended in a whole character when it was last shown."""
        self._num_given = 0
        """Leading characters of the window's text that have been shown."""

    def push(self, token: int) -> str:
        if token not in self._shown_ids:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        is_whole = not text.endswith(_REPLACEMENT)
        if is_whole:
            num_ready = len(text)
        elif len(self._window) - self._num_settled >= _PATIENCE_TOKENS:
            # The last three bytes may yet begin a character.
            num_ready = max(len(text) - 3, len(text.rstrip(_REPLACEMENT)))
        else:
            num_ready = len(text.rstrip(_REPLACEMENT))
        piece = text[self._num_given : num_ready]
        self._num_given = max(self._num_given, num_ready)
        if is_whole and piece:
            self._keep(self._window[self._num_settled :], 0)
            self._num_settled = len(self._window)
        elif len(self._window) - self._num_settled >= _PATIENCE_TOKENS:
            self._keep(self._window[-_KEPT_TOKENS:], len(text) - self._num_given)
            self._num_settled = 0
        return piece

    def flush(self) -> str:
        text = self._decode(self._window)[self._num_given :] if self._window else ""
        self._window, self._num_settled, self._num_given = [], 0, 0
        return text

    def _keep(self, window: list[int], num_pending: int) -> None:
        """Slide to `window`; the last `num_pending` characters of the text are not shown yet."""
        self._window = window
        self._num_given = max(0, len(self._decode(window)) - num_pending)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The whole text at once: what every detokenizer must come to."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def detokenizer_factory(tokenizer: Any) -> Callable[[], Detokenizer]:
    """Makes the fastest detokenizers that agree with `decode` for this Hugging Face tokenizer."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special_ids = _special_ids(tokenizer)
    style = _style(tokenizer)
    if style is not None:
        piece_bytes, errors, drops_space = style
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for piece, token in vocabulary.items():
            if token not in special_ids:
                table[token] = piece_bytes(piece)

        def from_table() -> Detokenizer:
            return TableDetokenizer(table, errors=errors, drops_space=drops_space)

        if _agree(from_table, partial(decode, tokenizer), sorted(set(vocabulary.values())), special_ids):
            return from_table
    shown_ids = frozenset(vocabulary.values()) - special_ids
    return lambda: WindowDetokenizer(partial(decode, tokenizer), shown_ids)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return frozenset(tokenizer.all_special_ids)
    return frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)


def _style(tokenizer: Any) -> tuple[Callable[[str], bytes], str, bool] | None:
    """(token text → bytes, how invalid bytes decode, whether a first space is dropped) of the known kinds of tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return None
    steps = json.loads(decoder.__getstate__())
    steps = steps["decoders"] if steps["type"] == "Sequence" else [steps]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes, "replace", False
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0]["pattern"] == {"String": "▁"} and steps[0]["content"] == " ":
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if steps[3:] in ([], [strip]):
            return _sentence_piece_bytes, "troupe_replace_each_byte", bool(steps[3:])
    return None


def _agree(make: Callable[[], Detokenizer], reference: Decode, ids: Sequence[int], special_ids: frozenset[int]) -> bool:
    """Each sampled id alone, and all those that are whole characters in a row."""
    sample = {*ids[:: max(1, len(ids) // _NUM_SAMPLES)], *special_ids, *ids[-_NUM_SAMPLES:]}
    whole = []
    for token in sorted(sample):
        text = reference([token])
        if _all_text(make(), [token]) != text:
            return False
        if _REPLACEMENT not in text:
            whole.append(token)
    return _all_text(make(), whole) == reference(whole)


def _all_text(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


# -- token text → bytes -----------------------------------------------------------------------------------------


def _byte_level_translation() -> dict[int, str]:
    """Code point of a byte's stand-in → that byte as a Latin-1 character.

    Printable bytes stand for themselves, the others for the code points from U+0100 on. Code points that stand for no byte go
    where Latin-1 cannot follow, so that encoding the result tells them.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(0x100) if byte not in printable]
    return dict.fromkeys(hidden, _REPLACEMENT) | {0x100 + index: chr(byte) for index, byte in enumerate(hidden)}


_BYTE_LEVEL = _byte_level_translation()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_BYTE_LEVEL).encode("latin-1")
    except UnicodeEncodeError:  # an added token in plain text
        return piece.encode()


def _sentence_piece_bytes(piece: str) -> bytes:
    if byte := _BYTE_FALLBACK.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace("▁", " ").encode()
