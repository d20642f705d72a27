"""A checkpoint's tokenizer behind the `Tokenizer` protocol: text to ids, chats to text, ids to text, and what ends a sequence.

Loaded through mlx-lm, which knows the chat formats that some checkpoints leave to code. Foreign code of the checkpoint runs only
when trusted.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from runtime.engine.checkpoint_config import describe, read_json_object
from runtime.engine.detokenizer import decode, detokenizer_factory
from runtime.engine.engine import Detokenizer, LoadError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
    "tiktoken.model",
)


MAX_TOKEN_IDS = 1 << 32
"""Ids travel as 32-bit numbers."""


class HfTokenizer:
    """`Tokenizer` on a Hugging Face tokenizer.

    eos_ids: every id that the tokenizer, generation_config.json or config.json names as an end. There is no lock on purpose: the
    library's own is enough for `encode` beside decoding, and a chat template that never returns must block nobody else.
    """

    def __init__(self, wrapper: Any, extra_eos_ids: frozenset[int] = frozenset()) -> None:
        """wrapper: mlx-lm's TokenizerWrapper."""
        self._wrapper = wrapper
        self._hf = wrapper._tokenizer
        self.eos_ids: frozenset[int] = frozenset(wrapper.eos_token_ids) | extra_eos_ids
        self.has_chat_template: bool = bool(wrapper.has_chat_template)
        self._vocabulary: dict[str, int] = self._hf.get_vocab()
        self.vocabulary_size: int = max(self._vocabulary.values(), default=-1) + 1
        self._new_detokenizer = detokenizer_factory(self._hf)

    @cached_property
    def vocabulary_digest(self) -> str:
        """SHA-256 in hex over all (token, id) pairs, each with its length, sorted by token and id."""
        digest = hashlib.sha256()
        for token, id_ in sorted(self._vocabulary.items()):
            data = token.encode("utf-8", "surrogatepass")
            digest.update(struct.pack("<II", len(data), id_))
            digest.update(data)
        return digest.hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int]) -> str:
        """The whole text at once, special tokens left out: what a detokenizer gives in pieces."""
        return decode(self._hf, ids)

    def render(self, messages: list[dict[str, Any]], *, options: dict[str, Any], add_generation_prompt: bool) -> str:
        return self._wrapper.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options)

    def special_token_text(self, name: str) -> str | None:
        """Text of a named token ("bos_token"; None when the tokenizer has none), or `name` itself when the vocabulary has it."""
        if name in self._hf.SPECIAL_TOKENS_ATTRIBUTES:
            text = getattr(self._hf, name, None)
            return str(text) if text else None
        return name if name in self._vocabulary else None

    def detokenizer(self) -> Detokenizer:
        return self._new_detokenizer()


def load_tokenizer(directory: Path, *, trust_remote_code: bool) -> HfTokenizer:
    """:raises LoadError: "tokenizer", "remote_code_refused", "malformed_config" (an end token that is no id)."""
    extra_eos_ids = _configured_eos_ids(directory)
    if not any(any(directory.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise LoadError("tokenizer", f"no tokenizer in {directory}; expected tokenizer.json")
    from mlx_lm.utils import load_tokenizer as load_wrapper

    try:
        # False, not None: with None transformers would ask on the terminal.
        wrapper = load_wrapper(directory, {"trust_remote_code": trust_remote_code})
        return HfTokenizer(wrapper, extra_eos_ids)
    except Exception as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise LoadError(
                "remote_code_refused",
                f"the tokenizer in {directory} needs the checkpoint's own code; "
                "load it with trust_remote_code=True only if you have read and trust that code",
            ) from error
        raise LoadError("tokenizer", f"cannot load the tokenizer in {directory}: {describe(error)}") from error


def _configured_eos_ids(directory: Path) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if not (directory / name).exists():
            continue
        value = read_json_object(directory / name).get("eos_token_id")
        for id_ in value if isinstance(value, list) else [value]:
            if isinstance(id_, int) and not isinstance(id_, bool) and 0 <= id_ < MAX_TOKEN_IDS:
                ids.add(id_)
            elif id_ is not None:
                raise LoadError(
                    "malformed_config", f"{name} in {directory}: 'eos_token_id' is {value!r}; expected a token id or a list of them"
                )
    return frozenset(ids)
