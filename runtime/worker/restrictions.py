"""Which conversations does a checkpoint's chat template refuse? Found by rendering small ones at load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]

_SYSTEM = {"role": "system", "content": "S"}
_USER = {"role": "user", "content": "U"}
_ASSISTANT = {"role": "assistant", "content": "A"}


def chat_restrictions(try_render: Callable[[Messages], bool]) -> tuple[str, ...]:
    """Words for what fails, empty when nothing does. `try_render` tells whether a conversation renders.

    "max_system_messages=0" no system message at all; "single_system_at_start" with "max_system_messages=1" not two of them;
    "alternating_turns" not two user messages in a row; "requires_user_last" not ending with the assistant's;
    "no_empty_messages" no empty content; "unusable" not even a lone user message.
    """
    if not try_render([_USER]):
        return ("unusable",)
    found: list[str] = []
    if not try_render([_SYSTEM, _USER]):
        found.append("max_system_messages=0")
    elif not try_render([_SYSTEM, _SYSTEM, _USER]):
        found += ["single_system_at_start", "max_system_messages=1"]
    if not try_render([_USER, _USER]):
        found.append("alternating_turns")
    if not try_render([_USER, _ASSISTANT]):
        found.append("requires_user_last")
    if not try_render([{"role": "user", "content": ""}]):
        found.append("no_empty_messages")
    return tuple(found)
