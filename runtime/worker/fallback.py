"""What does a conversation look like for a checkpoint without a chat template?

Each message is a block: an opening line, the stripped content, a closing line; an empty line stands between blocks.
The lines are the role's own pair of special tokens if the vocabulary has one, else a generic pair whose opening line
also names the role, else comments:

    <|user|>                <|context|>USER:        <!-- begin of USER -->
    Hello                   Hello                   Hello
    <|/user|>               <|/context|>            <!-- end of USER -->

The prompt ends with the opening line of the assistant's block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

SpecialTokenText = Callable[[str], str | None]
"""`Tokenizer.special_token_text`: the text itself when it is a special token of the vocabulary, else None."""

GENERIC_NAMES: Final = ("block", "context", "quote", "section")
_SPELLINGS: Final = (
    ("<|{}|>", "<|/{}|>"),
    ("<|{}_start|>", "<|{}_end|>"),
    ("<|start_{}|>", "<|end_{}|>"),
    ("<|begin_{}|>", "<|end_{}|>"),
    ("<{}>", "</{}>"),
    ("[{}]", "[/{}]"),
)


def render(messages: Sequence[dict[str, Any]], special_token_text: SpecialTokenText) -> str:
    """The messages' blocks and the beginning of the assistant's."""
    blocks = render_messages(messages, special_token_text)
    opening, _ = _lines("assistant", special_token_text)
    return f"{blocks}\n\n{opening}\n"


def render_messages(messages: Sequence[dict[str, Any]], special_token_text: SpecialTokenText) -> str:
    """:param messages: each with "role" and "content" (None counts as empty)."""
    blocks = []
    for message in messages:
        opening, closing = _lines(message["role"].strip(), special_token_text)
        blocks.append(f"{opening}\n{(message['content'] or '').strip()}\n{closing}")
    return "\n\n".join(blocks)


def _lines(role: str, special_token_text: SpecialTokenText) -> tuple[str, str]:
    pair = _pair(role.lower(), special_token_text)
    if pair is not None:
        return pair
    for name in GENERIC_NAMES:
        pair = _pair(name, special_token_text)
        if pair is not None:
            return f"{pair[0]}{role.upper()}:", pair[1]
    return f"<!-- begin of {role.upper()} -->", f"<!-- end of {role.upper()} -->"


def _pair(name: str, special_token_text: SpecialTokenText) -> tuple[str, str] | None:
    for opening, closing in _SPELLINGS:
        for spelled in (name, name.upper()):
            begin, end = opening.format(spelled), closing.format(spelled)
            if special_token_text(begin) == begin and special_token_text(end) == end:
                return begin, end
    return None
