"""Chat messages become text by the checkpoint's template or the fallback format; what is refused is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from runtime.engine.fake_text import BOS, FakeDetokenizer, FakeTokenizer
from runtime.protocol.commands import ChatPrompt, TextPrompt, TokenPrompt
from runtime.protocol.tokens import TokenIds
from runtime.worker import fallback
from runtime.worker.prompts import PromptError, prompt_ids
from runtime.worker.rendering import FILLER, MAX_RENDERED_CHARACTERS, render_chat
from runtime.worker.restrictions import chat_restrictions

HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "clock"}}]


class TemplateTokenizer(FakeTokenizer):
    """Renders with the given function of (messages, options)."""

    def __init__(self, template: Callable[..., str]) -> None:
        super().__init__()
        self.template = template

    def render(self, messages: list[dict[str, Any]], *, options: dict[str, Any], add_generation_prompt: bool) -> str:
        assert add_generation_prompt
        return self.template(messages, **options)


def vocabulary(*tokens: str) -> Callable[[str], str | None]:
    return lambda name: name if name in tokens else None


def chat(messages: object = HELLO, **options: Any) -> ChatPrompt:
    tools = options.pop("tools", None)
    return ChatPrompt(json.dumps(messages), None if tools is None else json.dumps(tools), **options)


def show(messages: list[dict[str, Any]], **options: Any) -> str:
    return json.dumps([[message["role"], message["content"]] for message in messages]) + json.dumps(options)


# -- fallback format --------------------------------------------------------------------------------------


def test_without_template_or_special_tokens_each_message_stands_between_comments() -> None:
    assert fallback.render_messages(HELLO, vocabulary()) == (
        "<!-- begin of USER -->\nHello\n<!-- end of USER -->\n\n<!-- begin of ASSISTANT -->\nHi\n<!-- end of ASSISTANT -->"
    )


def test_the_fallback_prompt_ends_with_the_beginning_of_the_assistants_block() -> None:
    text = render_chat(FakeTokenizer(has_chat_template=False), chat(HELLO[:1])).text
    assert text == "<!-- begin of USER -->\nHello\n<!-- end of USER -->\n\n<!-- begin of ASSISTANT -->\n"


def test_a_roles_own_pair_of_special_tokens_is_used() -> None:
    text = fallback.render_messages(HELLO[:1], vocabulary("<|user|>", "<|/user|>", "<|context|>", "<|/context|>"))
    assert text == "<|user|>\nHello\n<|/user|>"


def test_with_only_a_generic_pair_its_opening_line_names_the_role() -> None:
    text = fallback.render_messages([{"role": "system", "content": "Do."}], vocabulary("<|context|>", "<|/context|>"))
    assert text == "<|context|>SYSTEM:\nDo.\n<|/context|>"


def test_half_a_pair_is_none() -> None:
    assert fallback.render_messages(HELLO[:1], vocabulary("<|user|>")).startswith("<!-- begin of USER -->")


def test_content_is_stripped_in_the_fallback_format() -> None:
    assert "\nHello\n" in fallback.render_messages([{"role": "user", "content": "  Hello \n"}], vocabulary())


def test_tools_are_reported_as_not_shown_by_the_fallback_format() -> None:
    rendered = render_chat(FakeTokenizer(has_chat_template=False), chat(tools=TOOLS))
    assert rendered.warnings == ("this model has no chat template; tools is not shown to it",)


# -- checkpoint templates ---------------------------------------------------------------------------------


def test_tools_and_reasoning_effort_reach_the_template() -> None:
    rendered = render_chat(TemplateTokenizer(show), chat(tools=TOOLS, reasoning_effort="low"))
    assert rendered.text.endswith(json.dumps({"reasoning_effort": "low", "tools": TOOLS}))
    assert rendered.warnings == ()


def test_a_refused_option_is_left_out_with_a_warning() -> None:
    def template(messages: list[dict[str, Any]], tools: object = None) -> str:
        return show(messages, tools=tools)

    rendered = render_chat(TemplateTokenizer(template), chat(tools=TOOLS, reasoning_effort="low"))
    assert rendered.text.endswith(json.dumps({"tools": TOOLS}))
    assert len(rendered.warnings) == 1
    assert "refuses reasoning_effort" in rendered.warnings[0]


def test_a_template_that_takes_no_options_gets_none_with_two_warnings() -> None:
    rendered = render_chat(TemplateTokenizer(lambda messages: "text"), chat(tools=TOOLS, reasoning_effort="low"))
    assert rendered.text == "text"
    assert [warning.split("refuses ")[1].split(" ")[0] for warning in rendered.warnings] == ["reasoning_effort", "tools"]


def test_a_type_error_that_is_not_the_options_fault_is_the_templates() -> None:
    def template(messages: list[dict[str, Any]], **options: Any) -> str:
        raise TypeError("can only concatenate str")

    with pytest.raises(PromptError, match="can only concatenate str") as caught:
        render_chat(TemplateTokenizer(template), chat(tools=TOOLS))
    assert caught.value.code == "template_error"


def test_a_template_that_raises_is_refused_with_its_own_words() -> None:
    def template(messages: list[dict[str, Any]]) -> str:
        raise RuntimeError("Conversation roles must alternate")

    with pytest.raises(PromptError, match="Conversation roles must alternate") as caught:
        render_chat(TemplateTokenizer(template), chat())
    assert caught.value.code == "template_error"


def needs_user(messages: list[dict[str, Any]]) -> str:
    if not any(message["role"] == "user" for message in messages):
        raise RuntimeError("no user message")
    return show(messages)


def test_only_system_messages_get_a_filler_where_the_template_needs_a_user() -> None:
    rendered = render_chat(TemplateTokenizer(needs_user), chat([{"role": "system", "content": "Be brief."}]))
    assert rendered.text.startswith(json.dumps([["system", "Be brief."], ["user", FILLER["content"]]]))
    assert "no user message" in rendered.warnings[0]


def test_only_system_messages_stay_as_they_are_where_the_template_takes_them() -> None:
    rendered = render_chat(TemplateTokenizer(show), chat([{"role": "system", "content": "Be brief."}]))
    assert rendered.text.startswith('[["system", "Be brief."]]')
    assert rendered.warnings == ()


def test_the_primer_is_the_beginning_of_the_reply() -> None:
    assert render_chat(FakeTokenizer(), chat(primer="Sure, ")).text.endswith("<|im_start|>assistant\nSure, ")


# -- messages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty prompt"),
        ({}, "must be a list"),
        (["Hi"], r"messages\[0\]: must be an object"),
        ([{"content": "Hi"}], r"messages\[0\].role"),
        ([{"role": " ", "content": "Hi"}], r"messages\[0\].role"),
        ([*HELLO, {"role": "user"}], r"messages\[2\].content"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content: .*5"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"content\[0\].*'image_url'"),
    ],
)
def test_a_wrong_message_is_named(messages: object, words: str) -> None:
    with pytest.raises(PromptError, match=words) as caught:
        render_chat(FakeTokenizer(), chat(messages))
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("text", ["", "[", "nul", '"x"', "[" * 100_000])
def test_messages_that_are_no_json_list_are_refused(text: str) -> None:
    with pytest.raises(PromptError, match="messages"):
        render_chat(FakeTokenizer(), ChatPrompt(text))


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    rendered = render_chat(TemplateTokenizer(show), chat([{"role": "user", "content": parts}]))
    assert rendered.text.startswith('[["user", "one\\ntwo"]]')


def test_an_assistant_message_of_tool_calls_alone_needs_no_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert render_chat(TemplateTokenizer(show), chat([*HELLO, message])).text.startswith('[["user", "Hello"]')


# -- ids --------------------------------------------------------------------------------------------------


def test_text_gets_one_bos_and_not_a_second() -> None:
    assert prompt_ids(FakeTokenizer(), TextPrompt("hi"))[0] == [BOS, 104, 105]
    assert prompt_ids(FakeTokenizer(), TextPrompt("<|bos|>hi"))[0] == [BOS, 104, 105]


def test_a_rendered_chat_gets_no_bos_beside_the_templates_own() -> None:
    assert prompt_ids(TemplateTokenizer(lambda messages: "<|bos|>hi"), chat())[0] == [BOS, 104, 105]
    assert prompt_ids(TemplateTokenizer(lambda messages: "hi"), chat())[0] == [104, 105]


def test_the_fallback_format_is_text_and_begins_with_bos() -> None:
    assert prompt_ids(FakeTokenizer(has_chat_template=False), chat())[0][0] == BOS


def test_ids_stay_as_they_are() -> None:
    assert prompt_ids(FakeTokenizer(), TokenPrompt(TokenIds([7, 8])))[0] == [7, 8]


def test_a_prompt_without_any_token_is_refused() -> None:
    with pytest.raises(PromptError, match="empty"):
        prompt_ids(FakeTokenizer(), TokenPrompt(TokenIds()))


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(PromptError, match="surrogate") as caught:
        prompt_ids(FakeTokenizer(), ChatPrompt('[{"role": "user", "content": "\\ud800"}]'))
    assert caught.value.code == "invalid_request"


def test_control_characters_arrive_intact() -> None:
    ids, _ = prompt_ids(FakeTokenizer(), TextPrompt("a\0b\x1e\x1f"))
    detokenizer = FakeDetokenizer()
    assert "".join(detokenizer.push(token) for token in ids[1:]) == "a\0b\x1e\x1f"


# -- restrictions -----------------------------------------------------------------------------------------


def fails_on(*wrong: str) -> Callable[[list[dict[str, Any]]], bool]:
    kinds = {
        ("system", "user"): "with-system",
        ("system", "system", "user"): "multi-system",
        ("user", "user"): "consecutive-users",
        ("user", "assistant"): "assistant-last",
    }

    def try_render(messages: list[dict[str, Any]]) -> bool:
        kind = kinds.get(tuple(message["role"] for message in messages))
        if any(not message["content"] for message in messages):
            kind = "empty"
        return kind not in wrong

    return try_render


@pytest.mark.parametrize(
    ("wrong", "restrictions"),
    [
        ((), ()),
        (("multi-system",), ("single_system_at_start", "max_system_messages=1")),
        (("with-system", "multi-system"), ("max_system_messages=0",)),
        (("consecutive-users",), ("alternating_turns",)),
        (("assistant-last",), ("requires_user_last",)),
        (("empty",), ("no_empty_messages",)),
    ],
)
def test_restrictions_are_named_by_what_fails_to_render(wrong: tuple[str, ...], restrictions: tuple[str, ...]) -> None:
    assert chat_restrictions(fails_on(*wrong)) == restrictions


def test_a_template_that_renders_nothing_is_called_unusable() -> None:
    assert chat_restrictions(lambda messages: False) == ("unusable",)


def test_a_template_that_makes_far_too_much_text_is_refused_before_that_is_tokenized() -> None:
    tokenizer = TemplateTokenizer(lambda messages: "x" * (MAX_RENDERED_CHARACTERS + 1))
    with pytest.raises(PromptError, match=str(MAX_RENDERED_CHARACTERS + 1)) as caught:
        prompt_ids(tokenizer, chat())
    assert caught.value.code == "template_error"
