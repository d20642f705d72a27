"""Which prompts may a client give? Text, token ids or messages, checked so that the command that carries them can be sent."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from runtime.errors import InvalidRequest, shown
from runtime.protocol.commands import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from runtime.protocol.tokens import TokenIds

TOKEN_ID_LIMIT = 1 << 32
MAX_TEXT_BYTES = 4 << 20
MAX_PROMPT_TOKENS = 4 << 20
"""Far beyond any model's context, and small enough that the command that carries it can always be sent."""

_KINDS = ("prompt", "tokens", "messages")
_CHAT_ONLY = ("tools", "reasoning_effort", "primer")


def make_prompt(options: Mapping[str, Any]) -> Prompt:
    """The prompt among the options of a request. :raises InvalidRequest: names the option, or the place in it, at fault."""
    given = [kind for kind in _KINDS if options.get(kind) is not None]
    if len(given) != 1:
        got = " and ".join(given) if given else "none of them"
        raise InvalidRequest(given[-1] if given else "prompt", f"give exactly one of {', '.join(_KINDS)}; got {got}")
    kind = given[0]
    if kind != "messages":
        for name in _CHAT_ONLY:
            if options.get(name) is not None:
                raise InvalidRequest(name, f"is given to the chat template, so it needs messages; got it beside {kind}")
    value = options[kind]
    if kind == "prompt":
        return TextPrompt(checked_text("prompt", value))
    if kind == "tokens":
        return TokenPrompt(_tokens(value))
    primer, effort = options.get("primer"), options.get("reasoning_effort")
    return ChatPrompt(
        messages_json=_messages(value),
        tools_json=_tools(options.get("tools")),
        reasoning_effort=None if effort is None else checked_text("reasoning_effort", effort),
        primer=None if primer is None else checked_text("primer", primer),
    )


def _tokens(value: object) -> TokenIds:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequest("tokens", f"got {shown(value)}; allowed: a non-empty list of token ids")
    ids = value if isinstance(value, TokenIds) else TokenIds([checked_token("tokens", token) for token in value])
    if not 1 <= len(ids) <= MAX_PROMPT_TOKENS:
        raise InvalidRequest("tokens", f"has {len(ids)} ids; allowed: from 1 to {MAX_PROMPT_TOKENS}")
    return ids


def _messages(value: object) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise InvalidRequest("messages", f"got {shown(value)}; allowed: a non-empty list of {{'role': …, 'content': …}}")
    for number, message in enumerate(value):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(where, f"got {shown(message)}; allowed: {{'role': …, 'content': …}}")
        checked_text(f"{where}.role", message.get("role"))
        content = message.get("content")
        if not (content is None and message.get("tool_calls")):
            _content(f"{where}.content", content)
    return _json("messages", [dict(message) for message in value])


def _content(where: str, content: object) -> None:
    """A string (empty is allowed: some templates want a turn without words) or a list of text parts."""
    if isinstance(content, str):
        return
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(where, f"got {shown(content)}; allowed: a string, or a list of {{'type': 'text', 'text': …}}")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(where, f"got the part {shown(part)}; allowed: {{'type': 'text', 'text': …}}")


def _tools(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not all(isinstance(tool, Mapping) for tool in value):
        raise InvalidRequest("tools", f"got {shown(value)}; allowed: a list of tool definitions (dicts)")
    return _json("tools", [dict(tool) for tool in value]) if value else None


def _json(option: str, value: object) -> str:
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(option, f"cannot be written as JSON: {error}") from None
    return checked_text(option, written)


def whole_number(value: object) -> int | None:
    """None when it is none: a boolean, a float or text is no whole number."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(cast(Any, value))
    except Exception:  # a TypeError for most; whatever else a foreign class raises, it gave no number
        return None


def checked_token(option: str, value: object) -> int:
    token = whole_number(value)
    if token is None or not 0 <= token < TOKEN_ID_LIMIT:
        raise InvalidRequest(option, f"got {shown(value)}; allowed: whole token ids from 0 to {TOKEN_ID_LIMIT - 1}")
    return token


def checked_text(option: str, value: object, allowed: str = "a non-empty string") -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(option, f"got {shown(value)}; allowed: {allowed}")
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        what = f"holds half a surrogate pair at character {error.start}; it is no valid Unicode text"
        raise InvalidRequest(option, what) from None
    if num_bytes > MAX_TEXT_BYTES:
        raise InvalidRequest(option, f"has {num_bytes} bytes; allowed: at most {MAX_TEXT_BYTES}")
    return value
