"""Options: every value is checked in the host, and the error names the option and its range."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.options import ALLOWED_OPTIONS, RANGES, GenerateOptions, PromptOptions, validate
from runtime.prompts import MAX_PROMPT_TOKENS, MAX_TEXT_BYTES
from runtime.protocol.commands import ChatPrompt, Prefill, PrefillRow, Prepare, TextPrompt, TokenPrompt
from runtime.protocol.frames import encode
from runtime.protocol.ids import RequestId, SequenceId
from runtime.protocol.tokens import TokenIds


def refused(**options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        validate({"prompt": "hi", **options})
    return caught.value


def test_defaults_are_greedy_and_bounded() -> None:
    valid = validate({"prompt": "hi"})
    assert valid.prompt == TextPrompt("hi")
    assert (valid.max_tokens, valid.sampling.temperature, valid.sampling.logprobs, valid.num_sequences) == (1024, 0.0, -1, 1)
    assert (valid.stop, valid.priority, valid.deadline_seconds, valid.warnings) == ((), "interactive", None, ())


@pytest.mark.parametrize(("name", "words"), [("cache", ["on", "read-only", "off"]), ("cache_scope", ["tenant", "shared"])])
def test_how_prefixes_are_used_is_one_of_few_words(name: str, words: list[str]) -> None:
    assert getattr(validate({"prompt": "hi"}), name) == words[0]
    for word in words:
        assert getattr(validate({"prompt": "hi", name: word}), name) == word
    for wrong in ("On", "", True, None, [words[0]]):
        error = refused(**{name: wrong})
        assert error.option == name
        assert all(repr(word) in str(error) for word in words)


def test_every_option_is_explained_where_a_person_asks_for_help() -> None:
    explained = f"{PromptOptions.__doc__} {GenerateOptions.__doc__}"
    assert [name for name in ALLOWED_OPTIONS if re.search(rf"\b{name}\b", explained) is None] == []


def test_an_unknown_option_is_named_with_all_the_allowed_ones() -> None:
    error = refused(foo=1)
    assert error.option == "foo"
    assert all(name in str(error) for name in ALLOWED_OPTIONS)


@pytest.mark.parametrize("name", RANGES)
def test_each_range_holds_its_limits_and_refuses_what_is_beyond(name: str) -> None:
    allowed = RANGES[name]
    validate({"prompt": "hi", name: int(allowed.high) if allowed.whole else allowed.high})
    low = allowed.low + (1e-9 if allowed.above else 0)
    validate({"prompt": "hi", name: int(low) if allowed.whole else low})
    for wrong in (allowed.high + max(1, allowed.high), allowed.low if allowed.above else allowed.low - 1):
        error = refused(**{name: int(wrong) if allowed.whole else wrong})
        assert error.option == name
        assert allowed.describe() in str(error)


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("wrong", ["500", True, False, math.nan, math.inf, -math.inf, [1], {}, b"1", 10**400])
def test_no_number_is_taken_from_text_booleans_or_the_infinite(name: str, wrong: Any) -> None:
    assert refused(**{name: wrong}).option == name


class _Unwritable:
    def __repr__(self) -> str:
        raise RuntimeError

    def __index__(self) -> int:
        raise RuntimeError


@pytest.mark.parametrize("name", ALLOWED_OPTIONS)
@pytest.mark.parametrize("wrong", [10**5000, -(10**5000), _Unwritable(), [[10**5000]], {_Unwritable(): 10**5000}], ids=range(5))
def test_even_what_cannot_be_written_into_a_message_is_refused_with_one(name: str, wrong: Any) -> None:
    given = {"messages": [{"role": "user", "content": "hi"}]} if name != "messages" else {}
    with pytest.raises(InvalidRequest) as caught:
        validate({**given, name: wrong})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", [name for name, allowed in RANGES.items() if allowed.whole])
def test_whole_numbers_are_not_rounded(name: str) -> None:
    assert refused(**{name: 1.0}).option == name


@pytest.mark.parametrize("name", [name for name, allowed in RANGES.items() if not allowed.optional])
def test_none_is_no_number_where_the_option_is_not_optional(name: str) -> None:
    assert refused(**{name: None}).option == name


def test_seeds_use_all_64_bits_and_a_missing_one_is_drawn() -> None:
    assert validate({"prompt": "hi", "seed": (1 << 64) - 1}).sampling.seed == (1 << 64) - 1
    drawn = {validate({"prompt": "hi"}).sampling.seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= seed < 1 << 53 for seed in drawn)


def test_exactly_one_kind_of_prompt_is_needed() -> None:
    for given_kinds in ({}, {"prompt": "a", "tokens": [1]}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}):
        with pytest.raises(InvalidRequest, match="exactly one of prompt, tokens, messages"):
            validate(given_kinds)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("prompt", ""),
        ("prompt", b"bytes"),
        ("prompt", "half \ud800 pair"),
        ("tokens", []),
        ("tokens", "12"),
        ("tokens", [1, -1]),
        ("tokens", [1 << 32]),
        ("tokens", [True]),
        ("tokens", [1.0]),
        ("tokens", 5),
        ("messages", []),
        ("messages", "hello"),
        ("messages", {"role": "user", "content": "hi"}),
    ],
)
def test_empty_and_mistyped_prompts_are_refused_by_name(kind: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate({kind: value})
    assert caught.value.option == kind


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("hi", "messages[0]"),
        ({"content": "hi"}, "messages[0].role"),
        ({"role": 1, "content": "hi"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "messages[0].content"),
        ({"role": "user", "content": ["hi"]}, "messages[0].content"),
        ({"role": "user", "content": "hi", "extra": object()}, "messages"),
        ({"role": "user", "content": "hi", "extra": math.nan}, "messages"),
        ({"role": "user", "content": "half \udc00"}, "messages"),
    ],
)
def test_a_wrong_message_is_named_by_its_place(message: Any, where: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate({"messages": [message]})
    assert caught.value.option == where


def test_messages_travel_as_the_app_gave_them() -> None:
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "東京 \x00\x1f"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompt = validate({"messages": messages, "tools": tools, "reasoning_effort": "low", "primer": "Well,"}).prompt
    assert isinstance(prompt, ChatPrompt)
    assert json.loads(prompt.messages_json) == messages
    assert prompt.tools_json is not None
    assert json.loads(prompt.tools_json) == tools
    assert (prompt.reasoning_effort, prompt.primer) == ("low", "Well,")


@pytest.mark.parametrize("name", ["tools", "reasoning_effort", "primer"])
def test_what_only_a_template_understands_needs_messages(name: str) -> None:
    error = refused(**{name: [{"name": "f"}] if name == "tools" else "x"})
    assert error.option == name
    assert "messages" in str(error)


def test_what_could_not_be_sent_is_refused_by_its_size() -> None:
    for options in (
        {"prompt": "x" * (MAX_TEXT_BYTES + 1)},
        {"messages": [{"role": "user", "content": "é" * (MAX_TEXT_BYTES // 2)}]},
    ):
        with pytest.raises(InvalidRequest, match=str(MAX_TEXT_BYTES)):
            validate(options)
    with pytest.raises(InvalidRequest, match=str(MAX_PROMPT_TOKENS)):
        validate({"tokens": TokenIds.from_bytes(bytes(4 * MAX_PROMPT_TOKENS + 4))})
    largest = "x" * (MAX_TEXT_BYTES - 100)
    messages, tools = [{"role": "user", "content": largest}], [{"name": largest}]
    encode(Prepare(RequestId(1), validate({"messages": messages, "tools": tools, "primer": largest}).prompt))


def test_recursive_messages_are_refused() -> None:
    message: dict[str, Any] = {"role": "user", "content": "hi"}
    message["self"] = message
    with pytest.raises(InvalidRequest, match="JSON"):
        validate({"messages": [message]})


def test_stop_takes_one_string_or_several_and_drops_repeats() -> None:
    assert validate({"prompt": "hi", "stop": "END"}).stop == ("END",)
    assert validate({"prompt": "hi", "stop": ["END", "ENDING", "END"]}).stop == ("END", "ENDING")


def test_line_breaks_are_stops_in_earnest() -> None:
    assert validate({"prompt": "hi", "stop": ["\n\n", "\t"]}).stop == ("\n\n", "\t")


def test_a_stop_of_spaces_only_is_ignored_with_a_warning() -> None:
    valid = validate({"prompt": "hi", "stop": ["  ", "END"]})
    assert valid.stop == ("END",)
    assert len(valid.warnings) == 1
    assert "'  '" in valid.warnings[0]


@pytest.mark.parametrize("wrong", ["", [""], [1], 5, None, b"END", ["a"] * 17, ["\ud800"], "x" * 1001])
def test_other_stops_are_refused(wrong: Any) -> None:
    assert refused(stop=wrong).option == "stop"


def test_logit_bias_takes_token_ids_and_finite_numbers() -> None:
    assert validate({"prompt": "hi", "logit_bias": {7: -5, 3: 1.5}}).sampling.logit_bias == ((3, 1.5), (7, -5.0))


@pytest.mark.parametrize("wrong", [{"7": 1.0}, {-1: 1.0}, {1.0: 1.0}, {True: 1.0}, {7: math.nan}, {7: "1"}, {7: True}, [(7, 1.0)]])
def test_other_logit_biases_are_refused(wrong: Any) -> None:
    assert refused(logit_bias=wrong).option.startswith("logit_bias")


@pytest.mark.parametrize(("name", "wrong"), [("ignore_eos", 1), ("ignore_eos", "yes"), ("priority", "high"), ("priority", [])])
def test_flags_and_words_are_exact(name: str, wrong: Any) -> None:
    assert refused(**{name: wrong}).option == name


def test_token_ids_pass_through_unchanged() -> None:
    ids = TokenIds(range(1000))
    assert validate({"tokens": ids}).prompt == TokenPrompt(ids)
    assert validate({"tokens": iter([1, 2, 3])}).prompt == TokenPrompt(TokenIds([1, 2, 3]))


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*ALLOWED_OPTIONS, "foo"]), _ANYTHING, max_size=6))
def test_whatever_is_given_is_refused_with_a_typed_error_or_can_be_sent(options: dict[str, Any]) -> None:

    try:
        valid = validate(options)
    except InvalidRequest:
        return
    row = PrefillRow(SequenceId(1), TokenIds([1]), 1, valid.max_tokens, 1, sampling=valid.sampling, stop=valid.stop)
    encode(Prepare(RequestId(1), valid.prompt))
    encode(Prefill((row,)))
