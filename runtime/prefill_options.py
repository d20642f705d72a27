"""Which values may a client ask of `prefill`? Every option, its range, and the check of all of them.

Pure, and done before anything is sent, as in `runtime.options`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import InvalidRequest, shown
from runtime.handle import PrefixHandle
from runtime.options import (
    CACHE_SCOPES,
    PRIORITIES,
    RANGES,
    CacheScope,
    Priority,
    PromptOptions,
    ValidOptions,
    one_of,
    require_known,
)
from runtime.prompts import MAX_PROMPT_TOKENS, make_prompt, whole_number
from runtime.protocol.commands import ChatPrompt, Prompt, Sampling, TokenPrompt
from runtime.protocol.tokens import TokenIds

MAX_BOUNDARIES = 1024


class PrefillOptions(PromptOptions, total=False):
    """Keyword options of `Tenant.prefill`: those of the prompt (see `PromptOptions`), and

    boundaries: lengths in tokens, from 1, at which it must be possible to continue, beside its end; those beyond are ignored.
    extend: a handle of the same model to go on from: `tokens` are appended to its own, while `messages` are the whole and must be
    rendered to something that begins with its tokens. cache_scope, priority, deadline_seconds: see `GenerateOptions`.
    """

    boundaries: Sequence[int]
    extend: PrefixHandle | None
    cache_scope: CacheScope
    priority: Priority
    deadline_seconds: float | None


ALLOWED_OPTIONS = tuple(sorted(PrefillOptions.__optional_keys__))


def validate_prefill(model: str, options: Mapping[str, Any]) -> ValidOptions:
    """With `extend` and `tokens`, the prompt is the whole of both. :raises InvalidRequest: as `validate`."""
    require_known(options, ALLOWED_OPTIONS)
    return ValidOptions(
        prompt=_extended(model, make_prompt(options), options.get("extend")),
        sampling=Sampling(),
        max_tokens=0,
        stop=(),
        ignore_eos=False,
        num_sequences=1,
        priority=one_of("priority", options.get("priority", "interactive"), PRIORITIES),
        deadline_seconds=RANGES["deadline_seconds"].check("deadline_seconds", options.get("deadline_seconds")),
        warnings=(),
        cache_scope=one_of("cache_scope", options.get("cache_scope", "tenant"), CACHE_SCOPES),
        prefill_only=True,
        boundaries=_boundaries(options.get("boundaries", ())),
    )


def _boundaries(value: object) -> tuple[int, ...]:
    allowed = f"at most {MAX_BOUNDARIES} lengths in tokens, each from 1 to {MAX_PROMPT_TOKENS}"
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence) or len(value) > MAX_BOUNDARIES:
        raise InvalidRequest("boundaries", f"got {shown(value)}; allowed: {allowed}")
    boundaries = set()
    for number, given in enumerate(value):
        boundary = whole_number(given)
        if boundary is None or not 1 <= boundary <= MAX_PROMPT_TOKENS:
            raise InvalidRequest(f"boundaries[{number}]", f"got {shown(given)}; allowed: {allowed}")
        boundaries.add(boundary)
    return tuple(sorted(boundaries))


def _extended(model: str, prompt: Prompt, handle: object) -> Prompt:
    if handle is None:
        return prompt
    if not isinstance(handle, PrefixHandle):
        raise InvalidRequest("extend", f"got {shown(handle)}; allowed: a PrefixHandle, or None")
    if handle.model != model:
        raise InvalidRequest("extend", f"is a handle of model {handle.model!r}; allowed: one of {model!r}, whose tokens it holds")
    if isinstance(prompt, ChatPrompt):
        return prompt
    if not isinstance(prompt, TokenPrompt):
        raise InvalidRequest(
            "prompt", "cannot extend a handle: text may be tokenized otherwise alone; allowed: tokens, or messages"
        )
    num_tokens = len(handle.tokens) + len(prompt.tokens)
    if num_tokens > MAX_PROMPT_TOKENS:
        raise InvalidRequest("tokens", f"has {num_tokens} ids with those of the handle; allowed: at most {MAX_PROMPT_TOKENS}")
    return TokenPrompt(TokenIds.from_bytes(handle.tokens.to_bytes() + prompt.tokens.to_bytes()))
