"""How does the fake engine turn text into ids and back? Every UTF-8 byte is a token, and a few special tokens follow."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any, Final

BOS: Final = 256
EOS: Final = 257
IM_START: Final = 258
IM_END: Final = 259
SPECIAL_TOKENS: Final = {"<|bos|>": BOS, "<|eos|>": EOS, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
VOCABULARY_SIZE: Final = 260
EOS_IDS: Final = frozenset({EOS, IM_END})

_SPECIAL_TEXTS = {number: text for text, number in SPECIAL_TOKENS.items()}
_SPECIAL_PATTERN = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")


def encode(text: str, *, add_special_tokens: bool) -> list[int]:
    """Ids of `text`; the literal names of special tokens become those tokens, as with real tokenizers.

    :raises UnicodeEncodeError: `text` holds half a surrogate pair.
    """
    ids = [BOS] if add_special_tokens else []
    for part in _SPECIAL_PATTERN.split(text):
        special = SPECIAL_TOKENS.get(part)
        if special is None:
            ids.extend(part.encode())
        else:
            ids.append(special)
    return ids


def render(messages: list[dict[str, Any]], *, options: dict[str, Any], add_generation_prompt: bool) -> str:
    """ChatML, with tools and reasoning effort in a system block of their own at the front.

    :raises ValueError: an option that this template does not know.
    """
    unknown = options.keys() - {"tools", "reasoning_effort"}
    if unknown:
        raise ValueError(f"the fake chat template does not know {sorted(unknown)}")
    blocks = []
    if options:
        blocks.append(f"<|im_start|>system\n{json.dumps(options, ensure_ascii=False, sort_keys=True)}<|im_end|>\n")
    blocks += [f"<|im_start|>{message['role']}\n{message['content'] or ''}<|im_end|>\n" for message in messages]
    if add_generation_prompt:
        blocks.append("<|im_start|>assistant\n")
    return "".join(blocks)


class FakeDetokenizer:
    """Bytes to text, never half a character; special tokens show as their names."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token < 256:
            return self._decoder.decode(bytes((token,)))
        return self.flush() + _SPECIAL_TEXTS[token]

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class FakeTokenizer:
    """See the `Tokenizer` protocol. `on_encode` is called before each `encode` (the fault step "prepare")."""

    def __init__(self, *, has_chat_template: bool = True, on_encode: Callable[[], None] | None = None) -> None:
        self.eos_ids = EOS_IDS
        self.has_chat_template = has_chat_template
        self._on_encode = on_encode

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._on_encode is not None:
            self._on_encode()
        return encode(text, add_special_tokens=add_special_tokens)

    def render(self, messages: list[dict[str, Any]], *, options: dict[str, Any], add_generation_prompt: bool) -> str:
        if not self.has_chat_template:
            raise ValueError("this fake model has no chat template")
        return render(messages, options=options, add_generation_prompt=add_generation_prompt)

    def special_token_text(self, name: str) -> str | None:
        if name == "bos_token":
            return "<|bos|>"
        if name == "eos_token":
            return "<|eos|>"
        return name if name in SPECIAL_TOKENS else None

    def detokenizer(self) -> FakeDetokenizer:
        return FakeDetokenizer()
