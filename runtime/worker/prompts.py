"""Which token ids does a prompt have? Text gets special tokens, a rendered chat has its own, ids stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from runtime.engine.engine import Tokenizer
from runtime.protocol.commands import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from runtime.worker.rendering import PromptError, render_chat

__all__ = ["PromptError", "prompt_ids"]


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> tuple[Sequence[int], tuple[str, ...]]:
    """Ids and warnings.

    :raises PromptError: the prompt is at fault. :raises Exception: whatever a broken tokenizer raises.
    """
    warnings: tuple[str, ...] = ()
    ids: Sequence[int]
    match prompt:
        case TokenPrompt():
            ids = prompt.tokens.tolist()
        case TextPrompt():
            ids = _encode(tokenizer, prompt.text, is_rendered=False)
        case ChatPrompt():
            rendered = render_chat(tokenizer, prompt)
            warnings = rendered.warnings
            # A checkpoint's template writes its own BOS, or means to have none; the fallback format is plain text.
            ids = _encode(tokenizer, rendered.text, is_rendered=rendered.by_template)
        case _:
            assert_never(prompt)
    if not ids:
        raise PromptError("invalid_request", "prompt: it is empty (no tokens); give at least one token of text")
    return ids, warnings


def _encode(tokenizer: Tokenizer, text: str, *, is_rendered: bool) -> list[int]:
    bos = tokenizer.special_token_text("bos_token")
    begins_with_bos = bool(bos) and text.startswith(bos or "")
    try:
        return tokenizer.encode(text, add_special_tokens=not is_rendered and not begins_with_bos)
    except UnicodeEncodeError as error:
        raise PromptError("invalid_request", f"prompt: it holds half a surrogate pair at character {error.start}") from error
