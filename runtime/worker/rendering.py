"""What text do chat messages become? The checkpoint's own template, or the fallback format where there is none.

Nothing asked for is dropped silently: an option that a template or tokenizer refuses is left out with a warning, and a
conversation that a template cannot show is refused with the template's own words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from runtime.engine.engine import Tokenizer
from runtime.protocol.commands import ChatPrompt
from runtime.protocol.events import RefusalCode
from runtime.worker import fallback

FILLER: Final = {"role": "user", "content": "Please continue."}
"""Appended, with a warning, to messages without any user message when the template refuses them as they are."""


MAX_RENDERED_CHARACTERS: Final = 32 << 20
"""Several times what a client may send; tokenizing hundreds of megabytes would hold up everybody for minutes."""


class PromptError(Exception):
    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code: RefusalCode = code


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    by_template: bool
    warnings: tuple[str, ...] = ()


def render_chat(tokenizer: Tokenizer, prompt: ChatPrompt) -> Rendered:
    """The text up to and including the beginning of the assistant's reply, which is where `primer` stands.

    :raises PromptError: the messages or tools are at fault, or the template cannot render them.
    """
    messages = parse_messages(prompt.messages_json)
    options: dict[str, Any] = {}
    if prompt.reasoning_effort is not None:
        options["reasoning_effort"] = prompt.reasoning_effort
    if prompt.tools_json is not None:
        options["tools"] = _parse_list("tools", prompt.tools_json)
    if tokenizer.has_chat_template:
        text, warnings = _render_by_template(tokenizer, messages, options)
        if len(text) > MAX_RENDERED_CHARACTERS:
            raise PromptError("template_error", f"the chat template makes {len(text)} characters of these messages")
    else:
        text = fallback.render(messages, tokenizer.special_token_text)
        warnings = [f"this model has no chat template; {option} is not shown to it" for option in options]
    return Rendered(text + (prompt.primer or ""), tokenizer.has_chat_template, tuple(warnings))


def parse_messages(messages_json: str) -> list[dict[str, Any]]:
    """Messages with a role each, and content that is a string, or None beside tool calls. Parts of text are joined by newlines.

    :raises PromptError: naming the message at fault.
    """
    messages = _parse_list("messages", messages_json)
    if not messages:
        raise PromptError("invalid_request", "messages: empty prompt; give at least one message")
    return [_check_message(number, message) for number, message in enumerate(messages)]


def _parse_list(what: str, text: str) -> list[Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptError("invalid_request", f"{what}: not JSON: {error}") from error
    if not isinstance(value, list):
        raise PromptError("invalid_request", f"{what}: must be a list, got {type(value).__name__}")
    return value


def _check_message(number: int, message: Any) -> dict[str, Any]:
    at = f"messages[{number}]"
    if not isinstance(message, dict):
        raise PromptError("invalid_request", f"{at}: must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        raise PromptError("invalid_request", f"{at}.role: must be a non-empty string, got {role!r}")
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "\n".join(_part_text(f"{at}.content[{i}]", part) for i, part in enumerate(content))}
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return {**message, "content": content}
    raise PromptError("invalid_request", f"{at}.content: must be a string or a list of text parts, got {content!r:.80}")


def _part_text(at: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise PromptError("invalid_request", f"{at}: this model takes parts of type 'text' only, got {kind!r}")


def _render_by_template(tokenizer: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[str, list[str]]:
    try:
        return _render_with_fewer_options(tokenizer, messages, options)
    except Exception as error:
        if any(message["role"] == "user" for message in messages):
            raise PromptError("template_error", f"the chat template cannot render these messages: {error}") from error
        refusal = error
    try:
        text, warnings = _render_with_fewer_options(tokenizer, [*messages, dict(FILLER)], options)
    except Exception:
        raise PromptError("template_error", f"the chat template cannot render these messages: {refusal}") from refusal
    what = f"the chat template needs a user message ({refusal}); {FILLER['content']!r} was added as one"
    return text, [*warnings, what]


def _render_with_fewer_options(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]
) -> tuple[str, list[str]]:
    """Leave options out, the reasoning effort first, as long as the template or tokenizer answers with a TypeError."""
    warnings: list[str] = []
    remaining = dict(options)
    first: TypeError | None = None
    while True:
        try:
            text = tokenizer.render(messages, options=remaining, add_generation_prompt=True)
        except TypeError as error:
            first = first or error
            if not remaining:  # then the options were not what it minds
                raise first from None
            option = next(iter(remaining))
            del remaining[option]
            warnings.append(f"the chat template or tokenizer refuses {option} ({error}); rendered without it")
        else:
            return text, warnings
