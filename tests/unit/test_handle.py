"""A handle's facts, the options of a prefill, and what extending a handle asks of the prompt."""

from __future__ import annotations

import hashlib
import re
import struct
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.handle import PrefixHandle, require_continuation
from runtime.prefill_options import ALLOWED_OPTIONS, PrefillOptions, validate_prefill
from runtime.prompts import MAX_PROMPT_TOKENS
from runtime.protocol.commands import ChatPrompt, TextPrompt, TokenPrompt
from runtime.protocol.ids import RequestId
from runtime.protocol.tokens import TokenIds
from runtime.scheduler.request import Outcome, Timings

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]


class Desk:
    def __init__(self) -> None:
        self.released: list[RequestId] = []

    def release_prefix(self, request: RequestId) -> None:
        self.released.append(request)


def handle(
    tokens: list[int],
    *,
    boundaries: tuple[int, ...] = (),
    pinned: int = 0,
    cached: tuple[int, ...] = (0,),
    desk: Desk | None = None,
) -> PrefixHandle:
    outcome = Outcome(
        "finished", TokenIds(tokens), Timings(0.0, 0.0, None, 1.0), "print", cached_tokens=cached, pinned_length=pinned
    )
    return PrefixHandle(desk or Desk(), RequestId(7), "chat", outcome, boundaries)


def refused(model: str = "chat", **options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        validate_prefill(model, options)
    return caught.value


def test_boundaries_ascend_once_each_and_end_with_the_whole() -> None:
    assert handle(list(range(10))).boundaries == (10,)
    assert handle(list(range(10)), boundaries=(7, 3, 7, 10, 11, 500)).boundaries == (3, 7, 10)


def test_each_boundarys_digest_is_of_the_little_endian_ids_up_to_there() -> None:
    tokens = [1, 70_000, 3, 2**31 - 1, 5]
    made = handle(tokens, boundaries=(2, 4))
    expected = [hashlib.sha256(struct.pack(f"<{end}i", *tokens[:end])).hexdigest() for end in (2, 4, 5)]
    assert list(made.digests) == expected
    assert made.tokens == TokenIds(tokens)
    assert handle(tokens[:4]).digests[-1] == made.digests[1]


def test_what_can_be_continued_is_what_is_pinned_or_else_what_was_found() -> None:
    assert handle([1] * 9, pinned=9, cached=(4,)).cached_tokens == 9
    assert handle([1] * 9, pinned=0, cached=(4,)).cached_tokens == 4
    assert handle([1] * 9, pinned=0, cached=()).cached_tokens == 0


async def test_a_handle_is_released_once_by_hand_or_by_leaving_its_block() -> None:
    desk = Desk()
    async with handle([1], desk=desk) as held:
        assert desk.released == []
        await held.release()
        assert desk.released == [7]
    await held.release()
    assert desk.released == [7]


def test_a_handle_shows_no_tokens_of_the_prompt() -> None:
    assert repr(handle([12345] * 3, pinned=3)) == "PrefixHandle('chat', 3 tokens, 3 cached)"


def test_every_option_of_a_prefill_is_explained_and_an_unknown_one_named() -> None:
    explained = f"{PrefillOptions.__doc__} prompt messages tools reasoning_effort primer"
    assert [name for name in ALLOWED_OPTIONS if re.search(rf"\b{name}\b", explained) is None] == []
    error = refused(prompt="hi", cache="on")
    assert error.option == "cache"
    assert "cache_scope" in str(error)


def test_a_prefill_generates_nothing_and_keeps() -> None:
    valid = validate_prefill("chat", {"prompt": "hi", "boundaries": [9, 3, 9], "priority": "background", "deadline_seconds": 2})
    assert (valid.prompt, valid.max_tokens, valid.num_sequences) == (TextPrompt("hi"), 0, 1)
    assert (valid.prefill_only, valid.cache, valid.cache_scope) == (True, "on", "tenant")
    assert (valid.boundaries, valid.priority, valid.deadline_seconds) == ((3, 9), "background", 2)


@pytest.mark.parametrize("wrong", [5, "12", b"12", [0], [-1], [True], [1.5], [MAX_PROMPT_TOKENS + 1], range(1, 2000), {3}, None])
def test_boundaries_are_whole_lengths_from_one(wrong: Any) -> None:
    error = refused(prompt="hi", boundaries=wrong)
    assert error.option.startswith("boundaries")
    assert f"from 1 to {MAX_PROMPT_TOKENS}" in str(error)


def test_tokens_are_appended_to_the_handles_own() -> None:
    valid = validate_prefill("chat", {"tokens": [4, 5], "extend": handle([1, 2, 3])})
    assert valid.prompt == TokenPrompt(TokenIds([1, 2, 3, 4, 5]))


def test_messages_stand_for_the_whole_and_text_cannot_extend() -> None:
    valid = validate_prefill("chat", {"messages": MESSAGES, "extend": handle([1])})
    assert isinstance(valid.prompt, ChatPrompt)
    error = refused(prompt="more", extend=handle([1]))
    assert error.option == "prompt"
    assert "allowed: tokens, or messages" in str(error)


def test_only_a_handle_of_the_same_model_is_extended() -> None:
    assert "'chat'" in str(refused("other", tokens=[1], extend=handle([1])))
    assert refused(tokens=[1], extend=(1, 2, 3)).option == "extend"
    assert refused(tokens=[1] * MAX_PROMPT_TOKENS, extend=handle([1])).option == "tokens"


@pytest.mark.parametrize(
    ("rendered", "place"), [([1, 2, 9, 4], 2), ([1, 2], 2), ([], 0), ([9, 2, 3], 0)], ids=["other", "short", "none", "first"]
)
def test_messages_that_part_from_the_handle_are_refused_with_the_place(rendered: list[int], place: int) -> None:
    with pytest.raises(InvalidRequest, match=f"at token {place};") as caught:
        require_continuation(TokenIds(rendered), TokenIds([1, 2, 3]))
    assert caught.value.option == "extend"


def test_messages_that_begin_with_the_handle_pass() -> None:
    require_continuation(TokenIds([1, 2, 3]), TokenIds([1, 2, 3]))
    require_continuation(TokenIds([1, 2, 3, 4]), TokenIds([1, 2, 3]))
